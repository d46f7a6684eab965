# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Find thresholds by counting: brackets, probes, and the cut among ties.

A *segment* is what is ranked in one order: a leaf, or all leaves together. Its
*bracket* holds the keys between which the threshold lies. A *pass* counts how
many scores of a segment reach each of `PROBES` keys inside the bracket, and
narrows it. A segment whose bracket has one key left, with more scores on it
than may be kept, goes on with the same search over indices: among equal scores,
an element's key is its index, the first the highest.
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
# After so many passes of interpolation, probes are spread evenly: then every
# pass leaves an eighth of the bracket.
PATIENCE = 24


class State(NamedTuple):
  """The search of each segment between two passes.

  Attributes:
    low: a key that at least as many scores reach as are kept.
    high: a key above which fewer are than are kept.
    reach: how many scores reach `low`.
    beyond: how many scores are above `high`.
    keep: how many to keep; where `by_index`, how many of the ties.
    size: how many scores there are.
    level: the key that was found, where `by_index`.
    by_index: whether the key is found, and the cut among its ties is searched;
      bracket and probes are then index keys.
    done: whether nothing is left to search.
    evenly: whether the probes were spread evenly, not by interpolation.
    finite: whether all scores are finite; known after the first pass.
    passes: how many passes were made.
    probes: what the next pass counts; inside the bracket.
  """

  low: Int[Array, " segments"]
  high: Int[Array, " segments"]
  reach: UInt[Array, " segments"]
  beyond: UInt[Array, " segments"]
  keep: UInt[Array, " segments"]
  size: UInt[Array, " segments"]
  level: Int[Array, " segments"]
  by_index: Bool[Array, " segments"]
  done: Bool[Array, " segments"]
  evenly: Bool[Array, " segments"]
  finite: Bool[Array, " segments"]
  passes: Int[Array, " segments"]
  probes: Int[Array, "segments probes"]

  def pack(self) -> Int[Array, "segments columns"]:
    """Return the state as one table.

    What XLA does: on small arrays, every value that a loop carries is a kernel
    of its own, of 12 ms to compile. What we do: one table. What it saves: 12
    kernels. When it can go: when loop fusions have several results.
    """
    *columns, probes = self
    table = jnp.pad(probes, ((0, 0), (len(columns), 0)))
    number = np.arange(table.shape[1])[None]
    for i, column in enumerate(columns):
      column = _cast(column, probes.dtype)[:, None]
      table = jnp.where(number == i, column, table)
    return table

  @classmethod
  def unpack(cls, table: Int[Array, "segments columns"]) -> "State":
    """Return the state of a table."""
    last = len(cls._fields) - 1
    fields: dict[str, Array] = {
      name: lax.index_in_dim(table, i, 1, keepdims=False)
      for i, name in enumerate(cls._fields[:last])
    }
    for name in ("reach", "beyond", "keep", "size"):
      fields[name] = _cast(fields[name], COUNT)
    for name in ("by_index", "done", "evenly", "finite"):
      fields[name] = fields[name] != 0
    return cls(**fields, probes=table[:, last:])


def _cast(x: Array, dtype: Any) -> Array:
  """Convert integers; those of equal width wrap around."""
  if x.dtype.itemsize == jnp.dtype(dtype).itemsize:
    return lax.bitcast_convert_type(x, dtype)
  return x.astype(dtype)


def index_key(index: UInt[Array, "*shape"], dtype: Any) -> Int[Array, "*shape"]:
  """Return keys of indices, the first the highest; they wrap around."""
  return jnp.dtype(dtype).type(np.iinfo(dtype).max) - _cast(index, dtype)


def _index(keys: Int[Array, "*shape"]) -> UInt[Array, "*shape"]:
  """Return the indices that have these index keys."""
  return _cast(keys.dtype.type(np.iinfo(keys.dtype).max) - keys, COUNT)


