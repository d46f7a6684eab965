"""Blocks kept or removed whole: gathers and products that XLA does well."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats, kernels

# Rows of the batch per chunk. A large batch takes as many as keep the gathered
# inputs (rows times blocks) in cache.
SMALL_CHUNK, LARGE_CHUNK, MOST_GATHERED = 32, 64, 1 << 16
# Block columns with equally many blocks are multiplied together; more different
# heights than this would make the program long.
MAX_HEIGHTS = 32
# Sides of blocks worth trying, the largest first.
SIDES = (128, 64, 32)


@formats.register
class Block(formats.SparseMatrix):
  """Store the blocks that keep any weight, as dense matrices.

  Blocks are sorted by block column and row; block columns with few blocks come
  first. For a small batch, all blocks are multiplied at once and the products
  are summed by block column. For a large batch that sum would cost more than
  the products: the blocks of a column are joined to one tall matrix instead,
  whose product contains the sum. Runs on every platform.

  Attributes:
    values: (blocks, height, width), the stored blocks.
    rows: (blocks,) int32, the block row of each block.
    shape: (K, N).
    counts: number of stored blocks of each block column.

  Example:
    >>> w = Block.fromdense(np.eye(4, dtype=np.float32), block_shape=(2, 2))
    >>> w.values.shape, w.rows.tolist(), w.counts
    ((2, 2, 2), [0, 1], (1, 1))
    >>> (jnp.arange(4.0) @ w).tolist()
    [0.0, 1.0, 2.0, 3.0]
  """

  name: ClassVar[str] = "block"

  values: jax.Array  # (blocks, height, width)
  rows: jax.Array  # (blocks,) int32
  shape: tuple[int, int] = formats.static()
  counts: tuple[int, ...] = formats.static()  # blocks of each block column

  @classmethod
  def fits(cls, kept: formats.Kept) -> dict[str, Any] | None:
    for side in SIDES:
      if min(kept.mask.shape) < side:
        continue
      stored = kept.block_density(side)
      # Blocks must be mostly full, and not merely removed rows and columns.
      full = kept.density >= 0.7 * stored
      if stored <= 0.6 and full and stored < 0.9 * kept.inner_density:
        return {"block_shape": (side, side)}
    return None

  @classmethod
  def fromdense(
    cls,
    dense: Any,
    mask: Any = None,
    block_shape: tuple[int, int] = (64, 64),
    **options: Any,
  ) -> "Block":
    formats.refuse_options(cls, options)
    dense, kept = formats.kept_entries(dense, mask)
    height, width = block_shape
    grid = -(-dense.shape[0] // height), -(-dense.shape[1] // width)

    def blocks(array):
      padded = np.zeros((grid[0] * height, grid[1] * width), array.dtype)
      padded[: array.shape[0], : array.shape[1]] = array
      tiled = padded.reshape(grid[0], height, grid[1], width)
      return tiled.transpose(2, 0, 1, 3)

    found = np.any(blocks(kept), axis=(2, 3))
    counts = np.count_nonzero(found, axis=1)
    order = np.argsort(counts, kind="stable")
    cols, rows = np.nonzero(found[order])
    values = blocks(np.where(kept, dense, 0).astype(dense.dtype))
    return cls(
      jnp.asarray(values[order[cols], rows]),
      jnp.asarray(rows.astype(np.int32)),
      dense.shape,
      tuple(counts.tolist()),
    )

  @property
  def _order(self) -> np.ndarray:
    """The block columns in the order in which their blocks are stored."""
    return np.argsort(self.counts, kind="stable")

  @property
  def cols(self) -> jax.Array:
    """The block column of every block."""
    counts = np.asarray(self.counts)[self._order]
    return jnp.asarray(np.repeat(self._order, counts))

  def positions(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    _, height, width = self.values.shape
    row = (self.rows[:, None] * height + jnp.arange(height))[:, :, None]
    col = (self.cols[:, None] * width + jnp.arange(width))[:, None, :]
    # Blocks at the edges extend past the matrix; entries there are padding.
    return row, col, (row < self.shape[0]) & (col < self.shape[1])

  def take(self, columns: jax.Array) -> jax.Array:
    blocks, height, width = self.values.shape
    most = max(self.counts, default=0)
    full = jnp.zeros((len(columns), self.shape[0]), self.dtype)
    if not most:
      return full
    counts = np.asarray(self.counts)[self._order]
    starts = np.empty_like(counts)
    starts[self._order] = np.cumsum(counts) - counts
    column = columns // width
    place = jnp.asarray(starts)[column][:, None] + jnp.arange(most)
    mine = jnp.arange(most) < jnp.asarray(self.counts)[column][:, None]
    place = jnp.where(mine, place, blocks)
    values = self.values.at[place, :, (columns % width)[:, None]]
    row = self.rows.at[place].get(mode="fill", fill_value=self.shape[0])
    row = row[:, :, None] * height + jnp.arange(height)
    line = jnp.arange(len(columns))[:, None, None]
    return full.at[line, row].set(
      values.get(mode="fill", fill_value=0), mode="drop"
    )

  def matmul(self, x: jax.Array) -> jax.Array:
    return kernels.promoted_product(x, self)

  def product(
    self, x: jax.Array, back: bool, platform: str | None = None
  ) -> jax.Array:
    lead, length = x.shape[:-1], self.shape[not back]
    x = x.reshape(-1, x.shape[-1])
    if not len(self.rows):
      y = jnp.zeros((len(x), length), x.dtype)
    elif platform and _pallas().supports(platform, self.values):
      y = self._on_device(x, back, platform)
    elif back:
      y = self._back(x)
    else:
      y = self._forward(x)
    return y.reshape(*lead, length)

  def outer(
    self, x: jax.Array, g: jax.Array, platform: str | None = None
  ) -> jax.Array:
    if not len(self.rows):
      return jnp.zeros(self.values.shape, x.dtype)
    x, g = self._padded(x, 1), self._padded(g, 2)
    if platform and _pallas().supports(platform, self.values):
      like = jax.ShapeDtypeStruct(self.values.shape, x.dtype)
      return _pallas().at_blocks(
        x, g, like, self.rows, self.cols, platform=platform
      )
    blocks = jnp.einsum(
      "ibk,ibc->ikc",
      self._by_side(x, 1)[self.rows],
      self._by_side(g, 2)[self.cols],
      preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    # Blocks at the edges extend past the matrix: x and g are zero there.
    return blocks.astype(x.dtype)

  def _on_device(self, x: jax.Array, back: bool, platform: str) -> jax.Array:
    order = _pallas().walk(self.rows, self.cols, back)
    side = 1 if back else 2
    blocks = -(-self.shape[side - 1] // self.values.shape[side])
    y = _pallas().product(
      self._padded(x, 3 - side),
      self.values,
      order,
      blocks,
      platform=platform,
      back=back,
    )
    return y[: len(x), : self.shape[side - 1]]

  def _forward(self, x: jax.Array) -> jax.Array:
    """Multiply all blocks at once, a chunk of the batch at a time."""
    chunk, product = SMALL_CHUNK, self._by_block
    if len(x) >= LARGE_CHUNK and len(set(self.counts)) <= MAX_HEIGHTS:
      fitting = MOST_GATHERED // max(1, len(self.rows)) // LARGE_CHUNK
      chunk, product = LARGE_CHUNK * max(1, fitting), self._by_column()
    if len(x) <= chunk:
      return product(x)
    whole = len(x) // chunk * chunk
    parts = jax.lax.map(product, x[:whole].reshape(-1, chunk, x.shape[1]))
    y = parts.reshape(whole, self.shape[1])
    if whole < len(x):
      y = jnp.concatenate([y, product(x[whole:])])
    return y

  def _back(self, g: jax.Array) -> jax.Array:
    """Multiply by the transpose: sums are by block row."""
    products = jnp.einsum(
      "ibc,ikc->ibk",
      self._by_side(self._padded(g, 2), 2)[self.cols],
      self.values,
      preferred_element_type=jnp.promote_types(g.dtype, jnp.float32),
    )
    rows = -(-self.shape[0] // self.values.shape[1])
    sums = jax.ops.segment_sum(products, self.rows, rows).transpose(1, 0, 2)
    return sums.reshape(len(g), -1)[:, : self.shape[0]].astype(g.dtype)

  def _padded(self, x: jax.Array, side: int) -> jax.Array:
    """Pad the last axis of x to whole blocks; side 1 is rows, 2 columns."""
    length = self.values.shape[side]
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % length)])

  def _by_side(self, x: jax.Array, side: int) -> jax.Array:
    """Return x by block, (blocks, batch, side)."""
    length = self.values.shape[side]
    return x.reshape(len(x), -1, length).transpose(1, 0, 2)

  def _inputs(self, x: jax.Array) -> jax.Array:
    """Return x by block row, (rows, batch, height)."""
    return self._by_side(self._padded(x, 1), 1)

  def _output(self, columns: jax.Array, dtype: Any) -> jax.Array:
    """Return y from its block columns as stored, (columns, batch, width)."""
    y = columns[np.argsort(self._order)].transpose(1, 0, 2)
    return y.reshape(len(y), -1)[:, : self.shape[1]].astype(dtype)

  def _dtypes(self, x: jax.Array) -> tuple[Any, Any]:
    """Return the dtype of the result, and the dtype of partial sums."""
    dtype = jnp.result_type(x, self.values)
    return dtype, jnp.promote_types(dtype, jnp.float32)

  def _by_block(self, x: jax.Array) -> jax.Array:
    inputs, (dtype, wide) = self._inputs(x), self._dtypes(x)
    products = jnp.matmul(
      inputs[self.rows], self.values, preferred_element_type=wide
    )
    order = self._order
    stored = np.repeat(np.arange(len(order)), np.asarray(self.counts)[order])
    sums = jax.ops.segment_sum(
      products, stored, len(order), indices_are_sorted=True
    )
    return self._output(sums, dtype)

  def _by_column(self) -> Callable[[jax.Array], jax.Array]:
    _, height, width = self.values.shape
    kinds, start = [], 0
    for count, columns in zip(
      *np.unique(self.counts, return_counts=True), strict=True
    ):
      mine = slice(start, start := start + int(count * columns))
      rows = self.rows[mine].reshape(columns, count)
      tall = self.values[mine].reshape(columns, count, height, width)
      kinds.append((rows, tall))

    def product(x):
      inputs, (dtype, wide) = self._inputs(x), self._dtypes(x)
      parts = [
        jnp.einsum(
          "nibk,nikc->nbc", inputs[rows], tall, preferred_element_type=wide
        )
        for rows, tall in kinds
      ]
      return self._output(jnp.concatenate(parts), dtype)

    return product


def _pallas() -> Any:
  """Import the kernels of TPU and GPU where a program is lowered for them."""
  from jaxpruner.sparse._pallas import block

  return block
