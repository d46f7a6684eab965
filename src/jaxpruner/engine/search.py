# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Find thresholds by counting: brackets, probes, and the cut among ties.

A *segment* is what is ranked in one order: a leaf, or all leaves together. Its
*bracket* holds the keys between which the threshold lies. A *pass* counts, in
every segment at once, how many scores reach each of `PROBES` candidates inside
the bracket, and narrows it. A segment whose bracket has one key left, with more
scores on it than may be kept, goes on with the same search over indices: among
equal scores, an element's key is its index, the first the highest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int, UInt

from jaxpruner.engine import order
from jaxpruner.engine.leaves import Group, vary

PROBES = 8
COUNT = jnp.uint32


class Bracket(NamedTuple):
  """Where the threshold of each segment lies: at or above `low`, up to `high`.

  Attributes:
    low: a key that at least as many scores reach as are kept.
    high: a key above which fewer are than are kept.
    reach: how many scores reach `low`.
    beyond: how many scores are above `high`.
  """

  low: Int[Array, " segments"]
  high: Int[Array, " segments"]
  reach: UInt[Array, " segments"]
  beyond: UInt[Array, " segments"]


class State(NamedTuple):
  """The search of all segments between two passes.

  Attributes:
    bracket: of keys, or of index keys where `by_index`.
    keep: how many to keep; where `by_index`, how many of the ties.
    by_index: whether the key is found, and the cut among its ties is searched.
    level: the key that was found, where `by_index`.
    done: whether nothing is left to search.
    evenly: whether the probes were spread evenly, not by interpolation.
    probes: what the next pass counts; inside the bracket.
  """

  bracket: Bracket
  keep: UInt[Array, " segments"]
  by_index: Bool[Array, " segments"]
  level: Int[Array, " segments"]
  done: Bool[Array, " segments"]
  evenly: Bool[Array, " segments"]
  probes: Int[Array, "segments probes"]

  def pack(self) -> Int[Array, "segments columns"]:
    """Return the state as one table.

    What XLA does: on small arrays, every value that a loop carries is a kernel
    of its own, of 12 ms to compile. What we do: one table. What it saves: 12
    kernels. When it can go: when loop fusions have several results.
    """
    kind = self.probes.dtype
    *rest, probes = jax.tree.leaves(self)
    table = jnp.pad(probes, ((0, 0), (len(rest), 0)))
    columns = np.arange(table.shape[1])[None]
    for i, field in enumerate(rest):
      table = jnp.where(columns == i, _as_key(field, kind)[:, None], table)
    return table

  @classmethod
  def unpack(cls, table: Int[Array, "segments columns"]) -> "State":
    """Return the state of a table."""
    column = lambda i: lax.index_in_dim(table, i, 1, keepdims=False)
    low, high, reach, beyond, keep = (column(i) for i in range(5))
    by_index, level, done, evenly = (column(i) for i in range(5, 9))
    return cls(
      Bracket(low, high, _as_count(reach), _as_count(beyond)),
      _as_count(keep),
      by_index != 0,
      level,
      done != 0,
      evenly != 0,
      lax.slice_in_dim(table, 9, 9 + PROBES, axis=1),
    )


def _as_key(x: Array, kind: Any) -> Int[Array, " segments"]:
  if x.dtype == COUNT and jnp.dtype(kind).itemsize == 4:
    return lax.bitcast_convert_type(x, kind)
  return x.astype(kind)


def _as_count(x: Int[Array, " segments"]) -> UInt[Array, " segments"]:
  if x.dtype.itemsize == 4:
    return lax.bitcast_convert_type(x, COUNT)
  return x.astype(COUNT)


class Found(NamedTuple):
  """Thresholds: kept is what is above `level`, or on it and before `cut`."""

  level: Int[Array, " segments"]
  cut: UInt[Array, " segments"]
  finite: Bool[Array, " leaves"]


