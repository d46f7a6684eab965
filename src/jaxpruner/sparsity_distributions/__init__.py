"""Sparsity distributions: how much does each leaf give?

A distribution is a function `(params, …) -> tree of float or None`: the
sparsity of each leaf, `None` where it stays dense. Those here return sparsities
whose exact counts add up to the request, whatever the order of the leaves.

uniform, erk            know shapes only
lamp, owl, sensitivity  look at weights, or at a loss: call them outside `jit`
fixed                   what one of these has decided
filters                 which leaves may be pruned
budget                  exact totals, the tool that distributions share
table                   names in configuration
"""

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
]
