"""Allocation: distributions that look at the weights, or at a loss.

Like the distributions they return a tree of sparsities whose counts add up to
the request exactly. Unlike them they read values: call them once, outside
`jit`, and hand the result to a pruner with `fixed`.

>>> import functools, jaxpruner
>>> params = {"a": {"kernel": jnp.eye(4)}, "b": {"kernel": jnp.ones((4, 4))}}
>>> sparsities = lamp(params, 0.5)
>>> pruner = jaxpruner.MagnitudePruning(
...   sparsity_distribution_fn=functools.partial(fixed, sparsities=sparsities))
>>> sparsities["a"]["kernel"], sparsities["b"]["kernel"]
(0.75, 0.25)
"""

import fractions
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, mask_calculator
from jaxpruner.sparsity_distributions.base import (
  FilterFn,
  Plan,
  check_sparsity,
  default_filter,
)

PyTree: TypeAlias = Any


def fixed(params: PyTree, sparsities: PyTree) -> PyTree:
  """Give every leaf the sparsity decided on before."""
  _leaves.align(params, sparsities, "sparsities")  # raises where they differ
  return sparsities


def _values(plan: Plan, name: str) -> dict[int, np.ndarray]:
  for i in plan.free:
    if isinstance(plan.leaves[i][1], jax.core.Tracer):
      raise ValueError(
        f"{name} reads the weights, which jit hides; call it once outside, "
        "sparsities = …, and pass sparsity_distribution_fn=functools.partial("
        "jaxpruner.allocation.fixed, sparsities=sparsities)"
      )
  return {i: np.asarray(plan.leaves[i][1], np.float64) for i in plan.free}


def lamp_scores(weights: jax.Array) -> jax.Array:
  """Return `w²` over the sum of all squares not smaller (Lee et al., 2021).

  Among equals the later index counts as the larger.
  """
  squares = jnp.square(weights.astype(jnp.float32)).reshape(-1)
  order = jnp.argsort(squares, stable=True)
  ascending = squares[order]
  tail = jnp.cumsum(ascending[::-1])[::-1]
  scores = ascending / jnp.maximum(tail, jnp.finfo(jnp.float32).tiny)
  return jnp.zeros_like(squares).at[order].set(scores).reshape(weights.shape)


def lamp(
  params: PyTree,
  sparsity: float,
  filter_fn: FilterFn = default_filter,
  custom_sparsity_map: Any = None,
) -> PyTree:
  """Give each leaf what a global ranking by LAMP scores would (Lee et al.).

  The score of a weight is the share it has of its leaf's squares when all
  smaller weights are gone: no leaf is ever emptied.
  """
  sparsity = check_sparsity(sparsity)
  plan = Plan(params, filter_fn, custom_sparsity_map)
  values = _values(plan, "lamp")
  scores = {
    i: np.asarray(lamp_scores(jnp.asarray(w))) for i, w in values.items()
  }
  flat = np.concatenate([s.ravel() for s in scores.values()] or [np.zeros(0)])
  owner = np.repeat(list(scores), [s.size for s in scores.values()])
  keep = mask_calculator.num_ones(plan.size, sparsity)
  kept = owner[np.argsort(-flat, kind="stable")[:keep]]
  return plan.fill(
    sparsity,
    {
      i: fractions.Fraction(int((kept == i).sum()), plan.sizes[i])
      for i in values
    },
  )


def outlier_ratio(scores: Any, threshold: float) -> float:
  """Return the share of scores above `threshold` times their mean."""
  scores = np.abs(np.asarray(scores, np.float64))
  return float(np.mean(scores > threshold * scores.mean()))


def owl_densities(
  ratios: Sequence[float], sizes: Sequence[int], sparsity: float, limit: float
) -> list[fractions.Fraction]:
  """Return densities affine in outlier ratios that average to the request.

  They span `2 * limit`, or as much less as keeps all of them within 0 and 1.
  """
  density = 1 - fractions.Fraction(sparsity)
  exact = [fractions.Fraction(r) for r in ratios]
  total = sum(r * n for r, n in zip(exact, sizes, strict=True))
  away = [r - fractions.Fraction(total, max(sum(sizes), 1)) for r in exact]
  if not any(away):
    return [density] * len(away)
  slope = min(
    2 * fractions.Fraction(limit) / (max(away) - min(away)),
    min(density, 1 - density) / max(map(abs, away)),
  )
  return [density + a * slope for a in away]


