"""Choose the weights that grow: the highest scores of a matrix never stored.

A score function gives the scores of a few rows. The k-th highest score is found
by counting, four bits of it in each pass over the rows; a last pass notes the
chosen positions in a bitmap. The count is exact, and among equal scores the
lower position wins.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner import _leaves, _tools
from jaxpruner.engine import draw
from jaxpruner.kept import bitmaps

# Scores held at a time.
TILE = 2**19
_DIGIT = 4

# First row (traced), number of rows -> scores (rows, columns), at least zero.
ScoreRows = Callable[[Any, int], Array]


def tile_rows(rows: int, columns: int) -> int:
  """Return the rows of a tile: a multiple of 32, so that words are whole."""
  most = max(1, TILE // (32 * columns)) * 32
  return min(most, -(-rows // 32) * 32)


def highest(
  score: ScoreRows,
  rows: int,
  columns: int,
  count: Any,
  excluded: Array | None = None,
) -> Array:
  """Return the bitmap of the `count` highest scores.

  Args:
    score: the scores of some rows.
    rows: rows of the matrix.
    columns: its columns.
    count: how many, may be traced; at most those not excluded.
    excluded: bitmap of positions that cannot be chosen.

  Returns:
    A bitmap of `count_words(rows * columns + 1)` words.
  """
  height = tile_rows(rows, columns)
  tiles = -(-rows // height)
  words = height * columns // bitmaps.WORD
  total = bitmaps.count_words(rows * columns + 1)
  if excluded is None:
    excluded = jnp.zeros(total, jnp.uint32)
  excluded = jnp.pad(excluded, (0, max(0, tiles * words - total)))

  def ordered(tile: Array) -> Array:
    """The scores of a tile as integers; 0 where nothing can be chosen."""
    scores = score(tile * height, height).astype(jnp.float32)
    bits = lax.bitcast_convert_type(scores, jnp.uint32) + 1
    out = lax.dynamic_slice(excluded, (tile * words,), (words,))
    out = bitmaps.unpack(out, height * columns).reshape(height, columns)
    row = tile * height + jnp.arange(height)
    return jnp.where(out | (row >= rows)[:, None], 0, bits)

  count = jnp.asarray(count, jnp.int32)
  digits = jnp.arange(1, 2**_DIGIT, dtype=jnp.uint32)

  def narrow(step, threshold):
    shift = jnp.uint32(32 - _DIGIT) - step.astype(jnp.uint32) * _DIGIT
    tried = threshold | (digits << shift)

    def add(tile, counts):
      bits = ordered(tile)
      found = [jnp.sum(bits >= t, dtype=jnp.int32) for t in tried]
      return counts + jnp.stack(found)

    zero = jnp.zeros(len(digits), jnp.int32)
    counts = lax.fori_loop(0, tiles, add, zero)
    # Counts fall as thresholds rise: the highest that still leaves enough.
    enough = jnp.sum(counts >= count).astype(jnp.uint32)
    return threshold | (enough << shift)

  threshold = lax.fori_loop(0, 32 // _DIGIT, narrow, jnp.uint32(0))

  def note(_, tile):
    bits = ordered(tile)
    above = bitmaps.pack(bits > threshold)
    return None, (above, bitmaps.pack((bits == threshold) & (bits > 0)))

  _, (above, equal) = lax.scan(note, None, jnp.arange(tiles))
  above, equal = above.reshape(-1), equal.reshape(-1)
  missing = count - jnp.sum(lax.population_count(above).astype(jnp.int32))
  chosen = above | bitmaps.lowest(equal, missing)
  chosen = jnp.pad(chosen, (0, max(0, total - chosen.size)))
  return chosen[:total]


def path_number(name: str) -> int:
  return _tools.path_hash(name)


def random_scores(
  data: Array, salt: Any, names: _leaves.Names, columns: int
) -> ScoreRows:
  """Return the numbers of `BaseUpdater.random_scores`, a few rows at a time."""
  words = draw._words(data, salt, (names,))[0]
  step = words[1] | np.uint32(1)

  def score(row: Any, height: int) -> Array:
    first = jnp.asarray(row, jnp.uint32) * np.uint32(columns)
    index = first + lax.broadcasted_iota(
      jnp.uint32, (height * columns,), 0
    )
    bits = (index.reshape(height, columns) * step) ^ words[0]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
      bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    bits = bits ^ (bits >> np.uint32(16))
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)

  return score


def gradient_scores(pairs: list[tuple[Array, Array]], rows: int) -> ScoreRows:
  """Return |sum of left.T @ right|, a few rows at a time.

  Args:
    pairs: per use of the weight, an array (batch, rows), or the int row of
      each batch entry, and an array (batch, columns).
    rows: rows of the weight.
  """

  def score(row: Any, height: int) -> Array:
    total: Any = 0.0
    for left, right in pairs:
      if jnp.issubdtype(left.dtype, jnp.integer):
        part = left[:, None] == row + jnp.arange(height)
        part = part.astype(right.dtype)
      else:
        padded = jnp.pad(left, ((0, 0), (0, -rows % height)))
        part = lax.dynamic_slice_in_dim(padded, row, height, 1)
      total += part.astype(jnp.float32).T @ right.astype(jnp.float32)
    return jnp.abs(total)

  return score


def all_finite(pairs: list[tuple[Array, Array]]) -> Array:
  """Return whether all factors are finite, and so all their products' sums."""
  found = [jnp.all(jnp.isfinite(a)) for pair in pairs for a in pair]
  return jnp.all(jnp.stack(found)) if found else jnp.bool_(True)

