"""Neurons go when they cannot matter, and only then."""

import doctest

import hypothesis
import hypothesis.strategies as hst
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shrink_models as models

from jaxpruner.sparse import files, shrinking

# The parameters here are not masked: what masks alone decide is the point.
pytestmark = pytest.mark.filterwarnings("ignore:.*the masks remove")

X = np.random.default_rng(9).standard_normal((3, 5)).astype(np.float32)


def test_the_example_runs():
  assert doctest.testmod(shrinking).failed == 0


@hypothesis.settings(max_examples=6)
@hypothesis.given(
  hst.lists(hst.booleans(), min_size=6, max_size=6),
  hst.lists(hst.booleans(), min_size=6, max_size=6),
  hst.sampled_from([jax.nn.relu, jax.nn.sigmoid]),
)
def test_exactly_the_dead_neurons_go(columns, rows, activation):
  def fn(p, x):
    return models.mlp(p, x, activation)

  params = models.mlp_params(5, 6, 4)
  masks = models.nothing_masked(params)
  masks[0]["w"] = models.mask_axis(params[0]["w"], 1, np.flatnonzero(columns))
  masks[1]["w"] = models.mask_axis(params[1]["w"], 0, np.flatnonzero(rows))
  small = models.shrink_and_compare(fn, params, masks, X)
  count = int(np.sum(np.array(columns) & np.array(rows)))
  alive = max(1, count)
  assert models.shapes(small) == [
    {"w": (5, alive), "b": (alive,)}, {"w": (alive, 4), "b": (4,)}
  ]  # fmt: skip
  assert not count or small.blocked == []


@pytest.mark.quick
def test_constants_of_dead_neurons_move_into_the_next_bias():
  params = models.mlp_params(5, 8, 8, 4)
  masks = models.nothing_masked(params)
  masks[0]["w"] = models.mask_axis(params[0]["w"], 1, [0, 1, 2])
  masks[1]["w"] = models.mask_axis(params[1]["w"], 1, [3, 4])
  small = models.shrink_and_compare(models.mlp, params, masks, X)
  assert small.same_code
  assert not np.allclose(small.params[2]["b"], params[2]["b"])
  # The same code, so the original function serves any batch.
  batch = np.concatenate([X, X])
  run = jax.jit(models.mlp)
  np.testing.assert_allclose(
    run(small.params, batch),
    run(models.masked(params, masks), batch),
    rtol=1e-5,
    atol=1e-5,
  )


def test_constants_without_a_bias_are_added_in_fn():
  def fn(p, x):
    return jnp.tanh(jax.nn.sigmoid(x @ p["a"]) @ p["b"])

  params = models.randomize({"a": jnp.ones((5, 6)), "b": jnp.ones((6, 4))})
  masks = {"a": models.mask_axis(params["a"], 1, [1, 2]), "b": None}
  small = models.shrink_and_compare(fn, params, masks, X)
  assert models.shapes(small) == {"a": (5, 2), "b": (2, 4)}
  assert not small.same_code


def test_weights_on_the_left_as_in_equinox():
  def fn(p, x):
    return p["b"] @ jax.nn.relu(p["a"] @ x + p["c"]) + p["d"]

  params = models.randomize(
    {"a": jnp.ones((6, 5)), "b": jnp.ones((4, 6)), "c": jnp.ones(6),
     "d": jnp.ones(4)}
  )  # fmt: skip
  masks = models.nothing_masked(params)
  masks["a"] = models.mask_axis(params["a"], 0, [0, 5])
  small = models.shrink_and_compare(fn, params, masks, X[0])
  assert models.shapes(small, "a") == (2, 5)
  assert small.same_code


def test_without_masks_the_zeros_speak():
  params = models.mlp_params(5, 6, 4)
  masks = models.nothing_masked(params)
  masks[1]["w"] = models.mask_axis(params[1]["w"], 0, [0, 1])
  zeroed = models.masked(params, masks)
  small = models.shrink_and_compare(
    models.mlp, zeroed, models.nothing_masked(params), X
  )
  assert models.shapes(small, 0, "w") == (5, 2)


def test_a_dead_layer_keeps_one_neuron():
  params = models.mlp_params(5, 6, 4)
  masks = models.nothing_masked(params)
  masks[0]["w"] = models.mask_axis(params[0]["w"], 1, [])
  small = models.shrink_and_compare(models.mlp, params, masks, X)
  assert models.shapes(small, 0, "w") == (5, 1)


