"""Pruning at initialization against the papers' formulas, in slow NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jaxpruner

RNG = np.random.default_rng(0)
W = {
  "first": RNG.normal(size=(5, 6)).astype(np.float32),
  "second": RNG.normal(size=(6, 4)).astype(np.float32),
}
X = RNG.normal(size=(7, 5)).astype(np.float32)
Y = RNG.normal(size=(7, 4)).astype(np.float32)


def apply(params, x):
  """Two linear layers: derivatives by hand stay short."""
  return x @ params["first"] @ params["second"]


def loss(params, batch):
  x, y = batch
  return 0.5 * jnp.sum((apply(params, x) - y) ** 2)


def numpy_gradient(a, b):
  error = X.astype(np.float64) @ a @ b - Y
  return X.T @ error @ b.T, (X @ a).T @ error


@functools.cache
def masks_of(name, sparsity=0.6, **options):
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": name, "sparsity": sparsity, **options}
  ).bind(loss, (X, Y), apply, X)
  init = jax.jit(pruner.wrap_optax(optax.sgd(0.1)).init)
  state = init(jax.tree.map(jnp.asarray, W))
  return [np.asarray(state.masks[name]) for name in W]


def test_snip_keeps_the_largest_products_with_the_gradient():
  a, b = (W[name].astype(np.float64) for name in W)
  ga, gb = numpy_gradient(a, b)
  wanted = reference.together([np.abs(a * ga), np.abs(b * gb)], 0.6)
  for found, mask in zip(masks_of("snip"), wanted, strict=True):
    np.testing.assert_array_equal(found, mask)


def test_grasp_removes_what_the_gradient_flow_does_not_miss():
  a, b = (W[name].astype(np.float64) for name in W)
  ga, gb = numpy_gradient(a, b)
  # H g by differences: the gradient is a polynomial, its middle is exact
  # enough.
  e = 1e-5
  high = numpy_gradient(a + e * ga, b + e * gb)
  low = numpy_gradient(a - e * ga, b - e * gb)
  flow = [(h - l) / (2 * e) for h, l in zip(high, low, strict=True)]
  # S = -w · Hg; the highest go.
  scores = [-(-w * f) for w, f in zip((a, b), flow, strict=True)]
  wanted = reference.together(scores, 0.6)
  for found, mask in zip(masks_of("grasp"), wanted, strict=True):
    np.testing.assert_array_equal(found, mask)


@pytest.mark.parametrize("rounds", [1, 7])
def test_synflow_keeps_the_flow_round_by_round(rounds):
  a, b = (np.abs(W[name].astype(np.float64)) for name in W)
  masks = [np.ones(w.shape) for w in (a, b)]
  for k in range(rounds):
    ma, mb = a * masks[0], b * masks[1]
    # R = 1ᵀ |a| |b| 1.
    scores = [
      ma * mb.sum(1)[None, :] * np.ones((5, 1)),
      mb * ma.sum(0)[:, None],
    ]
    scores = [np.where(m, s, -1) for m, s in zip(masks, scores, strict=True)]
    masks = reference.together(scores, 1 - 0.4 ** ((k + 1) / rounds))
  for found, mask in zip(
    masks_of("synflow", rounds=rounds), masks, strict=True
  ):
    np.testing.assert_array_equal(found, mask)


def deep(sizes, seed=0):
  rng = np.random.default_rng(seed)
  return {
    f"layer_{i}": {
      "kernel": jnp.asarray(
        rng.normal(size=(m, n)) * np.sqrt(2 / m), jnp.float32
      )
    }
    for i, (m, n) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
  }


def deep_apply(params, x):
  for i in range(len(params)):
    x = (jax.nn.relu(x) if i else x) @ params[f"layer_{i}"]["kernel"]
  return x


def test_synflow_keeps_every_layer_alive_where_snip_wipes_one_out():
  params = deep((16, 64, 64, 64, 4))
  x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 16)), jnp.float32)
  mean = lambda p, x: jnp.mean(deep_apply(p, x) ** 2)

  def start(name):
    pruner = jaxpruner.create_updater_from_config(
      {"algorithm": name, "sparsity": 0.998}
    ).bind(mean, x, deep_apply, x)
    return pruner.wrap_optax(optax.sgd(0.1)).init

  state = jax.jit(start("synflow"))(params)
  assert jaxpruner.state_metrics(state)["collapsed"] == 0
  with pytest.warns(UserWarning, match=r"layer_\d/kernel.*has collapsed"):
    state = start("snip")(params)
  assert jaxpruner.state_metrics(state)["collapsed"] > 0
  assert 0 in jaxpruner.layers_near_collapse(state).values()


def numpy_flow(kernels, rounds, sparsity):
  """SynFlow of a chain of linear layers, in float64."""
  masks = [np.ones(w.shape) for w in kernels]
  for k in range(rounds):
    live = [np.abs(w) * m for w, m in zip(kernels, masks, strict=True)]
    before, after = [np.ones(live[0].shape[0])], [np.ones(live[-1].shape[1])]
    for w in live[:-1]:
      before.append(before[-1] @ w)
    for w in live[:0:-1]:
      after.append(w @ after[-1])
    total = before[-1] @ live[-1] @ after[0]
    scores = [
      w * np.outer(b, a) / total
      for w, b, a in zip(live, before, after[::-1], strict=True)
    ]
    scores = [np.where(m, s, -1) for m, s in zip(masks, scores, strict=True)]
    masks = reference.together(scores, 1 - (1 - sparsity) ** ((k + 1) / rounds))
  return masks


def test_synflow_of_forty_layers_is_that_of_float64():
  # In float32 the flow overflows, and most layers lost all their weights.
  params = jax.tree.map(lambda w: 4 * w, deep((32,) * 41))
  names = [f"layer_{i}" for i in range(40)]
  kernels = [np.asarray(params[n]["kernel"], np.float64) for n in names]
  flow = np.ones(32)
  for kernel in kernels:
    flow = flow @ np.abs(kernel)
  assert flow.sum() > 1e46
  pruner = jaxpruner.SynFlow(sparsity=0.9, rounds=3).bind(
    None, None, deep_apply, jnp.ones((1, 32))
  )
  state = jax.jit(pruner.init_state)(params)
  wanted = numpy_flow(kernels, 3, 0.9)
  for layer, mask in zip(names, wanted, strict=True):
    np.testing.assert_array_equal(state.masks[layer]["kernel"], mask)


def test_synflow_keeps_every_layer_of_a_network_as_deep_as_resnet_50():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(
    rng.normal(size=shape) * np.sqrt(2 / shape[-2]), jnp.float32
  )
  # 16 blocks of three layers; a loop over them, so that one is compiled.
  params = {
    "stem": draw(16, 96),
    "in": draw(16, 96, 64),
    "mid": draw(16, 64, 64),
    "out": draw(16, 64, 96),
    "head": draw(96, 10),
  }

  def block(x, parts):
    y = x
    for part in parts:
      y = jax.nn.relu(y) @ part
    return x + y, None

  def apply(params, x):
    parts = [params[name] for name in ("in", "mid", "out")]
    return jax.lax.scan(block, x @ params["stem"], parts)[0] @ params["head"]

  pruner = jaxpruner.SynFlow(sparsity=0.98)
  pruner = pruner.bind(None, None, apply, jnp.ones((1, 16)))
  outputs = apply(jax.tree.map(jnp.abs, params), jnp.ones((1, 16)))
  assert not np.isfinite(outputs).all()  # float32 cannot hold R
  score = jax.jit(pruner.calculate_scores)
  for k in range(10):
    scores, treedef = jax.tree.flatten(score(params))
    masks = reference.together(scores, 1 - 0.02 ** ((k + 1) / 10))
    layers = [m for mask in masks for m in (mask if mask.ndim > 2 else [mask])]
    assert len(layers) == 50
    assert all(layer.any() for layer in layers)
    masks = treedef.unflatten([jnp.asarray(mask) for mask in masks])
    params = jax.tree.map(jaxpruner.apply_mask, params, masks)


def test_synflow_takes_a_network_that_insists_on_float32():
  def square(params, x):
    start = (x @ params["first"]).astype(jnp.float32)
    step = lambda h, w: (h @ w, None)  # the carry becomes float64
    return jax.lax.scan(step, start, params["loop"][None])[0]

  params = {"first": jnp.ones((5, 6)), "loop": jnp.eye(6) + 0.5}
  pruner = jaxpruner.SynFlow(sparsity=0.5, rounds=2)
  pruner = pruner.bind(None, None, square, jnp.ones((1, 5)))
  masks = pruner.init_state(params).masks
  assert sum(int(m.sum()) for m in masks.values()) == 33


@pytest.mark.parametrize("name", ["snip", "grasp", "synflow"])
def test_an_unbound_pruner_says_what_to_call(name):
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": name, "sparsity": 0.5}
  )
  with pytest.raises(ValueError, match=r"pruner = pruner\.bind\(loss, batch"):
    pruner.wrap_optax(optax.sgd(0.1)).init(W)


def test_a_bound_pruner_compares_by_its_batch():
  pruner = jaxpruner.SNIP(sparsity=0.5)
  one, two = pruner.bind(loss, jnp.ones(2)), pruner.bind(loss, jnp.ones(2))
  assert one == two and hash(one) == hash(two)
  assert one != pruner.bind(loss, jnp.array([1.0, 1.5]))
