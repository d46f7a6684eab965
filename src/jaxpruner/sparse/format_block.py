"""Blocks kept or removed whole: gathers and products that XLA does well."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats

# More buckets waste less padding, but each is one more product to start.
MAX_BUCKETS = 4


@formats.register
class Block(formats.SparseMatrix):
  """Block columns, sorted by how many blocks they keep, in a few buckets.

  All block columns of a bucket are padded to its longest, so that a bucket is
  one gather of inputs and one batched product. Runs on every platform.
  """

  name: ClassVar[str] = "block"

  values: jax.Array  # (blocks, height, width)
  rows: jax.Array  # (blocks,) int32: block row, or -1 for padding
  order: jax.Array  # (block columns,) int32: which column a place holds
  shape: tuple[int, int] = formats.static()
  buckets: tuple[tuple[int, int], ...] = formats.static()  # (columns, blocks)

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
      return padded.reshape(grid[0], height, grid[1], width).transpose(
        2, 0, 1, 3
      )

    values = blocks(np.where(kept, dense, 0).astype(dense.dtype))
    kept = np.any(blocks(kept), axis=(2, 3))
    counts = kept.sum(axis=1)
    order = np.argsort(counts, kind="stable")
    buckets = _buckets(counts[order])
    lengths = np.repeat([j for _, j in buckets], [n for n, _ in buckets])
    rows, stored = [], []
    for col, length in zip(order, lengths, strict=True):
      row = np.nonzero(kept[col])[0]
      pad = length - len(row)
      rows.append(np.pad(row, (0, pad), constant_values=-1))
      stored.append(np.pad(values[col, row], [(0, pad), (0, 0), (0, 0)]))
    return cls(
      jnp.asarray(np.concatenate(stored)),
      jnp.asarray(np.concatenate(rows).astype(np.int32)),
      jnp.asarray(order.astype(np.int32)),
      dense.shape,
      buckets,
    )

  def positions(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    _, height, width = self.values.shape
    counts = np.repeat(
      [j for _, j in self.buckets], [n for n, _ in self.buckets]
    )
    col = self.order[np.repeat(np.arange(len(counts)), counts)]
    row = self.rows[:, None] * height + jnp.arange(height)
    col = col[:, None] * width + jnp.arange(width)
    # Edge blocks hang over: what lies outside the matrix was never kept.
    kept = (self.rows >= 0)[:, None, None] & (
      (row < self.shape[0])[:, :, None] & (col < self.shape[1])[:, None, :]
    )
    return row[:, :, None], col[:, None, :], kept

  def matmul(self, x: jax.Array) -> jax.Array:
    """Gather the inputs of each block column and multiply bucket by bucket."""
    _, height, width = self.values.shape
    batch = x.shape[:-1]
    x = x.reshape(-1, self.shape[0])
    x = jnp.pad(x, [(0, 0), (0, -self.shape[0] % height)])
    x = x.reshape(x.shape[0], -1, height)
    parts, start = [], 0
    for columns, length in self.buckets:
      stop = start + columns * length
      # Padding has row -1, the last one, and values of zero.
      chosen = x[:, self.rows[start:stop]]
      chosen = chosen.reshape(len(x), columns, length * height)
      values = self.values[start:stop].reshape(columns, length * height, width)
      parts.append(jnp.einsum("bnk,nkc->bnc", chosen, values))
      start = stop
    y = jnp.concatenate(parts, axis=1)
    y = y[:, jnp.argsort(self.order)].reshape(y.shape[0], -1)
    return y[:, : self.shape[1]].reshape(*batch, self.shape[1])


def _buckets(counts: np.ndarray) -> tuple[tuple[int, int], ...]:
  """Cut ascending counts into few buckets with the least padding."""
  total = len(counts)
  # cost[i]: least number of stored blocks for the first i columns.
  cost = np.where(np.arange(total + 1) == 0, 0.0, np.inf)
  cuts = []
  for _ in range(MAX_BUCKETS):
    length = np.arange(total + 1)[:, None] - np.arange(total + 1)
    last = np.concatenate([[0], counts])[:, None]
    ways = np.where(length >= 0, cost + length * last, np.inf)
    cuts.append(ways.argmin(axis=1))
    cost = ways.min(axis=1)
  buckets, end = [], total
  for cut in reversed(cuts):
    begin = int(cut[end])
    if begin < end:
      buckets.append((end - begin, int(counts[end - 1])))
    end = begin
  return tuple(reversed(buckets))
