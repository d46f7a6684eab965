"""Sparsity distributions: how much does each leaf give?

base         uniform, ERK; filters, and totals that are exact to the weight
allocation   LAMP, OWL, by sensitivity, fixed
"""

from jaxpruner.sparsity_distributions.allocation import (
  fixed,
  lamp,
  lamp_scores,
  outlier_ratio,
  owl,
  owl_densities,
  sensitivity,
)
from jaxpruner.sparsity_distributions.base import (
  KERNEL_FILTER_FN,
  Plan,
  check_filter,
  check_map,
  check_power_scale,
  check_sparsity,
  default_filter,
  erk,
  is_floating,
  uniform,
)

__all__ = [
  "KERNEL_FILTER_FN",
  "Plan",
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
  "owl_densities",
  "sensitivity",
  "uniform",
]
