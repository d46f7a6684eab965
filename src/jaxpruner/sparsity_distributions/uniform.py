"""Uniform: the same sparsity for every leaf."""

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
    sparsity: the fraction removed, `0 <= sparsity < 1`.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: exact path or glob -> the sparsity of these leaves,
      `None` to keep them dense; they do not count towards the total.

  Returns:
    A tree like `params` with sparsities, `None` for dense leaves. Where the
    rounded counts do not add up to the rounded total, single leaves differ by
    one weight.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    >>> uniform(params, 0.75)
    {'bias': None, 'kernel': 0.75}
  """
  sparsity = check_sparsity(sparsity)
  budget = Budget(params, filter_fn, custom_sparsity_map)
  return budget.fill(
    sparsity, {i: 1 - fractions.Fraction(sparsity) for i in budget.free}
  )
