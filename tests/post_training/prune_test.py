"""Pruning a whole function: what is found, in which order, and resumed."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpruner import post_training
from jaxpruner.post_training import _graph, calibration
from jaxpruner.post_training.contrib import alpha

RNG = np.random.default_rng(0)
MIX = RNG.normal(size=(16, 16)).astype(np.float32)
BATCHES = [RNG.normal(size=(32, 16)).astype(np.float32) @ MIX for _ in range(3)]
DATA = np.concatenate(BATCHES)


def mlp(params, x):
  h = jax.nn.relu(x @ params["a"]["w"] + params["a"]["b"])
  return h @ params["c"]["w"] + params["c"]["b"]


def mlp_params():
  rng = np.random.default_rng(1)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return {
    "a": {"w": draw(16, 24), "b": draw(24)},
    "c": {"w": draw(24, 8), "b": draw(8)},
  }


prune = functools.partial(post_training.prune, sparsity=0.5)


def test_statistics_are_those_of_the_activations():
  params = mlp_params()
  seen = post_training.calibrate(mlp, params, BATCHES)
  hidden = np.maximum(DATA @ params["a"]["w"] + params["a"]["b"], 0)
  for name, x in {"a/w": DATA, "c/w": hidden}.items():
    (found,) = seen[name]
    assert found.count == len(DATA)
    np.testing.assert_allclose(found.mean[0], x.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
      found.gram[0], x.T @ x / len(x), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(found.norm[0] ** 2, (x * x).mean(0), rtol=1e-4)


def models():
  """The same two layers in five frameworks: (apply_fn, params, paths)."""
  x = DATA[:1]

  class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(8)(jax.nn.relu(nn.Dense(24)(x)))

  linen = Linen()
  yield linen.apply, linen.init(jax.random.key(0), x), "kernel"

  class Nnx(nnx.Module):
    def __init__(self):
      self.a = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
      self.c = nnx.Linear(24, 8, rngs=nnx.Rngs(1))

    def __call__(self, x):
      return self.c(jax.nn.relu(self.a(x)))

  graph, state = nnx.split(Nnx())
  yield (lambda s, x: nnx.merge(graph, s)(x)), state, "kernel"
  model = eqx.nn.MLP(16, 8, 24, 1, key=jax.random.key(0))
  yield (lambda m, x: jax.vmap(m)(x)), model, "weight"
  mlp_of_haiku = lambda x: hk.nets.MLP([24, 8])(x)
  haiku = hk.without_apply_rng(hk.transform(mlp_of_haiku))
  yield haiku.apply, haiku.init(jax.random.key(0), x), "w"
  yield mlp, mlp_params(), "w"


@pytest.mark.parametrize("i", range(5))
def test_weights_are_found_by_path_in_every_framework(i):
  apply_fn, params, leaf = list(models())[i]
  new, masks, report = prune(apply_fn, params, BATCHES, method="wanda")
  assert [layer.shape for layer in report.layers] == [(16, 24), (24, 8)]
  assert all(layer.name.endswith(leaf) for layer in report.layers)
  assert report.sparsity == 0.5
  assert jax.tree.structure(new) == jax.tree.structure(params)
  chosen = [m for m in jax.tree.leaves(masks) if m is not None]
  assert len(chosen) == 2
  assert sum(int(m.sum()) for m in chosen) == (16 * 24 + 24 * 8) // 2
  # Wanda keeps half of the inputs of every output, wherever the axis lies.
  wide = next(m for m in chosen if 24 in m.shape and 16 in m.shape)
  assert (wide.sum(axis=wide.shape.index(16)) == 8).all()


def test_a_scanned_stack_is_pruned_like_its_layers():
  rng = np.random.default_rng(2)
  stack = jnp.asarray(rng.normal(size=(3, 16, 16)), jnp.float32)

  def scanned(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  def plain(layers, x):
    for w in layers:
      x = jnp.tanh(x @ w)
    return x

  options = dict(method="sparsegpt", filter_fn=lambda _names, _leaf: True)
  one, _, _ = prune(scanned, stack, BATCHES, **options)
  many, _, _ = prune(plain, list(stack), BATCHES, **options)
  np.testing.assert_array_equal(one != 0, np.stack(many) != 0)
  np.testing.assert_allclose(one, np.stack(many), rtol=1e-3, atol=1e-4)


def test_convolutions_are_products_with_their_windows():
  rng = np.random.default_rng(3)
  kernel = jnp.asarray(rng.normal(size=(3, 3, 4, 6)), jnp.float32)
  images = [rng.normal(size=(2, 9, 8, 4)).astype(np.float32) for _ in range(2)]

  def conv(w, x):
    return jax.lax.conv_general_dilated(
      x, w, (2, 1), [(1, 1), (0, 1)], dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

  seen = post_training.calibrate(conv, kernel, images)["kernel"][0]
  # E‖conv(x)‖² is the same number, whichever way it is reckoned.
  out = np.concatenate([conv(kernel, x) for x in images]).reshape(-1, 6)
  flat = np.asarray(kernel).reshape(36, 6)
  reckoned = np.einsum("io,ij,jo->o", flat, seen.gram[0], flat)
  np.testing.assert_allclose(reckoned, (out**2).mean(0), rtol=1e-4)
  _, masks, _ = prune(conv, kernel, images, sparsity_type="2:4")
  assert (masks.reshape(9, 4, 6).sum(1) == 2).all()


def test_later_layers_see_the_pruned_earlier_ones():
  params = mlp_params()
  one, _, _ = prune(mlp, params, BATCHES, sequential=True)
  other, _, _ = prune(mlp, params, BATCHES, sequential=False)
  np.testing.assert_array_equal(one["a"]["w"], other["a"]["w"])
  hidden = np.maximum(DATA @ one["a"]["w"] + params["a"]["b"], 0)
  alone, _, _ = prune(
    lambda p, x: x @ p["w"], {"w": params["c"]["w"]}, [hidden]
  )
  np.testing.assert_allclose(one["c"]["w"], alone["w"], rtol=1e-3, atol=1e-4)
  assert (np.asarray(one["c"]["w"]) != np.asarray(other["c"]["w"])).any()


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_one_device_and_eight_choose_the_same_masks(method):
  params = mlp_params()
  mesh = jax.make_mesh((8,), ("data",))
  _, one, _ = prune(mlp, params, BATCHES, method=method)
  _, eight, _ = prune(mlp, params, BATCHES, method=method, mesh=mesh)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
    np.testing.assert_array_equal(a, b)


def test_an_interrupted_run_continues_where_it_was(tmp_path):
  params = mlp_params()
  whole, masks, _ = prune(mlp, params, BATCHES)

  class Killed(Exception):
    pass

  def die(done, total, name):
    raise Killed

  with pytest.raises(Killed):
    prune(mlp, params, BATCHES, folder=tmp_path, progress=die)
  solved = []
  again, other, report = prune(
    mlp, params, BATCHES, folder=tmp_path,
    progress=lambda _done, _total, name: solved.append(name),
  )  # fmt: skip
  assert solved == ["a/w", "c/w"] and len(report.layers) == 2
  assert len(list(tmp_path.glob("*.safetensors"))) == 2
  for a, b in zip(
    jax.tree.leaves((whole, masks)), jax.tree.leaves((again, other)),
    strict=True,
  ):  # fmt: skip
    np.testing.assert_array_equal(a, b)
  with pytest.raises(ValueError, match="another job"):
    prune(mlp, params, BATCHES, folder=tmp_path, damping=0.1)


def norm_net(params, x):
  n = params["norm"]
  y = x @ params["w"] + params["b"]
  return (y - n["mean"]) * jax.lax.rsqrt(n["var"] + 1e-5)


def test_refitting_restores_means_and_running_statistics():
  rng = np.random.default_rng(4)
  w = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
  shifted = [b + 1 for b in BATCHES]
  data = np.concatenate(shifted)
  y = data @ w
  params = {
    "w": w,
    "b": jnp.zeros(8),
    "norm": {"mean": jnp.asarray(y.mean(0)), "var": jnp.asarray(y.var(0))},
  }
  options = dict(method="magnitude", refit=True)
  new, _, _ = prune(norm_net, params, shifted, **options)
  out = norm_net(new, data)
  np.testing.assert_allclose(out.mean(0), 0, atol=1e-3)
  np.testing.assert_allclose(out.var(0), 1, atol=1e-3)
  # The bias makes up for the mean even before the normalisation.
  mean = (data @ new["w"] + new["b"]).mean(0)
  np.testing.assert_allclose(mean, y.mean(0), atol=1e-3)


def test_owl_keeps_the_total_and_spares_outliers():
  params = mlp_params()
  spiky = np.asarray(params["a"]["w"]).copy()
  for i in range(24):  # one in each output: the hidden layer stays even
    spiky[i % 16, i] *= 40
  params["a"]["w"] = jnp.asarray(spiky)
  _, masks, report = prune(
    mlp, params, BATCHES, method="sparsegpt", sparsity=0.55, allocation="owl"
  )
  by_name = {layer.name: layer.sparsity for layer in report.layers}
  assert by_name["a/w"] < 0.55 < by_name["c/w"]
  sizes = [mask.size for mask in jax.tree.leaves(masks)]
  ones = sum(int(mask.sum()) for mask in jax.tree.leaves(masks))
  assert ones == round(sum(sizes) * 0.45)


def test_alpha_keeps_the_total_and_spares_heavy_tails():
  params = mlp_params()
  left, _, right = np.linalg.svd(params["a"]["w"], full_matrices=False)
  heavy = left * (np.arange(1, len(right) + 1) ** -2.0) @ right
  params["a"]["w"] = jnp.asarray(heavy, jnp.float32)
  _, masks, report = prune(
    mlp, params, BATCHES, method="magnitude", sparsity=0.55, allocation="alpha"
  )
  by_name = {layer.name: layer.sparsity for layer in report.layers}
  assert by_name["a/w"] < 0.55 < by_name["c/w"]
  sizes = [mask.size for mask in jax.tree.leaves(masks)]
  ones = sum(int(mask.sum()) for mask in jax.tree.leaves(masks))
  assert ones == round(sum(sizes) * 0.45)


def test_tail_exponent_is_hills_estimate():
  w = np.random.default_rng(0).normal(size=(7, 12))
  values = sorted(np.linalg.eigvalsh(w @ w.T))[::-1]
  total = sum(np.log(values[i] / values[3]) for i in range(3))
  assert alpha.tail_exponent(w) == pytest.approx(1 + 3 / total)
  assert alpha.tail_exponent(np.eye(4)) == np.inf


@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_donated_weights_give_up_their_memory(make):
  kept = jax.tree.map(make, mlp_params())
  given = jax.tree.map(make, mlp_params())
  expected, _, _ = prune(mlp, kept, BATCHES, refit=True)
  got, _, _ = prune(mlp, given, BATCHES, refit=True, donate=True)
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  jax.tree.map(np.testing.assert_array_equal, kept, mlp_params())
  for name in ("a", "c"):
    if make is np.array:
      assert got[name]["w"] is given[name]["w"]
    else:
      assert given[name]["w"].is_deleted()


def test_dense_weights_that_are_still_needed_cannot_be_donated():
  with pytest.raises(ValueError, match="donate=True .* sequential=False"):
    prune(mlp, mlp_params(), BATCHES, donate=True, sequential=False)


def test_weights_used_otherwise_stay_dense_and_say_why():
  params = {
    "embed": jnp.ones((10, 16)),
    "w": mlp_params()["a"]["w"],
    "u": jnp.eye(16),
    "v": jnp.ones((4, 4)),
  }

  def tied(p, ids):
    x = p["embed"][ids]
    return (x @ p["w"] @ p["w"].T + x @ p["u"]) @ p["embed"].T

  ids = np.arange(8, dtype=np.int32)
  _, masks, report = prune(tied, params, [ids], method="magnitude")
  assert masks["embed"] is None and masks["w"] is None
  assert masks["u"] is not None
  assert "gather" in report.skipped["embed"]
  assert "several layouts" in report.skipped["w"]
  assert report.skipped["v"] == "not used by a product"


@pytest.mark.parametrize(
  "tx",
  [optax.adamw(1e-2), optax.chain(optax.clip(1.0), optax.sgd(1e-2, 0.9))],
  ids=["adamw", "momentum"],
)
def test_the_mask_is_held_while_training_goes_on(tx):
  params = mlp_params()
  new, masks, _ = prune(mlp, params, BATCHES, method="magnitude")
  new["a"]["w"] = new["a"]["w"].at[0, 0].set(jnp.nan)  # even from outside
  masks["a"]["w"][0, 0] = 0
  tx = post_training.hold_masks(tx, masks)
  target = mlp(params, DATA)

  @jax.jit
  def step(new, state):
    clean = jax.tree.map(jnp.nan_to_num, new)
    loss = lambda p: jnp.mean(jnp.square(mlp(p, DATA) - target))
    value, grads = jax.value_and_grad(loss)(clean)
    updates, state = tx.update(grads, state, clean)
    return optax.apply_updates(clean, updates), state, value

  state, losses = tx.init(new), []
  for _ in range(10):
    new, state, loss = step(new, state)
    losses.append(float(loss))
  assert losses[-1] < losses[0]
  for name in "ac":
    zero = np.asarray(new[name]["w"])[np.asarray(masks[name]["w"]) == 0]
    assert (zero == 0).all() and not np.signbit(zero).any()
  assert (np.asarray(new["a"]["b"]) != np.asarray(params["a"]["b"])).any()


def test_lora_learns_and_merges_into_the_same_mask():
  params = mlp_params()
  new, masks, _ = prune(mlp, params, BATCHES, method="magnitude")
  factors = post_training.add_lora(new, masks, 4, jax.random.key(0))
  start = post_training.apply_lora(new, masks, factors)
  for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(new), strict=True):
    np.testing.assert_array_equal(a, b)

  def loss(factors):
    adapted = post_training.apply_lora(new, masks, factors)
    return jnp.mean(jnp.square(mlp(adapted, DATA) - mlp(params, DATA)))

  tx = optax.adam(3e-2)
  state, before = tx.init(factors), loss(factors)
  step = jax.jit(jax.value_and_grad(loss))
  for _ in range(20):
    updates, state = tx.update(step(factors)[1], state)
    factors = optax.apply_updates(factors, updates)
  assert loss(factors) < before
  merged = post_training.merge_lora(new, masks, factors)
  for name in "ac":
    zero = np.asarray(masks[name]["w"]) == 0
    assert not np.asarray(merged[name]["w"])[zero].any()
    assert (np.asarray(merged[name]["w"])[~zero] != 0).all()


@pytest.mark.parametrize(
  "change, message",
  [
    ({"method": "wand"}, "did you mean 'wanda'"),
    ({"sparsity": 1.0}, "0 <= sparsity < 1"),
    ({"sparsity": None}, "sparsity is missing"),
    ({"sparsity_type": "5:7", "sparsity": None}, "does not divide"),
    ({"sparsity_type": "channel_0"}, "Unstructured, NByM and Block"),
    ({"allocation": "fair"}, "allocation='fair'"),
    ({"damping": -1.0}, "damping=-1.0"),
  ],
)
def test_wrong_requests_say_what_is_wrong(change, message):
  with pytest.raises(ValueError, match=message):
    prune(mlp, mlp_params(), BATCHES, **{"method": "magnitude", **change})


def test_batches_of_unequal_shape_are_refused():
  with pytest.raises(ValueError, match="the same shapes"):
    prune(mlp, mlp_params(), [DATA[:4], DATA[:3]], method="wanda")
  with pytest.raises(ValueError, match="batches is empty"):
    prune(mlp, mlp_params(), [])


def test_experts_are_groups_of_their_own():
  rng = np.random.default_rng(5)
  w = jnp.asarray(rng.normal(size=(2, 16, 8)), jnp.float32)
  apply_fn = lambda w, x: jnp.einsum("ebi,eio->ebo", x, w)
  x = np.stack([DATA, 3 * DATA[::-1]])
  filter_fn = lambda _names, _leaf: True
  model = calibration.Model(apply_fn, w, [x], filter_fn)
  (part,) = model.parts
  assert isinstance(part, _graph.Part)
  assert part.indices(w.shape).shape == (2, 16, 8)
  (seen,) = post_training.calibrate(apply_fn, w, [x])["kernel"]
  np.testing.assert_allclose(seen.gram[1] / seen.gram[0], 9, rtol=1e-3)


def test_elements_are_counted_only_where_a_weight_is_used_twice(monkeypatch):
  # An index per weight would outgrow the statistics: an embedding has many.
  asked = []
  indices = _graph.View.indices

  def ask(view, shape):
    asked.append(shape)
    return indices(view, shape)

  monkeypatch.setattr(_graph.View, "indices", ask)
  params = {"once": jnp.ones((16, 8)), "twice": jnp.ones((8, 8))}

  def apply_fn(p, x):
    y = x @ p["once"]
    return y @ p["twice"] + jax.nn.relu(y) @ p["twice"]

  filter_fn = lambda _names, _leaf: True
  model = calibration.Model(apply_fn, params, [DATA], filter_fn)
  assert [part.shape for part in model.parts] == [(1, 16, 8), (1, 8, 8)]
  assert asked == [(8, 8)] * 2


def rnn(params, xs):
  def body(h, x):
    return (h := jnp.tanh(x @ params["i"] + h @ params["h"])), h

  return jax.lax.scan(body, jnp.zeros((4, 8)), xs)[1]


def rnn_and_head(params, xs):
  return rnn(params[0], xs) @ params[1]


def test_a_recurrent_scan_is_calibrated_over_all_its_steps():
  rng = np.random.default_rng(2)
  params = {
    "i": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
    "h": jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32),
  }

  batches = [x.reshape(8, 4, 16) for x in BATCHES]
  states = [rnn(params, xs) for xs in batches]
  seen = post_training.calibrate(rnn, params, batches)
  (found,) = seen["i"]
  np.testing.assert_allclose(found.square[0], (DATA**2).mean(0), rtol=1e-4)
  (found,) = seen["h"]
  # The state of the first step is zeros, which are no data.
  before = np.concatenate([h[:-1].reshape(-1, 8) for h in states])
  assert found.count == len(before)
  np.testing.assert_allclose(found.square[0], (before**2).mean(0), rtol=1e-4)
  _, masks, report = prune(rnn, params, batches, method="wanda")
  assert not report.skipped
  assert [int(masks[n].sum()) for n in "ih"] == [64, 32]
  long = [np.concatenate([batches[0]] * 20)]
  _, _, report = prune(rnn_and_head, (params, params["h"]), long,
                       method="wanda")  # fmt: skip
  assert "calibrate on shorter sequences" in report.skipped["0/h"]
