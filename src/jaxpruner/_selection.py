"""Find the k-th largest score by counting, and where to cut its ties.

Floats are compared through an *image*: a signed integer of the same width
that orders as the numbers do (subnormals and infinities included), in which
-0.0 equals +0.0 and every NaN is one value below -inf. A pass over the scores
counts how many images reach each of `PROBES` candidate thresholds; a few
passes close the bracket `[low, high]` around the k-th largest one.

Two forms of a pass:
  `by_rows`   scores seen as a matrix, counts kept per row. The counts of the
              last pass also tell the row in which the ties are cut, so ties
              cost one row, not another pass. For scores on one device.
  `by_mesh`   one sum over all axes, no reshape: what crosses devices is
              `PROBES` counters. Ties are cut by a second counting search, on
              the index. For scores that may be sharded.

Both count by one reduction of several operands. XLA's CPU backend vectorizes
that as it stands, but rewrites a long reduction of a single operand into
windows, which writes the comparisons to memory first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

PROBES = 8
_RUN = 16  # neighbours a sample takes together: a cache line of float32
_COUNT = jnp.uint32


class Leaf(NamedTuple):
  """Scores by recipe: `score(*inputs)` is elementwise, so passes fuse it."""

  score: Callable[..., Array]
  inputs: tuple[Array, ...]
  shape: tuple[int, ...]
  dtype: Any

  @property
  def size(self) -> int:
    return int(np.prod(self.shape, dtype=np.int64))

  def image(self) -> Array:
    return image(self.score(*self.inputs))


def image(x: Array) -> Array:
  """Return signed integers that order as `x` does; NaN is lowest."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.int8)
  if jnp.issubdtype(x.dtype, jnp.signedinteger):
    return x
  bits = 8 * x.dtype.itemsize
  signed = jnp.dtype(f"int{bits}").type
  raw = lax.bitcast_convert_type(x, signed)
  if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
    return raw ^ signed(-(1 << (bits - 1)))
  low, high = bounds(x.dtype)
  # Positive NaNs wrap around past +inf = high to the bottom, below `low`.
  lift = signed(high - _infinity(x.dtype))
  negative = (signed(-(1 << (bits - 1))) + lift) - raw
  return jnp.maximum(jnp.where(raw < 0, negative, raw + lift), signed(low))


def _infinity(dtype) -> int:
  info = jnp.finfo(dtype)
  return ((1 << info.nexp) - 1) << info.nmant


def bounds(dtype) -> tuple[int, int]:
  """The lowest and highest image of a dtype."""
  dtype = jnp.dtype(dtype)
  if dtype == jnp.bool_:
    return 0, 1
  top = (1 << (8 * dtype.itemsize - 1)) - 1
  if jnp.issubdtype(dtype, jnp.integer):
    return -top - 1, top
  return top - 2 * _infinity(dtype) - 1, top


def _count_reaching(image: Array, probes, axes, counter) -> list[Array]:
  """How many of `image` reach each probe, summed over `axes`."""
  hits = [(image >= p).astype(counter) for p in probes]
  add = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]
  return lax.reduce(hits, [counter(0)] * len(hits), add, axes)


