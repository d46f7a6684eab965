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
