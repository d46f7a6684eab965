# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Count on one device: segment after segment, small leaves from a copy.

The keys of a small leaf are copied to an array of one length, so that one
compiled count serves small leaves of all shapes; a large leaf is counted where
it is, and equal leaves share the compiled count. For the largest, a strided,
sorted sample says where to look first.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, UInt

from jaxpruner.engine import order, search, warm_start
from jaxpruner.engine.leaves import Group, flat_index, vary
from jaxpruner.engine.search import COUNT, PROBES

COPIED = 1 << 15  # scores of a leaf that is always copied: 128 kB of keys
SAMPLED = 1 << 18  # scores of a segment whose passes cost more than a sample
SAMPLE = 1 << 10
BRANCHES = 1 << 3


def find_thresholds(
  group: Group,
  inputs: list[tuple[Array, ...]],
  keep: UInt[Array, " segments"],
  hint: Float[Array, "leaves 3"] | None,
) -> search.Found:
  """Find the thresholds of leaves on one device."""
  if hint is not None:
    guess = warm_start.guess(hint, group.dtype)
  elif group.segment_sizes.max() > SAMPLED:
    guess = _sample(group, inputs, keep)
  else:
    guess = search.even_guess(group)
  table = vary(search.start(group, keep, guess).pack(), (inputs, keep))
  counter, number = Counter(group, inputs), len(group.leaves)

  def count_all(row: Array) -> Array:
    add = lambda leaf, sums: sums + counter.count(leaf, row)
    zeros = vary(jnp.zeros((1, PROBES), COUNT), (row, inputs))
    return lax.fori_loop(0, number, add, zeros)

  def one_leaf(leaf: Array, table: Array) -> Array:
    row = lax.dynamic_slice_in_dim(table, leaf, 1)
    row = search.search(row, functools.partial(counter.count, leaf))
    return lax.dynamic_update_slice_in_dim(table, row, leaf, 0)

  if number == 1:
    count = functools.partial(counter.count, 0)
    table = search.search(table, search.in_loop(count, inputs))
  elif group.together:
    table = search.search(table, count_all)
  else:
    table = lax.fori_loop(0, number, one_leaf, table)
  return search.found(group, table)