def vary(tree, anchor):
  """Mark `tree` as varying over the manual mesh axes `anchor` varies over.

  Inside `shard_map` a loop's first carry must have the type of its last.
  """
  axes = lambda x: getattr(jax.typeof(x), "vma", frozenset())
  wanted = frozenset().union(*map(axes, jax.tree.leaves(anchor)))

  def cast(x):
    missing = tuple(wanted - axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


class Bracket(NamedTuple):
  """`low <= k-th largest <= high`; `reach`, `beyond`: counts >=low, >high."""

  low: Array
  high: Array
  reach: Array
  beyond: Array

  def narrow(self, probes: Array, counts: Array, ones: Array) -> "Bracket":
    low, high, reach, beyond = self
    for j in range(probes.shape[-1]):
      probe, count = probes[..., j], counts[..., j]
      up = (count >= ones) & (probe >= low)
      down = (count < ones) & (probe - 1 <= high) & (probe > low)
      low, reach = jnp.where(up, probe, low), jnp.where(up, count, reach)
      high = jnp.where(down, probe - 1, high)
      beyond = jnp.where(down, count, beyond)
    return Bracket(low, high, reach, beyond)


def _unsigned(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _signed(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))


def _part(width: Array, fraction: Array) -> Array:
  """`fraction * width` in unsigned integers, at least 0, at most `width`."""
  wide = width.astype(jnp.float32)
  # The largest float32 below 2**bits: a conversion beyond it is undefined.
  cap = np.nextafter(
    np.float32(2.0 ** (8 * width.dtype.itemsize)), np.float32(0)
  )
  part = jnp.clip(fraction * wide, 0, cap).astype(width.dtype)
  return jnp.minimum(part, width)


_SPREAD = (-4.0, -2.0, -1.0, -0.3, 0.3, 1.0, 2.0, 4.0)


def _next_probes(bracket: Bracket, ones: Array, uniform: Array) -> Array:
  """Candidate thresholds, ascending, where the k-th largest is expected."""
  low, high, reach, beyond = (x[..., None] for x in bracket)
  width = _unsigned(high - low)
  inside = jnp.maximum((reach - beyond).astype(jnp.float32), 1.0)
  share = (reach - ones[..., None]).astype(jnp.float32) / inside
  deviation = jnp.sqrt(jnp.maximum(inside * share * (1 - share), 0.25))
  deviation = deviation / inside
  guess = share + deviation * np.array(_SPREAD, np.float32)
  even = np.arange(1, PROBES + 1, dtype=np.float32) / (PROBES + 1)
  step = _part(width, jnp.where(uniform[..., None], even, guess))
  step = jnp.clip(step, 1, jnp.maximum(width, 1))
  near = jnp.arange(PROBES, dtype=width.dtype)
  # A bracket this narrow is counted value by value, its upper end's successor
  # included: that settles the threshold and counts its ties in one pass.
  step = jnp.where(width <= PROBES - 2, near, step)
  return low + _signed(step)


def _search(
  count, ones, bracket, tops, *, anchor, need_ties=False, probes=None, carry=()
):
  """Narrow the brackets of all segments until the thresholds are known.

  Args:
    count: `(probes [S, P], active [S], carry) -> (counts [S, P], carry)`.
    ones: how many to keep, [S], at least 1.
    bracket: `Bracket` of arrays [S].
    tops: the highest image of each segment, [S].
    anchor: the arrays that `count` reads.
    need_ties: go on until one pass counted both the threshold and its
      successor, unless no ties are cut.
    probes: the first candidates [S, P], ascending from `probes[:, 0]`.
    carry: what `count` keeps from its last pass.

  Returns:
    bracket, carry, and the probes of each segment's last pass.
  """

  def settled(bracket, last):
    closed = bracket.low == bracket.high
    if need_ties:
      pair = (last[:, :-1] == bracket.low[:, None]) & (
        last[:, 1:] == bracket.low[:, None] + 1
      )
      closed &= jnp.any(pair, -1)
    return (bracket.reach == ones) | closed

  def body(state):
    bracket, last, carry, poor, turn = state
    active = ~settled(bracket, last)
    tried = _next_probes(bracket, ones, poor)
    if probes is not None:
      tried = jnp.where(turn == 0, probes, tried)
    counts, carry = count(tried, active, carry)
    valid = (tried >= tried[:, :1]) & (tried <= tops[:, None])
    counts = jnp.where(valid, counts, 0)
    new = bracket.narrow(tried, counts, ones)
    new = Bracket(
      *(jnp.where(active, a, b) for a, b in zip(new, bracket, strict=True))
    )
    inside = bracket.reach - bracket.beyond
    poor = ~poor & (new.reach - new.beyond > inside // 4)
    last = jnp.where(active[:, None], tried, last)
    return new, last, carry, poor, turn + 1

  no_probes = jnp.broadcast_to(bracket.high[:, None], (*ones.shape, PROBES))
  start = jnp.full_like(bracket.low, True, jnp.bool_)
  state = vary((bracket, no_probes, carry, start), anchor)
  state = (*state, jnp.int32(0))
  state = lax.while_loop(lambda s: jnp.any(~settled(s[0], s[1])), body, state)
  return state[0], state[2], state[1]


def _first_reaching(values: Array, need: Array) -> tuple[Array, Array]:
  """Where the running sum of `values` [L, W] first reaches `need` [L] >= 1.

  Returns:
    The index, `W` if it never does, and what is still needed there.
  """
  width = values.shape[1]
  index = lax.broadcasted_iota(_COUNT, values.shape, 1)

  def before(position):
    return jnp.sum(jnp.where(index < position[:, None], values, 0), 1)

  def bit(i, position):
    trial = position + (_COUNT(1) << (width.bit_length() - 1 - i))
    fits = (trial <= width) & (before(trial) < need)
    return jnp.where(fits, trial, position)

  start = vary(jnp.zeros_like(need), (values, need))
  position = lax.fori_loop(0, width.bit_length(), bit, start)
  return position, need - before(position)


class _Plan(NamedTuple):
  """Which leaves share one threshold, as static facts."""

  leaves: Sequence[Leaf]
  segments: np.ndarray  # of each leaf
  sizes: np.ndarray  # of each segment
  wide: Any  # holds the images of all leaves

  @classmethod
  def of(cls, leaves: Sequence[Leaf], together: bool) -> "_Plan":
    sizes = np.array([leaf.size for leaf in leaves], np.int64)
    segments = np.arange(len(leaves))
    if together:
      segments, sizes = np.zeros_like(segments), sizes.sum(keepdims=True)
    width = max(jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
    return cls(leaves, segments, sizes, jnp.int64 if width == 8 else jnp.int32)

  def whole(self) -> Bracket:
    """The brackets that exclude nothing."""
    first = np.unique(self.segments, return_index=True)[1]
    limits = np.array([bounds(self.leaves[i].dtype) for i in first])
    low, high = jnp.asarray(limits.T, self.wide)
    reach = jnp.asarray(self.sizes, _COUNT)
    return Bracket(low, high, reach, jnp.zeros_like(reach))

  def per_segment(self, of_leaves: Sequence[Array]) -> Array:
    stacked = jnp.stack(of_leaves)
    if len(self.sizes) == len(self.leaves):
      return stacked
    return jnp.sum(stacked, 0, keepdims=True)

  def share_ties(self, need: Array, ties: Array) -> Array:
    """How many of its `ties` [L] each leaf keeps: earlier leaves first."""
    if len(self.sizes) == len(self.leaves):
      return need
    earlier = np.tri(len(self.leaves), k=-1, dtype=np.uint32)
    taken = jnp.sum(earlier * ties, 1)
    return jnp.where(need > taken, need - taken, 0)

  def masks(self, low: Array, cuts: Array, ones: Array, dtype) -> list[Array]:
    """Ones above the threshold, and on it before the cut."""
    low = jnp.where(ones == 0, self.whole().high, low)
    cuts = jnp.where((ones == 0)[self.segments], 0, cuts)
    out = []
    for i, leaf in enumerate(self.leaves):
      image, level = leaf.image(), low[self.segments[i]]
      level = level.astype(image.dtype)
      first = flat_index(leaf.shape) < cuts[i]
      out.append(((image > level) | ((image == level) & first)).astype(dtype))
    return out


def flat_index(shape: tuple[int, ...]) -> Array:
  """The row-major index of each element, without a reshape."""
  index, stride = jnp.zeros((), _COUNT), 1
  for axis in reversed(range(len(shape))):
    index += lax.broadcasted_iota(_COUNT, shape, axis) * _COUNT(stride)
    stride *= shape[axis]
  return jnp.broadcast_to(index, shape)


def _sample(leaf: Leaf, budget: int, wide) -> Array:
  """Images of about `budget` elements: short runs, evenly spaced."""
  image = leaf.image().reshape(-1)
  if leaf.size > budget:
    runs = max(1, budget // _RUN)
    stride = leaf.size // runs
    image = image[: runs * stride].reshape(runs, stride)[:, :_RUN]
  return image.reshape(-1).astype(wide)


def _sample_matrix(plan: _Plan) -> tuple[Array, np.ndarray]:
  """One row of images per segment, and how many of each row are real."""
  share = int(plan.sizes.sum()) // (16 * len(plan.sizes))
  budget = 1 << min(max(share.bit_length() - 1, 10), 15)
  rows = []
  for s, size in enumerate(plan.sizes):
    leaves = [plan.leaves[i] for i in np.flatnonzero(plan.segments == s)]
    parts = [
      _sample(
        leaf,
        budget
        if size <= budget or len(leaves) == 1
        else max(_RUN, budget * leaf.size // int(size)),
        plan.wide,
      )
      for leaf in leaves
    ]
    rows.append(jnp.concatenate(parts))
  real = np.array([row.size for row in rows])
  bottom = jnp.iinfo(plan.wide).min
  pad = lambda r: jnp.pad(r, (0, real.max() - r.size), constant_values=bottom)
  return jnp.stack([pad(row) for row in rows]), real


def _search_sample(matrix, ones, bracket, tops) -> Bracket:
  """`_search` in rows of `matrix` [S, W] for one or more `ones` [S, T]."""
  counter = jnp.int32

  def count(probes, active, carry):
    del active
    probes = probes.reshape(*ones.shape, PROBES)
    hits = [probes[:, :, None, j] for j in range(PROBES)]
    counts = _count_reaching(matrix[:, None, :], hits, (2,), counter)
    return jnp.stack(counts, -1).reshape(-1, PROBES).astype(_COUNT), carry

  spread = lambda x: jnp.broadcast_to(x[:, None], ones.shape).reshape(-1)
  bracket = Bracket(*map(spread, bracket))
  bracket, _, _ = _search(
    count, ones.reshape(-1), bracket, spread(tops), anchor=matrix
  )
  return Bracket(*(x.reshape(ones.shape) for x in bracket))


def _columns(size: int) -> int:
  """The row length for `by_rows`: a divisor of `size` if there is one.

  Rows must be long enough to vectorize and to keep the counts small, short
  enough for 16-bit counters and for the cut of the ties.
  """
  for columns in (*range(4096, 16384), *range(4095, 1023, -1)):
    if size % columns == 0:
      return columns
  return 4096 if size > 4096 else 1024


def _row_counts(leaf: Leaf, probes: Array) -> Array:
  """How many scores of each row reach each probe: [P, rows]."""
  image = leaf.image().reshape(-1)
  columns = _columns(leaf.size)
  rows = leaf.size // columns
  # Narrow counters keep twice the lanes per vector for 16-bit scores.
  counter = jnp.int16 if image.dtype.itemsize <= 2 else jnp.int32
  levels = [probes[j].astype(image.dtype) for j in range(PROBES)]
  body = image[: rows * columns].reshape(rows, columns)
  counts = jnp.stack(_count_reaching(body, levels, (1,), counter))
  counts = counts.astype(_COUNT)
  if leaf.size % columns:
    tail = image[rows * columns :]
    last = jnp.stack(_count_reaching(tail, levels, (0,), counter))
    counts = jnp.append(counts, last[:, None].astype(_COUNT), 1)
  return counts


def by_rows(leaves, ones: Array, *, together: bool, dtype) -> list[Array]:
  """Masks of `ones` [S] ones per segment, for scores on one device."""
  plan = _Plan.of(leaves, together)
  segments, sizes = plan.segments, plan.sizes
  whole, wanted = plan.whole(), jnp.maximum(ones, 1)
  tops = whole.high
  matrix, real = _sample_matrix(plan)
  full = real == sizes
  seen = whole._replace(reach=jnp.asarray(real, _COUNT))

  large = [i for i in range(len(leaves)) if not full[segments[i]]]
  if not large:
    bracket = _search_sample(matrix, wanted[:, None], seen, tops)
    bracket = Bracket(*(x[:, 0] for x in bracket))
    rows, last = [], None
  else:
    # The sample brackets the threshold at 3.5 standard deviations.
    share = wanted.astype(jnp.float32) / sizes.astype(np.float32)
    count = real.astype(np.float32)
    spread = 3.5 * jnp.sqrt(count * share * (1 - share)) + 2
    ends = jnp.stack([share * count + spread, share * count - spread], 1)
    ends = jnp.clip(ends, 1, count[:, None]).astype(_COUNT)
    ends = jnp.where(full[:, None], wanted[:, None], ends)
    sampled = _search_sample(matrix, ends, seen, tops)
    exact = Bracket(*(x[:, 0] for x in sampled))
    low, high = sampled.low[:, 0], sampled.high[:, 1]
    width = _unsigned(jnp.maximum(high, low) - low)[:, None]
    even = np.arange(PROBES, dtype=np.float32) / (PROBES - 1)
    step = jnp.maximum(
      _part(width, even), jnp.arange(PROBES, dtype=width.dtype)
    )
    probes = low[:, None] + _signed(step)
    start = Bracket(
      *(jnp.where(full, e, w) for e, w in zip(exact, whole, strict=True))
    )
    start = start._replace(reach=jnp.where(full, wanted, start.reach))

    def count(probes, active, carry):
      carry = [
        lax.cond(
          active[segments[i]],
          lambda p, old, leaf=leaves[i]: vary(_row_counts(leaf, p), old),
          lambda p, old: old,
          probes[segments[i]],
          old,
        )
        for i, old in zip(large, carry, strict=True)
      ]
      sums = dict(zip(large, [jnp.sum(c, 1) for c in carry], strict=True))
      none = jnp.zeros((PROBES,), _COUNT)
      sums = [sums.get(i, none) for i in range(len(leaves))]
      return plan.per_segment(sums), carry

    blank = [
      jnp.zeros(
        (PROBES, -(-leaves[i].size // _columns(leaves[i].size))), _COUNT
      )
      for i in large
    ]
    bracket, rows, last = _search(
      count,
      wanted,
      start,
      tops,
      anchor=[leaf.inputs for leaf in leaves],
      need_ties=True,
      probes=probes,
      carry=blank,
    )
    bracket = Bracket(
      *(jnp.where(full, e, b) for e, b in zip(exact, bracket, strict=True))
    )

  everything = jnp.array([leaf.size for leaf in leaves], _COUNT)
  tied = bracket.reach != wanted

  def cut():
    cuts = _cut_sample(plan, matrix, bracket, wanted)
    if large:
      cuts = _cut_rows(plan, large, rows, last, bracket, wanted, cuts)
    return jnp.where(tied[segments], cuts, everything)

  cuts = lax.cond(jnp.any(tied), cut, lambda: vary(everything, (tied, matrix)))
  return plan.masks(bracket.low, cuts, ones, dtype)


def _cut_sample(plan, matrix, bracket, wanted) -> Array:
  """Cuts of segments that the sample holds in full."""
  ties = (matrix == bracket.low[:, None]).astype(_COUNT)
  end = _first_reaching(ties, wanted - bracket.beyond)[0] + 1
  cuts, offset = [], np.zeros(len(plan.sizes), np.int64)
  for leaf, s in zip(plan.leaves, plan.segments, strict=True):
    begin = min(int(offset[s]), matrix.shape[1])
    left = jnp.where(end[s] > begin, end[s] - _COUNT(begin), 0)
    cuts.append(jnp.minimum(left, _COUNT(leaf.size)))
    offset[s] += leaf.size
  return jnp.stack(cuts)


def _cut_rows(plan, large, rows, last, bracket, wanted, cuts) -> Array:
  """Replace the cuts of `large` leaves by those their `rows` tell."""
  segments = plan.segments[large]
  low = bracket.low[segments]
  at_top = low == plan.whole().high[segments]
  match = last[segments, :-1] == low[:, None]
  match &= last[segments, 1:] == low[:, None] + 1
  column = jnp.argmax(match, 1)
  length = max(r.shape[1] for r in rows)
  ties = []
  for i, counts in enumerate(rows):
    reach = counts[column[i]]
    beyond = jnp.where(at_top[i], 0, counts[column[i] + 1])
    ties.append(jnp.pad(reach - beyond, (0, length - reach.size)))
  ties = jnp.stack(ties)
  total = jnp.sum(ties, 1)
  need = (wanted - bracket.beyond)[segments]
  if len(plan.sizes) < len(plan.leaves):
    need = plan.share_ties(need, total)
  row, rest = _first_reaching(ties, jnp.maximum(need, 1))

  width = max(_columns(plan.leaves[i].size) for i in large)
  begins, found = [], []
  for j, i in enumerate(large):
    leaf = plan.leaves[i]
    columns = _columns(leaf.size)
    begin = row[j] * _COUNT(columns)
    clipped = jnp.minimum(begin, _COUNT(leaf.size - columns))
    image = leaf.image().reshape(-1)
    image = lax.dynamic_slice(image, (clipped,), (columns,))
    inside = lax.iota(_COUNT, columns) >= begin - clipped
    equal = (image == low[j].astype(image.dtype)) & inside
    begins.append(clipped)
    found.append(jnp.pad(equal.astype(_COUNT), (0, width - columns)))
  end = jnp.stack(begins) + _first_reaching(jnp.stack(found), rest)[0] + 1
  size = np.array([plan.leaves[i].size for i in large], np.uint32)
  end = jnp.where(need < total, end, size)
  return cuts.at[np.array(large)].set(jnp.where(need == 0, 0, end))


def by_mesh(leaves, ones: Array, *, together: bool, dtype) -> list[Array]:
  """Masks of `ones` [S] ones per segment, for scores that may be sharded."""
  plan = _Plan.of(leaves, together)
  whole, wanted = plan.whole(), jnp.maximum(ones, 1)
  anchor = [leaf.inputs for leaf in leaves]

  def count_leaf(leaf, image, probes):
    levels = [probes[j].astype(image.dtype) for j in range(probes.size)]
    axes = tuple(range(len(leaf.shape)))
    return jnp.stack(_count_reaching(image, levels, axes, _COUNT))

  def count(probes, active, carry):
    del active
    counts = [
      count_leaf(leaf, leaf.image(), probes[s])
      for leaf, s in zip(leaves, plan.segments, strict=True)
    ]
    return plan.per_segment(counts), carry

  bracket, _, _ = _search(count, wanted, whole, whole.high, anchor=anchor)
  low = bracket.low[plan.segments]
  everything = jnp.array([leaf.size for leaf in leaves], _COUNT)
  tied = (bracket.reach != wanted)[plan.segments]

  def cut():
    ties = [
      jnp.sum((leaf.image() == low[i].astype(leaf.image().dtype)), dtype=_COUNT)
      for i, leaf in enumerate(leaves)
    ]
    ties = jnp.stack(ties)
    need = (wanted - bracket.beyond)[plan.segments]
    if together:
      need = plan.share_ties(need, ties)
    search = tied & (need > 0) & (need < ties)
    # Ties, too, are found by counting: their scores are their indices, last
    # to first.
    last = jnp.int32(jnp.iinfo(jnp.int32).max)

    def count_ties(probes, active, carry):
      del active
      counts = []
      for i, leaf in enumerate(leaves):
        image = leaf.image()
        rank = last - lax.bitcast_convert_type(
          flat_index(leaf.shape), jnp.int32
        )
        equal = image == low[i].astype(image.dtype)
        hits = [
          (equal & (rank >= probes[i, j])).astype(_COUNT) for j in range(PROBES)
        ]
        add = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]
        axes = tuple(range(len(leaf.shape)))
        zeros = [_COUNT(0)] * PROBES
        counts.append(jnp.stack(lax.reduce(hits, zeros, add, axes)))
      return jnp.stack(counts), carry

    start = Bracket(
      last - lax.bitcast_convert_type(everything - 1, jnp.int32),
      jnp.full_like(everything, last, jnp.int32),
      jnp.where(search, ties, 1),
      jnp.zeros_like(everything),
    )
    found, _, _ = _search(
      count_ties,
      jnp.where(search, need, 1),
      start,
      start.high,
      anchor=anchor,
    )
    end = lax.bitcast_convert_type(last - found.low, _COUNT) + 1
    end = jnp.where(need < ties, end, everything)
    return jnp.where(tied, jnp.where(need == 0, 0, end), everything)

  cuts = lax.cond(jnp.any(tied), cut, lambda: vary(everything, (tied, anchor)))
  return plan.masks(bracket.low, cuts, ones, dtype)