def test_inputs_and_outputs_stay_and_say_so():
  params = models.mlp_params(5, 6, 4)
  masks = models.nothing_masked(params)
  masks[0]["w"] = models.mask_axis(params[0]["w"], 0, [1, 2])
  masks[1]["w"] = models.mask_axis(params[1]["w"], 1, [0])
  small = models.shrink_and_compare(models.mlp, params, masks, X)
  assert small.removed == []
  text = str(small)
  assert "0/w: 3 empty slices of axis 0 stay: it is an axis of the f" in text
  assert "function's input" in text and "function's output" in text


@pytest.mark.parametrize(
  "name, operation",
  [
    ("softmax", jax.nn.softmax),
    ("sort", lambda h: jnp.sort(h, -1)),
    ("cumsum", lambda h: jnp.cumsum(h, -1)),
    ("rev", lambda h: h[:, ::-1]),
    ("slice", lambda h: h.at[:, 0].set(0)),
    ("concatenate", lambda h: jnp.concatenate([h[:, 2:], h[:, :2]], -1)),
    ("roll", lambda h: jnp.roll(h, 1, -1)),
    ("cond", lambda h: jax.lax.cond(h[0, 0] > 0, jnp.sin, jnp.cos, h)),
    ("while", lambda h: jax.lax.while_loop(lambda c: c.sum() < 9, jnp.exp, h)),
    ("norm", lambda h: h - h.mean(-1, keepdims=True)),
  ],
)
def test_an_operation_that_sees_the_axis_whole_stops_it(name, operation):
  def fn(p, x):
    return models.mlp(p, x, lambda h: operation(jax.nn.relu(h)))

  params = models.mlp_params(5, 6, 4)
  masks = models.nothing_masked(params)
  masks[0]["w"] = models.mask_axis(params[0]["w"], 1, [0, 1])
  small = models.shrink_and_compare(fn, params, masks, X)
  assert small.removed == []
  (blocked,) = small.blocked
  assert blocked[:3] == ("0/w", 1, 4)
  assert "(" in blocked.reason, name


@pytest.mark.parametrize("reverse", [False, True])
def test_scanned_layers_are_as_wide_as_the_widest_needs(reverse):
  def fn(p, x):
    def layer(h, p):
      h = h + jax.nn.relu(h @ p["up"] + p["bias"]) @ p["down"] + p["out"]
      return h, h.sum(-1)

    return jax.lax.scan(layer, x, p, reverse=reverse)

  params = models.randomize(
    {"up": jnp.ones((3, 5, 6)), "bias": jnp.ones((3, 6)),
     "down": jnp.ones((3, 6, 5)), "out": jnp.ones((3, 5))}
  )  # fmt: skip
  masks = models.nothing_masked(params)
  masks["up"] = models.mask_axis(params["up"], 2, range(6))
  for layer, dead in enumerate(([0, 1, 2], [1, 2, 4], [2, 1, 5])):
    masks["up"][layer][:, dead] = 0
  small = models.shrink_and_compare(fn, params, masks, X)
  assert models.shapes(small) == {
    "up": (3, 5, 3), "bias": (3, 3), "down": (3, 3, 5), "out": (3, 5)
  }  # fmt: skip


def test_residual_partners_go_together_or_not_at_all():
  def fn(p, x):
    h = jax.nn.relu(x @ p["in"])
    h = h + jax.nn.relu(h @ p["a"]) @ p["b"]
    return h @ p["out"]

  params = models.randomize(
    {"in": jnp.ones((5, 6)), "a": jnp.ones((6, 8)), "b": jnp.ones((8, 6)),
     "out": jnp.ones((6, 3))}
  )  # fmt: skip
  masks = models.nothing_masked(params)
  masks["in"] = models.mask_axis(params["in"], 1, [0, 1, 2])
  small = models.shrink_and_compare(fn, params, masks, X)
  assert small.removed == []
  masks["b"] = models.mask_axis(params["b"], 1, [0, 2, 4])
  small = models.shrink_and_compare(fn, params, masks, X)
  assert models.shapes(small) == {
    "in": (5, 4), "a": (4, 8), "b": (8, 4), "out": (4, 3)
  }  # fmt: skip


