"""Select on one device: one loop searches leaf after leaf.

A leaf is seen as a matrix. A strided sample says about where its threshold is,
or the thresholds of earlier steps do; passes count, row by row, how many scores
are below each probe. Once so few are left between the middle probes that no row
has more than three, these are known: from their number, the largest, the
smallest and the sum, which every pass finds besides. The search goes on among
them; it takes about two passes. The first also tells whether all scores are
finite, and the last counts in which row ties are cut, so that cutting them
takes one row, not another pass.

To compile a search for each leaf by itself would take longer than to compile
the model. Here only what reads a leaf is compiled for its shape, and equal
leaves share it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner.engine import search as sel
from jaxpruner.engine import warm_start as _trails
from jaxpruner.engine.search import COUNT, PROBES, Plan, Selected, at

_COMPARISONS = 1 << 22  # so many take about a millisecond
_COLUMNS = (1 << 16) - 1  # at most: 16-bit scores are counted in 16 bits
_ROWS = 1 << 6  # at least: threads share them
_FEW = 3  # scores that a row's largest, smallest and sum tell apart
_MIDDLE = PROBES // 2  # few scores are collected from below this probe
_SAMPLE = 1 << 10
_BRANCHES = 1 << 3
# Where the first probes go between two ends: closer where the threshold is
# likelier. One more at either side only tells what is not finite.
_FIRST = np.array([0, 0.27, 0.43, 0.57, 0.73, 1], np.float32)

# A place counted from the start: unsigned, so that JAX does not ask whether it
# counts from the end, which would be one more kernel each time.
_PLACE = np.uint32


def _rows(table: Array, place: Array, number: int = 1) -> Array:
  return lax.dynamic_slice_in_dim(table, place, number)


def _put(table: Array, rows: Array, place: Array) -> Array:
  return lax.dynamic_update_slice_in_dim(table, rows, place, 0)


def _number_of_rows(sizes: np.ndarray) -> int:
  """In how many rows to see leaves; a divisor of all sizes, if there is one."""
  largest = int(sizes.max())
  least = max(_ROWS, math.isqrt(largest), -(-largest // _COLUMNS))
  common = int(np.gcd.reduce(sizes))
  fitting = (rows for rows in range(least, 2 * least) if common % rows == 0)
  return next(fitting, least)


def _facts(images: Array, probes: Sequence[Array], axis: int) -> list[Array]:
  """How many along an axis are below each probe, and what is in the middle.

  Of images between the middle probes, the distance to the lower one: the
  largest, the smallest, and their sum, which may wrap around.
  """
  # Narrow counters keep twice the lanes per vector for 16-bit scores. What is
  # below is counted: to compare the other way takes one operation more.
  counter = jnp.uint16 if images.dtype.itemsize <= 2 else COUNT
  below = [images < probe for probe in probes]
  within = below[_MIDDLE] & ~below[_MIDDLE - 1]
  distance = sel.as_unsigned(images - probes[_MIDDLE - 1])
  ends = np.iinfo(distance.dtype)
  none, most = (distance.dtype.type(x) for x in (ends.min, ends.max))
  large, small = (jnp.where(within, distance, x) for x in (none, most))
  values = [*(b.astype(counter) for b in below), large, small, large]

  def join(a, b):
    pairs = list(zip(a, b, strict=True))
    added = [x + y for x, y in pairs]
    added[PROBES] = jnp.maximum(*pairs[PROBES])
    added[PROBES + 1] = jnp.minimum(*pairs[PROBES + 1])
    return added

  start = [counter(0)] * PROBES + [none, most, none]
  return lax.reduce(values, start, join, (axis,))


@functools.partial(jax.jit, static_argnames=("rows", "tail"))
def _row_facts(
  scores: Array, probes: Sequence[Array], *, rows: int, tail: bool
) -> list[Array]:
  """`_facts` of each row: of [rows], or one more that is not filled."""
  images = sel.image(scores).reshape(-1)
  columns = images.size // rows
  body, rest = images[: rows * columns], images[rows * columns :]
  facts = _facts(body.reshape(rows, columns), probes, 1)
  if tail:
    last = _facts(rest, probes, 0)
    facts = [jnp.append(f, x) for f, x in zip(facts, last, strict=True)]
  return [f.astype(COUNT) for f in facts[:PROBES]] + facts[PROBES:]


def _first_reaching(values: Array, need: Array) -> tuple[Array, Array]:
  """Where the sum of `values` [W] first reaches `need`, and that before it."""
  index = lax.iota(COUNT, values.size)

  def before(*positions):
    return sel.sums([jnp.where(index < p, values, 0) for p in positions], (0,))

  # Two bits of the position at a time.
  turns = (values.size.bit_length() + 1) // 2

  def body(turn, state):
    position, found = state
    unit = COUNT(1) << (2 * (turns - 1 - turn)).astype(COUNT)
    trials = [position + unit * i for i in range(1, 4)]
    for trial, total in zip(trials, before(*trials), strict=True):
      fits = total < need
      position = jnp.where(fits, trial, position)
      found = jnp.where(fits, total, found)
    return position, found

  start = sel.vary((COUNT(0), COUNT(0)), (values, need))
  return lax.fori_loop(0, turns, body, start)


class _Leaves:
  """What is done to a leaf whose number is known only when it is done."""

  def __init__(self, plan: Plan):
    sizes = plan.leaf_sizes.astype(np.int64)
    self.plan = plan
    self.rows = _number_of_rows(sizes)
    self.tail = bool((sizes % self.rows).any())
    # Elements of a row, and of what is fetched for it: the last may be short.
    self.columns = sizes // self.rows
    self.lengths = np.minimum(sizes, np.maximum(self.columns, self.rows))
    # So many that what is left after a pass can mostly be told apart.
    sample = max(_SAMPLE, 2 * math.isqrt(int(plan.sizes.mean())))
    share = -(-sample * sizes // (sizes.sum() if plan.together else sizes))
    self.strides = -(-sizes // share)
    self.taken = -(-sizes // self.strides)
    # What the ties of a segment are counted in: rows, then elements. One
    # length for both, so that the search is compiled once.
    rows = self.number * (self.rows + self.tail)
    self.width = max(rows, int(self.lengths.max()))

  @property
  def number(self) -> int:
    """How many leaves a segment has."""
    return len(self.plan.leaves) // len(self.plan.sizes)

  def _switch(self, leaf: Array, run: Callable[..., Any], *args) -> Any:
    """`run(leaf, *args)`, for a leaf known by its number."""
    count, bits = len(self.plan.leaves), _BRANCHES.bit_length() - 1

    # JAX hands every branch the inputs of all: of a hundred branches there are
    # a hundred times as many, of a tree of them a few times.
    def among(first: int, level: int):
      if not level:
        return functools.partial(run, first)
      step = _BRANCHES ** (level - 1)
      end = min(first + step * _BRANCHES, count)
      branches = [among(i, level - 1) for i in range(first, end, step)]
      number = (leaf >> _PLACE(bits * (level - 1))) & _PLACE(_BRANCHES - 1)
      if len(branches) == 1:
        return branches[0]
      return lambda *args: lax.switch(number.astype(np.int32), branches, *args)

    level = -(-(count - 1).bit_length() // bits)
    return among(0, level)(*args)

  def facts(self, leaf: Array, probes: Array) -> list[Array]:
    """`_facts` of each row."""

    def run(i, *probes):
      scores = self.plan.leaves[i].scores()
      return _row_facts(scores, probes, rows=self.rows, tail=self.tail)

    return self._switch(leaf, run, *(at(probes, p) for p in range(PROBES)))

  def filled(self, first: Array) -> Array:
    """How many scores the rows of a segment have, [N, rows]."""
    columns, sizes = self.columns, self.plan.leaf_sizes
    table = jnp.asarray(np.stack([columns, sizes - self.rows * columns]), COUNT)
    columns, rest = lax.dynamic_slice_in_dim(table, first, self.number, axis=1)
    filled = jnp.tile(columns[:, None], self.rows)
    return jnp.append(filled, rest[:, None], 1) if self.tail else filled

  def _fetch(self, i: int) -> Array:
    return self.plan.leaves[i].scores().reshape(-1)

  def sample(self, leaf: Array) -> Array:
    """Images, evenly from all of the leaf; padded at the bottom, as NaN is."""
    width = int(self.taken.max())

    def run(i):
      scores = self._fetch(i)[:: int(self.strides[i])]
      return jnp.pad(scores, (0, width - scores.size))

    images = sel.image(self._switch(leaf, run))
    if (self.taken == width).all():
      return images
    real = _rows(jnp.asarray(self.taken, COUNT), leaf)
    bottom = sel.bounds(self.plan.dtype)[0]
    return jnp.where(lax.iota(COUNT, width) < real, images, bottom)

  def ties(self, leaf: Array, row: Array, level: Array) -> tuple[Array, Array]:
    """Which of a row are at the level; the index of the first of them."""

    def run(i, start):
      length = int(self.lengths[i])
      scores = lax.dynamic_slice(self._fetch(i), (start,), (length,))
      return jnp.pad(scores, (0, self.width - length))

    table = [self.columns, self.plan.leaf_sizes - self.lengths, self.lengths]
    table = jnp.asarray(np.stack(table, 1), COUNT)
    columns, last, length = _rows(table, leaf)[0]
    # Of the last row, a whole one that ends with it is fetched.
    start = row * columns
    fetched = jnp.minimum(start, last)
    equal = sel.image(self._switch(leaf, run, fetched)) == level
    index = lax.iota(COUNT, self.width)
    equal &= (index >= start - fetched) & (index < length)
    return equal.astype(COUNT), fetched


def _guess(sample: Array, real: Array, share: Array) -> Array:
  """The first probes [P - 2], around a sample's threshold."""
  # The threshold lies within 3.5 standard deviations, as good as always.
  spread = 3.5 * jnp.sqrt(real * share * (1 - share)) + 2
  ranks = share * real + spread * np.array([1, -1], np.float32)
  # Ranks are from the top.
  index = (sample.size - jnp.clip(ranks, 1, real)).astype(_PLACE)
  low, high = jnp.sort(sample).at[index].get(mode="promise_in_bounds")
  step = sel.part(sel.as_unsigned(high - low), _FIRST)
  step = jnp.maximum(step, np.arange(PROBES - 2, dtype=step.dtype))
  return low + sel.as_signed(step)


