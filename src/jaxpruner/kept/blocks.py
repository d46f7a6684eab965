"""Where the kept blocks of a weight are: one row and one column per block."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner.kept.places import Places
from jaxpruner.sparse import formats
from jaxpruner.sparsity_types import Block


@formats.register
class BlockLayout(Places):
  """The positions of the kept blocks of one leaf.

  Values have the shape (blocks, height, width). Blocks at the edge extend past
  the matrix; their entries there are zero and stay so, because the inputs and
  the cotangents that meet them are padding. Arrays of a stack of layers have
  one more axis, the first.

  Attributes:
    rows: int32, the block row of each slot.
    columns: int32, its block column.
    shape: the shape of the dense weight.
    split: how many leading axes (of a layer) form the rows.
    name: the path of the leaf.
    kind: the sparsity type, which tells the shape of a block and its score.
    axis: the axis that numbers the layers of a stack; None if it is none.

  Example:
    >>> from jaxpruner import kept
    >>> w = kept.from_dense(jnp.eye(4), block=(2, 2))
    >>> w.values.shape, w.layout.rows.tolist(), w.layout.columns.tolist()
    ((2, 2, 2), [0, 1], [0, 1])
  """

  rows: Array
  columns: Array
  shape: tuple[int, ...] = formats.static()
  split: int = formats.static()
  name: str = formats.static()
  kind: Block = formats.static()
  axis: int | None = formats.static(default=None)

  @property
  def block(self) -> tuple[int, int]:
    """Rows and columns of a block."""
    return self.kind.block_shape

  @property
  def count(self) -> int:
    """The number of kept blocks (of a layer)."""
    return self.rows.shape[-1]

  @property
  def grid(self) -> tuple[int, int]:
    """Block rows and block columns of the folded matrix."""
    return grid_of(self.matrix, self.block)

  @property
  def values_shape(self) -> tuple[int, ...]:
    return (*self.rows.shape, *self.block)

  def at_slots(self) -> Array:
    """Return the flat position of each slot in the grid, int32."""
    return self.rows * self.grid[1] + self.columns

  def scatter(self, values: Array) -> Array:
    """Return the folded dense matrix."""
    full = jnp.zeros((*self.grid, *self.block), values.dtype)
    full = full.at[self.rows, self.columns].set(values)
    full = full.transpose(0, 2, 1, 3)
    (up, down), (height, width) = self.grid, self.block
    rows, columns = self.matrix
    return full.reshape(up * height, down * width)[:rows, :columns]

  def gather(self, dense: Array) -> Array:
    """Return the blocks of a folded dense matrix, by slot."""
    return tiled(dense, self.block)[self.rows, self.columns]

  def clear_outside(self, values: Array) -> Array:
    """Return values with zeros where blocks extend past the matrix."""
    (height, width), (rows, columns) = self.block, self.matrix
    row = self.rows[..., None] * height + jnp.arange(height)
    column = self.columns[..., None] * width + jnp.arange(width)
    within = (row < rows)[..., :, None] & (column < columns)[..., None, :]
    return jnp.where(within, values, 0)


def grid_of(matrix: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
  """Return the block rows and block columns of a matrix."""
  return -(-matrix[0] // block[0]), -(-matrix[1] // block[1])


def tiled(dense: Array, block: tuple[int, int]) -> Array:
  """Return a matrix as blocks, (block rows, block columns, height, width)."""
  rows, columns = dense.shape
  (up, down), (height, width) = grid_of((rows, columns), block), block
  dense = jnp.pad(dense, ((0, up * height - rows), (0, down * width - columns)))
  return dense.reshape(up, height, down, width).transpose(0, 2, 1, 3)


def inside(layout: BlockLayout) -> np.ndarray:
  """Return how many entries of each block lie in the matrix, by the grid."""
  sides = [
    np.minimum(side, size - side * np.arange(number))
    for size, side, number in zip(
      layout.matrix, layout.block, layout.grid, strict=True
    )
  ]
  return sides[0][:, None] * sides[1][None, :]
