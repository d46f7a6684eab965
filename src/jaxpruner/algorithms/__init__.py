"""The algorithms, one file per family."""

from jaxpruner.algorithms.alternating import ACDC
from jaxpruner.algorithms.at_init import SNIP, GraSP, SynFlow
from jaxpruner.algorithms.cram import CrAM
from jaxpruner.algorithms.decaying import DecayingMaskPruning
from jaxpruner.algorithms.dynamic import (
  DSR,
  ITOP,
  MEST,
  SNFS,
  DeepR,
  GraNet,
  SRigL,
)
from jaxpruner.algorithms.fisher import FisherPruning, WoodFisherPruning
from jaxpruner.algorithms.global_pruners import (
  GlobalMagnitudePruning,
  GlobalSaliencyPruning,
  LampPruning,
)
from jaxpruner.algorithms.imp import IterativeMagnitudePruning
from jaxpruner.algorithms.movement import (
  MovementPruning,
  SoftMovementPruning,
)
from jaxpruner.algorithms.phases import Chain, chain
from jaxpruner.algorithms.powerprop import PowerPropagation
from jaxpruner.algorithms.pruners import (
  MagnitudePruning,
  RandomPruning,
  SaliencyPruning,
)
from jaxpruner.algorithms.soft_threshold import SoftThresholdPruning
from jaxpruner.algorithms.sparse_trainers import (
  SET,
  Rewiring,
  RigL,
  StaticRandomSparse,
)
from jaxpruner.algorithms.ste import (
  SrStePruning,
  SteMagnitudePruning,
  SteRandomPruning,
  SteSaliencyPruning,
)
from jaxpruner.algorithms.top_kast import TopKAST

__all__ = [
  "ACDC",
  "DSR",
  "ITOP",
  "MEST",
  "SET",
  "SNFS",
  "SNIP",
  "Chain",
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
  "PowerPropagation",
  "RandomPruning",
  "Rewiring",
  "RigL",
  "SRigL",
  "SaliencyPruning",
  "SoftMovementPruning",
  "SoftThresholdPruning",
  "SrStePruning",
  "StaticRandomSparse",
  "SteMagnitudePruning",
  "SteRandomPruning",
  "SteSaliencyPruning",
  "SynFlow",
  "TopKAST",
  "WoodFisherPruning",
  "chain",
]
