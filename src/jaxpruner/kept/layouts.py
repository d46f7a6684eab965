"""Where the kept weights are: two sets of lists over one array of values.

A weight is folded to a matrix: its first `split` axes are rows, the others
columns. Its values lie in *slots*, in no order. Lists by row and lists by
column name, for each entry, the slot and the index on the other side. A weight
that moves keeps its slot, so optimizer moments never move.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner.kept import bitmaps
from jaxpruner.kept.places import Places, fold
from jaxpruner.sparse import formats

LIMIT = 2**31 - 64


class Lists(NamedTuple):
  """The entries of each row (or column), one list after the other.

  Attributes:
    starts: int32, where each list starts, and the end of the last.
    indices: the column (or row) of each entry, ascending within a list.
    slots: int32, the place of each entry in the array of values.
  """

  starts: Array
  indices: Array
  slots: Array


@formats.register
class Layout(Places):
  """The positions of the kept weights of one leaf.

  Arrays of a stack of layers have one more axis, the first: every layer keeps
  as many weights.

  Attributes:
    by_row: the entries of each row of the folded matrix.
    by_column: the entries of each column.
    shape: the shape of the dense weight.
    split: how many leading axes (of a layer) form the rows.
    name: the path of the leaf, for errors and for growth scores.
    axis: the axis that numbers the layers of a stack; None if it is none.

  Example:
    >>> from jaxpruner import kept
    >>> w = kept.from_dense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> w.layout.by_row.indices.tolist(), w.layout.by_column.indices.tolist()
    ([1, 0], [1, 0])
  """

  by_row: Lists
  by_column: Lists
  shape: tuple[int, ...] = formats.static()
  split: int = formats.static()
  name: str = formats.static()
  axis: int | None = formats.static(default=None)

  @property
  def count(self) -> int:
    """The number of kept weights (of a layer)."""
    return self.by_row.slots.shape[-1]

  @property
  def values_shape(self) -> tuple[int, ...]:
    return self.by_row.slots.shape

  def positions(self) -> Array:
    """Return the flat position of each entry, ascending, int32."""
    starts, columns, _ = self.by_row
    rows, width = self.matrix
    row = jnp.repeat(
      jnp.arange(rows, dtype=jnp.int32),
      jnp.diff(starts),
      total_repeat_length=self.count,
    )
    return row * width + columns.astype(jnp.int32)

  def at_slots(self) -> Array:
    """Return the flat position of each slot, int32."""
    found = self.positions()
    return jnp.zeros_like(found).at[self.by_row.slots].set(found)

  def scatter(self, values: Array) -> Array:
    """Return the folded dense matrix."""
    flat = jnp.zeros(int(np.prod(self.shape)), values.dtype)
    flat = flat.at[self.positions()].set(values[self.by_row.slots])
    return flat.reshape(self.matrix)

  def gather(self, dense: Array) -> Array:
    """Return the entries of a folded dense matrix, by slot."""
    found = dense.reshape(-1)[self.positions()]
    return jnp.zeros_like(found).at[self.by_row.slots].set(found)


def arrange(
  positions: Array,
  slots: Array,
  shape: tuple[int, ...],
  split: int,
  name: str = "",
) -> Layout:
  """Return the layout of entries at distinct flat positions, in any order.

  Args:
    positions: int32, the flat position of each entry.
    slots: int32, its slot.
    shape: the shape of the dense weight.
    split: how many leading axes form the rows.
    name: the path of the leaf.

  Returns:
    The layout.
  """
  rows, columns = fold(shape, split)
  row, column = positions // columns, positions % columns
  return Layout(
    _lists(row, column, slots, rows, columns),
    _lists(column, row, slots, columns, rows),
    tuple(shape),
    split,
    name,
  )


def from_sorted(
  positions: np.ndarray, shape: tuple[int, ...], split: int, name: str
) -> Layout:
  """Return `arrange` of ascending positions, without compiling anything.

  Args:
    positions: the flat positions, ascending; their slots are in this order.
    shape: the shape of the dense weight.
    split: how many leading axes form the rows.
    name: the path of the leaf.

  Returns:
    The layout.
  """
  rows, columns = fold(shape, split)
  row, column = np.divmod(positions, columns)
  slots = np.argsort(column, kind="stable").astype(np.int32)

  def lists(outer, inner, slots, count, length):
    starts = np.searchsorted(outer, np.arange(count + 1)).astype(np.int32)
    inner = inner.astype(index_dtype(length))
    return Lists(*map(jnp.asarray, (starts, inner, slots)))

  own = np.arange(len(positions), dtype=np.int32)
  return Layout(
    lists(row, column, own, rows, columns),
    lists(column[slots], row[slots], slots, columns, rows),
    tuple(shape),
    split,
    name,
  )


def _lists(
  outer: Array, inner: Array, slots: Array, lists: int, length: int
) -> Lists:
  """Sort entries by counting the bits before them."""
  at = outer * length + inner
  words = bitmaps.from_positions(at, bitmaps.count_words(lists * length + 1))
  place = bitmaps.ranks(words, at)
  # int32 cannot hold the end of the largest matrices: that is the last rank.
  begins = jnp.arange(lists, dtype=jnp.int32) * length
  starts = bitmaps.ranks(words, begins)
  end = jnp.full(1, len(slots), jnp.int32)
  kind = index_dtype(length)
  return Lists(
    jnp.concatenate([starts, end]),
    jnp.zeros(len(slots), kind).at[place].set(inner.astype(kind)),
    jnp.zeros(len(slots), jnp.int32).at[place].set(slots.astype(jnp.int32)),
  )


def index_dtype(length: int) -> Any:
  """Return the smallest type the kernel reads that can index so many."""
  return jnp.uint16 if length <= 2**16 else jnp.int32
