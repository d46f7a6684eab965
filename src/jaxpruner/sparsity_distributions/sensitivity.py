"""Sensitivity: remove weights where a calibration loss rises least."""

import fractions
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator
from jaxpruner.sparsity_distributions.budget import Budget, values
from jaxpruner.sparsity_distributions.filters import FilterFn, default_filter
from jaxpruner.sparsity_types import check_sparsity

PyTree: TypeAlias = Any


def sensitivity(
  params: PyTree,
  sparsity: float,
  loss_fn: Callable[[PyTree], Any],
  levels: Sequence[float] = (0.25, 0.5, 0.75, 0.9, 0.95),
  filter_fn: FilterFn = default_filter,
) -> PyTree:
  """Remove more weights from leaves whose pruning raises the loss least.

  Each leaf alone is pruned by |w| to every level, and down to one weight, and
  the loss is measured. A convex curve is fitted below the losses of each leaf.
  Weights are then removed where the slope of these curves is smallest, until
  the total is reached.

  Args:
    params: the weights; values are read, so call it outside `jit`.
    sparsity: the fraction removed from all leaves together.
    loss_fn: `params -> scalar` on calibration data; called once per leaf and
      level.
    levels: the sparsities to measure at, ascending.
    filter_fn: `(names, param) -> bool`, the leaves to prune.

  Returns:
    A tree like `params` with sparsities, `None` for dense leaves.

  Example:
    >>> params = {"used": jnp.ones((2, 2)), "unused": jnp.ones((2, 2))}
    >>> loss_fn = lambda p: -p["used"].sum()
    >>> sensitivity(params, 0.375, loss_fn)
    {'unused': 0.75, 'used': 0.0}
  """
  sparsity = check_sparsity(sparsity)
  budget = Budget(params, filter_fn, None)
  weights_of = values(budget, "sensitivity")
  leaves = [leaf for _, leaf in budget.leaves]
  before = float(loss_fn(params))
  steps = []
  for i, weights in weights_of.items():
    size, curve = budget.sizes[i], [(0, 0.0)]
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
      loss = float(loss_fn(budget.treedef.unflatten(changed)))
      curve.append((size - ones, max(loss - before, curve[-1][1])))
    steps += [(*step, i) for step in _hull(curve)]
  left = budget.size - int(mask_calculator.num_ones(budget.size, sparsity))
  removed = dict.fromkeys(weights_of, 0)
  for _, count, i in sorted(steps):
    taken = min(count, left)
    removed[i] += taken
    left -= taken
  return budget.fill(
    sparsity,
    {
      i: 1 - fractions.Fraction(removed[i], budget.sizes[i]) for i in weights_of
    },
  )


def _hull(curve: list[tuple[int, float]]) -> list[tuple[float, int]]:
  """Return slopes and lengths of the lower convex hull of some points."""
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
