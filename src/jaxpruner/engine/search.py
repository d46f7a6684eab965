# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Find a threshold by counting: bracket, probes, and the cut among ties.

A *segment* is what is ranked in one order: a leaf, or all leaves together. Its
*bracket* holds the keys between which the threshold lies. A *pass* counts how
many scores of the segment reach each of `PROBES` keys inside the bracket, and
narrows it. If the bracket has one key left, with more scores on it than may be
kept, the same search goes on over indices: among equal scores, an element's key
is its index, the first the highest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int, UInt

from jaxpruner.engine.leaves import Indices, PerSegment
from jaxpruner.engine.order import Keys

PROBES = 6
COUNT = jnp.uint32
Row: TypeAlias = Int[Array, "*segments columns"]  # a packed `State`
Counts: TypeAlias = UInt[Array, " probes"]
# After so many passes of interpolation, probes are spread evenly: then every
# pass leaves a sixth of the bracket.
PATIENCE = 24
# More passes than any search needs: an error ends in a wrong mask, not never.
LIMIT = 128


class State(NamedTuple):
  """The search of a segment between two passes.

  Attributes:
    reach: how many scores reach `low`.
    beyond: how many scores are above `high`.
    keep: how many to keep; if `by_index`, how many of the ties.
    size: how many scores there are.
    by_index: whether the key is found, and the cut among its ties is searched;
      bracket and probes are then index keys.
    evenly: whether the probes were spread evenly, not by interpolation.
    finite: whether all scores are finite; known after the first pass.
    low: a key that at least as many scores reach as are kept.
    high: a key above which fewer are than are kept.
    level: the key found so far; final once `by_index`.
    passes: how many passes were made.
    probes: what the next pass counts; inside the bracket.
  """

  reach: UInt[Array, "*segments"]
  beyond: UInt[Array, "*segments"]
  keep: UInt[Array, "*segments"]
  size: UInt[Array, "*segments"]
  by_index: Bool[Array, "*segments"]
  evenly: Bool[Array, "*segments"]
  finite: Bool[Array, "*segments"]
  low: Int[Array, "*segments"]
  high: Int[Array, "*segments"]
  level: Int[Array, "*segments"]
  passes: Int[Array, "*segments"]
  probes: Int[Array, "*segments probes"]

  @property
  def done(self) -> Bool[Array, "*segments"]:
    """Whether nothing is left to search."""
    found = (self.reach == self.keep) | (self.keep == 0)
    return ((self.passes > 0) & found) | (self.passes >= LIMIT)

  def pack(self) -> Row:
    """Return the state as one array.

    What XLA does: on small arrays, every value that a loop carries is a kernel
    of its own, of 12 ms to compile. What we do: one array. What it saves: 12
    kernels. When it can go: when loop fusions have several results.
    """
    *columns, probes = self
    none = [(0, 0)] * (probes.ndim - 1)
    packed = jnp.pad(probes, [*none, (len(columns), 0)])
    number = np.arange(packed.shape[-1])
    for i, column in enumerate(columns):
      entry = _cast(column, packed.dtype)[..., None]
      packed = jnp.where(number == i, entry, packed)
    return packed


@jax.jit
def unpack(packed: Row) -> State:
  """Return the state that was packed; a call, so that it is lowered once."""
  last = len(State._fields) - 1
  columns = [lax.index_in_dim(packed, i, -1, False) for i in range(last)]
  counts = [_cast(x, COUNT) for x in columns[:4]]
  flags = [x != 0 for x in columns[4:7]]
  return State._make([*counts, *flags, *columns[7:], packed[..., last:]])


def _cast(x: Array, dtype: Any) -> Array:
  """Convert integers; those of equal width wrap around."""
  if x.dtype.itemsize == jnp.dtype(dtype).itemsize:
    return lax.bitcast_convert_type(x, dtype)
  return x.astype(dtype)


def index_key(index: Indices, dtype: Any) -> Keys:
  """Return keys of indices, the first the highest; they wrap around."""
  return jnp.dtype(dtype).type(np.iinfo(dtype).max) - _cast(index, dtype)


