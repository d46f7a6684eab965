"""ERK: small leaves keep a larger fraction."""

import fractions
import math
from typing import Any, TypeAlias

from jaxpruner import _tools
from jaxpruner.sparsity_distributions.budget import Budget, SparsityMap
from jaxpruner.sparsity_distributions.filters import FilterFn, default_filter
from jaxpruner.sparsity_types import check_sparsity

PyTree: TypeAlias = Any


def erk(
  params: PyTree,
  sparsity: float,
  filter_fn: FilterFn = default_filter,
  custom_sparsity_map: SparsityMap | None = None,
  erk_power_scale: float = 1.0,
) -> PyTree:
  """Keep a larger fraction of small leaves (Erdős–Rényi kernel).

  The density of a leaf is proportional to `(sum(shape)/prod(shape))^scale`. A
  density above 1 is set to 1, and the other leaves share the rest of the budget
  (Evci et al., "Rigging the Lottery", 2020, after Mocanu et al., 2018).

  Args:
    params: tree of parameters (or of their shapes).
    sparsity: the fraction removed from all leaves together, at least 0 and
      below 1.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: as in `uniform`.
    erk_power_scale: the exponent; 1 is ERK, 0 is uniform.

  Returns:
    A tree like `params` with sparsities, `None` for dense leaves.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {"large": jnp.ones((8, 8)), "small": jnp.ones((4, 4))}
    >>> erk(params, 0.75)
    {'large': 0.796875, 'small': 0.5625}
  """
  sparsity = check_sparsity(sparsity)
  check_power_scale(erk_power_scale)
  budget = Budget(params, filter_fn, custom_sparsity_map)
  raw = {}
  for i in budget.free:
    shape = budget.leaves[i][1].shape
    ratio = sum(shape) / math.prod(shape)
    raw[i] = fractions.Fraction(ratio**erk_power_scale)
  dense: set[int] = set()
  allowed = budget.size * (1 - fractions.Fraction(sparsity))
  scale = fractions.Fraction(0)
  while len(dense) < len(raw):
    rest = [i for i in raw if i not in dense]
    left = allowed - sum(budget.sizes[i] for i in dense)
    scale = left / sum(raw[i] * budget.sizes[i] for i in rest)
    over = {i for i in rest if raw[i] * scale > 1}
    if not over:
      break
    highest = max(raw[i] for i in over)
    dense |= {i for i in over if raw[i] == highest}
  return budget.fill(
    sparsity,
    {i: fractions.Fraction(1) if i in dense else raw[i] * scale for i in raw},
  )


def check_power_scale(erk_power_scale: Any) -> None:
  """Raise if the exponent of `erk` is not a finite number of at least 0.

  Args:
    erk_power_scale: the exponent.

  Raises:
    ValueError: names the value and the rule.

  Example:
    >>> check_power_scale(0.5)
    >>> check_power_scale(-1)
    Traceback (most recent call last):
    ValueError: erk: erk_power_scale=-1 must be a number of at least 0
  """
  is_number = _tools.is_number(erk_power_scale)
  if not (is_number and 0 <= erk_power_scale < math.inf):
    raise ValueError(
      f"erk: erk_power_scale={erk_power_scale!r} must be a number of at least 0"
    )