def _by_rank(plan: Plan, ones: Array, dtype) -> tuple[list[Array], Array]:
  """Compare every two scores: quick to compile, for few of them."""
  masks, levels = [], []
  for segment in range(len(plan.sizes)):
    mine = np.flatnonzero(plan.segments == segment).tolist()
    scores = jnp.concatenate([plan.image(i).reshape(-1) for i in mine])
    this, other = scores[:, None], scores[None]
    index = lax.iota(jnp.int32, scores.size)
    larger = (other > this).astype(jnp.int32)
    first = index[None] < index[:, None]
    earlier = ((other == this) & first).astype(jnp.int32)
    above, before = sel.sums([larger, earlier], (1,))
    rank = (above + before).astype(COUNT)
    chosen = rank < at(ones, segment)
    mask, top = chosen.astype(dtype), sel.bounds(plan.dtype)[1]
    levels.append(jnp.min(jnp.where(chosen, scores, scores.dtype.type(top))))
    parts = jnp.split(mask, np.cumsum(plan.leaf_sizes[mine])[:-1])
    masks += [
      part.reshape(plan.leaves[i].shape)
      for i, part in zip(mine, parts, strict=True)
    ]
  return masks, jnp.stack(levels)


def _within(rows: list[Array]) -> Array:
  """How many scores each row has between the middle probes."""
  return rows[_MIDDLE] - rows[_MIDDLE - 1]


