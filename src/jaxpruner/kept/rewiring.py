"""Drop the smallest kept weights of a leaf and grow others, slot by slot."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxpruner import engine
from jaxpruner.kept import bitmaps, choosing, layouts
from jaxpruner.kept.layouts import Layout


def rewire(
  values: Array,
  layout: Layout,
  score: choosing.ScoreRows,
  left: Array,
  most: int,
) -> tuple[Layout, Array]:
  """Return the layout after a mask update, and which slots moved.

  A weight that stays keeps its slot, and so its value and its moments. The
  slots of the removed weights are given to the grown ones, in order.

  Args:
    values: the kept values, by slot.
    layout: their positions.
    score: growth scores of some rows of the folded weight.
    left: int32, how many of the kept weights are not dropped.
    most: an upper bound of how many are.

  Returns:
    `(layout, moved)`: the new layout, and a boolean per slot.
  """
  rows, columns = layout.matrix
  words = bitmaps.count_words(layout.size + 1)
  slots, positions = layout.by_row.slots, layout.positions()
  # Entries by row are in the order of the dense weight: ties break alike.
  magnitudes = jnp.abs(values[slots])
  stay = engine.select([magnitudes], left.reshape(1)).masks[0] == 1
  past = jnp.where(stay, positions, words * bitmaps.WORD)
  survivors = bitmaps.from_positions(past, words)
  grown = choosing.highest(
    score, rows, columns, layout.count - left, most, survivors
  )
  new = survivors | grown
  old = bitmaps.from_positions(positions, words)
  removed = ~bitmaps.contains(new, positions)
  rank = jnp.cumsum(removed) - 1
  added = bitmaps.positions(new & ~old, most)
  positions = jnp.where(removed, added[jnp.clip(rank, 0, most - 1)], positions)
  arranged = layouts.arrange(
    positions, slots, layout.shape, layout.split, layout.name
  )
  moved = jnp.zeros(layout.count, bool).at[slots].set(removed)
  return arranged, moved


def all_finite(values: Any) -> Array:
  return jnp.all(jnp.isfinite(values))
