"""Sparsity types: which masks are allowed?

base             the interface, and the unstructured type
grouped          n of every m weights, constant fan-in
pooled           blocks, channels
transposable     n of m along both axes
block_diagonal   blocks along the diagonal
diagonals        whole diagonals
masks            the masks of many leaves, selected together
_spec            the table of names that configuration uses
"""

from jaxpruner.sparsity_types.base import (
  SparsityType,
  Unstructured,
  check_sparsity,
  pairwise_sum,
  register_sparsity_type,
)
from jaxpruner.sparsity_types.block_diagonal import BlockDiagonal
from jaxpruner.sparsity_types.diagonals import Diagonals
from jaxpruner.sparsity_types.grouped import ConstantFanIn, NByM, NbyM
from jaxpruner.sparsity_types.masks import (
  create_masks,
  expand,
  ones_each,
  pool,
  select,
  select_masks,
)
from jaxpruner.sparsity_types.pooled import Block, Channel
from jaxpruner.sparsity_types.transposable import TransposableNByM

__all__ = [
  "Block",
  "BlockDiagonal",
  "Channel",
  "ConstantFanIn",
  "Diagonals",
  "NByM",
  "NbyM",
  "SparsityType",
  "TransposableNByM",
  "Unstructured",
  "check_sparsity",
  "create_masks",
  "expand",
  "ones_each",
  "pairwise_sum",
  "pool",
  "register_sparsity_type",
  "select",
  "select_masks",
]
