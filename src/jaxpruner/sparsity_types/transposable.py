"""N:M masks that are valid for a matrix and for its transpose."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator
from jaxpruner.sparsity_types import base, grouped

# Up to this m all valid blocks are enumerated: 139 for m = 4.
_ENUMERATED = 4


@dataclasses.dataclass(frozen=True)
class TransposableNByM(grouped.NByM):
  """Keep `n` in every row and every column of each `m` × `m` block.

  The backward pass multiplies by the transpose, which N:M hardware accelerates
  only if the mask is N:M along both axes (Hubara et al., "Accelerated Sparse
  Neural Training", 2021). Blocks lie in the last two dimensions. Up to `m=4`
  the mask keeps the largest possible sum of scores. For larger `m` it starts
  from the best diagonals and swaps pairs of weights while the sum grows.

  Attributes:
    n: the number of kept weights in every row and column of a block.
    m: the number of rows and columns of a block.
    axis: not used; present because `NByM` has it.
    stride: 1; present because `NByM` has it.

  Example:
    >>> scores = jnp.array([[4.0, 3.0], [2.0, 5.0]])
    >>> TransposableNByM(1, 2).mask(scores, 0.5).tolist()
    [[1, 0], [0, 1]]
  """

  def __post_init__(self):
    super().__post_init__()
    if self.stride != 1:
      raise ValueError(
        f"TransposableNByM: stride={self.stride!r} must be 1; strided groups "
        "are for NByM"
      )

  def for_leaf(self, names: Any, shape: Any) -> base.SparsityType:
    del names, shape
    return self

  def check(self, shape: Any, sparsity: Any, name: str = "scores") -> None:
    for axis in (-2, -1):
      kind = grouped.NByM(self.n, self.m, axis)
      kind.check(shape, sparsity, name)

  def on_matrix(self, axes: tuple[int, int] | None) -> base.SparsityType | None:
    return None if axes is None else self

  def choose(self, scores: jax.Array, ones: Any) -> jax.Array:
    """Return the mask that keeps `ones` weights in every row and column."""
    m = self.m
    *lead, rows, columns = scores.shape
    blocks = scores.reshape(-1, rows // m, m, columns // m, m)
    blocks = blocks.swapaxes(2, 3).astype(jnp.float32)
    shape = blocks.shape
    blocks = _finite(blocks.reshape(-1, m, m))
    pick = _enumerated if m <= _ENUMERATED else _swapped
    mask = pick(blocks, ones).reshape(shape).swapaxes(2, 3)
    mask = mask.reshape(*lead, rows, columns)
    return mask.astype(mask_calculator.MASK_DTYPE)


def _finite(blocks: jax.Array) -> jax.Array:
  # Infinite scores mark weights that must stay: replace them by a number
  # larger than any sum of the others.
  finite = jnp.where(jnp.isfinite(blocks), blocks, 0)
  large = 4 * blocks.shape[-1] ** 2 * jnp.max(jnp.abs(finite)) + 1
  return jnp.where(jnp.isinf(blocks), jnp.sign(blocks) * large, finite)


@functools.cache
def patterns(m: int) -> tuple[np.ndarray, np.ndarray]:
  """Return all m × m masks with equal row and column sums, and those sums."""
  found, sums = [], []
  for n in range(1, m + 1):
    rows = [
      [i in chosen for i in range(m)]
      for chosen in itertools.combinations(range(m), n)
    ]
    for block in itertools.product(rows, repeat=m):
      if (np.sum(block, 0) == n).all():
        found.append(block)
        sums.append(n)
  return np.array(found, np.float32), np.array(sums)


def _enumerated(blocks: jax.Array, ones: Any) -> jax.Array:
  masks, sums = patterns(blocks.shape[-1])
  totals = jnp.einsum(
    "bij,pij->bp", blocks, masks, precision=jax.lax.Precision.HIGHEST
  )
  totals = jnp.where(sums == ones, totals, -jnp.inf)
  return jnp.asarray(masks)[jnp.argmax(totals, axis=1)]


def _swapped(blocks: jax.Array, ones: Any) -> jax.Array:
  m = blocks.shape[-1]
  # Diagonal d holds (i, i + d): one weight of each row and column.
  diagonal = (np.arange(m)[None, :] - np.arange(m)[:, None]) % m
  sums = jnp.stack(
    [jnp.sum(jnp.where(diagonal == d, blocks, 0), (1, 2)) for d in range(m)], 1
  )
  rank = jnp.argsort(jnp.argsort(-sums, axis=1), axis=1)
  start = rank[:, diagonal] < ones

  def gains(mask):
    # The gain of replacing (i, a), (j, b) by (i, b), (j, a): the counts per
    # row and column stay the same.
    inside = jnp.where(mask, -blocks, -jnp.inf)
    outside = jnp.where(mask, -jnp.inf, blocks)
    return (
      inside[:, :, None, :, None]
      + inside[:, None, :, None, :]
      + outside[:, :, None, None, :]
      + outside[:, None, :, :, None]
    ).reshape(len(mask), -1)

  def improve(state):
    mask, _, left = state
    gain = gains(mask)
    best = jnp.argmax(gain, axis=1)
    i, j, a, b = jnp.unravel_index(best, (m, m, m, m))
    # A tolerance: a swap whose gain is only rounding would be undone, and
    # the loop would not end.
    better = jnp.max(gain, axis=1) > 1e-6 * jnp.max(jnp.abs(blocks), (1, 2))
    index = jnp.arange(len(mask))
    for row, column, kept in ((i, a, 0), (j, b, 0), (i, b, 1), (j, a, 1)):
      value = jnp.where(better, kept == 1, mask[index, row, column])
      mask = mask.at[index, row, column].set(value)
    return mask, jnp.any(better), left - 1

  state = start, jnp.array(True), jnp.int32(m**3)
  return jax.lax.while_loop(lambda s: s[1] & (s[2] > 0), improve, state)[0]
