"""Fixed masks: block diagonals, plain and strided."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _tools, mask_calculator
from jaxpruner.sparsity_types import base


@dataclasses.dataclass(frozen=True)
class BlockDiagonal(base.SparsityType):
  """Keep the blocks along the diagonal; scores are not used.

  A strided layer connects the indices that are equal modulo `blocks`: a block
  diagonal between two permutations. A block-diagonal layer followed by a
  strided one connects every input with every output. This product is a Monarch
  matrix (Dao et al., "Monarch", 2022).

  Attributes:
    blocks: the number of blocks; `1 - 1/blocks` of the weights are removed.
    strided: whether to connect indices that are equal modulo `blocks`,
      instead of those in the same block.

  Example:
    >>> BlockDiagonal(2).mask(jnp.ones((2, 4)), 0.5).tolist()
    [[1, 1, 0, 0], [0, 0, 1, 1]]
    >>> BlockDiagonal(2, strided=True).mask(jnp.ones((2, 4)), 0.5).tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1]]
  """

  blocks: int
  strided: bool = False

  def __post_init__(self):
    _tools.check_int("BlockDiagonal", "blocks", self.blocks)

  def spec(self) -> str:
    """Return `diagonal_4`, or `strided_4`."""
    return f"{'strided' if self.strided else 'diagonal'}_{self.blocks}"

  @classmethod
  def from_spec(cls, spec: str) -> base.SparsityType | None:
    """Read `diagonal_4` and `strided_4`."""
    found = re.fullmatch(r"(diagonal|strided)_(\d+)", spec)
    return cls(int(found[2]), found[1] == "strided") if found else None

  @property
  def sparsity(self) -> float:
    """The sparsity of this structure, 1 - 1/blocks."""
    return 1 - 1 / self.blocks

  def check(self, shape: Any, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    if len(shape) < 2 or any(size % self.blocks for size in shape[-2:]):
      raise ValueError(
        f"{name}: shape {shape} cannot be cut into {self.blocks} diagonal "
        "blocks of equal size; choose a divisor of its last two dimensions, or "
        "leave it out with filter_fn"
      )

  def mask(self, scores: jax.Array, sparsity: Any) -> jax.Array:
    """Keep the pattern; keep everything while the sparsity is 0."""
    scores = jnp.asarray(scores)
    self.check(scores.shape, 0.0)
    rows, columns = (
      np.arange(size) % self.blocks
      if self.strided
      else np.arange(size) * self.blocks // size
      for size in scores.shape[-2:]
    )
    pattern = rows[:, None] == columns[None, :]
    kept = jnp.where(jnp.asarray(sparsity) > 0, pattern, True)
    # Read the scores, so that the mask is laid out like them on a mesh.
    mask = jnp.broadcast_to(kept, scores.shape) & (scores == scores)
    return mask.astype(mask_calculator.MASK_DTYPE)
