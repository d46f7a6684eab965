"""The algorithms, one file per family."""

from jaxpruner.algorithms.dynamic import (
  DSR,
  ITOP,
  MEST,
  SNFS,
  DeepR,
  GraNet,
  SRigL,
)
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
  Rewiring,
  RigL,
  StaticRandomSparse,
)
from jaxpruner.algorithms.ste import SteMagnitudePruning, SteRandomPruning
from jaxpruner.algorithms.top_kast import TopKAST

__all__ = [
  "DSR",
  "ITOP",
  "MEST",
  "SNFS",
  "DeepR",
  "GraNet",
  "SRigL",
  "TopKAST",
  "SET",
  "GlobalMagnitudePruning",
  "GlobalSaliencyPruning",
  "MagnitudePruning",
  "RandomPruning",
  "Rewiring",
  "RigL",
  "SaliencyPruning",
  "SteMagnitudePruning",
  "SteRandomPruning",
  "StaticRandomSparse",
]
