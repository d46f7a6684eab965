"""Sparsity types: what shapes may a mask take?

base             the interface, and the unstructured type
grouped          n of every m weights, constant fan-in
pooled           blocks, channels
transposable     n of m along both axes
block_diagonal   whole diagonals of blocks
masks            the masks of many leaves at once
_spec            names in configuration: the open table of types
"""

from jaxpruner.sparsity_types.base import (
  SparsityType,
  Unstructured,
  check_sparsity,
  pairwise_sum,
  register_sparsity_type,
)
from jaxpruner.sparsity_types.block_diagonal import BlockDiagonal
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
