"""Find the k-th largest score by counting, and where to cut its ties.

Scores are compared through an *image*: a signed integer of the same width
that orders as the numbers do (subnormals and infinities included), in which
-0.0 equals +0.0 and every NaN is one value below -inf. A pass over the scores
counts how many images reach each of `PROBES` candidate thresholds; a few
passes close the bracket around the k-th largest one.

Leaves that are ranked together form a segment. All arrays here that are
indexed by segment, [S], or by leaf, [L], are small.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner.engine.recipe import Recipe

PROBES = 8
COUNT = jnp.uint32


def _infinity(dtype) -> int:
  info = jnp.finfo(dtype)
  return ((1 << info.nexp) - 1) << info.nmant


def bounds(dtype) -> tuple[int, int]:
  """The lowest and the highest image of a dtype."""
  dtype = jnp.dtype(dtype)
  if dtype == jnp.bool_:
    return 0, 1
  top = (1 << (8 * dtype.itemsize - 1)) - 1
  if jnp.issubdtype(dtype, jnp.integer):
    return -top - 1, top
  return top - 2 * _infinity(dtype) - 1, top


def finite_bounds(dtype) -> tuple[int, int]:
  """The images of the least finite float, and of infinity."""
  low, high = bounds(dtype)
  # Below them are -inf and NaN. All integers are finite.
  return (low + 2, high) if jnp.issubdtype(dtype, jnp.floating) else (low, high)


def image_dtype(dtype) -> Any:
  """The dtype of the images of a dtype."""
  return jnp.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")


@jax.jit
def image(x: Array) -> Array:
  """Return signed integers that order as `x` does; NaN is lowest."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.int8)
  if jnp.issubdtype(x.dtype, jnp.signedinteger):
    return x
  bits = 8 * x.dtype.itemsize
  signed = jnp.dtype(f"int{bits}").type
  raw = lax.bitcast_convert_type(x, signed)
  sign = signed(-(1 << (bits - 1)))
  if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
    return raw ^ sign
  low, high = bounds(x.dtype)
  # The lift wraps positive NaNs from above +inf to the bottom.
  lift = signed(high - _infinity(x.dtype))
  ordered = jnp.where(raw < 0, signed(int(sign) + int(lift)) - raw, raw + lift)
  return jnp.maximum(ordered, signed(low))


def score(image: Array, dtype) -> Array:
  """Return the floats that have these images."""
  bits = 8 * image.dtype.itemsize
  lift = bounds(dtype)[1] - _infinity(dtype)
  below = image.dtype.type(lift - (1 << (bits - 1))) - image
  raw = jnp.where(image < lift, below, image - image.dtype.type(lift))
  return lax.bitcast_convert_type(raw, dtype)


def flat_index(shape: tuple[int, ...]) -> Array:
  """The row-major index of each element, without a reshape."""
  index, stride = jnp.zeros((), COUNT), 1
  for axis in reversed(range(len(shape))):
    index += lax.broadcasted_iota(COUNT, shape, axis) * COUNT(stride)
    stride *= shape[axis]
  return jnp.broadcast_to(index, shape)


def at(x: Array, index: int) -> Array:
  return lax.index_in_dim(x, index, keepdims=False)


def row_from(tables: Sequence[Array], place: int) -> list[Array]:
  """A row of each table, from a place that the compiler takes for data.

  XLA compiles equal kernels once. With the place of each leaf written into
  its code, leaves of one shape would have as many kernels as there are.
  """
  # Not one number alone, which would be written into the code after all.
  places = jnp.asarray(np.array([place, 0], np.uint32))
  return _row_from(tables, lax.optimization_barrier(places))


@jax.jit
def _row_from(tables: Sequence[Array], places: Array) -> list[Array]:
  row = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
  return [row(table, at(places, 0)) for table in tables]


def sums(values: Sequence[Array], axes: tuple[int, ...]) -> list[Array]:
  """Sum several arrays over the same axes, in one pass.

  One reduction of several operands: XLA's CPU backend vectorizes it as it
  stands, but rewrites a long reduction of one operand into windows, which
  writes the operand to memory first.
  """
  zeros = [np.zeros((), v.dtype) for v in values]
  add = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]
  return lax.reduce(list(values), zeros, add, axes)