Count = Callable[[Int[Array, "segments columns"]], UInt[Array, "leaves probes"]]


def index_key(index: UInt[Array, "*shape"], dtype: Any) -> Int[Array, "*shape"]:
  """Return keys of indices, the first the highest; they wrap around."""
  last = np.iinfo(dtype).max
  if jnp.dtype(dtype).itemsize == 8:
    return last - index.astype(dtype)
  return jnp.dtype(dtype).type(last) - lax.bitcast_convert_type(index, dtype)


def ranked(
  keys: Int[Array, "*shape"],
  index: UInt[Array, "*shape"],
  row: Int[Array, "1 columns"],
) -> Int[Array, "*shape"]:
  """Return what a pass compares: keys, or the index keys of ties.

  Elements that are not compared get the lowest key, which no probe has.
  """
  state = State.unpack(row)
  by_index, level, high = (
    x[0] for x in (state.by_index, state.level, state.bracket.high)
  )
  place = index_key(index, keys.dtype)
  tied = (keys == level) & (place <= high)
  lowest = keys.dtype.type(np.iinfo(keys.dtype).min)
  return jnp.where(by_index, jnp.where(tied, place, lowest), keys)


def reached(
  ranks: Int[Array, "*shape"],
  row: Int[Array, "1 columns"],
  axes: tuple[int, ...],
) -> list[UInt[Array, "*rest"]]:
  """Count along axes how many ranks reach each probe.

  What XLA does: it rewrites a long reduction of one operand into windows, which
  stores the operand first. What we do: one reduction of all probes' operands.
  What it saves: writing the comparisons, 1 byte per weight and probe. When it
  can go: when a reduction of one operand is not rewritten.
  """
  probes = State.unpack(row).probes
  # ">" is one vector operation, ">=" is two. No probe is the lowest integer.
  before = probes - 1
  hits = [(ranks > before[0, p]).astype(COUNT) for p in range(PROBES)]
  return sums(hits, axes)


def sums(
  values: list[UInt[Array, "*shape"]], axes: tuple[int, ...]
) -> list[UInt[Array, "*rest"]]:
  """Sum several arrays over the same axes, in one pass."""
  zeros = [np.zeros((), v.dtype) for v in values]

  def add(a: list[Any], b: list[Any]) -> list[Any]:
    return [x + y for x, y in zip(a, b, strict=True)]

  return lax.reduce(values, zeros, add, axes)


def totals(values: list[UInt[Array, "*shape"]]) -> list[UInt[Array, ""]]:
  """Sum each of several arrays of one shape, in one pass.

  What XLA does: it stores the operand of a long one-operand reduction, as wide
  as the sum, and gives a reduction to a scalar to one thread. What we do: one
  reduction of two operands or more, the last axis first. What it saves: 4 bytes
  per entry of temporary memory, and half of the time on two cores. When it can
  go: when XLA does neither.
  """
  last = values[0].ndim - 1
  for axes in ((last,), tuple(range(last))):
    if last >= 0 and axes:
      values = sums(values, axes)
  return values


@jax.jit
def count_true(which: Bool[Array, "*shape"]) -> UInt[Array, ""]:
  """Count the true entries of an array, as odd and even columns: `totals`."""
  if not which.ndim:
    return which.astype(COUNT)
  column = lax.broadcasted_iota(jnp.int32, which.shape, which.ndim - 1)
  odd = column & 1 == 1
  halves = totals([(which & part).astype(COUNT) for part in (odd, ~odd)])
  return halves[0] + halves[1]


