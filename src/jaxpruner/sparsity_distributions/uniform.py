"""Uniform: every leaf gives the same fraction."""

import fractions
from typing import Any, TypeAlias

from jaxpruner.sparsity_distributions.budget import Budget, SparsityMap
from jaxpruner.sparsity_distributions.filters import FilterFn, default_filter
from jaxpruner.sparsity_types import check_sparsity

PyTree: TypeAlias = Any


def uniform(
  params: PyTree,
  sparsity: float,
  filter_fn: FilterFn = default_filter,
  custom_sparsity_map: SparsityMap | None = None,
) -> PyTree:
  """Give every leaf the same sparsity.

  Args:
    params: tree of parameters (or of their shapes).
    sparsity: fraction removed, `0 <= sparsity < 1`.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: exact path or glob to the sparsity of these leaves,
      `None` to keep them dense; they do not count towards the total.

  Returns:
    A tree of floats and `None`. Where the rounded counts of the leaves do not
    add up to the rounded total, single leaves differ by one weight.
  """
  sparsity = check_sparsity(sparsity)
  budget = Budget(params, filter_fn, custom_sparsity_map)
  return budget.fill(
    sparsity, {i: 1 - fractions.Fraction(sparsity) for i in budget.free}
  )