def totals(values: Sequence[Array]) -> list[Array]:
  """Sum several arrays, in one pass that threads can share."""
  ndim = values[0].ndim
  # A sum over everything at once would be one thread's.
  for axes in ((ndim - 1,), tuple(range(ndim - 1))):
    if ndim and axes:
      values = sums(values, axes)
  return list(values)


@jax.jit
def total(which: Array) -> Array:
  """Count what is true, uint32; in the form that `sums` is about."""
  if not which.ndim:
    return which.astype(COUNT)
  odd = lax.broadcasted_iota(jnp.int32, which.shape, which.ndim - 1) & 1 == 1
  some, others = totals([(which & s).astype(COUNT) for s in (odd, ~odd)])
  return some + others


@jax.jit
def odd(scores: Array) -> Array:
  """How many scores are not finite."""
  return total(~jnp.isfinite(scores))


def manual_axes(x: Array) -> frozenset[str]:
  """The axes of an enclosing `shard_map` that `x` varies over."""
  kind = jax.typeof(x)
  if hasattr(kind, "vma"):  # older JAX
    return frozenset(kind.vma)
  return frozenset(kind.manual_axis_type.varying)


def vary(tree, anchor):
  """Mark `tree` as varying over the manual mesh axes `anchor` varies over.

  Inside `shard_map` a loop's first carry must have the type of its last.
  """
  wanted = frozenset().union(*map(manual_axes, jax.tree.leaves(anchor)))

  def cast(x):
    missing = tuple(wanted - manual_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def as_unsigned(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def as_signed(x: Array) -> Array:
  return lax.bitcast_convert_type(x, image_dtype(x.dtype))


def part(width: Array, fraction: Array | np.ndarray) -> Array:
  """`fraction * width` in unsigned integers, from 0 to `width`."""
  # The largest float32 below 2**bits: a conversion beyond it is undefined.
  limit = np.float32(2.0 ** (8 * width.dtype.itemsize))
  limit = np.nextafter(limit, np.float32(0))
  product = jnp.clip(fraction * width.astype(jnp.float32), 0, limit)
  return jnp.minimum(product.astype(width.dtype), width)


class Bracket(NamedTuple):
  """Bounds of the k-th largest image, [S], and the counts at them."""

  low: Array
  high: Array
  reach: Array  # how many are at least `low`
  beyond: Array  # how many are above `high`

  def narrow(self, probes: Array, counts: Array, ones: Array) -> "Bracket":
    """Move the bounds to those of `probes` [S, P] nearest the threshold."""
    # Probes ascend; those that do not have wrapped around past the top.
    valid = probes >= probes[:, :1]
    reached = counts >= ones[:, None]
    up = valid & reached & (probes >= self.low[:, None])
    down = valid & ~reached & (probes > self.low[:, None])
    down &= probes - 1 <= self.high[:, None]
    # The best of each in one reduction: one kernel to compile, not four.
    up_to, down_to = np.iinfo(probes.dtype).min, np.iinfo(probes.dtype).max
    offers = [
      jnp.where(up, probes, self.low[:, None]),
      jnp.where(down, probes - 1, self.high[:, None]),
      jnp.where(up, counts, self.reach[:, None]),
      jnp.where(down, counts, self.beyond[:, None]),
    ]
    worst = [up_to, down_to, np.iinfo(COUNT).max, 0]
    worst = [x.dtype.type(w) for x, w in zip(offers, worst, strict=True)]

    def best(a, b):
      return [
        jnp.maximum(a[0], b[0]),
        jnp.minimum(a[1], b[1]),
        jnp.minimum(a[2], b[2]),
        jnp.maximum(a[3], b[3]),
      ]

    low, high, reach, beyond = lax.reduce(offers, worst, best, (1,))
    return Bracket(low, high, reach, beyond)

  def where(self, condition, other: "Bracket") -> "Bracket":
    return jax.tree.map(functools.partial(jnp.where, condition), self, other)


# Where the next probes go, in standard deviations from the expected threshold:
# two about it, as near as these bounds say, and the others so far beyond them.
_SIDE = np.array([-1] * 4 + [1] * 4, np.float32)
_BEYOND = np.array([3.7, 1.7, 0.7, 0, 0, 0.7, 1.7, 3.7], np.float32)
_NEAR, _FAR = np.float32(0.3), np.float32(3)
# The first is next to the lower end: many scores may be equal to that.
_EVEN = np.arange(PROBES, dtype=np.float32) / PROBES


def _next_probes(
  bracket: Bracket, ones: Array, evenly: Array, room: Any
) -> Array:
  """Candidate thresholds [S, P], ascending, around where it is expected.

  With about `room` scores between the middle ones, if that is sensible.
  """
  width = as_unsigned(bracket.high - bracket.low)[:, None]
  inside = (bracket.reach - bracket.beyond).astype(jnp.float32)
  inside = jnp.maximum(inside, 1)
  above = (bracket.reach - ones).astype(jnp.float32)
  spread = jnp.sqrt(jnp.maximum(above * (1 - above / inside), 0.25))
  middle = jnp.clip(room / 2, _NEAR * spread, _FAR * spread)
  away = _SIDE * (middle[:, None] + spread[:, None] * _BEYOND)
  guess = (above[:, None] + away) / inside[:, None]
  step = part(width, jnp.where(evenly[:, None], _EVEN, guess))
  step = jnp.clip(step, 1, jnp.maximum(width, 1))
  # A bracket this narrow is counted value by value, the successor of its
  # upper end included: that finds the threshold and counts its ties at once.
  each = jnp.arange(PROBES, dtype=width.dtype)
  step = jnp.where(width <= PROBES - 2, each, step)
  return bracket.low[:, None] + as_signed(step)


def between_ends(probes: Array, dtype) -> Array:
  """Probes [..., P - 2] with two more, that tell what is not finite."""
  (least, most), kind = finite_bounds(dtype), image_dtype(dtype)
  place = lax.iota(jnp.int32, PROBES)
  padding = [(0, 0)] * (probes.ndim - 1) + [(1, 1)]
  # Ascending, also where a sample has met what is not finite.
  probes = jnp.clip(jnp.pad(probes, padding), least, most).astype(kind)
  ends = [kind.type(x) for x in (least, most)]
  probes = jnp.where(place == 0, ends[0], probes)
  return jnp.where(place == PROBES - 1, ends[1], probes)


def ties_at(bracket: Bracket, probes: Array) -> Array:
  """Which of `probes` [S, P - 1] is the threshold, its successor the next."""
  low = bracket.low[:, None]
  return (probes[:, :-1] == low) & (probes[:, 1:] == low + 1)


def search(
  count: Callable[..., tuple[Array, Any, Any]],
  ones: Array,
  bracket: Bracket,
  top: Array,
  *,
  anchor: Any,
  first: Array | None = None,
  carry: Any = None,
  enough: Callable[[Any], Any] = lambda carry: np.True_,
) -> tuple[Bracket, Any]:
  """Narrow all brackets until their thresholds are known.

  Args:
    count: `(probes [S, P], active [S], carry) -> (counts [S, P], room [S],
      carry)`; it can make use of `room` scores between the middle probes.
    ones: how many to keep, [S], at least 1.
    bracket: where to look.
    top: the highest image, [S].
    anchor: the arrays `count` reads.
    first: the first probes, [S, P].
    carry: what `count` keeps of its last pass; for a single segment. If given,
      there is a pass, and the last has counted both the threshold and its
      successor, unless no ties are cut.
    enough: whether a carry says all there is to know of a segment for which
      the right number reaches a probe; else its threshold is searched for.

  Returns:
    The brackets, and the carry.
  """

  def body(state):
    settled, bracket, probes, poor, kept = state
    counts, room, kept = count(probes, ~settled, kept)
    # Nothing reaches a probe beyond the top; its narrow image has wrapped.
    counts = jnp.where(probes <= top[:, None], counts, 0)
    new = bracket.narrow(probes, counts, ones)
    if ones.size > 1:  # a single one is not settled, or there were no turn
      new = bracket.where(settled, new)
    before = bracket.reach - bracket.beyond
    # Where interpolation did little, the next probes are spread evenly, so
    # that no distribution of scores takes many passes.
    poor = ~poor & (new.reach - new.beyond > before // 4)
    known = new.low == new.high
    if carry is not None:
      known &= jnp.any(ties_at(new, probes), 1)
    settled |= known | (new.reach == ones) & enough(kept)
    return settled, new, _next_probes(new, ones, poor, room), poor, kept

  settled = bracket.reach == ones
  if carry is not None:
    settled = jnp.zeros_like(settled)
  evenly = jnp.ones(ones.shape, jnp.bool_)
  if first is None:
    settled |= bracket.low == bracket.high
    first = _next_probes(bracket, ones, evenly, np.float32(0))
  start = settled, bracket, first, evenly, carry
  start = vary(start, (anchor, ones))
  state = lax.while_loop(lambda s: ~jnp.all(s[0]), body, start)
  return state[1], state[4]


class Plan(NamedTuple):
  """Which leaves, of one dtype, share a threshold: static facts."""

  leaves: Sequence[Recipe]
  segments: np.ndarray  # [L]
  sizes: np.ndarray  # [S]
  together: bool  # one segment of all leaves, or one of each

  @classmethod
  def of(cls, leaves: Sequence[Recipe], together: bool) -> "Plan":
    sizes = np.array([leaf.size for leaf in leaves], np.int64)
    segments = np.arange(len(leaves))
    if together:
      segments, sizes = np.zeros_like(segments), sizes.sum(keepdims=True)
    return cls(leaves, segments, sizes, together)

  @property
  def dtype(self) -> Any:
    return self.leaves[0].dtype

  @property
  def leaf_sizes(self) -> np.ndarray:
    return np.array([leaf.size for leaf in self.leaves], np.uint32)

  @property
  def inputs(self) -> list:
    return [leaf.inputs for leaf in self.leaves]

  def image(self, leaf: int) -> Array:
    return image(self.leaves[leaf].scores())

  def whole(self, sizes: Array) -> Bracket:
    """Brackets of segments of these sizes [S] that exclude nothing."""
    kind = image_dtype(self.dtype)
    low, high = (jnp.full(sizes.shape, x, kind) for x in bounds(self.dtype))
    return Bracket(low, high, sizes, jnp.zeros_like(sizes))

  def finite(self) -> Array:
    """Which segments have finite scores only, [S]; takes a pass of its own."""
    found = jnp.stack([odd(leaf.scores()) for leaf in self.leaves])
    return jnp.all(found[None] == 0, 1) if self.together else found == 0

  def per_segment(self, of_leaves: Array) -> Array:
    """Sum counts [L, P] of leaves over their segments."""
    if not self.together:
      return of_leaves
    return jnp.sum(of_leaves, 0, keepdims=True, dtype=COUNT)

  def masks(self, levels: Array, cuts: Array, dtype) -> list[Array]:
    """Ones above the level [L], and on it before the cut [L]."""
    return [
      _mask(leaf.scores(), *row_from([levels, cuts], i)).astype(dtype)
      for i, leaf in enumerate(self.leaves)
    ]


class Selected(NamedTuple):
  """What a selection finds.

  Attributes:
    masks: uint8, 1 = kept, one per leaf.
    finite: which segments have finite scores only, [S].
    levels: images [S] that what is kept reaches; with trails, those of the
      least scores kept.
  """

  masks: list[Array]
  finite: Array
  levels: Array


def split_ties(kept: Array, ties: Array) -> Array:
  """How many leaves ranked together keep of their `ties` [L], in order."""
  earlier = np.tri(ties.size, k=-1, dtype=np.uint32)
  taken = jnp.sum(earlier * ties, 1, dtype=COUNT)
  return jnp.minimum(jnp.where(kept > taken, kept - taken, 0), ties)


@jax.jit
def _mask(scores: Array, level: Array, cut: Array) -> Array:
  images, first = image(scores), flat_index(scores.shape) < cut
  return (images > level) | ((images == level) & first)
