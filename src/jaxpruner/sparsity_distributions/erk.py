"""ERK: small leaves keep more."""

import fractions
import math
from typing import Any, TypeAlias

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
  """Keep more of small leaves: Erdős–Rényi-Kernel (Evci et al., 2020).

  The density of a leaf is proportional to `(sum(shape)/prod(shape))^scale`,
  capped at 1; what a capped leaf cannot give, the others do.

  Args:
    params: tree of parameters (or of their shapes).
    sparsity: fraction removed of all leaves together, `0 <= sparsity < 1`.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: as in `uniform`.
    erk_power_scale: below 1 is closer to uniform; 0 is uniform.

  Returns:
    A tree of floats and `None`.
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
  """Raise if ERK's exponent is no number of at least 0."""
  if (
    isinstance(erk_power_scale, bool)
    or not isinstance(erk_power_scale, int | float)
    or not 0 <= erk_power_scale < math.inf
  ):
    raise ValueError(
      f"erk: erk_power_scale={erk_power_scale!r} must be a number of at least 0"
    )