def start(
  group: Group, keep: UInt[Array, " segments"], guess: Int[Array, "segments 6"]
) -> State:
  """Return brackets that exclude nothing, and the probes of the first pass.

  Args:
    group: the leaves and their segments.
    keep: how many to keep, up to the size of the segment.
    guess: keys to look at first.

  Returns:
    The state. Two of the probes, the keys of -max and +inf, tell what is
    finite.
  """
  kind, shape = order.search_dtype(group.dtype), keep.shape
  low, high = order.bounds(group.dtype)
  ends = jnp.broadcast_to(np.array([low + 3, high], kind), (*shape, 2))
  probes = jnp.concatenate([jnp.clip(guess, low + 1, high), ends], 1)
  sizes = jnp.asarray(group.segment_sizes, COUNT)
  yes, no = jnp.ones(shape, jnp.bool_), jnp.zeros(shape, jnp.bool_)
  return State(
    low=jnp.full(shape, low, kind),
    high=jnp.full(shape, high, kind),
    reach=sizes,
    beyond=jnp.zeros_like(sizes),
    keep=keep,
    size=sizes,
    level=jnp.full(shape, low, kind),
    by_index=no,
    done=no,
    evenly=yes,
    finite=yes,
    passes=jnp.zeros(shape, kind),
    probes=probes,
  )


def even_guess(group: Group) -> Int[Array, "segments 6"]:
  """Return keys to look at first where nothing is known."""
  if jnp.issubdtype(group.dtype, jnp.floating):
    # Weights and gradients are small numbers.
    common = [-(2**-6), 0, 2**-12, 2**-7, 2**-3, 2]
    keys = order.sort_key(jnp.asarray(common, group.dtype))
  else:
    keys = jnp.asarray(np.linspace(*order.bounds(group.dtype), 8)[1:-1])
  keys = keys.astype(order.search_dtype(group.dtype))
  return jnp.broadcast_to(keys, (len(group.segment_sizes), keys.size))


def reached(
  keys: Int[Array, "*shape"],
  index: UInt[Array, "*shape"],
  row: Int[Array, "1 columns"],
) -> list[UInt[Array, "*shape"]]:
  """Return 1 for each element that reaches a probe of a segment, per probe."""
  state = State.unpack(row)
  place = index_key(index, keys.dtype)
  tied = (keys == state.level[0]) & (place <= state.high[0])
  # Elements that are not compared get the lowest key, which no probe has.
  lowest = keys.dtype.type(np.iinfo(keys.dtype).min)
  ties = jnp.where(tied, place, lowest)
  ranks = jnp.where(state.by_index[0], ties, keys)
  # ">" is one vector operation, ">=" is two.
  before = state.probes - 1
  return [(ranks > before[0, p]).astype(COUNT) for p in range(PROBES)]


def sums(
  values: list[UInt[Array, "*shape"]], axes: tuple[int, ...]
) -> list[UInt[Array, "*rest"]]:
  """Sum several arrays over the same axes, in one pass."""
  zeros = [np.zeros((), v.dtype) for v in values]

  def add(a: list[Any], b: list[Any]) -> list[Any]:
    return [x + y for x, y in zip(a, b, strict=True)]

  return lax.reduce(values, zeros, add, axes)


# Up to this size, one thread sums faster than two kernels compile.
ONE_THREAD = 1 << 18


def totals(values: list[UInt[Array, "*shape"]]) -> list[UInt[Array, ""]]:
  """Sum each of two or more arrays of one shape, in one pass.

  What XLA does: it stores the operand of a long one-operand reduction, as wide
  as the sum, and gives a reduction to a scalar to one thread. What we do: one
  reduction of two operands or more; if they are large, the last axis first.
  What it saves: 4 bytes per entry of temporary memory, and half of the time on
  two cores. When it can go: when XLA does neither.
  """
  axes = tuple(range(values[0].ndim))
  if values[0].size <= ONE_THREAD or len(axes) < 2:
    return sums(values, axes) if axes else values
  return sums(sums(values, axes[-1:]), axes[:-1])


