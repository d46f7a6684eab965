"""The algorithms, one file per family."""

from jaxpruner.algorithms.global_pruners import (
  GlobalMagnitudePruning,
  GlobalSaliencyPruning,
)
from jaxpruner.algorithms.pruners import (
  MagnitudePruning,
  RandomPruning,
  SaliencyPruning,
)
from jaxpruner.algorithms.sparse_trainers import (
  SET,
  RigL,
  StaticRandomSparse,
)
from jaxpruner.algorithms.ste import SteMagnitudePruning, SteRandomPruning

__all__ = [
  "SET",
  "GlobalMagnitudePruning",
  "GlobalSaliencyPruning",
  "MagnitudePruning",
  "RandomPruning",
  "RigL",
  "SaliencyPruning",
  "SteMagnitudePruning",
  "SteRandomPruning",
  "StaticRandomSparse",
]