class _Seen(NamedTuple):
  """What passes over the rows [N, R] of a segment have told."""

  rows: list[Array]  # how many are below each probe of the last pass
  probes: Array  # these, [1, P]
  finite: Array  # whether all scores are, [1]
  few: Array  # images [F, N, R] of the scores that are left, once collected
  under: Array  # how many are below all of them, [1]
  collected: Array  # [1]


class _Segment:
  """What passes do to one segment, known by its number: a `sel.search`."""

  def __init__(
    self, leaves: _Leaves, segment: Array, ones: Array, facts: Array
  ):
    self.leaves, self.plan = leaves, leaves.plan
    self.anchor = (self.plan.inputs, segment)
    self.size, self.sampled = facts
    self.ones, self.wanted = ones, jnp.maximum(ones, 1)
    self.whole = self.plan.whole(self.size[None])
    self.first = segment * _PLACE(leaves.number)
    self.shape = leaves.number, leaves.rows + leaves.tail

  def each(self, run: Callable[[Array], list[Array]], tables) -> list[Array]:
    """Tables with a row of what `run` gives for each leaf."""
    number = self.leaves.number
    if number == 1:
      return [row[None] for row in run(self.first)]

    def visit(i, tables):
      rows = run(self.first + i)
      return [_put(t, r[None], i) for t, r in zip(tables, rows, strict=True)]

    tables = sel.vary(tables, self.anchor)
    return lax.fori_loop(_PLACE(0), _PLACE(number), visit, tables)

  def guess(self) -> Array:
    """The first probes [1, P], from a sample."""
    width = int(self.leaves.taken.max())
    blank = jnp.zeros((self.leaves.number, width), self.whole.low.dtype)
    (sample,) = self.each(lambda leaf: [self.leaves.sample(leaf)], [blank])
    size, real, share = (
      x.astype(jnp.float32) for x in (self.size, self.sampled, self.wanted[0])
    )
    probes = _guess(sample.reshape(-1), real, share / size)
    return sel.between_ends(probes, self.plan.dtype)[None]

  def unseen(self, probes: Array) -> _Seen:
    """What is known before the first pass."""
    no, rows = jnp.zeros(1, jnp.bool_), jnp.zeros(self.shape, COUNT)
    few = jnp.broadcast_to(self.whole.high, (_FEW, *self.shape))
    return _Seen([rows] * PROBES, probes, ~no, few, jnp.zeros(1, COUNT), no)

  def _look(
    self, probes: Array, seen: _Seen
  ) -> tuple[list[Array], Array, Array]:
    """Read the scores."""
    unsigned = sel.as_unsigned(self.whole.low).dtype
    tables = [jnp.zeros(self.shape, COUNT)] * PROBES
    tables += [jnp.zeros(self.shape, unsigned)] * _FEW
    facts = self.each(lambda leaf: self.leaves.facts(leaf, probes[0]), tables)
    rows, (large, small, total) = facts[:PROBES], facts[PROBES:]
    few = jnp.stack([large, small, total - large - small])
    few = at(probes[0], _MIDDLE - 1) + sel.as_signed(few)
    real = lax.broadcasted_iota(COUNT, few.shape, 0) < _within(rows)
    few = jnp.where(real, few, self.whole.high)
    return rows, few, jnp.zeros_like(seen.under)

  def _look_again(
    self, probes: Array, seen: _Seen
  ) -> tuple[list[Array], Array, Array]:
    """Count among the few scores that are left."""
    below = [seen.few < at(probes[0], p) for p in range(PROBES)]
    rows = sel.sums([x.astype(COUNT) for x in below], (0,))
    return rows, seen.few, seen.under

  def count(
    self, probes: Array, active: Array, seen: _Seen
  ) -> tuple[Array, Array, _Seen]:
    del active
    # Outside of a conditional, or of the choice of a leaf, scores would be
    # hoisted out of the loop, and stored.
    rows, few, under = lax.cond(
      seen.collected[0], self._look_again, self._look, probes, seen
    )
    crowded = (_within(rows) > _FEW).astype(COUNT)
    *below, crowded = sel.sums([*rows, crowded], (0, 1))
    below = under[:, None] + jnp.stack(below)
    reached = self.whole.reach[:, None] - below
    least, most = sel.finite_bounds(self.plan.dtype)
    odd = (probes == least) & (below > 0) | (probes == most) & (reached > 0)
    enough = reached >= self.wanted[:, None]
    found = enough[:, _MIDDLE - 1] & ~enough[:, _MIDDLE] & (crowded == 0)
    collected = seen.collected | found
    seen = _Seen(
      rows,
      probes,
      seen.finite & ~jnp.any(odd, 1),
      few,
      jnp.where(seen.collected, under, below[:, _MIDDLE - 1]),
      collected,
    )
    room = np.float32((self.shape[0] * self.shape[1]) ** 0.75)
    return reached, jnp.where(collected, 0, room), seen

  def cut(self, bracket: sel.Bracket, seen: _Seen, sizes: Array) -> Array:
    """Where the leaves cut their ties, [N]."""
    number, rows = self.leaves.number, seen.rows
    match, ties = sel.ties_at(bracket, seen.probes)[0], jnp.zeros_like(rows[0])
    # Beyond the highest image there is no probe: all are below it.
    at_top = bracket.low == self.whole.high
    filled = self.leaves.filled(self.first)
    for p in range(PROBES - 1):
      below_next = jnp.where(at_top, filled, rows[p + 1])
      ties = jnp.where(at(match, p), below_next - rows[p], ties)
    width, kept = ties.shape[1], (self.wanted - bracket.beyond)[0]
    ties = jnp.pad(ties.reshape(-1), (0, self.leaves.width - ties.size))
    row, before = _first_reaching(ties, kept)
    # Leaves before the one in which the ties are cut keep theirs.
    i = row // COUNT(width) if number > 1 else COUNT(0)
    row -= i * COUNT(width)
    equal, start = self.leaves.ties(self.first + i, row, bracket.low[0])
    end = _first_reaching(equal, kept - before)[0] + start + 1
    index = lax.iota(COUNT, number)
    return jnp.where(index < i, sizes, jnp.where(index == i, end, 0))

  def search(self, trail: Array | None) -> tuple[Array, Array, Array]:
    """The level [1], where leaves cut their ties [N], and what is finite [1].

    Given a trail [1, 3], the level is the least score that is kept; else it may
    be anywhere above the next.
    """
    plan, number = self.plan, self.leaves.number
    warm = trail is not None
    first = _trails.probes(trail, plan.dtype) if warm else self.guess()
    bracket, seen = sel.search(
      self.count,
      self.wanted,
      self.whole,
      self.whole.high,
      anchor=plan.inputs,
      first=first,
      carry=self.unseen(first),
      enough=lambda seen: seen.collected if warm else np.True_,
    )
    sizes = _rows(jnp.asarray(plan.leaf_sizes), self.first, number)
    sizes = sel.vary(sizes, (bracket, plan.inputs))
    cuts = lax.cond(
      (bracket.reach != self.wanted)[0],
      lambda: self.cut(bracket, seen, sizes),
      lambda: sizes,
    )
    level, none = bracket.low, self.ones == 0
    if warm:
      above = jnp.where(seen.few >= level, seen.few, self.whole.high)
      level = jnp.where(seen.collected, jnp.min(above), level)
    level = jnp.where(none, self.whole.high, level)
    return level, jnp.where(none, 0, cuts), seen.finite


