"""Structures for hardware and for coupled layers, beyond blocks of one leaf."""

from jaxpruner.algorithms.contrib.coupled import (
  CoupledPruning,
  Coupling,
  permute,
)
from jaxpruner.sparsity_types.block_diagonal import BlockDiagonal
from jaxpruner.sparsity_types.transposable import TransposableNByM
from jaxpruner.structures.permutation import kept_magnitude, permutation
from jaxpruner.structures.regrouping import refill, regroup
from jaxpruner.structures.search import search_n_by_m

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
