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

from jaxpruner import engine
from jaxpruner.kept import bitmaps

# Scores held at a time.
TILE = 2**19
# Matrices up to this size are searched without a sample.
SMALL = 2**17
_DIGIT = 4
# The integer of the largest finite score.
_LARGEST = np.uint32(0x7F800000)

# Rows (traced) -> their scores (rows, columns), at least zero.
ScoreRows = Callable[[Array], Array]


def tile_rows(rows: int, columns: int) -> int:
  """Return the rows of a tile: a multiple of 32, so that words are whole."""
  most = max(1, TILE // (32 * columns)) * 32
  return min(most, -(-rows // 32) * 32)


def highest(
  score: ScoreRows,
  rows: int,
  columns: int,
  count: Any,
  most: int,
  excluded: Array | None = None,
) -> tuple[Array, Array]:
  """Return the bitmap of the `count` highest scores.

  Args:
    score: the scores of some rows.
    rows: rows of the matrix.
    columns: its columns.
    count: how many, may be traced; at most those not excluded.
    most: an upper bound of `count`.
    excluded: bitmap of positions that cannot be chosen.

  Returns:
    A bitmap of `count_words(rows * columns + 1)` words, and whether all scores,
    excluded ones too, are finite; without that the bitmap means nothing.
  """
  tiles = _Tiles(score, rows, columns, excluded)
  count = jnp.asarray(count, jnp.int32)
  if rows * columns <= SMALL:
    return tiles.search(count)
  # A threshold from a sample leaves few candidates, which are ranked exactly;
  # if it leaves too few or too many, all scores are searched.
  room = int(1.6 * most) + 1024
  found, finite = tiles.above(tiles.guess(count))
  number = jnp.sum(lax.population_count(found).astype(jnp.int32))
  words = lax.cond(
    (number >= count) & (number <= room),
    lambda: tiles.ranked(bitmaps.positions(found, room), count),
    lambda: tiles.search(count)[0],
  )
  return words, finite


class _Tiles:
  """The scores of a matrix, a tile at a time, as ordered integers."""

  def __init__(
    self, score: ScoreRows, rows: int, columns: int, excluded: Array | None
  ):
    self.score, self.rows, self.columns = score, rows, columns
    self.height = tile_rows(rows, columns)
    self.tiles = -(-rows // self.height)
    self.size = self.height * columns
    self.total = bitmaps.count_words(rows * columns + 1)
    words = max(self.total, self.tiles * self.size // bitmaps.WORD)
    if excluded is None:
      excluded = jnp.zeros(words, jnp.uint32)
    self.excluded = jnp.pad(excluded, (0, words - len(excluded)))

  def ordered(self, tile: Array) -> Array:
    """Return the scores of a tile as integers; 0: cannot be chosen."""
    return self._ordered(tile)[0]

  def _ordered(self, tile: Array) -> tuple[Array, Array]:
    row = tile * self.height + jnp.arange(self.height)
    words = self.size // bitmaps.WORD
    out = lax.dynamic_slice(self.excluded, (tile * words,), (words,))
    out = bitmaps.unpack(out, self.size).reshape(self.height, -1)
    bits = _integers(self.score(jnp.minimum(row, self.rows - 1)))
    finite = jnp.all(bits <= _LARGEST)
    bits = jnp.where(out | (row >= self.rows)[:, None], 0, bits)
    # XLA would compute the scores once for each of their uses.
    return lax.optimization_barrier(bits), finite

  def guess(self, count: Array) -> Array:
    """Return a threshold that leaves about 1.25 times as many, from a sample.

    The rows of the sample are spread over the matrix.
    """
    number = min(self.rows, max(32, SMALL // self.columns))
    row = (np.arange(number) * self.rows // number).astype(np.int32)
    at = row[:, None] * self.columns + np.arange(self.columns, dtype=np.int32)
    out = bitmaps.contains(self.excluded, jnp.asarray(at))
    bits = jnp.where(out, 0, _integers(self.score(jnp.asarray(row))))
    bits = lax.optimization_barrier(bits)
    share = 1.25 * number / self.rows
    wanted = (count.astype(jnp.float32) * share).astype(jnp.int32) + 8

    def narrow(step, threshold):
      tried = threshold | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
      enough = jnp.sum(bits >= tried, dtype=jnp.int32) >= wanted
      return jnp.where(enough, tried, threshold)

    return jnp.maximum(lax.fori_loop(0, 32, narrow, jnp.uint32(0)), 1)

  def above(self, threshold: Array) -> tuple[Array, Array]:
    """Return the bitmap of the scores at or above a threshold."""

    def note(tile):
      bits, finite = self._ordered(tile)
      return bitmaps.pack(bits >= threshold), finite

    words, finite = lax.map(note, jnp.arange(self.tiles))
    return self._words(words), jnp.all(finite)

  def ranked(self, positions: Array, count: Array) -> Array:
    """Return the bitmap of the highest among candidates (-1: none)."""

    def look(tile, found):
      at = positions - tile * self.size
      inside = (positions >= 0) & (at >= 0) & (at < self.size)
      bits = self.ordered(tile).reshape(-1)[jnp.clip(at, 0, self.size - 1)]
      return jnp.where(inside, bits, found)

    start = jnp.zeros(len(positions), jnp.uint32)
    bits = lax.fori_loop(0, self.tiles, look, start)
    scores = lax.bitcast_convert_type(bits - 1, jnp.float32)
    scores = jnp.where(bits > 0, scores, -1.0)
    chosen = engine.select([scores], count.reshape(1)).masks[0] == 1
    past = self.total * bitmaps.WORD
    return bitmaps.from_positions(
      jnp.where(chosen, positions, past), self.total
    )

  def search(self, count: Array) -> tuple[Array, Array]:
    """Return the bitmap of the highest, by counting four bits at a time."""
    digits = jnp.arange(1, 2**_DIGIT, dtype=jnp.uint32)

    def narrow(step, threshold):
      shift = jnp.uint32(32 - _DIGIT) - step.astype(jnp.uint32) * _DIGIT
      tried = threshold | (digits << shift)

      def add(tile, counts):
        bits = self.ordered(tile)
        found = [jnp.sum(bits >= t, dtype=jnp.int32) for t in tried]
        return counts + jnp.stack(found)

      zero = jnp.zeros(len(digits), jnp.int32)
      counts = lax.fori_loop(0, self.tiles, add, zero)
      # Counts fall as thresholds rise: the highest that still leaves enough.
      enough = jnp.sum(counts >= count).astype(jnp.uint32)
      return threshold | (enough << shift)

    threshold = lax.fori_loop(0, 32 // _DIGIT, narrow, jnp.uint32(0))

    def note(tile):
      bits, finite = self._ordered(tile)
      equal = (bits == threshold) & (bits > 0)
      return bitmaps.pack(bits > threshold), bitmaps.pack(equal), finite

    above, equal, finite = lax.map(note, jnp.arange(self.tiles))
    above, equal = self._words(above), self._words(equal)
    missing = count - jnp.sum(lax.population_count(above).astype(jnp.int32))
    return above | bitmaps.lowest(equal, missing), jnp.all(finite)

  def _words(self, words: Array) -> Array:
    words = words.reshape(-1)
    return jnp.pad(words, (0, max(0, self.total - words.size)))[: self.total]


def _integers(scores: Array) -> Array:
  """Return non-negative scores as integers of the same order, from 1."""
  return lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32) + 1
