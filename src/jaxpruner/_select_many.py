"""Select on one device, for many leaves: one kernel visits all of them.

Compiling each pass for each leaf by itself would take longer than compiling
the model. Here every leaf is cut into pieces of one length, and one loop
visits piece after piece; only fetching a piece is compiled per leaf.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner import _selection as sel
from jaxpruner._selection import COUNT, PROBES, Plan

_PIECE = 1 << 18  # at most: it stays in the cache from fetching to counting
_VISIT = 1 << 16  # weights that could be counted while a piece is called up
_ROWS = 16  # of a piece: threads share them
_SAMPLE = 1 << 11
# Of the first probes, in spreads around the rank a sample's threshold has.
_RANKS = np.linspace(1, -1, PROBES, dtype=np.float32)


# A place counted from the start: unsigned, so that JAX does not ask whether it
# counts from the end, which would be one more kernel each time.
_PLACE = np.uint32


def _row(table: Array, place: Array) -> Array:
  return lax.dynamic_index_in_dim(table, place, keepdims=False)


def _put(table: Array, row: Array, place: Array) -> Array:
  return lax.dynamic_update_index_in_dim(table, row, place, 0)


def _length(sizes: np.ndarray) -> int:
  """The length of all pieces: few pieces, and little of them beyond leaves."""
  sizes, number = np.unique(sizes, return_counts=True)
  parts = -(-int(sizes.max()) // _PIECE) + np.arange(64)
  lengths = np.unique(-(-sizes[:, None] // parts))
  lengths = np.unique(-(-lengths // _ROWS) * _ROWS)
  lengths = lengths[lengths <= max(_PIECE, _ROWS)]
  cost = [np.sum(number * -(-sizes // n)) * (n + _VISIT) for n in lengths]
  return int(lengths[np.argmin(cost)])


def _totals(which: Sequence[Array]) -> Array:
  """Count what is true in each of several pieces, [P]."""
  rows = [w.reshape(_ROWS, -1).astype(jnp.int32) for w in which]
  return jnp.sum(jnp.stack(sel.sums(rows, (1,))), 1).astype(COUNT)


class _Pieces:
  """Where the pieces lie; all but `fetch` are static facts."""

  def __init__(self, plan: Plan):
    sizes = plan.leaf_sizes.astype(np.int64)
    self.plan = plan
    self.length = _length(sizes)
    self.number = -(-sizes // self.length)
    self.ends = np.cumsum(self.number)
    self.leaf = np.repeat(np.arange(len(sizes)), self.number)
    begin = np.arange(self.ends[-1]) - (self.ends - self.number)[self.leaf]
    begin *= self.length
    # The last piece ends with its leaf, and overlaps the one before.
    start = np.minimum(begin, np.maximum(sizes[self.leaf] - self.length, 0))
    end = np.minimum(sizes[self.leaf] - start, self.length)
    self.fresh = begin - start
    self._whole = not self.fresh.any() and bool((end == self.length).all())
    segment = plan.segments[self.leaf]
    self._table = np.stack([segment, self.leaf, start, self.fresh, end], 1)

  def segment(self, piece: Array) -> Array:
    return _row(jnp.asarray(self._table[:, 0], _PLACE), piece)

  def fetch(self, piece: Array) -> tuple[Array, Array | bool]:
    """Images of a piece, and which of them count."""

    def of(i):
      def run(start):
        flat = self.plan.image(i).reshape(-1)
        if flat.size >= self.length:
          flat = lax.dynamic_slice(flat, (start,), (self.length,))
        else:
          flat = jnp.pad(flat, (0, self.length - flat.size))
        return flat.astype(self.plan.wide)

      return run

    row = _row(jnp.asarray(self._table, _PLACE), piece)
    _, leaf, start, fresh, end = (sel.at(row, i) for i in range(5))
    branches = [of(i) for i in range(len(self.plan.leaves))]
    images = lax.switch(leaf.astype(jnp.int32), branches, start)
    place = lax.iota(COUNT, self.length)
    real = self._whole or (place >= fresh) & (place < end)
    return images, real

  def join(self, rows: Array) -> list[Array]:
    """Leaves of the rows [pieces, length] that the loop has written."""
    leaves = []
    for leaf, end, number in zip(
      self.plan.leaves, self.ends, self.number, strict=True
    ):
      flat = sel.rows_from(rows, int(end - number), int(number)).reshape(-1)
      overlap = int(self.fresh[end - 1])
      if overlap:
        last = (int(number) - 1) * self.length
        flat = jnp.concatenate([flat[:last], flat[last + overlap :]])
      leaves.append(flat[: leaf.size].reshape(leaf.shape))
    return leaves

  def sample(self) -> tuple[Array, np.ndarray]:
    """A row of images per segment, padded at the bottom; how many are real."""
    plan, rows = self.plan, []
    for segment in range(len(plan.sizes)):
      parts, members = [], np.flatnonzero(plan.segments == segment).tolist()
      for i in members:
        flat = plan.image(i).reshape(-1)
        step = -(-flat.size * len(members) // _SAMPLE)
        parts.append(flat[:: min(step, flat.size)].astype(plan.wide))
      rows.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts))
    real = np.array([row.size for row in rows])
    bottom = jnp.iinfo(plan.wide).min
    pad = lambda x: jnp.pad(x, (0, real.max() - x.size), constant_values=bottom)
    return jnp.stack([pad(row) for row in rows]), real


def _guess(pieces: _Pieces, ones: Array) -> Array:
  """The first probes [S, P]: around where a sample has its threshold."""
  sample, real = pieces.sample()
  sample = jnp.sort(sample, axis=1)
  share = ones.astype(jnp.float32) / pieces.plan.sizes.astype(np.float32)
  count = real.astype(np.float32)
  spread = 3.5 * jnp.sqrt(count * share * (1 - share)) + 2
  ranks = (share * count)[:, None] + spread[:, None] * _RANKS
  # Ranks are from the top; probes ascend.
  index = sample.shape[1] - jnp.clip(ranks, 1, count[:, None])
  return jnp.take_along_axis(
    sample, index.astype(_PLACE), 1, mode="promise_in_bounds"
  )


def masks(plan: Plan, ones: Array, dtype) -> list[Array]:
  """Masks with `ones` [S] ones per segment, for leaves on one device."""
  pieces = _Pieces(plan)
  total, whole = len(pieces.leaf), plan.whole()
  visit_all = functools.partial(lax.fori_loop, _PLACE(0), _PLACE(total))
  wanted = jnp.maximum(ones, 1)

  def count(probes, active, carry):
    def visit(piece, counts):
      mine = pieces.segment(piece)

      def run(counts):
        images, real = pieces.fetch(piece)
        levels = _row(probes, mine)
        hits = [(images >= sel.at(levels, p)) & real for p in range(PROBES)]
        return _put(counts, _row(counts, mine) + _totals(hits), mine)

      return lax.cond(_row(active, mine), run, lambda counts: counts, counts)

    blank = sel.vary(jnp.zeros(probes.shape, COUNT), plan.inputs)
    return visit_all(visit, blank), carry

  bracket, _, _ = sel.search(
    count,
    wanted,
    whole,
    whole.high,
    anchor=plan.inputs,
    first=_guess(pieces, wanted),
  )
  level = jnp.where(ones == 0, whole.high, bracket.low)
  room = jnp.where(ones == 0, 0, wanted - bracket.beyond)

  def write(piece, state):
    rows, room = state
    mine = pieces.segment(piece)
    images, real = pieces.fetch(piece)
    threshold, left = _row(level, mine), _row(room, mine)
    equal = (images == threshold) & real
    ties, _ = _totals([equal, ~equal])  # two, for the form `sums` is about
    end = lax.cond(
      ties > left, _cut, lambda *_: COUNT(pieces.length), equal, left
    )
    place = lax.iota(COUNT, pieces.length)
    row = (images > threshold) | (equal & (place < end))
    room = _put(room, left - jnp.minimum(ties, left), mine)
    return _put(rows, row.astype(dtype), piece), room

  rows = jnp.zeros((total, pieces.length), dtype)
  start = sel.vary((rows, room), (plan.inputs, level))
  rows, _ = visit_all(write, start)
  return pieces.join(rows)


def _cut(equal: Array, left: Array) -> Array:
  """Where to end so that `left` of the ties come before."""
  place = lax.iota(COUNT, equal.size)

  def halve(turn, end):
    trial = end + (COUNT(1 << (turns - 1)) >> turn.astype(COUNT))
    return jnp.where(sel.total(equal & (place < trial)) <= left, trial, end)

  turns = equal.size.bit_length()
  return lax.fori_loop(0, turns, halve, sel.vary(COUNT(0), (equal, left)))
