"""Select on one device: one loop searches leaf after leaf.

A leaf is seen as a matrix. A strided sample says about where its threshold is;
passes count, row by row, how many scores are below each probe; the first also
tells whether all are finite, and the last the row in which ties are cut, so
that cutting them takes one row, not another pass.

To compile a search for each leaf by itself would take longer than to compile
the model. Here only what reads a leaf is compiled for its shape, and equal
leaves share it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner import _selection as sel
from jaxpruner._recipe import Recipe
from jaxpruner._selection import COUNT, PROBES, Plan, at

_COMPARISONS = 1 << 22  # so many take about a millisecond
_COLUMNS = (1 << 16) - 1  # at most: 16-bit scores are counted in 16 bits
_ROWS = 1 << 6  # at least: threads share them
_SAMPLE = 1 << 10
_BRANCHES = 1 << 3
# The first and the last of the first probes only tell what is not finite.
_EVEN = np.linspace(0, 1, PROBES - 2, dtype=np.float32)

# A place counted from the start: unsigned, so that JAX does not ask whether it
# counts from the end, which would be one more kernel each time.
_PLACE = np.uint32


def _rows(table: Array, place: Array, number: int = 1) -> Array:
  return lax.dynamic_slice_in_dim(table, place, number)


def _put(table: Array, rows: Array, place: Array) -> Array:
  return lax.dynamic_update_slice_in_dim(table, rows, place, 0)


def _number_of_rows(sizes: np.ndarray) -> int:
  """In how many rows to see leaves; a divisor of all sizes, if there is one."""
  least = max(_ROWS, -(-int(sizes.max()) // _COLUMNS))
  common = int(np.gcd.reduce(sizes))
  fitting = (rows for rows in range(least, 2 * least) if common % rows == 0)
  return next(fitting, least)


@functools.partial(jax.jit, static_argnames=("rows", "tail"))
def _row_counts(
  scores: Array, probes: Sequence[Array], *, rows: int, tail: bool
) -> list[Array]:
  """How many images of each row are below each probe: `PROBES` of [rows].

  With `tail`, one more row has what does not fill the others.
  """
  images = sel.image(scores).reshape(-1)
  # Narrow counters keep twice the lanes per vector for 16-bit scores. What is
  # below is counted: to compare the other way takes one operation more.
  counter = jnp.uint16 if images.dtype.itemsize <= 2 else COUNT
  hits = lambda x: [(x < probe).astype(counter) for probe in probes]
  columns = images.size // rows
  body, rest = images[: rows * columns], images[rows * columns :]
  counts = sel.sums(hits(body.reshape(rows, columns)), (1,))
  if tail:
    last = sel.sums(hits(rest), (0,))
    counts = [jnp.append(c, x) for c, x in zip(counts, last, strict=True)]
  return [c.astype(COUNT) for c in counts]


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
    # A larger sample would bring its own cost back only for large leaves.
    sample = np.clip(int(plan.sizes.mean()) >> 10, _SAMPLE, 32 * _SAMPLE)
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

  def count(self, leaf: Array, probes: Array) -> list[Array]:
    """How many of each row are below each probe: `PROBES` of [rows]."""

    def run(i, *probes):
      scores = self.plan.leaves[i].scores()
      return _row_counts(scores, probes, rows=self.rows, tail=self.tail)

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


def _guess(sample: Array, real: Array, share: Array, ends: Any) -> Array:
  """The first probes [P]: `ends`, and around a sample's threshold."""
  # The threshold lies within 3.5 standard deviations, as good as always.
  spread = 3.5 * jnp.sqrt(real * share * (1 - share)) + 2
  ranks = share * real + spread * np.array([1, -1], np.float32)
  # Ranks are from the top.
  index = (sample.size - jnp.clip(ranks, 1, real)).astype(_PLACE)
  low, high = jnp.sort(sample).at[index].get(mode="promise_in_bounds")
  step = sel.part(sel.as_unsigned(high - low), _EVEN)
  step = jnp.maximum(step, np.arange(PROBES - 2, dtype=step.dtype))
  probes = jnp.pad(low + sel.as_signed(step), 1)
  least, most = (low.dtype.type(end) for end in ends)
  place = lax.iota(jnp.int32, PROBES)
  # Ascending, also where the sample has met what is not finite.
  probes = jnp.where(place == 0, least, jnp.clip(probes, least, most))
  return jnp.where(place == PROBES - 1, most, probes)


def _by_rank(plan: Plan, ones: Array, dtype) -> list[Array]:
  """Compare every two scores: quick to compile, for few of them."""
  masks = []
  for segment in range(len(plan.sizes)):
    mine = np.flatnonzero(plan.segments == segment).tolist()
    scores = jnp.concatenate([plan.image(i).reshape(-1) for i in mine])
    this, other = scores[:, None], scores[None]
    index = lax.iota(jnp.int32, scores.size)
    larger = (other > this).astype(jnp.int32)
    earlier = ((other == this) & (index < index[:, None])).astype(jnp.int32)
    above, before = sel.sums([larger, earlier], (1,))
    rank = (above + before).astype(COUNT)
    mask = (rank < at(ones, segment)).astype(dtype)
    parts = jnp.split(mask, np.cumsum(plan.leaf_sizes[mine])[:-1])
    masks += [
      part.reshape(plan.leaves[i].shape)
      for i, part in zip(mine, parts, strict=True)
    ]
  return masks


