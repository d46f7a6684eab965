"""Blocks kept or removed whole: gathers and products that XLA does well."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats

# Batch rows at a time: the products of all blocks then stay in cache until
# they are summed.
CHUNK = 64


@formats.register
class Block(formats.SparseMatrix):
  """The kept blocks, in order of block column and row.

  A product gathers the inputs of every block, multiplies all blocks at once,
  and sums by block column. Runs on every platform.
  """

  name: ClassVar[str] = "block"

  values: jax.Array  # (blocks, height, width)
  rows: jax.Array  # (blocks,) int32
  cols: jax.Array  # (blocks,) int32, ascending
  shape: tuple[int, int] = formats.static()

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
      jnp.asarray(cols.astype(np.int32)),
      dense.shape,
    )

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
    if len(x) <= CHUNK:
      return self._chunk(x).reshape(*lead, self.shape[1])
    whole = len(x) // CHUNK * CHUNK
    parts = jax.lax.map(self._chunk, x[:whole].reshape(-1, CHUNK, x.shape[1]))
    y = parts.reshape(whole, self.shape[1])
    if whole < len(x):
      y = jnp.concatenate([y, self._chunk(x[whole:])])
    return y.reshape(*lead, self.shape[1])

  def _chunk(self, x: jax.Array) -> jax.Array:
    _, height, width = self.values.shape
    x = jnp.pad(x, [(0, 0), (0, -self.shape[0] % height)])
    inputs = x.reshape(len(x), x.shape[1] // height, height).transpose(1, 0, 2)
    dtype = jnp.result_type(x, self.values)
    # Half precision would round every block's product before they are summed.
    products = jnp.matmul(
      inputs[self.rows],
      self.values,
      preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    sums = jax.ops.segment_sum(
      products,
      self.cols,
      num_segments=-(-self.shape[1] // width),
      indices_are_sorted=True,
    )
    y = sums.transpose(1, 0, 2).reshape(len(x), -1)
    return y[:, : self.shape[1]].astype(dtype)
