"""The format for unstructured sparsity: sliced, tiled, one-byte indices.

K is divided into tiles of 256 rows, so that one byte holds a row index; N into
blocks of up to 256 columns. Within a tile the columns of a block are sorted by
the number of weights they keep, and 16 neighbouring columns form a slice, which
is padded to its longest column. Sorting makes neighbours similar and padding
rare. A slice is stored slot by slot, 16 values per slot. At batch 1 a slot is
one vector of values and one gather; at larger batches each value scales a row
of the batch. A kept weight costs about 5.3 bytes.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats, kernels

TILE = 256
LANES = 16


@formats.register
class Sell(formats.SparseMatrix):
  """Store single weights anywhere: sliced ELLPACK with one-byte row indices.

  The matrix has G column blocks × T row tiles; each tile consists of slices of
  16 columns, and each slice of slots of 16 values. On CPU the product is a
  compiled kernel; elsewhere the matrix is decoded.

  Attributes:
    values: (slots, 16), the kept weights and zeros as padding.
    indices: (slots, 16) uint8, the row within the tile.
    starts: (G, T) int32, the first slot of each tile.
    counts: (G, T, block) uint16, weights kept per column, ascending.
    columns: (G, T, block) uint8, the column within the block, in that order.
    shape: (K, N).

  Example:
    >>> w = Sell.fromdense(2 * np.eye(16, dtype=np.float32))
    >>> w.values.shape, w.indices[0, :4].tolist()
    ((1, 16), [0, 1, 2, 3])
    >>> (jnp.ones((1, 16)) @ w)[0, :3].tolist()
    [2.0, 2.0, 2.0]
  """

  name: ClassVar[str] = "sell"
  stackable: ClassVar[bool] = True

  values: jax.Array  # (slots, 16)
  indices: jax.Array  # (slots, 16) uint8: row within the tile
  starts: jax.Array  # (G, T) int32: first slot of the tile
  counts: jax.Array  # (G, T, block) uint16: weights kept, ascending
  columns: jax.Array  # (G, T, block) uint8: column within the block
  shape: tuple[int, int] = formats.static()

  @classmethod
  def fits(cls, kept: formats.Kept) -> dict[str, Any] | None:
    return {} if kept.density <= 0.55 else None

  @classmethod
  def runs_here(cls) -> bool:
    return kernels.load(cls.name) is not None

  @classmethod
  def fromdense(
    cls,
    dense: Any,
    mask: Any = None,
    block: int | None = None,
    **options: Any,
  ) -> "Sell":
    formats.refuse_options(cls, options)
    dense, kept = formats.kept_entries(dense, mask)
    rows, cols = dense.shape
    # Narrow matrices get small blocks: every core needs at least one.
    block = block or (256 if cols >= 1024 else 128 if cols > 64 else 64)
    tiles, groups = -(-rows // TILE), -(-cols // block)
    counts = np.zeros((groups, tiles, block), np.uint16)
    columns = np.zeros((groups, tiles, block), np.uint8)
    starts = np.zeros((groups, tiles), np.int32)
    values, indices, total = [], [], 0
    for g in range(groups):
      for t in range(tiles):
        part = np.s_[t * TILE : (t + 1) * TILE, g * block : (g + 1) * block]
        value, index, count, order = _pack_tile(dense[part], kept[part], block)
        counts[g, t], columns[g, t], starts[g, t] = count, order, total
        values.append(value)
        indices.append(index)
        total += len(value)
    return cls(
      jnp.asarray(np.concatenate(values)),
      jnp.asarray(np.concatenate(indices)),
      jnp.asarray(starts),
      jnp.asarray(counts),
      jnp.asarray(columns),
      (rows, cols),
    )

  def positions(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    groups, tiles, block = self.columns.shape
    counts = self.counts.reshape(-1, LANES).astype(jnp.int32)
    columns = self.columns.reshape(-1, LANES).astype(jnp.int32)
    lengths = counts[:, -1]
    slots = self.indices.shape[0]
    # Slices and tiles are contiguous, so a running sum of the slice lengths
    # gives the slice of each slot and its index within the slice.
    which = jnp.repeat(
      jnp.arange(len(lengths)), lengths, total_repeat_length=slots
    )
    slot = jnp.arange(slots) - (jnp.cumsum(lengths) - lengths)[which]
    tile = which // (block // LANES)
    row = (tile % tiles * TILE)[:, None] + self.indices.astype(jnp.int32)
    col = (tile // tiles * block)[:, None] + columns[which]
    return row, col, slot[:, None] < counts[which]

  def take(self, columns: jax.Array) -> jax.Array:
    _, tiles, block = self.columns.shape
    group, column = columns // block, columns % block
    # Where each tile has the column, and where that lane's slots begin.
    place = jnp.argmax(self.columns[group] == column[:, None, None], axis=2)
    counts = self.counts[group].astype(jnp.int32)
    lengths = counts[:, :, LANES - 1 :: LANES]
    first = self.starts[group][..., None] + jnp.cumsum(lengths, -1) - lengths
    which = place[..., None]
    base = jnp.take_along_axis(first, which // LANES, axis=2)
    count = jnp.take_along_axis(counts, which, axis=2)
    step = jnp.arange(min(TILE, self.shape[0]))
    slot = jnp.where(step < count, base + step, len(self.values))
    at = slot, which % LANES
    values = self.values.at[at].get(mode="fill", fill_value=0)
    row = self.indices.at[at].get(mode="fill").astype(jnp.int32)
    row += jnp.arange(tiles)[:, None] * TILE
    row = jnp.where(step < count, row, self.shape[0])
    full = jnp.zeros((len(columns), self.shape[0]), self.dtype)
    line = jnp.arange(len(columns))[:, None, None]
    return full.at[line, row].set(values, mode="drop")

  def matmul(self, x: jax.Array) -> jax.Array:
    """Multiply in machine code on CPU, through a dense copy elsewhere."""
    return kernels.matmul(x, self)


def _pack_tile(
  dense: np.ndarray, kept: np.ndarray, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Return the slots, their rows, the sorted counts and the column order."""
  count = np.zeros(block, np.int64)
  count[: kept.shape[1]] = kept.sum(axis=0)
  order = np.argsort(count, kind="stable")
  count = count[order]
  lengths = count[LANES - 1 :: LANES]
  bases = np.cumsum(lengths) - lengths
  place = np.argsort(order)
  col, row = np.nonzero(kept.T)
  lane = place[col]
  # Entries of one column come in order of row: number them within it.
  first = np.cumsum(count) - count
  by_lane = np.argsort(lane, kind="stable")
  slot = np.empty(len(col), np.int64)
  slot[by_lane] = np.arange(len(col)) - np.repeat(first, count)
  where = (bases[lane // LANES] + slot, lane % LANES)
  values = np.zeros((lengths.sum(), LANES), dense.dtype)
  indices = np.zeros((lengths.sum(), LANES), np.uint8)
  values[where] = dense[row, col]
  indices[where] = row
  return values, indices, count, order
