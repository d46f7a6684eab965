"""Drop and grow whole blocks: scores of blocks, a few rows at a time.

Scores have one entry per block of the grid, so they are stored and ranked as
the masked version ranks them; the scores of single weights never are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpruner import engine
from jaxpruner.kept import choosing
from jaxpruner.kept.blocks import BlockLayout, inside
from jaxpruner.kept.growth import Growth
from jaxpruner.sparsity_types import base


def rewire(
  values: Array, layout: BlockLayout, growth: Growth, left: Array
) -> tuple[BlockLayout, Array, Array]:
  """Return the layout after a mask update, and which slots moved.

  Args:
    values: the kept blocks, by slot.
    layout: their positions.
    growth: growth scores of the folded weight.
    left: int32, how many of the kept blocks are not dropped.

  Returns:
    `(layout, moved, finite)`: the new layout, a boolean per slot, and whether
    all scores are finite; if not, all stay.
  """
  at = (layout.rows, layout.columns)
  scores = (
    jnp.full(layout.grid, -jnp.inf).at[at].set(_magnitudes(values, layout))
  )
  stay = engine.select([scores], left.reshape(1)).masks[0] == 1
  old = jnp.zeros(layout.grid, bool).at[at].set(True)
  stay = jnp.where(left == layout.count, old, stay)  # also if some are NaN
  grown = pooled(growth, layout)
  finite = jnp.all(jnp.isfinite(grown))
  ranked = jnp.where(stay, jnp.inf, grown)
  new = engine.select([ranked], jnp.array([layout.count])).masks[0] == 1
  new = jnp.where(finite, new, old)
  moved = ~new[at]
  added = jnp.nonzero((new & ~old).reshape(-1), size=layout.count, fill_value=0)
  rank = jnp.clip(jnp.cumsum(moved) - 1, 0)
  here = jnp.where(moved, added[0][rank].astype(jnp.int32), layout.at_slots())
  return placed(layout, here), moved, finite


def placed(layout: BlockLayout, at: Array) -> BlockLayout:
  """Return a layout with its slots at other flat positions of the grid."""
  return BlockLayout(
    at // layout.grid[1],
    at % layout.grid[1],
    layout.shape,
    layout.split,
    layout.name,
    layout.kind,
    layout.axis,
  )


def first_layout(growth: Growth, empty: BlockLayout, count: int) -> BlockLayout:
  """Return the layout of the highest growth scores of a leaf without weights.

  Args:
    growth: growth scores of the folded weight.
    empty: its layout without a block.
    count: how many blocks to keep.

  Returns:
    The layout; its slots are in row-major order.
  """
  scores = pooled(growth, empty)
  chosen = engine.select([scores], jnp.array([count])).masks[0] == 1
  at = jnp.nonzero(chosen.reshape(-1), size=count)[0]
  return placed(empty, at.astype(jnp.int32))


def pooled(growth: Growth, layout: BlockLayout) -> Array:
  """Return the growth scores of all blocks, by the grid."""
  kind = layout.kind
  (rows, columns), height = layout.matrix, layout.block[0]
  tile = max(1, choosing.TILE // (height * columns)) * height
  whole = rows // tile
  parts: list[Any] = []
  if whole:
    score = lambda i: kind.pool(growth.rows(i * tile + jnp.arange(tile)))
    found = jax.lax.map(score, jnp.arange(whole))
    parts.append(found.reshape(-1, found.shape[-1]))
  if rows % tile:  # its last block may be lower than the others
    parts.append(kind.pool(growth.rows(jnp.arange(whole * tile, rows))))
  return jnp.concatenate(parts)


def _magnitudes(values: Array, layout: BlockLayout) -> Array:
  """Return the drop score of each kept block, as `Block.pool` does."""
  sizes = jnp.abs(values.astype(jnp.float32))
  if not layout.kind.use_avg_pooling:
    return jnp.max(sizes, axis=(-2, -1))
  total = base.pairwise_sum(base.pairwise_sum(sizes, -1), -1)
  entries = jnp.asarray(inside(layout), jnp.float32)
  return total / entries[layout.rows, layout.columns]
