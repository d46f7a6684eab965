"""jaxpruner: pruning and sparse training in JAX."""

import importlib
from typing import Any

from jaxpruner import (
  algorithms,
  criteria,
  mask_calculator,
  redistribution,
  sparsity_distributions,
  sparsity_schedules,
  sparsity_types,
)
from jaxpruner._state import Category, SparseState, apply_mask, find_state
from jaxpruner.algorithms import (
  DSR,
  ITOP,
  MEST,
  SET,
  SNFS,
  DeepR,
  GlobalMagnitudePruning,
  GlobalSaliencyPruning,
  GraNet,
  MagnitudePruning,
  RandomPruning,
  Rewiring,
  RigL,
  SaliencyPruning,
  SRigL,
  StaticRandomSparse,
  SteMagnitudePruning,
  SteRandomPruning,
  TopKAST,
)
from jaxpruner.api import (
  algorithm_category,
  algorithm_class,
  all_algorithm_names,
  config_from_updater,
  create_updater_from_config,
  parse_sparsity_type,
  register_algorithm,
)
from jaxpruner.base_updater import BaseUpdater, NoPruning
from jaxpruner.doctor import check
from jaxpruner.metrics import layers_near_collapse, state_metrics
from jaxpruner.sparsity_types import (
  Block,
  Channel,
  ConstantFanIn,
  NByM,
  NbyM,
  Unstructured,
)
from jaxpruner.utils import (
  sparsity_table,
  summarize_intersection,
  summarize_sparsity,
)

__version__ = "1.0.0"

__all__ = [
  "ConstantFanIn",
  "TopKAST",
  "SRigL",
  "GraNet",
  "DeepR",
  "SNFS",
  "MEST",
  "ITOP",
  "DSR",
  "SET",
  "BaseUpdater",
  "Block",
  "Category",
  "Channel",
  "GlobalMagnitudePruning",
  "GlobalSaliencyPruning",
  "MagnitudePruning",
  "NByM",
  "NbyM",
  "NoPruning",
  "RandomPruning",
  "Rewiring",
  "RigL",
  "SaliencyPruning",
  "SparseState",
  "StaticRandomSparse",
  "SteMagnitudePruning",
  "SteRandomPruning",
  "Unstructured",
  "algorithm_category",
  "algorithm_class",
  "algorithms",
  "all_algorithm_names",
  "apply_mask",
  "check",
  "config_from_updater",
  "create_updater_from_config",
  "criteria",
  "find_state",
  "layers_near_collapse",
  "mask_calculator",
  "parse_sparsity_type",
  "post_training",  # pyright: ignore[reportUnsupportedDunderAll]
  "redistribution",
  "register_algorithm",
  "sparse",  # pyright: ignore[reportUnsupportedDunderAll]
  "sparsity_distributions",
  "sparsity_schedules",
  "sparsity_table",
  "sparsity_types",
  "state_metrics",
  "summarize_intersection",
  "summarize_sparsity",
]


def __getattr__(name: str) -> Any:
  # Formats and files are imported on use: `import jaxpruner` stays light.
  if name in ("sparse", "report", "post_training"):
    return importlib.import_module(f"jaxpruner.{name}")
  raise AttributeError(f"module 'jaxpruner' has no attribute {name!r}")
