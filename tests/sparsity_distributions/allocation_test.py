"""Allocation: exact totals, and the papers' formulas in plain loops."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.sparsity_distributions import allocation

SHAPES = {"a": (4, 6), "b": (5, 7), "c": (8, 3)}
SIZE = sum(a * b for a, b in SHAPES.values())


def draw(seed, spread=1.0):
  rng = np.random.default_rng(seed)
  return {
    name: {
      "kernel": jnp.asarray(
        rng.standard_t(2, size=shape) * spread**i, jnp.float32
      )
    }
    for i, (name, shape) in enumerate(SHAPES.items())
  }


def kept(sparsities):
  return {
    name: round(np.prod(SHAPES[name]) * (1 - tree["kernel"]))
    for name, tree in sparsities.items()
  }


def quadratic(params):
  scale = {"a": 1.0, "b": 10.0, "c": 0.1}
  start = draw(0)
  return sum(
    scale[k] * jnp.sum((params[k]["kernel"] - start[k]["kernel"]) ** 2)
    for k in SHAPES
  )


def allocate(name, params, sparsity):
  if name == "sensitivity":
    return allocation.sensitivity(params, sparsity, quadratic, levels=(0.5,))
  return getattr(allocation, name)(params, sparsity)


@hypothesis.settings(max_examples=10)
@hypothesis.given(
  st.sampled_from(["lamp", "owl", "sensitivity"]),
  st.integers(0, 2**32 - 1),
  st.floats(0.0, 0.96),
)
def test_totals_are_exact(name, seed, sparsity):
  counts = kept(allocate(name, draw(seed), sparsity))
  wanted = round(SIZE * (1 - sparsity))
  assert sum(counts.values()) == max(wanted, len(SHAPES))
  assert min(counts.values()) >= 1


def numpy_lamp(w):
  squares = np.asarray(w, np.float64).ravel() ** 2
  return np.array([u / squares[squares >= u].sum() for u in squares])


def test_lamp_ranks_by_the_share_of_what_is_left():
  params = draw(1, spread=5.0)
  scores = {k: numpy_lamp(t["kernel"]) for k, t in params.items()}
  least = np.sort(np.concatenate(list(scores.values())))[-30]
  expected = {k: int((s >= least).sum()) for k, s in scores.items()}
  sparsity = 1 - 30 / SIZE
  assert kept(allocation.lamp(params, sparsity)) == expected
  _, masks = jaxpruner.LampPruning(sparsity=sparsity).instant_sparsify(params)
  for k, s in scores.items():
    got = np.asarray(masks[k]["kernel"]).ravel()
    np.testing.assert_array_equal(got, s >= least)


def test_owl_keeps_more_where_there_are_more_outliers():
  flat, peaked = np.ones((10, 10)), np.ones((10, 10))
  peaked[0, :3] = 100
  params = {
    "flat": {"kernel": flat.astype(np.float32)},
    "peaked": {"kernel": peaked.astype(np.float32)},
  }
  got = allocation.owl(params, 0.7, threshold=5.0, limit=0.05)
  # Ratios 0 and 0.03 about their mean 0.015, scaled to a spread of 0.1.
  assert got["flat"]["kernel"] == pytest.approx(0.75)
  assert got["peaked"]["kernel"] == pytest.approx(0.65)
  other = {"flat": {"kernel": peaked}, "peaked": {"kernel": flat}}
  got = allocation.owl(params, 0.7, other, limit=0.05)
  assert got["flat"]["kernel"] == pytest.approx(0.65)


def test_sensitivity_takes_from_what_the_loss_does_not_need():
  counts = kept(allocation.sensitivity(draw(0), 0.5, quadratic))
  density = {k: counts[k] / np.prod(SHAPES[k]) for k in SHAPES}
  assert density["b"] > density["a"] > density["c"]


def test_sensitivity_is_optimal_where_losses_add_up():
  """Against every allocation in steps of the levels, by brute force."""
  levels = (0.25, 0.5, 0.75)
  full = {"a": 24, "b": 36, "c": 24}
  params = {
    k: {"kernel": jnp.asarray(np.arange(1.0, n + 1).reshape(4, -1))}
    for k, n in full.items()
  }
  scale = {"a": 1.0, "b": 4.0, "c": 0.5}
  removed_loss = lambda k, r: scale[k] * np.sum(np.arange(1.0, r + 1) ** 2)
  loss = lambda p: sum(
    scale[k] * np.sum((np.asarray(p[k]["kernel"] - params[k]["kernel"])) ** 2)
    for k in full
  )
  got = allocation.sensitivity(params, 0.5, loss, levels)
  removed = {k: round(n * got[k]["kernel"]) for k, n in full.items()}
  ours = sum(removed_loss(k, r) for k, r in removed.items())
  every = [
    sum(removed_loss(k, r) for k, r in zip(full, removals, strict=True))
    for removals in itertools.product(
      *(range(0, n, n // 4) for n in full.values())
    )
    if sum(removals) == 42
  ]
  assert every and ours <= min(every) * (1 + 1e-6)


def test_values_under_jit_are_refused_and_fixed_works():
  params = draw(0)
  with pytest.raises(ValueError, match="allocation.fixed"):
    jax.jit(lambda p: allocation.lamp(p, 0.5))(params)
  pruner = jaxpruner.MagnitudePruning(
    sparsity_distribution_fn=functools.partial(
      allocation.fixed, sparsities=allocation.lamp(params, 0.5)
    )
  )
  masks = jax.jit(pruner.instant_sparsify)(params)[1]
  total = sum(int(m.sum()) for m in jax.tree.leaves(masks))
  assert total == round(SIZE * 0.5)
