"""The algorithms, one file per family.

A new one is its class, one import here, and one line in `api._REGISTRY`.
"""

from jaxpruner.algorithms.contrib.admm import AdmmPruning as AdmmPruning
from jaxpruner.algorithms.contrib.alternating import ACDC as ACDC
from jaxpruner.algorithms.contrib.at_init import SNIP as SNIP
from jaxpruner.algorithms.contrib.at_init import GraSP as GraSP
from jaxpruner.algorithms.contrib.at_init import SynFlow as SynFlow
from jaxpruner.algorithms.contrib.cram import CrAM as CrAM
from jaxpruner.algorithms.contrib.decaying import (
  DecayingMaskPruning as DecayingMaskPruning,
)
from jaxpruner.algorithms.contrib.dynamic import DSR as DSR
from jaxpruner.algorithms.contrib.dynamic import ITOP as ITOP
from jaxpruner.algorithms.contrib.dynamic import MEST as MEST
from jaxpruner.algorithms.contrib.dynamic import SNFS as SNFS
from jaxpruner.algorithms.contrib.dynamic import DeepR as DeepR
from jaxpruner.algorithms.contrib.dynamic import GraNet as GraNet
from jaxpruner.algorithms.contrib.dynamic import SignalRigL as SignalRigL
from jaxpruner.algorithms.contrib.dynamic import SRigL as SRigL
from jaxpruner.algorithms.contrib.fisher import FisherPruning as FisherPruning
from jaxpruner.algorithms.contrib.fisher import (
  WoodFisherPruning as WoodFisherPruning,
)
from jaxpruner.algorithms.contrib.imp import (
  IterativeMagnitudePruning as IterativeMagnitudePruning,
)
from jaxpruner.algorithms.contrib.movement import (
  MovementPruning as MovementPruning,
)
from jaxpruner.algorithms.contrib.movement import (
  SoftMovementPruning as SoftMovementPruning,
)
from jaxpruner.algorithms.contrib.powerprop import (
  PowerPropagation as PowerPropagation,
)
from jaxpruner.algorithms.contrib.soft_ste import SoftSte as SoftSte
from jaxpruner.algorithms.contrib.soft_threshold import (
  SoftThresholdPruning as SoftThresholdPruning,
)
from jaxpruner.algorithms.contrib.top_kast import TopKAST as TopKAST
from jaxpruner.algorithms.global_pruners import (
  GlobalMagnitudePruning as GlobalMagnitudePruning,
)
from jaxpruner.algorithms.global_pruners import (
  GlobalSaliencyPruning as GlobalSaliencyPruning,
)
from jaxpruner.algorithms.global_pruners import LampPruning as LampPruning
from jaxpruner.algorithms.phases import Chain as Chain
from jaxpruner.algorithms.phases import chain as chain
from jaxpruner.algorithms.pruners import MagnitudePruning as MagnitudePruning
from jaxpruner.algorithms.pruners import RandomPruning as RandomPruning
from jaxpruner.algorithms.pruners import SaliencyPruning as SaliencyPruning
from jaxpruner.algorithms.sparse_trainers import SET as SET
from jaxpruner.algorithms.sparse_trainers import Rewiring as Rewiring
from jaxpruner.algorithms.sparse_trainers import RigL as RigL
from jaxpruner.algorithms.sparse_trainers import (
  StaticRandomSparse as StaticRandomSparse,
)
from jaxpruner.algorithms.ste import SrStePruning as SrStePruning
from jaxpruner.algorithms.ste import SteMagnitudePruning as SteMagnitudePruning
from jaxpruner.algorithms.ste import SteRandomPruning as SteRandomPruning
from jaxpruner.algorithms.ste import SteSaliencyPruning as SteSaliencyPruning

# Every class imported above, so that a new algorithm is named here once.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
  *(name for name, value in list(globals().items()) if isinstance(value, type)),
  "chain",
]