@jax.jit
def count_true(which: Bool[Array, "*shape"]) -> UInt[Array, ""]:
  """Count the true entries of an array, as odd and even columns: `totals`."""
  if not which.ndim:
    return which.astype(COUNT)
  column = lax.broadcasted_iota(jnp.int32, which.shape, which.ndim - 1)
  odd = column & 1 == 1
  halves = totals([(which & part).astype(COUNT) for part in (odd, ~odd)])
  return halves[0] + halves[1]


def advance(state: State, counts: UInt[Array, "segments probes"]) -> State:
  """Return the state after a pass.

  Args:
    state: the state before it.
    counts: how many scores reach each probe; where `by_index`, how many ties
      of those that are left.

  Returns:
    The state, with narrower brackets and new probes. Every bracket that is not
    done has shrunk, whatever the probes inside it were.
  """
  finite = (counts[:, -2] == state.size) & (counts[:, -1] == 0)
  counts += jnp.where(state.by_index, state.beyond, 0)[:, None]
  new = _narrow(state, counts)
  done = state.done | (new.reach == state.keep) | (state.keep == 0)
  tied = ~done & (new.low == new.high)
  inside, before = new.reach - new.beyond, state.reach - state.beyond
  # Where interpolation did little, the next probes are spread evenly, so that
  # no distribution of scores takes many passes.
  evenly = ~state.evenly & ~tied & (inside > before // 4)
  last = index_key(state.size - 1, new.low.dtype)
  new = new._replace(
    low=jnp.where(tied, last, new.low),
    high=jnp.where(tied, np.iinfo(last.dtype).max, new.high),
    reach=jnp.where(tied, inside, new.reach),
    beyond=jnp.where(tied, 0, new.beyond),
    keep=state.keep - jnp.where(tied, new.beyond, 0),
    level=jnp.where(state.by_index, state.level, new.low),
    by_index=state.by_index | tied,
    done=done,
    evenly=evenly | (state.passes >= PATIENCE),
    finite=jnp.where(state.passes == 0, finite, state.finite),
    passes=state.passes + 1,
  )
  return new._replace(probes=_next_probes(new))


def _narrow(state: State, counts: UInt[Array, "segments probes"]) -> State:
  """Move the bounds to the probes nearest to the threshold."""
  old = (state.low, state.high, state.reach, state.beyond)
  low, high, reach, beyond = (x[:, None] for x in old)
  enough = counts >= state.keep[:, None]
  offers = [
    jnp.where(enough, state.probes, low),
    jnp.where(enough, high, state.probes - 1),
    jnp.where(enough, counts, reach),
    jnp.where(enough, beyond, counts),
  ]
  key, word = np.iinfo(low.dtype), np.iinfo(COUNT)
  worst = [key.min, key.max, word.max, word.min]
  worst = [x.dtype.type(w) for x, w in zip(offers, worst, strict=True)]
  best = [jnp.maximum, jnp.minimum, jnp.minimum, jnp.maximum]

  # The best of each in one reduction: one kernel to compile, not four.
  def better(a: list[Any], b: list[Any]) -> list[Any]:
    return [f(x, y) for f, x, y in zip(best, a, b, strict=True)]

  new = lax.reduce(offers, worst, better, (1,))
  new = [jnp.where(state.done, x, y) for x, y in zip(old, new, strict=True)]
  return state._replace(low=new[0], high=new[1], reach=new[2], beyond=new[3])


# Where the next probes go, in standard deviations from the expected threshold.
_AWAY = np.array([[-4, -2, -1, -0.3, 0.3, 1, 2, 4]], np.float32)
# The first is next to the lower end: many scores may be equal to that.
_EVEN = np.arange(PROBES, dtype=np.float32)[None] / PROBES


def _next_probes(state: State) -> Int[Array, "segments probes"]:
  """Return probes in `(low, high]`, around the expected threshold."""
  low, unsigned = state.low[:, None], f"uint{8 * state.low.dtype.itemsize}"
  width = _cast(state.high - state.low, unsigned)[:, None]
  inside = (state.reach - state.beyond).astype(jnp.float32)[:, None]
  inside = jnp.maximum(inside, 1)
  above = (state.reach - state.keep).astype(jnp.float32)[:, None]
  # If the keys are spread evenly in the bracket, the one that `above` of them
  # exceed has this variance, counted in keys. Products only: a quotient would
  # be rounded in another way where it is compiled for another layout, and so
  # would the sum of a product, except that these signs are exact.
  inverse = 1 / inside
  variance = _AWAY**2 * (above * (inside - above) * inverse)
  away = jnp.sqrt(jnp.maximum(variance, _AWAY**2 / 4)) * np.sign(_AWAY)
  share = jnp.where(state.evenly[:, None], _EVEN, (above + away) * inverse)
  # A bracket this narrow is counted value by value.
  each = np.arange(1, PROBES + 1).astype(width.dtype)[None]
  step = jnp.where(width <= PROBES, each, fraction(width, share))
  return low + _cast(jnp.clip(step, 1, jnp.maximum(width, 1)), low.dtype)


def fraction(
  width: UInt[Array, "segments 1"], share: Any
) -> UInt[Array, "segments probes"]:
  """Return `share * width` in unsigned integers, from 0 to `width`."""
  # The largest float32 below 2**bits: a conversion beyond it is undefined.
  limit = np.float32(2.0 ** (8 * width.dtype.itemsize))
  limit = np.nextafter(limit, np.float32(0))
  product = jnp.clip(share * width.astype(jnp.float32), 0, limit)
  return jnp.minimum(product.astype(width.dtype), width)


Count = Callable[
  [Int[Array, "segments columns"]], UInt[Array, "segments probes"]
]


def in_loop(count: Count, anchor: Any) -> Count:
  """Return the count, guarded against being moved out of the loop.

  What XLA does: it moves what no pass changes, the keys, out of the loop and
  stores them. What we do: a conditional in the loop, out of which nothing is
  moved; a `switch` over leaves is one. What it saves: 4 bytes per weight. When
  it can go: when that motion weighs memory against arithmetic.

  Args:
    count: the count.
    anchor: the arrays that it reads.

  Returns:
    A function with the results of `count`.
  """

  def guarded(table: Array) -> Array:
    blank = jnp.zeros((table.shape[0], PROBES), COUNT)
    skip = lambda table: vary(blank, (table, anchor))
    run = lambda table: vary(count(table), (table, anchor))
    return lax.cond(jnp.all(State.unpack(table).done), skip, run, table)

  return guarded


def search(
  table: Int[Array, "segments columns"], count: Count
) -> Int[Array, "segments columns"]:
  """Pass until all segments are done.

  Args:
    table: the packed state.
    count: returns how many scores reach each probe of their segment.

  Returns:
    The packed state in which all are done.
  """
  going = lambda table: ~jnp.all(State.unpack(table).done)
  one_pass = lambda table: advance(State.unpack(table), count(table)).pack()
  return lax.while_loop(going, one_pass, table)


class Found(NamedTuple):
  """Thresholds: kept is what is above `level`, or on it and before `cut`."""

  level: Int[Array, " segments"]
  cut: UInt[Array, " segments"]
  finite: Bool[Array, " segments"]


def found(group: Group, table: Int[Array, "segments columns"]) -> Found:
  """Return the thresholds of segments that are done."""
  state = State.unpack(table)
  none, top = state.keep == 0, order.bounds(group.dtype)[1]
  cut = jnp.where(state.by_index, _index(state.low) + 1, state.size)
  finite = state.finite
  if not jnp.issubdtype(group.dtype, jnp.floating):
    finite = jnp.ones_like(finite)
  return Found(
    jnp.where(none, top, state.level), jnp.where(none, 0, cut), finite
  )