def _narrow(state: State, counts: UInt[Array, "segments probes"]) -> Bracket:
  """Move the bounds to the probes nearest to the threshold."""
  old, probes = state.bracket, state.probes
  enough = counts >= state.keep[:, None]
  kind, column = np.iinfo(probes.dtype), lambda x: x[:, None]
  offers = [
    jnp.where(enough, probes, column(old.low)),
    jnp.where(enough, column(old.high), probes - 1),
    jnp.where(enough, counts, column(old.reach)),
    jnp.where(enough, column(old.beyond), counts),
  ]
  worst = [kind.min, kind.max, np.iinfo(np.uint32).max, 0]
  worst = [x.dtype.type(w) for x, w in zip(offers, worst, strict=True)]
  choose = [jnp.maximum, jnp.minimum, jnp.minimum, jnp.maximum]

  # The best of each in one reduction: one kernel to compile, not four.
  def best(a: list[Any], b: list[Any]) -> list[Any]:
    return [f(x, y) for f, x, y in zip(choose, a, b, strict=True)]

  return Bracket(*lax.reduce(offers, worst, best, (1,)))


# Where the next probes go, in standard deviations from the expected threshold.
_AWAY = np.array([[-4, -2, -1, -0.3, 0.3, 1, 2, 4]], np.float32)
# The first is next to the lower end: many scores may be equal to that.
_EVEN = np.arange(PROBES, dtype=np.float32)[None] / PROBES


def _next_probes(state: State) -> Int[Array, "segments probes"]:
  """Return probes inside the brackets, around the expected threshold."""
  low, high, reach, beyond = state.bracket
  unsigned = jnp.dtype(f"uint{8 * low.dtype.itemsize}")
  width = lax.bitcast_convert_type(high - low, unsigned)[:, None]
  inside = jnp.maximum((reach - beyond).astype(jnp.float32), 1)[:, None]
  above = (reach - state.keep).astype(jnp.float32)[:, None]
  # If the keys are spread evenly in the bracket, the one that `above` of them
  # exceed has this standard deviation, counted in keys.
  spread = jnp.sqrt(jnp.maximum(above * (1 - above / inside), 0.25))
  guess = (above + spread * _AWAY) / inside
  step = fraction(width, jnp.where(state.evenly[:, None], _EVEN, guess))
  # A bracket this narrow is counted value by value.
  each = np.arange(1, PROBES + 1).astype(unsigned)[None]
  step = jnp.where(width <= PROBES, each, step)
  step = jnp.clip(step, 1, jnp.maximum(width, 1))
  return low[:, None] + lax.bitcast_convert_type(step, low.dtype)


def fraction(
  width: UInt[Array, "segments 1"], share: Any
) -> UInt[Array, "segments probes"]:
  """Return `share * width` in unsigned integers, from 0 to `width`."""
  # The largest float32 below 2**bits: a conversion beyond it is undefined.
  limit = np.float32(2.0 ** (8 * width.dtype.itemsize))
  limit = np.nextafter(limit, np.float32(0))
  product = jnp.clip(share * width.astype(jnp.float32), 0, limit)
  return jnp.minimum(product.astype(width.dtype), width)


def whole(group: Group) -> Bracket:
  """Return brackets that exclude nothing."""
  kind, number = order.search_dtype(group.dtype), len(group.segment_sizes)
  low, high = (jnp.full(number, x, kind) for x in order.bounds(group.dtype))
  sizes = jnp.asarray(group.segment_sizes, COUNT)
  return Bracket(low, high, sizes, jnp.zeros_like(sizes))


def first_probes(
  group: Group, guess: Int[Array, "segments 6"]
) -> Int[Array, "segments probes"]:
  """Return the probes of the first pass: guesses, and what tells finiteness."""
  low, high = order.bounds(group.dtype)
  kind = order.search_dtype(group.dtype)
  # The keys of -max and of +inf.
  ends = np.array([low + 3, high], kind)
  ends = jnp.broadcast_to(ends, (guess.shape[0], ends.size))
  guess = jnp.clip(guess, low + 1, high)
  return jnp.concatenate([guess, ends], 1)


def even_guess(group: Group) -> Int[Array, "segments 6"]:
  """Return keys to look at first where nothing is known."""
  low, high = order.bounds(group.dtype)
  keys = np.linspace(low, high, 8)[1:-1].astype(order.search_dtype(group.dtype))
  return jnp.broadcast_to(keys, (len(group.segment_sizes), keys.size))