def owl(
  params: PyTree,
  sparsity: float,
  scores: PyTree = None,
  threshold: float = 5.0,
  limit: float = 0.08,
  filter_fn: FilterFn = default_filter,
) -> PyTree:
  """Keep more of leaves with more outliers (Yin et al., 2023).

  The outlier ratio of a leaf is the share of scores above `threshold` times
  their mean. Densities are affine in the ratios and span `2 * limit`.

  Args:
    params: the weights.
    sparsity: fraction removed of all leaves together.
    scores: a tree like `params`, such as |w| times activation norms; |w| by
      default.
    threshold: how many times the mean makes an outlier.
    limit: half of what the densities span.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
  """
  sparsity = check_sparsity(sparsity)
  plan = Plan(params, filter_fn, None)
  found = _values(plan, "owl")
  if scores is not None:
    given = _leaves.align(params, scores, "scores")
    found = {i: given[i] for i in plan.free}
  ratios = [outlier_ratio(score, threshold) for score in found.values()]
  sizes = [plan.sizes[i] for i in found]
  densities = owl_densities(ratios, sizes, sparsity, limit)
  return plan.fill(sparsity, dict(zip(found, densities, strict=True)))


def sensitivity(
  params: PyTree,
  sparsity: float,
  loss_fn: Callable[[PyTree], Any],
  levels: Sequence[float] = (0.25, 0.5, 0.75, 0.9, 0.95),
  filter_fn: FilterFn = default_filter,
) -> PyTree:
  """Take from the leaves whose pruning costs the calibration loss least.

  Each leaf alone is pruned by |w| to each level, and down to one weight; the
  convex curves below the measured losses are then descended together,
  cheapest weight first.

  Args:
    params: the weights.
    sparsity: fraction removed of all leaves together.
    loss_fn: `params -> scalar` on calibration data; called once per leaf and
      level.
    levels: sparsities to measure at, ascending.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
  """
  sparsity = check_sparsity(sparsity)
  plan = Plan(params, filter_fn, None)
  values = _values(plan, "sensitivity")
  leaves = [leaf for _, leaf in plan.leaves]
  before = float(loss_fn(params))
  steps = []
  for i, weights in values.items():
    size, curve = plan.sizes[i], [(0, 0.0)]
    for level in (*levels, 1 - 1 / size):
      level = check_sparsity(level, "levels")
      ones = int(mask_calculator.num_ones(size, level))
      if size - ones <= curve[-1][0]:
        continue
      smallest = np.argsort(np.abs(weights), axis=None, kind="stable")
      pruned = np.asarray(leaves[i]).copy().reshape(-1)
      pruned[smallest[: size - ones]] = 0
      changed = [*leaves]
      changed[i] = jnp.asarray(pruned.reshape(weights.shape))
      loss = float(loss_fn(plan.treedef.unflatten(changed)))
      curve.append((size - ones, max(loss - before, curve[-1][1])))
    steps += [(*step, i) for step in _hull(curve)]
  left = plan.size - int(mask_calculator.num_ones(plan.size, sparsity))
  removed = dict.fromkeys(values, 0)
  for _, count, i in sorted(steps):
    taken = min(count, left)
    removed[i] += taken
    left -= taken
  return plan.fill(
    sparsity,
    {i: 1 - fractions.Fraction(removed[i], plan.sizes[i]) for i in values},
  )


def _hull(curve: list[tuple[int, float]]) -> list[tuple[float, int]]:
  """Return the slopes and lengths of the convex curve below some points."""
  hull: list[tuple[int, float]] = []
  for x, y in curve:
    while len(hull) > 1 and (
      (hull[-1][1] - hull[-2][1]) * (x - hull[-1][0])
      >= (y - hull[-1][1]) * (hull[-1][0] - hull[-2][0])
    ):
      hull.pop()
    hull.append((x, y))
  return [
    ((y1 - y0) / (x1 - x0), x1 - x0)
    for (x0, y0), (x1, y1) in zip(hull, hull[1:], strict=False)
  ]