def select(plan: Plan, ones: Array, trails: Array | None, dtype) -> Selected:
  """Keep `ones` [S] per segment, of leaves on one device."""
  if int(np.sum(plan.sizes**2)) <= _COMPARISONS:
    found, levels = _by_rank(plan, ones, dtype)
    return Selected(found, plan.finite(), levels)
  return by_search(plan, ones, trails, dtype)


def by_search(plan: Plan, ones: Array, trails: Array | None, dtype) -> Selected:
  """The same, for leaves of any size."""
  many, segments = _Leaves(plan), len(plan.sizes)
  taken = many.taken.reshape(segments, -1).sum(1)
  facts = jnp.asarray(np.stack([plan.sizes, taken], 1), COUNT)

  def solve(segment, state):
    levels, cuts, finite = state
    mine = _Segment(
      many, segment, _rows(ones, segment), _rows(facts, segment)[0]
    )
    level, ends, good = mine.search(
      None if trails is None else _rows(trails, segment)
    )
    place = segment * _PLACE(many.number)
    return (
      _put(levels, level, segment),
      _put(cuts, ends, place),
      _put(finite, good, segment),
    )

  start = (
    plan.whole(facts[:, 0]).low,
    jnp.asarray(plan.leaf_sizes),
    jnp.ones(segments, jnp.bool_),
  )
  start = sel.vary(start, (plan.inputs, ones))
  state = lax.fori_loop(_PLACE(0), _PLACE(segments), solve, start)
  levels, cuts, finite = state
  each = jnp.broadcast_to(levels, cuts.shape) if plan.together else levels
  return Selected(plan.masks(each, cuts, dtype), finite, levels)
