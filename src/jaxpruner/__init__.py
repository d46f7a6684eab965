"""jaxpruner: pruning and sparse training in JAX.

Names are imported on first use, so that `jaxpruner --help` needs no JAX.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from jaxpruner._tools import on_use

if TYPE_CHECKING:
  from jaxpruner import activations as activations
  from jaxpruner import algorithms as algorithms
  from jaxpruner import mask_calculator as mask_calculator
  from jaxpruner import sparsity_distributions as sparsity_distributions
  from jaxpruner import sparsity_schedules as sparsity_schedules
  from jaxpruner import sparsity_types as sparsity_types
  from jaxpruner import structures as structures
  from jaxpruner.algorithms import *  # noqa: F403
  from jaxpruner.algorithms import criteria as criteria
  from jaxpruner.algorithms import redistribution as redistribution
  from jaxpruner.algorithms.contrib import transforms as transforms
  from jaxpruner.api import algorithm_category as algorithm_category
  from jaxpruner.api import algorithm_class as algorithm_class
  from jaxpruner.api import all_algorithm_names as all_algorithm_names
  from jaxpruner.api import config_from_updater as config_from_updater
  from jaxpruner.api import (
    create_updater_from_config as create_updater_from_config,
  )
  from jaxpruner.api import register_algorithm as register_algorithm
  from jaxpruner.base_updater import BaseUpdater as BaseUpdater
  from jaxpruner.base_updater import NoPruning as NoPruning
  from jaxpruner.config.codec import parse_sparsity_type as parse_sparsity_type
  from jaxpruner.inspect import cost as report  # noqa: F401
  from jaxpruner.inspect import metrics as metrics
  from jaxpruner.inspect import plot as plot
  from jaxpruner.inspect.doctor import check as check
  from jaxpruner.inspect.metrics import (
    layers_near_collapse as layers_near_collapse,
  )
  from jaxpruner.inspect.metrics import state_metrics as state_metrics
  from jaxpruner.inspect.summary import sparsity_table as sparsity_table
  from jaxpruner.inspect.summary import (
    summarize_intersection as summarize_intersection,
  )
  from jaxpruner.inspect.summary import summarize_sparsity as summarize_sparsity
  from jaxpruner.sparse.budgets import prune_to as prune_to
  from jaxpruner.sparsity_distributions import allocation as allocation
  from jaxpruner.sparsity_distributions import (
    register_distribution as register_distribution,
  )
  from jaxpruner.sparsity_schedules import (
    register_schedule as register_schedule,
  )
  from jaxpruner.sparsity_types import Block as Block
  from jaxpruner.sparsity_types import Channel as Channel
  from jaxpruner.sparsity_types import ConstantFanIn as ConstantFanIn
  from jaxpruner.sparsity_types import NByM as NByM
  from jaxpruner.sparsity_types import NbyM as NbyM
  from jaxpruner.sparsity_types import Unstructured as Unstructured
  from jaxpruner.sparsity_types import (
    register_sparsity_type as register_sparsity_type,
  )
  from jaxpruner.updater.state import Category as Category
  from jaxpruner.updater.state import SparseState as SparseState
  from jaxpruner.updater.state import apply_mask as apply_mask
  from jaxpruner.updater.state import find_state as find_state

# Names that the paper's library had here; `_legacy` says what they are now.
_OLD_NAMES = (
  "ALGORITHM_REGISTRY",
  "NoUpdateSchedule",
  "OneShotSchedule",
  "PeriodicSchedule",
  "PolynomialSchedule",
  "SparsityType",
)
# Module -> the public names it defines. The classes of `algorithms`, and
# `chain`, are public too.
_HOMES = {
  "updater.state": ("Category", "SparseState", "apply_mask", "find_state"),
  "api": (
    "algorithm_category",
    "algorithm_class",
    "all_algorithm_names",
    "config_from_updater",
    "create_updater_from_config",
    "register_algorithm",
  ),
  "base_updater": ("BaseUpdater", "NoPruning"),
  "config.codec": ("parse_sparsity_type",),
  "inspect.doctor": ("check",),
  "inspect.metrics": ("layers_near_collapse", "state_metrics"),
  "inspect.summary": (
    "sparsity_table",
    "summarize_intersection",
    "summarize_sparsity",
  ),
  "sparse.budgets": ("prune_to",),
  "sparsity_distributions": ("register_distribution",),
  "sparsity_schedules": ("register_schedule",),
  "sparsity_types": (
    "Block",
    "Channel",
    "ConstantFanIn",
    "NByM",
    "NbyM",
    "Unstructured",
    "register_sparsity_type",
  ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
# Old path -> the module that it gives. All of them can still be imported.
_MOVED = {
  "allocation": "sparsity_distributions.allocation",
  "archives": "datasets.archives",
  "criteria": "algorithms.criteria",
  "metrics": "inspect.metrics",
  "plot": "inspect.plot",
  "redistribution": "algorithms.redistribution",
  "report": "inspect.cost",
  "transforms": "algorithms.contrib.transforms",
} | {
  f"algorithms.{family}": f"algorithms.contrib.{family}"
  for family in (
    "alternating",
    "at_init",
    "coupled",
    "cram",
    "decaying",
    "dynamic",
    "fisher",
    "imp",
    "movement",
    "powerprop",
    "soft_threshold",
    "top_kast",
    "transforms",
  )
}
sys.meta_path.append(on_use.MovedModules(__name__, _MOVED))
_MODULES = (
  "activations",
  "algorithms",
  "allocation",
  "criteria",
  "kept",
  "mask_calculator",
  "plot",
  "post_training",
  "redistribution",
  "sparse",
  "sparsity_distributions",
  "sparsity_schedules",
  "sparsity_types",
  "structures",
  "tickets",
  "transforms",
)
# Modules that `import jaxpruner` has always given, although not in `__all__`.
_MORE_MODULES = ("api", "base_updater", "engine", "metrics", "report", "utils")


def __getattr__(name: str) -> Any:
  if name in _MODULES or name in _MORE_MODULES:
    return importlib.import_module(f"jaxpruner.{name}")
  if name in _HOME:
    value = getattr(importlib.import_module(f"jaxpruner.{_HOME[name]}"), name)
    globals()[name] = value
    return value
  if name == "__version__":
    # Looked up on use: reading the metadata of packages takes milliseconds.
    from importlib import metadata

    return metadata.version("jaxpruner")
  if name in _OLD_NAMES:
    legacy = importlib.import_module("jaxpruner._legacy")
    return legacy.old_names(__name__, frames=4)(name)
  if name == "__all__":
    return _all()
  # Submodules are asked for here too, in `from jaxpruner import engine`: their
  # names are in lower case.
  if name[0].isupper() or name == "chain":
    algorithms = importlib.import_module("jaxpruner.algorithms")
    if name in algorithms.__all__:
      globals()[name] = getattr(algorithms, name)
      return globals()[name]
  raise AttributeError(f"module 'jaxpruner' has no attribute {name!r}")


def _all() -> list[str]:
  """Return the public names: constants, classes, functions, as ruff sorts."""
  algorithms = importlib.import_module("jaxpruner.algorithms")
  names = [*algorithms.__all__, *_HOME, *_MODULES]
  return sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))


def __dir__() -> list[str]:
  return sorted({*globals(), *_all(), *_MORE_MODULES})