class Counter:
  """Counts the leaves of a group, each by its traced number.

  Attributes:
    small: the leaves that are copied before they are counted.
    large: all others.
    length: to which the copies are padded.
  """

  def __init__(self, group: Group, inputs: list[tuple[Array, ...]]):
    """Decide which leaves are copied.

    What XLA does: it optimizes every leaf's count by itself, in 20 ms or more,
    even if the kernels are equal. What we do: the keys of small leaves are
    copied to an array of one length, which one kernel counts. What it saves:
    half of the time to compile 60 equal leaves. It costs the memory of one such
    leaf, and at most a pass over padding. When it can go: when XLA does not
    inline calls.
    """
    sizes = group.sizes
    most = max(COPIED, int(sizes.sum()) // max(len(sizes), 50))
    self.small = np.flatnonzero(sizes <= most).tolist()
    self.large = np.flatnonzero(sizes > most).tolist()
    self.length = int(sizes[self.small].max(initial=0))
    self._group, self._inputs = group, inputs

  def count(
    self, leaf: Int[Array, ""] | int, row: Int[Array, "1 columns"]
  ) -> UInt[Array, "1 probes"]:
    """Count how many scores of a leaf reach each probe of its segment."""
    group = self._group
    place = np.zeros(len(group.leaves), np.uint32)
    for ids in (self.small, self.large):
      place[ids] = np.arange(len(ids))
    # Of each leaf: its place, whether it is copied, its offset, its size.
    is_small = group.sizes <= self.length
    facts = np.stack([place, is_small, group.offsets, group.sizes], 1)
    facts = jnp.asarray(facts.astype(np.uint32))
    fact = lax.dynamic_index_in_dim(facts, leaf, keepdims=False)

    def from_copy(row: Array, fact: Array) -> Array:
      keys = switch(fact[0], self._copy, len(self.small))
      size = fact[3] if group.together else None
      return _count_leaf(keys, row, fact[2], size)

    def in_place(row: Array, fact: Array) -> Array:
      return switch(fact[0], self._count_large, len(self.large), row, fact)

    if not self.large:
      return from_copy(row, fact)
    if not self.small:
      return in_place(row, fact)
    return lax.cond(fact[1] == 1, from_copy, in_place, row, fact)

  def _copy(self, place: int) -> Int[Array, " length"]:
    leaf = self.small[place]
    keys = self._group.leaves[leaf].keys(self._inputs[leaf]).reshape(-1)
    lowest = np.iinfo(keys.dtype).min  # no probe is as low
    rest = self.length - keys.size
    return jnp.pad(keys, (0, rest), constant_values=lowest)

  def _count_large(self, place: int, row: Array, fact: Array) -> Array:
    leaf = self.large[place]
    keys = self._group.leaves[leaf].keys(self._inputs[leaf])
    return _count_leaf(keys, row, fact[2])


def switch(
  leaf: Array, run: Callable[..., Any], number: int, *args: Any
) -> Any:
  """Return `run(i, *args)` for the traced leaf index `leaf`.

  What JAX does: it hands every branch the inputs of all, of a hundred leaves
  ten thousand. What we do: a tree of switches of `BRANCHES`. What it saves:
  seconds of tracing and lowering for hundreds of leaves. When it can go: when
  a branch is given only what it reads.
  """
  bits = BRANCHES.bit_length() - 1

  def tree(first: int, level: int) -> Callable[..., Any]:
    if not level:
      return functools.partial(run, first)
    step = BRANCHES ** (level - 1)
    end = min(first + step * BRANCHES, number)
    branches = [tree(i, level - 1) for i in range(first, end, step)]
    branch = (leaf >> np.uint32(bits * (level - 1))) & np.uint32(BRANCHES - 1)
    if len(branches) == 1:
      return branches[0]
    return lambda *args: lax.switch(branch.astype(np.int32), branches, *args)

  return tree(0, -(-(number - 1).bit_length() // bits))(*args)


def _rows(size: int) -> int:
  """Return in how many rows to see a leaf: threads share them."""
  if size <= search.ONE_THREAD:
    return 1
  near = range(math.isqrt(size), 7, -1)
  return next((rows for rows in near if size % rows == 0), 1)


@jax.jit
def _count_leaf(
  keys: Int[Array, "..."],
  row: Int[Array, "1 columns"],
  offset: UInt[Array, ""],
  size: UInt[Array, ""] | None = None,
) -> UInt[Array, "1 probes"]:
  """Count how many keys of a leaf reach each probe.

  Args:
    keys: the keys of the leaf, perhaps padded.
    row: the packed state of its segment.
    offset: the index in the segment at which the leaf starts.
    size: of the leaf without its padding, needed where other leaves follow it
      in the segment: padding must not have their indices.
  """
  rows = _rows(keys.size)
  keys = keys.reshape(rows, -1) if rows > 1 else keys.reshape(-1)
  index = flat_index(keys.shape)
  last = np.uint32(np.iinfo(np.uint32).max)  # its index key is below all probes
  if size is None:
    index += offset
  else:
    index = jnp.where(index < size, index + offset, last)
  return jnp.stack(search.totals(search.reached(keys, index, row)))[None]


def _sample(
  group: Group, inputs: list[tuple[Array, ...]], keep: UInt[Array, " segments"]
) -> Int[Array, "segments 6"]:
  """Return keys around the threshold of a sample."""
  sizes = group.segment_sizes
  wanted = max(SAMPLE, 2 * math.isqrt(int(sizes.mean())))
  strides = np.maximum(sizes // wanted, 1)
  strides = np.broadcast_to(strides, len(group.leaves))
  parts = [
    leaf.keys(x).reshape(-1)[:: int(stride)]
    for leaf, x, stride in zip(group.leaves, inputs, strides, strict=True)
  ]
  low = order.bounds(group.dtype)[0]
  if group.together:
    taken = np.array([sum(part.size for part in parts)])
    sample = jnp.concatenate(parts)[None]
  else:
    taken = np.array([part.size for part in parts])
    width = int(taken.max())
    pad = lambda x: jnp.pad(x, (0, width - x.size), constant_values=low)
    sample = jnp.stack([pad(part) for part in parts])
  sample = jnp.sort(sample, 1)
  real = taken.astype(np.float32)
  share = keep.astype(jnp.float32) / sizes.astype(np.float32)
  # The threshold lies within 3.5 standard deviations, as good as always.
  spread = 3.5 * jnp.sqrt(real * share * (1 - share)) + 2
  ranks = (share * real)[:, None] + spread[:, None] * _FROM_RANK
  # Ranks are from the top.
  place = sample.shape[1] - jnp.clip(ranks, 1, real[:, None])
  ends = jnp.take_along_axis(
    sample, place.astype(np.int32), 1, mode="promise_in_bounds"
  )
  low, high = ends[:, :1], ends[:, 1:]
  unsigned = jnp.dtype(f"uint{8 * low.dtype.itemsize}")
  width = lax.bitcast_convert_type(high - low, unsigned)
  step = search.fraction(width, _FIRST)
  step = jnp.maximum(step, np.arange(_FIRST.size).astype(unsigned)[None])
  return low + lax.bitcast_convert_type(step, low.dtype)


_FROM_RANK = np.array([[1, -1]], np.float32)
# Where the first probes go between the two ends: closer where the threshold is
# likelier.
_FIRST = np.array([[0, 0.27, 0.43, 0.57, 0.73, 1]], np.float32)
