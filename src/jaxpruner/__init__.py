"""jaxpruner: pruning and sparse training in JAX."""

import importlib
import sys
from typing import Any

from jaxpruner import (
  activations,
  algorithms,
  mask_calculator,
  sparsity_distributions,
  sparsity_schedules,
  sparsity_types,
  structures,
)
from jaxpruner._state import Category, SparseState, apply_mask, find_state
from jaxpruner.algorithms import (
  ACDC,
  DSR,
  ITOP,
  MEST,
  SET,
  SNFS,
  SNIP,
  Chain,
  CrAM,
  DecayingMaskPruning,
  DeepR,
  FisherPruning,
  GlobalMagnitudePruning,
  GlobalSaliencyPruning,
  GraNet,
  GraSP,
  IterativeMagnitudePruning,
  LampPruning,
  MagnitudePruning,
  MovementPruning,
  PowerPropagation,
  RandomPruning,
  Rewiring,
  RigL,
  SaliencyPruning,
  SoftMovementPruning,
  SoftThresholdPruning,
  SRigL,
  SrStePruning,
  StaticRandomSparse,
  SteMagnitudePruning,
  SteRandomPruning,
  SteSaliencyPruning,
  SynFlow,
  TopKAST,
  WoodFisherPruning,
  chain,
  criteria,
  redistribution,
  transforms,
)
from jaxpruner.api import (
  algorithm_category,
  algorithm_class,
  all_algorithm_names,
  config_from_updater,
  create_updater_from_config,
  register_algorithm,
)
from jaxpruner.base_updater import BaseUpdater, NoPruning
from jaxpruner.config.codec import parse_sparsity_type
from jaxpruner.inspect import cost as report
from jaxpruner.inspect import metrics
from jaxpruner.inspect.doctor import check
from jaxpruner.inspect.metrics import layers_near_collapse, state_metrics
from jaxpruner.inspect.summary import (
  sparsity_table,
  summarize_intersection,
  summarize_sparsity,
)
from jaxpruner.sparsity_distributions import allocation
from jaxpruner.sparsity_types import (
  Block,
  Channel,
  ConstantFanIn,
  NByM,
  NbyM,
  Unstructured,
)

__all__ = [
  "ACDC",
  "DSR",
  "ITOP",
  "MEST",
  "SET",
  "SNFS",
  "SNIP",
  "BaseUpdater",
  "Block",
  "Category",
  "Chain",
  "Channel",
  "ConstantFanIn",
  "CrAM",
  "DecayingMaskPruning",
  "DeepR",
  "FisherPruning",
  "GlobalMagnitudePruning",
  "GlobalSaliencyPruning",
  "GraNet",
  "GraSP",
  "IterativeMagnitudePruning",
  "LampPruning",
  "MagnitudePruning",
  "MovementPruning",
  "NByM",
  "NbyM",
  "NoPruning",
  "PowerPropagation",
  "RandomPruning",
  "Rewiring",
  "RigL",
  "SRigL",
  "SaliencyPruning",
  "SoftMovementPruning",
  "SoftThresholdPruning",
  "SparseState",
  "SrStePruning",
  "StaticRandomSparse",
  "SteMagnitudePruning",
  "SteRandomPruning",
  "SteSaliencyPruning",
  "SynFlow",
  "TopKAST",
  "Unstructured",
  "WoodFisherPruning",
  "activations",
  "algorithm_category",
  "algorithm_class",
  "algorithms",
  "all_algorithm_names",
  "allocation",
  "apply_mask",
  "chain",
  "check",
  "config_from_updater",
  "create_updater_from_config",
  "criteria",
  "find_state",
  "layers_near_collapse",
  "mask_calculator",
  "parse_sparsity_type",
  "plot",  # pyright: ignore[reportUnsupportedDunderAll]
  "post_training",  # pyright: ignore[reportUnsupportedDunderAll]
  "redistribution",
  "register_algorithm",
  "sparse",  # pyright: ignore[reportUnsupportedDunderAll]
  "sparsity_distributions",
  "sparsity_schedules",
  "sparsity_table",
  "sparsity_types",
  "state_metrics",
  "structures",
  "summarize_intersection",
  "summarize_sparsity",
  "tickets",  # pyright: ignore[reportUnsupportedDunderAll]
  "transforms",
]


# Modules that moved into a package keep their old path: `import
# jaxpruner.criteria` works as before.
for _module in (allocation, criteria, metrics, redistribution, transforms):
  sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
sys.modules[f"{__name__}.report"] = report


def __getattr__(name: str) -> Any:
  # Formats and files are imported on use: `import jaxpruner` stays light.
  if name in ("plot", "sparse", "post_training", "tickets"):
    return importlib.import_module(f"jaxpruner.{name}")
  if name == "__version__":
    # Looked up on use: reading the metadata of packages takes milliseconds.
    from importlib import metadata

    return metadata.version("jaxpruner")
  raise AttributeError(f"module 'jaxpruner' has no attribute {name!r}")
