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
from jaxpruner.algorithms import *  # noqa: F403
from jaxpruner.algorithms import criteria, redistribution, transforms
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
from jaxpruner.sparsity_distributions import allocation, register_distribution
from jaxpruner.sparsity_schedules import register_schedule
from jaxpruner.sparsity_types import (
  Block,
  Channel,
  ConstantFanIn,
  NByM,
  NbyM,
  Unstructured,
  register_sparsity_type,
)

# Imported on first use: `import jaxpruner` stays light.
_ON_USE = ("kept", "plot", "post_training", "sparse", "tickets")

__all__ = [
  *algorithms.__all__,
  *_ON_USE,
  "BaseUpdater",
  "Block",
  "Category",
  "Channel",
  "ConstantFanIn",
  "NByM",
  "NbyM",
  "NoPruning",
  "SparseState",
  "Unstructured",
  "activations",
  "algorithm_category",
  "algorithm_class",
  "algorithms",
  "all_algorithm_names",
  "allocation",
  "apply_mask",
  "check",
  "config_from_updater",
  "create_updater_from_config",
  "criteria",
  "find_state",
  "layers_near_collapse",
  "mask_calculator",
  "parse_sparsity_type",
  "redistribution",
  "register_algorithm",
  "register_distribution",
  "register_schedule",
  "register_sparsity_type",
  "sparsity_distributions",
  "sparsity_schedules",
  "sparsity_table",
  "sparsity_types",
  "state_metrics",
  "structures",
  "summarize_intersection",
  "summarize_sparsity",
  "transforms",
]
# Constants, classes, functions, as ruff sorts them.
__all__.sort(key=lambda n: (not n.isupper(), not n[0].isupper(), n))  # pyright: ignore[reportUnsupportedDunderAll]


# Modules that moved into a package keep their old path: `import
# jaxpruner.criteria` works as before.
for _module in (allocation, criteria, metrics, redistribution, transforms):
  sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
sys.modules[f"{__name__}.report"] = report


def __getattr__(name: str) -> Any:
  if name in _ON_USE:
    return importlib.import_module(f"jaxpruner.{name}")
  if name == "__version__":
    # Looked up on use: reading the metadata of packages takes milliseconds.
    from importlib import metadata

    return metadata.version("jaxpruner")
  raise AttributeError(f"module 'jaxpruner' has no attribute {name!r}")
