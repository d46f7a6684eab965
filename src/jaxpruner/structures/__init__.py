"""Structures beyond one leaf's blocks: what hardware and coupling ask for."""

from jaxpruner.structures.block_diagonal import BlockDiagonal
from jaxpruner.structures.coupled import CoupledPruning, Coupling, permute
from jaxpruner.structures.permutation import kept_magnitude, permutation
from jaxpruner.structures.regrouping import refill, regroup
from jaxpruner.structures.search import search_n_by_m
from jaxpruner.structures.transposable import TransposableNByM

__all__ = [
  "BlockDiagonal",
  "CoupledPruning",
  "Coupling",
  "TransposableNByM",
  "kept_magnitude",
  "permutation",
  "permute",
  "refill",
  "regroup",
  "search_n_by_m",
]