def _all_finite(
  group: Group, counts: UInt[Array, "leaves probes"]
) -> Bool[Array, " leaves"]:
  """Tell finiteness from the counts at the last of the first probes."""
  if not jnp.issubdtype(group.dtype, jnp.floating):
    return jnp.ones(counts.shape[0], jnp.bool_)
  sizes = jnp.asarray(group.sizes, COUNT)
  return (counts[:, PROBES - 2] == sizes) & (counts[:, PROBES - 1] == 0)


def search(
  group: Group,
  count: Count,
  keep: UInt[Array, " segments"],
  guess: Int[Array, "segments 6"],
  anchor: Any,
) -> Found:
  """Search the thresholds of all segments.

  Args:
    group: the leaves and their segments.
    count: how many of a leaf reach each probe of its segment; what it returns
      for segments that are done is not used.
    keep: how many to keep, up to the size of the segment.
    guess: keys to look at first.
    anchor: the arrays that `count` reads.

  Returns:
    Thresholds, cuts, and what is finite.
  """
  sizes = jnp.asarray(group.segment_sizes, COUNT)
  start = whole(group)
  kind, no = start.low.dtype, jnp.zeros(keep.shape, jnp.bool_)
  top, last = np.iinfo(kind).max, index_key(sizes - 1, kind)

  def body(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    table, finite, is_first = carry
    state = State.unpack(table)
    counts = count(table)
    finite = jnp.where(is_first, _all_finite(group, counts), finite)
    total = group.per_segment(counts)
    total += jnp.where(state.by_index, state.bracket.beyond, 0)[:, None]
    new = _where(state.done, state.bracket, _narrow(state, total))
    done = state.done | (new.reach == state.keep)
    tied = ~done & (new.low == new.high)
    inside, before = (x.reach - x.beyond for x in (new, state.bracket))
    ties = Bracket(last, jnp.full_like(last, top), inside, inside * 0)
    state = state._replace(
      bracket=_where(tied, ties, new),
      keep=state.keep - jnp.where(tied, new.beyond, 0),
      by_index=state.by_index | tied,
      level=jnp.where(state.by_index, state.level, new.low),
      done=done,
      # Where interpolation did little, the next probes are spread evenly, so
      # that no distribution of scores takes many passes.
      evenly=~state.evenly & ~tied & (inside > before // 4),
    )
    state = state._replace(probes=_next_probes(state))
    return state.pack(), finite, jnp.zeros_like(is_first)

  state = State(
    bracket=start,
    keep=jnp.maximum(keep, 1),
    by_index=no,
    level=start.low,
    done=no,
    evenly=~no,
    probes=first_probes(group, guess),
  )
  carry = state.pack(), jnp.ones(len(group.leaves), jnp.bool_), jnp.bool_(True)
  carry = vary(carry, (anchor, keep))
  going = lambda carry: ~jnp.all(State.unpack(carry[0]).done)
  table, finite, _ = lax.while_loop(going, body, carry)
  state, none = State.unpack(table), keep == 0
  cut = jnp.where(state.by_index, _index(state.bracket.low) + 1, sizes)
  return Found(
    jnp.where(none, start.high, state.level), jnp.where(none, 0, cut), finite
  )


def _where(which: Bool[Array, " segments"], a: Any, b: Any) -> Any:
  return jax.tree.map(lambda x, y: jnp.where(which, x, y), a, b)


def _index(keys: Int[Array, " segments"]) -> UInt[Array, " segments"]:
  """Return the indices that have these index keys."""
  last = np.iinfo(keys.dtype).max
  if keys.dtype.itemsize == 8:
    return (last - keys).astype(COUNT)
  return lax.bitcast_convert_type(keys.dtype.type(last) - keys, COUNT)
