"""Pruning to a budget: coupled groups, exact budgets, equal outputs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import sparse
from jaxpruner.sparse import budgets

RNG = np.random.default_rng(0)


def normal(*shape):
  return jnp.asarray(RNG.standard_normal(shape), "float32")


def drawn(shapes):
  return jax.tree.map(lambda x: normal(*x.shape) / 4, shapes)


def count(tree):
  return sum(np.size(x) for x in jax.tree.leaves(tree))


def check(fn, weights, *inputs, **budget):
  """Prune; the smaller model must be what it says and equal the masked one."""
  pruned = jaxpruner.prune_to(fn, weights, *inputs, **budget)
  # One program each compiles faster than its operations one by one.
  want = np.asarray(jax.jit(fn)(pruned.params, *inputs))
  got = jax.jit(pruned.small.fn)(pruned.small.params, *inputs)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6 * abs(want).max())
  assert abs(pruned.reached - pruned.wanted) <= 0.01
  if pruned.kind == "params":
    real = count(pruned.small.params) / count(weights)
    assert real == pytest.approx(pruned.reached)
  for param, mask in zip(
    jax.tree.leaves(pruned.params), jax.tree.leaves(pruned.masks), strict=True
  ):
    assert not np.asarray(param)[mask == 0].any()
  return pruned


def decoder(p, tokens):
  """Grouped heads, rotary positions, fused gate and up, tied embedding."""

  def norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

  def rotary(x, shape):
    a, b = jnp.split(x, 2, -1)
    c, s = (f(jnp.arange(5.0)).reshape(shape) for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

  x = p["embed"][tokens]
  h = norm(x, p["n1"])
  q = rotary((h @ p["q"]).reshape(1, 5, 2, 2, 8), (1, 5, 1, 1, 1))
  k = rotary((h @ p["k"]).reshape(1, 5, 2, 8), (1, 5, 1, 1))
  v = (h @ p["v"]).reshape(1, 5, 2, 8)
  a = jax.nn.softmax(jnp.einsum("bsngd,btnd->bngst", q, k))
  o = jnp.einsum("bngst,btnd->bsngd", a, v)
  x = x + o.reshape(1, 5, 32) @ p["o"]
  gate, up = jnp.split(norm(x, p["n2"]) @ p["gate_up"], 2, -1)
  x = x + (jax.nn.silu(gate) * up) @ p["down"]
  return norm(x, p["n"]) @ p["embed"].T


def decoder_weights():
  shapes = {
    "embed": (30, 32), "n1": (32,), "n2": (32,), "n": (32,), "q": (32, 32),
    "k": (32, 16), "v": (32, 16), "o": (32, 32), "gate_up": (32, 96),
    "down": (48, 32),
  }  # fmt: skip
  return {name: normal(*shape) / 4 for name, shape in shapes.items()}


@pytest.mark.parametrize("scores", budgets.SCORES)
def test_a_decoder_keeps_its_groups_whole(scores):
  weights, tokens = decoder_weights(), jnp.arange(5)[None]
  grads = None
  if scores == "taylor":
    grads = jax.jit(jax.grad(lambda p: decoder(p, tokens).sum()))(weights)
  pruned = check(decoder, weights, tokens, params=0.6, scores=scores,
                 grads=grads)  # fmt: skip
  shapes = {n: x.shape for n, x in pruned.small.params.items()}
  width = shapes["embed"][1]
  assert shapes["n1"] == shapes["n2"] == shapes["n"] == (width,)
  assert shapes["gate_up"] == (width, 2 * shapes["down"][0])
  # Query and key share a width; each query group has one.
  assert shapes["q"][1] == 2 * shapes["k"][1]


class Residual(nn.Module):
  """A residual network with batch norms, and a pooled head."""

  @nn.compact
  def __call__(self, x):
    norm = lambda: nn.BatchNorm(use_running_average=True)
    x = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False)(x)))
    y = nn.relu(norm()(nn.Conv(24, (3, 3), use_bias=False)(x)))
    x = nn.relu(x + norm()(nn.Conv(16, (3, 3), use_bias=False)(y)))
    return nn.Dense(4)(x.mean((1, 2)))


@pytest.mark.parametrize("kind", ["params", "flops", "bytes"])
def test_a_residual_network_meets_every_budget(kind):
  x = normal(1, 4, 4, 3)
  weights = drawn(jax.eval_shape(Residual().init, jax.random.key(0), x))
  weights["batch_stats"] = jax.tree.map(jnp.abs, weights["batch_stats"])
  pruned = check(Residual().apply, weights, x, **{kind: 0.5})
  assert len(pruned.groups) == 2
  assert kind in str(pruned)


class Lstm(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(nn.RNN(nn.OptimizedLSTMCell(24))(x))


def test_a_recurrent_cell_loses_whole_units():
  x = normal(2, 3, 8)
  weights = drawn(jax.eval_shape(Lstm().init, jax.random.key(0), x))
  pruned = check(Lstm().apply, weights, x, params=0.5)
  cell = pruned.small.params["params"]["OptimizedLSTMCell_0"]
  kernel = cell["hi"]["kernel"].shape
  assert kernel[0] == kernel[1] < 24


class Skips(nn.Module):
  """Dense connections: each layer sees all before it, of unequal width."""

  @nn.compact
  def __call__(self, x):
    for width in (12, 20):
      norm = nn.BatchNorm(use_running_average=True)
      x = jnp.concatenate([x, nn.Conv(width, (3, 3))(nn.relu(norm(x)))], -1)
    narrow, wide = jnp.split(x, [15], axis=-1)
    return nn.Dense(4)(narrow.mean((1, 2))) + nn.Dense(4)(wide.mean((1, 2)))


def test_parts_of_unequal_width_are_followed():
  x = normal(1, 4, 4, 3)
  weights = drawn(jax.eval_shape(Skips().init, jax.random.key(0), x))
  weights["batch_stats"] = jax.tree.map(jnp.abs, weights["batch_stats"])
  pruned = check(Skips().apply, weights, x, params=0.6)
  sizes = {g.name: g.after for g in pruned.groups}
  first, second = (sizes[f"params/Conv_{i}/kernel[3]"] for i in range(2))
  small = pruned.small.params["params"]
  assert small["BatchNorm_1"]["scale"].shape == (3 + first,)
  assert small["Dense_1"]["kernel"].shape == (second, 4)
  # Other batches, too.
  y = pruned.small.fn(pruned.small.params, jnp.concatenate([x, x]))
  want = Skips().apply(pruned.params, x)
  np.testing.assert_allclose(y[1:], want, rtol=1e-4, atol=1e-5)


def experts(p, x):
  h = x @ p["in"]
  gates = jax.nn.softmax(h @ p["router"])
  hidden = jax.nn.relu(jnp.einsum("bd,edh->beh", h, p["up"]))
  y = jnp.einsum("be,beh,ehd->bd", gates, hidden, p["down"])
  return (h + y) @ p["out"]


def routed(p, x):
  """Each token goes to the best two of three experts, with a room for each."""
  h = x @ p["in"]
  best, chosen = jax.lax.top_k(jax.nn.softmax(h @ p["router"]), 2)
  places = jax.nn.one_hot(chosen, 3)
  sent = jnp.einsum("tke,td->etd", places, h)
  hidden = jax.nn.relu(jnp.einsum("etd,edh->eth", sent, p["up"]))
  y = jnp.einsum("eth,ehd->etd", hidden, p["down"])
  return (h + jnp.einsum("tke,tk,etd->td", places, best, y)) @ p["out"]


@pytest.mark.parametrize("fn", [experts, routed])
def test_experts(fn):
  shapes = {"in": (6, 16), "router": (16, 3), "up": (3, 16, 24),
            "down": (3, 24, 16), "out": (16, 4)}  # fmt: skip
  weights = {name: normal(*shape) for name, shape in shapes.items()}
  for name in ("up", "down"):
    weights[name] = weights[name].at[1].multiply(0.01)
  x = normal(5, 6)
  pruned = check(fn, weights, x, params=0.5)
  # The worst expert goes whole, and no column of the router.
  small = {n: a.shape for n, a in pruned.small.params.items()}
  assert small["up"][0] == small["down"][0] == 2
  assert small["router"][1] == 3 and not pruned.small.same_code
  assert not np.asarray(pruned.masks["up"])[1].any()
  more = pruned.small.fn(pruned.small.params, jnp.concatenate([x, x])[:7])
  np.testing.assert_allclose(
    more[:5], fn(pruned.params, x), rtol=1e-4, atol=1e-4
  )


def mlp(p, x):
  return jnp.tanh(x @ p["up"]) @ p["down"]


MLP = {"up": normal(8, 32), "down": normal(32, 4)}


def test_the_lowest_scores_go():
  weights = {"up": MLP["up"].at[:, ::2].multiply(0.01),
             "down": MLP["down"].at[::2].multiply(0.01)}  # fmt: skip
  pruned = check(mlp, weights, normal(1, 8), params=0.5)
  np.testing.assert_array_equal(
    pruned.small.params["up"], weights["up"][:, 1::2]
  )
  # A unit whose input is always zero adds nothing, whatever its weight.
  x = normal(4, 8).at[:, 0].set(0)
  weights = {"up": 9 * jnp.eye(8, 8), "down": jnp.ones((8, 4))}
  pruned = jaxpruner.prune_to(
    mlp, weights, x, params=0.875, scores="activations"
  )
  assert pruned.masks["up"].min(0).tolist() == [0] + [1] * 7


def test_a_filter_leaves_groups_out():
  weights, tokens = decoder_weights(), jnp.arange(5)[None]
  pruned = check(
    decoder, weights, tokens, params=0.8,
    filter_fn=lambda names, _: names[-1] != "embed",
  )  # fmt: skip
  assert pruned.small.params["embed"].shape == (30, 32)


def test_latency_is_measured():
  weights = {"up": normal(64, 2048), "down": normal(2048, 64)}
  pruned = jaxpruner.prune_to(mlp, weights, normal(64, 64), latency=0.5)
  assert pruned.kind == "latency" and 0 < pruned.reached < 1
  assert count(pruned.small.params) < count(weights)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({}, "exactly one of params, flops, bytes, latency, width; 0"),
    ({"params": 0.5, "flops": 0.5}, "exactly one"),
    ({"params": 1.5}, "params=1.5 must be above 0 and below 1"),
    ({"params": 0.01}, "is as near as removing whole groups comes"),
    ({"params": 0.5, "scores": "luck"}, "scores='luck' must be one of"),
    ({"params": 0.5, "scores": "taylor"}, "needs grads"),
    ({"params": 0.5, "least": 1}, "least=1 must be"),
    ({"params": 0.5, "filter_fn": lambda *_: False}, "no group of slices"),
    ({"depth": 0.5}, "there is no residual block"),
    ({"depth": 1.0}, "depth=1.0 must be"),
  ],
)
def test_errors_name_the_cure(options, words):
  with pytest.raises(ValueError, match=words):
    jaxpruner.prune_to(mlp, MLP, normal(1, 8), **options)


def test_shapes_have_no_activations():
  like = jax.ShapeDtypeStruct((1, 8), "float32")
  check_only = jaxpruner.prune_to(mlp, MLP, like, params=0.5)
  assert check_only.small.params["up"].shape == (8, 16)
  with pytest.raises(ValueError, match="with numbers"):
    jaxpruner.prune_to(mlp, MLP, like, params=0.5, scores="activations")


def test_scores_that_are_not_finite_are_named():
  weights = {**MLP, "up": MLP["up"].at[0, 0].set(jnp.nan)}
  with pytest.raises(ValueError, match=r"up\[1\]: 1 scores are not finite"):
    jaxpruner.prune_to(mlp, weights, normal(1, 8), params=0.5)


def test_a_neuron_that_is_empty_already_goes_first():
  weights = {"up": normal(4, 8).at[:, 1].set(0), "down": normal(8, 3)}
  fn = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
  pruned = check(fn, weights, normal(2, 4), params=0.5)
  assert pruned.small.params["up"].shape == (4, 4)
  assert not np.asarray(pruned.masks["up"])[:, 1].any()


@pytest.mark.parametrize("turned", [False, True])
def test_a_width_keeps_a_part_of_every_dimension(turned):
  """The weights of a product remember what is left of its inputs."""

  def network(p, x):
    second = p["b"].T if turned else p["b"]
    return jnp.tanh(jnp.tanh(x @ p["a"] + p["bias"]) @ second) @ p["c"]

  middle = normal(6, 8) if turned else normal(8, 6)
  weights = {
    "a": normal(3, 8),
    "b": middle,
    "bias": normal(8),
    "c": normal(6, 2),
  }
  pruned = jaxpruner.prune_to(network, weights, normal(1, 3), width=0.5)
  assert np.shape(pruned.small.params["a"]) == (3, 4)
  assert np.shape(pruned.small.params["c"]) == (3, 2)
  assert pruned.fan_in == {"a": 1.0, "b": 0.5, "bias": 1.0, "c": 0.5}
  assert pruned.reached == 0.5
  least = jaxpruner.prune_to(network, weights, normal(1, 3), width=0.01)
  assert np.shape(least.small.params["a"]) == (3, 1)


class Blocks(nn.Module):
  """Attention and hidden layers, or convolutions, each added to its input."""

  parallel: bool = False

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(16)(x)
    for _ in range(2):
      h = nn.LayerNorm()(x)
      y = nn.MultiHeadDotProductAttention(num_heads=2)(h, h)
      x = x + y
      h = h if self.parallel else nn.LayerNorm()(x)
      x = x + nn.Dense(16)(nn.gelu(nn.Dense(48)(h)))
    return nn.Dense(3)(x)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("scores", budgets.SCORES)
def test_whole_residual_blocks_go(parallel, scores):
  model, x = Blocks(parallel), normal(2, 5, 6)
  weights = drawn(jax.eval_shape(model.init, jax.random.key(0), x))
  low = weights["params"]["MultiHeadDotProductAttention_1"]["out"]
  low["kernel"], low["bias"] = low["kernel"] * 1e-3, low["bias"] * 1e-3
  low = weights["params"]["MultiHeadDotProductAttention_1"]["value"]
  low["kernel"] = low["kernel"] * 1e-3
  grads = None
  if scores == "taylor":
    loss = lambda p: (model.apply(p, x) ** 2).sum()
    grads = jax.jit(jax.grad(loss))(weights)
  pruned = check(model.apply, weights, x, depth=0.75, scores=scores,
                 grads=grads)  # fmt: skip
  assert pruned.reached == 0.75 and not pruned.groups
  (block,) = pruned.blocks
  if scores != "taylor":  # whose sums may cancel
    assert block == "params/MultiHeadDotProductAttention_1"
  gone = [x for x in jax.tree.leaves(pruned.small.params) if not x.size]
  assert gone and not pruned.small.same_code
  # Fewer operations are left, and other batches work.
  small = jax.jit(pruned.small.fn)
  more = small(pruned.small.params, jnp.concatenate([x, x]))
  want = jax.jit(model.apply)(pruned.params, x)
  np.testing.assert_allclose(more[2:], want, rtol=1e-4, atol=1e-4)


def test_depth_goes_before_width(tmp_path):
  model, x = Residual(), normal(1, 4, 4, 3)
  weights = drawn(jax.eval_shape(model.init, jax.random.key(0), x))
  weights["batch_stats"] = jax.tree.map(jnp.abs, weights["batch_stats"])
  total = count(weights)
  own = sum(
    count(weights[kind].get(name, ()))
    for kind in weights
    for name in ("Conv_1", "Conv_2", "BatchNorm_1", "BatchNorm_2")
  )
  with pytest.raises(ValueError, match="ask for more depth"):
    jaxpruner.prune_to(model.apply, weights, x, params=0.5, depth=0.4)
  share = 0.8 * (1 - own / total)
  pruned = check(model.apply, weights, x, params=share, depth=0.4)
  assert len(pruned.blocks) == len(pruned.groups) == 1
  assert not pruned.small.params["params"]["Conv_1"]["kernel"].size
  path = tmp_path / "small.jaxpruner"
  pruned.small.save(path)
  want = pruned.small.fn(pruned.small.params, x)
  np.testing.assert_allclose(sparse.load_model(path)(x), want, rtol=1e-5)
  small = pruned.small.shrink({"m": weights})["m"]
  assert jax.tree.map(jnp.shape, small) == jax.tree.map(
    jnp.shape, pruned.small.params
  )


def test_the_filter_and_bad_numbers_hold_for_blocks():
  model, x = Blocks(), normal(1, 3, 6)
  weights = drawn(jax.eval_shape(model.init, jax.random.key(0), x))
  pruned = check(
    model.apply, weights, x, depth=0.5,
    filter_fn=lambda names, _: "Attention" in "/".join(names)
    or "LayerNorm" in "/".join(names),
  )  # fmt: skip
  (block,) = pruned.blocks
  assert block.startswith("params/MultiHeadDotProductAttention_")
  weights["params"]["Dense_1"]["kernel"] *= jnp.nan
  with pytest.raises(ValueError, match="scores are not finite"):
    jaxpruner.prune_to(model.apply, weights, x, depth=0.5)


def test_zero_blocks_are_taken_out_only_when_asked_for():
  weights = {name: normal(6, 6) for name in ("a", "b", "c")}
  weights["c"] *= 0
  fn = lambda p, x: x + jnp.tanh(x @ p["a"]) + jnp.sin(x @ p["b"]) @ p["c"]
  x = normal(2, 6)
  kept = sparse.shrink(fn, weights, x)
  assert kept.params["b"].shape == (6, 1)  # as before: one unit stays
  small = sparse.shrink(fn, weights, x, blocks=True)
  assert [small.params[k].size for k in "abc"] == [36, 0, 0]
  np.testing.assert_array_equal(small.fn(small.params, x), fn(weights, x))
  # A result that zero weights do not make zero stays.
  one = lambda p, x: x + jnp.cos(x @ p["c"])
  assert sparse.shrink(one, weights, x, blocks=True).params["c"].size