def start(
  keep: PerSegment, size: PerSegment, probes: Array, key_dtype: Any
) -> State:
  """Return brackets that exclude nothing, and the probes of the first pass.

  Args:
    keep: how many to keep, up to the size of the segment.
    size: how many scores there are.
    probes: keys to look at first; the last two tell what is finite.
    key_dtype: of the keys.

  Returns:
    The state.
  """
  info, kind = np.iinfo(key_dtype), probes.dtype.type
  low, high = (jnp.full_like(keep, x, kind) for x in (info.min, info.max))
  probes = jnp.clip(probes, kind(info.min + 1), kind(info.max))
  counts = size, jnp.zeros_like(size), keep, size
  yes, none = jnp.full_like(keep, True, jnp.bool_), jnp.zeros_like(low)
  return State(*counts, ~yes, yes, yes, low, high, low, none, probes)


def reached(
  keys: Keys, index: Indices, packed: Row, by_index: bool | None, word: Any
) -> list[Array]:
  """Count the elements that reach each probe of their segment.

  Args:
    keys: keys of scores.
    index: their indices in the segment.
    packed: the packed state of the segment.
    by_index: that of the state, if known.
    word: as in `totals`.

  Returns:
    A count per probe.
  """
  state = unpack(packed)
  is_tied = state.by_index if by_index is None else by_index
  rank = index_key(index, packed.dtype)
  tied = keys == state.level.astype(keys.dtype)
  # Other elements get the lowest key, which no probe has.
  ties = jnp.where(tied, rank, packed.dtype.type(np.iinfo(packed.dtype).min))
  # ">" is one vector operation, ">=" is two.
  before = state.probes - 1
  # The compiler makes a loop of its own of each case.
  hits = [
    jnp.where(is_tied, ties > limit, keys > limit.astype(keys.dtype))
    for limit in (before[p] for p in range(PROBES))
  ]
  return totals(hits, word)


# Up to this size, one thread sums faster than two kernels compile.
ONE_THREAD = 1 << 18


def totals(values: list[Array], word: Any = COUNT) -> list[Array]:
  """Sum each of two or more arrays of one shape, in one pass.

  What XLA does: it stores the operand of a long one-operand reduction, as wide
  as the sum, and gives a reduction to a scalar to one thread. What we do: one
  reduction of two operands or more; if they are large, the last axis first.
  What it saves: 4 bytes per entry of temporary memory, and half of the time on
  two cores. When it can go: when XLA does neither.

  Args:
    values: bools or small unsigned integers.
    word: a dtype that holds the sums over the last axis; None sums over all
      axes at once, so that only totals cross devices.

  Returns:
    The sums, as `COUNT`.
  """
  add: Callable[..., list[Any]] = lambda a, b: [*map(jnp.add, a, b)]

  def sums(values: list[Array], dtype: Any, axes: tuple[int, ...]) -> list[Any]:
    values = [v.astype(dtype) for v in values]
    zeros = [np.zeros((), dtype)] * len(values)
    return lax.reduce(values, zeros, add, axes) if axes else values

  axes = tuple(range(values[0].ndim))
  if word is not None and values[0].size > ONE_THREAD and len(axes) > 1:
    values, axes = sums(values, word, axes[-1:]), axes[:-1]
  return sums(values, COUNT, axes)


@jax.jit
def count_true(which: Bool[Array, "*shape"]) -> UInt[Array, ""]:
  """Count the true entries of an array; the others too, for `totals`."""
  ones, zeros = totals([which, ~which])
  return jnp.minimum(ones, which.size - zeros)