def _search(
  leaves: _Leaves, segment: Array, ones: Array, facts: Array
) -> tuple[Array, Array, Array]:
  """The level of a segment [1], and where its leaves cut their ties [N].

  And whether all its scores are finite, [1].
  """
  plan, number = leaves.plan, leaves.number
  size, real = facts
  whole = plan.whole(size[None])
  first, wanted = segment * _PLACE(number), jnp.maximum(ones, 1)

  def each(run, tables):
    """Tables with a row of what `run` gives for each leaf."""
    if number == 1:
      return [row[None] for row in run(first)]

    def visit(i, tables):
      rows = run(first + i)
      return [_put(t, r[None], i) for t, r in zip(tables, rows, strict=True)]

    return lax.fori_loop(_PLACE(0), _PLACE(number), visit, tables)

  def count(probes, active, carry):
    look = lambda rows: each(lambda leaf: leaves.count(leaf, probes[0]), rows)
    if len(plan.leaves) > 1:
      rows = look(carry[0])
    else:
      # Outside of a conditional, or of the choice of a leaf, its scores would
      # be hoisted out of the loop, and stored.
      rows = lax.cond(active[0], look, lambda rows: rows, carry[0])
    below = jnp.stack(sel.sums(rows, (0, 1)))
    reached, (least, most) = whole.reach[:, None] - below, ends
    odd = (probes == least) & (below > 0) | (probes == most) & (reached > 0)
    return reached, (rows, probes, carry[2] & ~jnp.any(odd, 1))

  blank = jnp.zeros((number, int(leaves.taken.max())), whole.low.dtype)
  blank = sel.vary([blank], (plan.inputs, segment))
  (sample,) = each(lambda leaf: [leaves.sample(leaf)], blank)
  size, real, share = (x.astype(jnp.float32) for x in (size, real, wanted[0]))
  ends = sel.finite_bounds(plan.dtype)
  guess = _guess(sample.reshape(-1), real, share / size, ends)[None]
  rows = jnp.zeros((number, leaves.rows + leaves.tail), COUNT)
  bracket, (rows, probes, finite) = sel.search(
    count,
    wanted,
    whole,
    whole.high,
    anchor=plan.inputs,
    first=guess,
    carry=([rows] * PROBES, guess, jnp.ones(1, jnp.bool_)),
  )
  sizes = _rows(jnp.asarray(plan.leaf_sizes), first, number)
  sizes = sel.vary(sizes, (bracket, plan.inputs))

  def cut():
    match, ties = sel.ties_at(bracket, probes)[0], jnp.zeros_like(rows[0])
    # Beyond the highest image there is no probe: all are below it.
    at_top, filled = bracket.low == whole.high, leaves.filled(first)
    for p in range(PROBES - 1):
      below_next = jnp.where(at_top, filled, rows[p + 1])
      ties = jnp.where(at(match, p), below_next - rows[p], ties)
    width, kept = ties.shape[1], (wanted - bracket.beyond)[0]
    ties = jnp.pad(ties.reshape(-1), (0, leaves.width - ties.size))
    row, before = _first_reaching(ties, kept)
    # Leaves before the one in which the ties are cut keep theirs.
    i = row // COUNT(width) if number > 1 else COUNT(0)
    row -= i * COUNT(width)
    equal, start = leaves.ties(first + i, row, bracket.low[0])
    end = _first_reaching(equal, kept - before)[0] + start + 1
    index = lax.iota(COUNT, number)
    return jnp.where(index < i, sizes, jnp.where(index == i, end, 0))

  tied = (bracket.reach != wanted)[0]
  cuts = lax.cond(tied, cut, lambda: sizes)
  none = ones == 0
  level = jnp.where(none, whole.high, bracket.low)
  return level, jnp.where(none, 0, cuts), finite


def masks(
  leaves: Sequence[Recipe], ones: Array, *, together: bool, dtype
) -> tuple[list[Array], Array]:
  """Masks with `ones` [S] ones per segment, for leaves on one device.

  And which segments have finite scores only, [S].
  """
  plan = Plan.of(leaves, together)
  if int(np.sum(plan.sizes**2)) <= _COMPARISONS:
    return _by_rank(plan, ones, dtype), plan.finite()
  return by_search(plan, ones, dtype)


def by_search(plan: Plan, ones: Array, dtype) -> tuple[list[Array], Array]:
  """The same, for leaves of any size."""
  many, segments = _Leaves(plan), len(plan.sizes)
  taken = many.taken.reshape(segments, -1).sum(1)
  facts = jnp.asarray(np.stack([plan.sizes, taken], 1), COUNT)

  def solve(segment, state):
    levels, cuts, finite = state
    level, ends, good = _search(
      many, segment, _rows(ones, segment), _rows(facts, segment)[0]
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
  if plan.together:
    levels = jnp.broadcast_to(levels, cuts.shape)
  return plan.masks(levels, cuts, dtype), finite
