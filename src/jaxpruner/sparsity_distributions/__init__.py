"""Sparsity distributions: which sparsity does each leaf get?

A distribution is a function `(params, …) -> tree of float or None`: the
sparsity of each leaf, `None` where it stays dense. The kept weights of all
leaves add up exactly to the requested total, in any order of the leaves.

uniform, erk            read shapes only
lamp, owl, sensitivity  read weights or a loss: call them outside `jit`
fixed                   returns a tree that was computed before
filters, roles          which leaves are prunable, and why
budget                  exact totals, used by all distributions
table                   the table of names that configuration uses
"""

from jaxpruner import _legacy
from jaxpruner.sparsity_distributions import allocation
from jaxpruner.sparsity_distributions.budget import (
  Budget,
  SparsityMap,
  check_map,
)
from jaxpruner.sparsity_distributions.erk import check_power_scale, erk
from jaxpruner.sparsity_distributions.filters import (
  KERNEL_FILTER_FN,
  NOT_DIM_ONE_FILTER_FN,
  FilterFn,
  check_filter,
  default_filter,
  is_floating,
)
from jaxpruner.sparsity_distributions.fixed import fixed
from jaxpruner.sparsity_distributions.lamp import lamp, lamp_scores
from jaxpruner.sparsity_distributions.owl import (
  outlier_ratio,
  owl,
  owl_by_layer,
  owl_densities,
)
from jaxpruner.sparsity_distributions.sensitivity import sensitivity
from jaxpruner.sparsity_distributions.stacking import unstack
from jaxpruner.sparsity_distributions.table import register_distribution
from jaxpruner.sparsity_distributions.uniform import uniform
from jaxpruner.sparsity_types import check_sparsity

__all__ = [
  "KERNEL_FILTER_FN",
  "NOT_DIM_ONE_FILTER_FN",
  "Budget",
  "FilterFn",
  "SparsityMap",
  "allocation",
  "check_filter",
  "check_map",
  "check_power_scale",
  "check_sparsity",
  "default_filter",
  "erk",
  "fixed",
  "is_floating",
  "lamp",
  "lamp_scores",
  "outlier_ratio",
  "owl",
  "owl_by_layer",
  "owl_densities",
  "register_distribution",
  "sensitivity",
  "uniform",
  "unstack",
]

__getattr__ = _legacy.old_names(__name__)