def advance(state: State, counts: Counts) -> State:
  """Return the state after a pass.

  Args:
    state: the state before it.
    counts: how many scores reach each probe; if `by_index`, how many ties.

  Returns:
    The state, with a narrower bracket and new probes. A bracket that is not
    done has shrunk, whatever the probes inside it were.
  """
  finite = (counts[-2] == state.size) & (counts[-1] == 0)
  new = _narrow(state, counts)
  new = new._replace(
    level=jnp.where(state.by_index, state.level, new.low),
    finite=jnp.where(state.passes == 0, finite, state.finite),
    passes=state.passes + 1,
  )
  inside, previous = new.reach - new.beyond, state.reach - state.beyond
  tied = ~new.done & (new.low == new.high)
  # If interpolation did little, the next probes are spread evenly, so that no
  # distribution of scores takes many passes.
  evenly = ~state.evenly & ~tied & (inside > previous // 4)
  last = index_key(state.size - 1, new.low.dtype)
  new = new._replace(
    low=jnp.where(tied, last, new.low),
    high=jnp.where(tied, np.iinfo(last.dtype).max, new.high),
    reach=jnp.where(tied, inside, new.reach),
    beyond=jnp.where(tied, 0, new.beyond),
    keep=state.keep - jnp.where(tied, new.beyond, 0),
    by_index=state.by_index | tied,
    evenly=evenly | (state.passes >= PATIENCE),
  )
  return new._replace(probes=_next_probes(new))


def _narrow(state: State, counts: Counts) -> State:
  """Move the bounds to the probes nearest to the threshold."""
  enough = counts >= state.keep
  # The best of each in one reduction: one kernel to compile, not four. The
  # largest complement is that of the smallest.
  offers = [
    jnp.where(enough, state.probes, state.low),
    ~jnp.where(enough, state.high, state.probes - 1),
    ~jnp.where(enough, counts, state.reach),
    jnp.where(enough, state.beyond, counts),
  ]
  worst = [x.dtype.type(np.iinfo(x.dtype).min) for x in offers]
  best: Callable[..., Any] = lambda a, b: [*map(jnp.maximum, a, b)]
  low, high, reach, beyond = lax.reduce(offers, worst, best, (0,))
  return state._replace(low=low, high=~high, reach=~reach, beyond=beyond)


# Where the next probes go, in standard deviations from the expected threshold.
_AWAY = np.array([-4, -1.5, -0.4, 0.4, 1.5, 4], np.float32)
# And at least so many keys from there.
_APART = np.array([-2, -1, 0, 1, 2, 3])
# The first is next to the lower end: many scores may be equal to that.
_EVEN = np.arange(PROBES, dtype=np.float32) / PROBES


def _next_probes(state: State) -> Int[Array, " probes"]:
  """Return probes in `(low, high]`, around the expected threshold."""
  unsigned = f"uint{8 * state.low.dtype.itemsize}"
  width = _cast(state.high - state.low, unsigned)
  inside = jnp.maximum((state.reach - state.beyond).astype(jnp.float32), 1)
  above = (state.reach - state.keep).astype(jnp.float32)
  # If the keys are spread evenly in the bracket, the one that `above` of them
  # exceed has this variance, counted in keys; and some more, because they are
  # not spread evenly. Products only: a quotient would be rounded in another way
  # where it is compiled for another layout.
  inverse = 1 / inside
  variance = above * (inside - above) * inverse
  variance *= 1 + variance * np.float32(2**-12)
  away = jnp.sqrt(_AWAY**2 * jnp.maximum(variance, np.float32(0.25)))

  def key_at(share: Any) -> UInt[Array, "..."]:
    # Below 1, or the product may be 2**bits, which is no integer of `width`.
    share = jnp.clip(share, 0, np.float32(1 - 2**-24))
    return (share * width.astype(jnp.float32)).astype(width.dtype)

  step = key_at((above + away * np.sign(_AWAY)) * inverse)
  # Where it wraps around, the other one is taken.
  near = key_at(above * inverse) + _APART.astype(width.dtype)
  step = jnp.where(_APART > 0, jnp.maximum(step, near), jnp.minimum(step, near))
  step = jnp.where(state.evenly, key_at(_EVEN), step)
  # A bracket this narrow is counted value by value.
  each = np.arange(1, PROBES + 1).astype(width.dtype)
  step = jnp.where(width <= PROBES, each, step)
  step = jnp.clip(step, 1, jnp.maximum(width, 1))
  return state.low + _cast(step, state.low.dtype)


def search(packed: Row, count: Callable[[Row], Counts]) -> Row:
  """Pass until the segment is done.

  Args:
    packed: the packed state.
    count: returns how many scores reach each probe.

  Returns:
    The packed state that is done.
  """
  going = lambda packed: ~unpack(packed).done
  one_pass = lambda packed: advance(unpack(packed), count(packed)).pack()
  return lax.while_loop(going, one_pass, packed)


def found(table: Row, key_dtype: Any) -> list[Array]:
  """Return level, cut and finiteness of segments that are done.

  Kept is what is above the level, or on it and before the cut.
  """
  state = unpack(table)
  cut = _cast(np.iinfo(table.dtype).max - state.low, COUNT) + 1
  cut = jnp.where(state.by_index, cut, state.size)
  is_empty = state.keep == 0
  level = jnp.where(is_empty, np.iinfo(key_dtype).max, state.level)
  return [level, jnp.where(is_empty, 0, cut), state.finite]
