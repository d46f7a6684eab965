"""Drop the smallest kept weights of a leaf and grow others, slot by slot.

On CPU a mask update is one call of machine code; elsewhere, and without Numba,
it is written with bitmaps. Both choose the same weights.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxpruner import engine
from jaxpruner.kept import (
  bitmaps,
  block_rewiring,
  choosing,
  layouts,
  products,
)
from jaxpruner.kept.blocks import BlockLayout
from jaxpruner.kept.growth import Growth
from jaxpruner.kept.layouts import Layout, Lists
from jaxpruner.kept.places import fold


@functools.cache
def load() -> Any:
  """Compile (or load from Numba's cache) and register the kernel, or None."""
  if products.load() is None:
    return None
  from jaxpruner.kept import _rewire_kernel

  products.register(_rewire_kernel, "rewire_random", "rewire_gradient")
  return _rewire_kernel


class Leaf(NamedTuple):
  """What a mask update of one leaf (no stack) needs.

  Attributes:
    values: the kept values, by slot.
    layout: their positions.
    growth: growth scores of the folded weight.
    left: int32, how many of the kept weights are not dropped.
    most: an upper bound of how many are.
  """

  values: Array
  layout: Layout | BlockLayout
  growth: Growth
  left: Array
  most: int

  @property
  def has_kernel(self) -> bool:
    if isinstance(self.layout, BlockLayout) or load() is None:
      return False
    return self.growth.has_kernel


Rewired = tuple[Layout | BlockLayout, Array, Array]


def rewire(leaves: Sequence[Leaf]) -> list[Rewired]:
  """Return the layouts after a mask update, and which slots moved.

  A weight that stays keeps its slot, and so its value and its moments. The
  slots of the removed weights are given to the grown ones, in order. If a
  growth score is not finite, all stay. Leaves that machine code can rewire are
  handed over together: XLA would call it for one after the other, and much of
  its work has one thread.

  Args:
    leaves: the leaves.

  Returns:
    Per leaf `(layout, moved, finite)`: the new layout, a boolean per slot, and
    whether all scores are finite.
  """
  together = [leaf for leaf in leaves if leaf.has_kernel]
  found: Iterator[Any] = iter(())
  if together:
    # `most` is no array: it belongs to the branches, not to their operands.
    most = [leaf.most for leaf in together]
    slow = lambda *operands: [
      _with_bitmaps(*own, most=m) for own, m in zip(operands, most, strict=True)
    ]
    operands = [leaf[:-1] for leaf in together]
    found = iter(
      jax.lax.platform_dependent(*operands, cpu=_in_kernel, default=slow)
    )
  return [next(found) if leaf.has_kernel else _alone(leaf) for leaf in leaves]


def _alone(leaf: Leaf) -> Rewired:
  values, layout, growth, left, most = leaf
  if isinstance(layout, BlockLayout):
    return block_rewiring.rewire(values, layout, growth, left)
  return _with_bitmaps(values, layout, growth, left, most=most)


def first_layout(
  growth: Growth,
  shape: tuple[int, ...],
  split: int,
  name: str,
  count: int,
) -> Layout:
  """Return the layout of the highest growth scores of a leaf without weights.

  Args:
    growth: growth scores of the folded weight.
    shape: the shape of the dense weight.
    split: how many leading axes form the rows.
    name: the path of the leaf.
    count: how many weights to keep.

  Returns:
    The layout; its slots are in row-major order.
  """
  rows, columns = fold(shape, split)

  def slow(growth):
    words = choosing.highest(growth.rows, rows, columns, count, count)[0]
    positions = bitmaps.positions(words, count)
    slots = jnp.arange(count, dtype=jnp.int32)
    return layouts.arrange(positions, slots, shape, split, name)

  def fast(growth):
    none = lambda length: Lists(
      jnp.zeros(length + 1, jnp.int32),
      jnp.zeros(0, layouts.index_dtype(columns)),
      jnp.zeros(0, jnp.int32),
    )
    empty = Layout(none(rows), none(columns), tuple(shape), split, name)
    values, left = jnp.zeros(0, jnp.float32), jnp.int32(0)
    return _in_kernel((values, empty, growth, left), count=count)[0][0]

  if load() is None or not growth.has_kernel:
    return slow(growth)
  return jax.lax.platform_dependent(growth, cpu=fast, default=slow)


def _in_kernel(*leaves, count=None):
  """Call the kernel; `count` is the new number of weights, if it changes."""
  names, operands, results = set(), [], []
  for values, layout, growth, left in leaves:
    name, scores = growth.for_kernel(load())
    names.add(name)
    values, left = values.astype(jnp.float32), left.astype(jnp.int32)
    operands += [*layout.by_row, values, left, *scores]
    results += _result_shapes(layout, count or layout.count)
  (name,) = names  # an algorithm grows all its leaves alike
  call = jax.ffi.ffi_call(f"jaxpruner_kept_{name}", tuple(results))
  out, each = call(*operands), len(results) // len(leaves)
  found = []
  for i, (_, layout, _, _) in enumerate(leaves):
    own = out[each * i : each * (i + 1)]
    new = Layout(
      Lists(*own[:3]),
      Lists(*own[3:6]),
      layout.shape,
      layout.split,
      layout.name,
    )
    found.append((new, own[6] == 1, own[7][0] == 1))
  return found


def _result_shapes(layout: Layout, count: int) -> list[jax.ShapeDtypeStruct]:
  rows, columns = layout.matrix
  lists = lambda number, length: [
    jax.ShapeDtypeStruct((number + 1,), jnp.int32),
    jax.ShapeDtypeStruct((count,), layouts.index_dtype(length)),
    jax.ShapeDtypeStruct((count,), jnp.int32),
  ]
  return [
    *lists(rows, columns),
    *lists(columns, rows),
    jax.ShapeDtypeStruct((count,), jnp.uint8),
    jax.ShapeDtypeStruct((1,), jnp.uint8),
  ]


def _with_bitmaps(values, layout, growth, left, *, most):
  rows, columns = layout.matrix
  words = bitmaps.count_words(layout.size + 1)
  slots, positions = layout.by_row.slots, layout.positions()
  # Entries by row are in the order of the dense weight: ties break alike.
  magnitudes = jnp.abs(values[slots])
  stay = engine.select([magnitudes], left.reshape(1)).masks[0] == 1
  past = jnp.where(stay, positions, words * bitmaps.WORD)
  survivors = bitmaps.from_positions(past, words)
  grown, finite = choosing.highest(
    growth.rows, rows, columns, layout.count - left, most, survivors
  )
  old = bitmaps.from_positions(positions, words)
  new = jnp.where(finite, survivors | grown, old)
  removed = ~bitmaps.contains(new, positions)
  rank = jnp.cumsum(removed) - 1
  added = bitmaps.positions(new & ~old, most)
  positions = jnp.where(removed, added[jnp.clip(rank, 0, most - 1)], positions)
  arranged = layouts.arrange(
    positions, slots, layout.shape, layout.split, layout.name
  )
  moved = jnp.zeros(layout.count, bool).at[slots].set(removed)
  return arranged, moved, finite


def all_finite(values: Any) -> Array:
  return jnp.all(jnp.isfinite(values))
