"""Blocks kept or removed whole: gathers and products that XLA does well."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats

# Batch rows at a time: what is gathered for them stays in cache.
SMALL_CHUNK, LARGE_CHUNK = 32, 128
# Tall matrices pay from this many blocks per column on. Columns of equal height
# are multiplied together; with more heights the program would grow long.
MIN_TALL, MAX_HEIGHTS = 4, 32


@formats.register
class Block(formats.SparseMatrix):
  """The kept blocks, in order of block column and row.

  A small batch is multiplied by all blocks at once and the products summed by
  block column. For a large one that sum costs more than the products: there
  the blocks of a column become one tall matrix, and the contraction sums.
  Runs on every platform.
  """

  name: ClassVar[str] = "block"

  values: jax.Array  # (blocks, height, width)
  rows: jax.Array  # (blocks,) int32
  shape: tuple[int, int] = formats.static()
  counts: tuple[int, ...] = formats.static()  # blocks of each block column

  @classmethod
  def fromdense(
    cls,
    dense: Any,
    mask: Any = None,
    block_shape: tuple[int, int] = (64, 64),
  ) -> "Block":
    dense, kept = formats.kept_entries(dense, mask)
    height, width = block_shape
    grid = -(-dense.shape[0] // height), -(-dense.shape[1] // width)

    def blocks(array):
      padded = np.zeros((grid[0] * height, grid[1] * width), array.dtype)
      padded[: array.shape[0], : array.shape[1]] = array
      tiled = padded.reshape(grid[0], height, grid[1], width)
      return tiled.transpose(2, 0, 1, 3)

    cols, rows = np.nonzero(np.any(blocks(kept), axis=(2, 3)))
    values = blocks(np.where(kept, dense, 0).astype(dense.dtype))[cols, rows]
    return cls(
      jnp.asarray(values),
      jnp.asarray(rows.astype(np.int32)),
      dense.shape,
      tuple(np.bincount(cols, minlength=grid[1]).tolist()),
    )

  @property
  def cols(self) -> jax.Array:
    """The block column of every block."""
    return jnp.asarray(np.repeat(np.arange(len(self.counts)), self.counts))

  def positions(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    _, height, width = self.values.shape
    row = (self.rows[:, None] * height + jnp.arange(height))[:, :, None]
    col = (self.cols[:, None] * width + jnp.arange(width))[:, None, :]
    # Edge blocks hang over: what lies outside the matrix was never kept.
    return row, col, (row < self.shape[0]) & (col < self.shape[1])

  def matmul(self, x: jax.Array) -> jax.Array:
    """Multiply all blocks at once, a chunk of the batch at a time."""
    lead = x.shape[:-1]
    x = x.reshape(-1, self.shape[0])
    chunk, product = SMALL_CHUNK, self._by_block
    tall = len(self.rows) >= MIN_TALL * len(self.counts)
    if len(x) >= LARGE_CHUNK and tall and len(set(self.counts)) <= MAX_HEIGHTS:
      chunk, product = LARGE_CHUNK, self._by_column()
    if len(x) <= chunk:
      return product(x).reshape(*lead, self.shape[1])
    whole = len(x) // chunk * chunk
    parts = jax.lax.map(product, x[:whole].reshape(-1, chunk, x.shape[1]))
    y = parts.reshape(whole, self.shape[1])
    if whole < len(x):
      y = jnp.concatenate([y, product(x[whole:])])
    return y.reshape(*lead, self.shape[1])

  def _inputs(self, x: jax.Array) -> jax.Array:
    height = self.values.shape[1]
    x = jnp.pad(x, [(0, 0), (0, -self.shape[0] % height)])
    return x.reshape(len(x), x.shape[1] // height, height)

  def _dtypes(self, x: jax.Array) -> tuple[Any, Any]:
    """Return the dtype of the result, and of sums on the way to it."""
    dtype = jnp.result_type(x, self.values)
    return dtype, jnp.promote_types(dtype, jnp.float32)

  def _by_block(self, x: jax.Array) -> jax.Array:
    inputs = self._inputs(x).transpose(1, 0, 2)
    dtype, wide = self._dtypes(x)
    products = jnp.matmul(
      inputs[self.rows], self.values, preferred_element_type=wide
    )
    sums = jax.ops.segment_sum(
      products, self.cols, len(self.counts), indices_are_sorted=True
    )
    y = sums.transpose(1, 0, 2).reshape(len(x), -1)
    return y[:, : self.shape[1]].astype(dtype)

  def _by_column(self) -> Callable[[jax.Array], jax.Array]:
    _, height, width = self.values.shape
    counts = np.asarray(self.counts)
    starts = np.cumsum(counts) - counts
    kinds = []
    for count in np.unique(counts):
      blocks = starts[counts == count][:, None] + np.arange(count)
      tall = (len(blocks), count * height, width)
      kinds.append((self.rows[blocks], self.values[blocks].reshape(tall)))
    place = np.argsort(np.argsort(counts, kind="stable"))

    def product(x):
      inputs, (dtype, wide) = self._inputs(x), self._dtypes(x)
      parts = []
      for rows, tall in kinds:
        taken = inputs[:, rows].reshape(len(x), *tall.shape[:2])
        parts.append(
          jnp.einsum("bnk,nkc->bnc", taken, tall, preferred_element_type=wide)
        )
      y = jnp.concatenate(parts, axis=1)[:, place].reshape(len(x), -1)
      return y[:, : self.shape[1]].astype(dtype)

    return product