def test_a_square_weight_is_judged_by_the_right_side():
  def fn(p, x):
    h = x @ p["in"]
    return (h + h @ p["square"]) @ p["out"]

  params = models.randomize(
    {"in": jnp.ones((5, 6)), "square": jnp.ones((6, 6)),
     "out": jnp.ones((6, 3))}
  )  # fmt: skip
  masks = models.nothing_masked(params)
  masks["in"] = models.mask_axis(params["in"], 1, [0, 1])
  masks["square"] = models.mask_axis(params["square"], 0, [0, 1])
  assert models.shrink_and_compare(fn, params, masks, X).removed == []
  masks["square"] = models.mask_axis(params["square"], 1, [0, 1, 2])
  small = models.shrink_and_compare(fn, params, masks, X)
  assert models.shapes(small, "square") == (3, 3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision(dtype):
  params = jax.tree.map(lambda p: p.astype(dtype), models.mlp_params(5, 6, 4))
  masks = models.nothing_masked(params)
  masks[0]["w"] = models.mask_axis(params[0]["w"], 1, [0, 4])
  small = models.shrink_and_compare(
    models.mlp, params, masks, X.astype(dtype), tolerance=0.03
  )
  assert small.params[0]["w"].shape == (5, 2)
  assert small.params[0]["w"].dtype == dtype


def test_fn_takes_other_batch_sizes_and_names_other_ranks():
  params = models.mlp_params(5, 6, 4)
  masks = models.nothing_masked(params)
  masks[0]["w"] = models.mask_axis(params[0]["w"], 1, [0, 4])
  small = models.shrink_and_compare(models.mlp, params, masks, X)
  run = jax.jit(small.fn)
  one = run(small.params, X[:1])
  np.testing.assert_allclose(one, run(small.params, X)[:1], rtol=1e-5)
  with pytest.raises(ValueError, match="call shrink again"):
    small.fn(small.params, X[0])


def test_optimizer_state_and_masks_shrink_along():
  params = models.mlp_params(5, 6, 4)
  masks = models.nothing_masked(params)
  kept = [0, 4]
  masks[0]["w"] = models.mask_axis(params[0]["w"], 1, kept)
  tx = optax.chain(optax.clip(1.0), optax.adam(1e-2))
  update = jax.jit(tx.update)
  _, state = update(params, jax.jit(tx.init)(params), params)
  small = shrinking.shrink(models.mlp, params, X, masks=masks)
  small_state = small.shrink(state)
  mu = small_state[1][0].mu
  assert jax.tree.map(jnp.shape, mu) == jax.tree.map(jnp.shape, small.params)
  np.testing.assert_array_equal(
    mu[1]["w"], np.asarray(state[1][0].mu[1]["w"])[kept]
  )
  assert small.shrink(masks)[0]["w"].tolist() == np.ones((5, 2)).tolist()
  updates, _ = update(small.params, small_state, small.params)
  assert jax.tree.map(jnp.shape, updates) == jax.tree.map(
    jnp.shape, small.params
  )


def test_factored_moments_are_refused():
  params = {"w": jnp.ones((256, 256)), "v": jnp.zeros((256, 4))}
  fn = lambda p, x: (x @ p["w"]) @ p["v"]
  params["v"] = params["v"].at[:128].set(1)
  small = shrinking.shrink(fn, params, np.ones((1, 256), np.float32))
  assert models.shapes(small) == {"w": (256, 128), "v": (128, 4)}
  state = optax.scale_by_factored_rms().init(params)
  with pytest.raises(ValueError, match="initialise this optimizer again"):
    small.shrink(state)


def test_shrunk_shapes_are_saved_and_loaded(tmp_path):
  params = models.mlp_params(5, 6, 4)
  masks = models.nothing_masked(params)
  masks[0]["w"] = models.mask_axis(params[0]["w"], 1, [0, 4])
  small = shrinking.shrink(models.mlp, params, X, masks=masks)
  files.save(tmp_path / "small.safetensors", small.params)
  loaded, _ = files.load(tmp_path / "small.safetensors", like=params)
  run = jax.jit(models.mlp)
  np.testing.assert_array_equal(run(loaded, X), run(small.params, X))


def test_gradients_flow_through_the_small_function():
  params = models.mlp_params(5, 6, 4)
  masks = models.nothing_masked(params)
  masks[1]["w"] = models.mask_axis(params[1]["w"], 0, [0, 4])
  small = shrinking.shrink(models.mlp, params, X, masks=masks)
  slope = lambda fn: jax.jit(jax.grad(lambda p: jnp.sum(fn(p, X) ** 2)))
  ours = slope(small.fn)(small.params)
  theirs = slope(models.mlp)(models.masked(params, masks))
  np.testing.assert_allclose(
    ours[0]["w"], np.asarray(theirs[0]["w"])[:, [0, 4]], rtol=1e-4, atol=1e-5
  )
