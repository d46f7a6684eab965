# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Visit the leaves of a group: search one segment after the other.

On one device, the keys of a small leaf are copied to an array of one length, so
that one compiled count serves small leaves of all shapes. All other leaves are
counted where they are: one sum over all axes, without a reshape, which the
partitioner turns into local sums and an exchange of `PROBES` numbers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

from jaxpruner.engine import order, search, warm_start
from jaxpruner.engine.leaves import Group, PerSegment, flat_index, row, vary
from jaxpruner.engine.order import Keys
from jaxpruner.engine.search import COUNT, PROBES, Counts, Row
from jaxpruner.engine.warm_start import Hint

COPIED = 1 << 15  # scores of a leaf that is always copied: 128 kB of keys
SAMPLED = 1 << 18  # scores of a segment whose passes cost more than a sample
SAMPLE = 1 << 10
BRANCHES = 1 << 3
_LAST = np.uint32(np.iinfo(np.uint32).max)


def find_thresholds(
  group: Group, keep: PerSegment, hint: Hint | None, is_sharded: bool
) -> list[Array]:
  """Find the thresholds of all segments.

  Args:
    group: the leaves.
    keep: how many to keep of each segment.
    hint: where thresholds were, or None. All scores are then floats of one
      dtype.
    is_sharded: whether leaves may be spread over devices.

  Returns:
    Level, cut and finiteness of each segment. With a hint, the search takes
    the same path on any number of devices.
  """
  sizes, anchor = group.segment_sizes, (group.leaves, keep)
  dtypes = [leaf.dtype for leaf in group.leaves[: len(sizes)]]
  known = np.stack([order.landmarks(dtype) for dtype in dtypes])
  probes = jnp.asarray(known.astype(order.search_dtype(group.key_dtype)))
  guess = None
  if hint is not None:
    guess = warm_start.guess(hint, dtypes[0])
  elif sizes.max() > SAMPLED and not is_sharded:
    guess = _sample(group, keep)
  if guess is not None:
    probes = jnp.concatenate([guess, probes[:, guess.shape[1] :]], 1)
  state = search.start(keep, jnp.asarray(sizes, COUNT), probes, group.key_dtype)
  table, number = vary(state.pack(), anchor), np.uint32(len(group.leaves))
  count_leaf = counter(group, is_sharded)

  def count_all(packed: Array) -> Array:
    add = lambda leaf, sums: sums + count_leaf(leaf, packed)
    zeros = vary(jnp.zeros(PROBES, COUNT), (packed, anchor))
    return lax.fori_loop(np.uint32(0), number, add, zeros)

  def one_leaf(leaf: Array, table: Array) -> Array:
    found = search.search(row(table, leaf), functools.partial(count_leaf, leaf))
    return lax.dynamic_update_index_in_dim(
      table, found, leaf, 0, allow_negative_indices=False
    )

  if group.together:
    table = search.search(table[0], count_all)[None]
  else:
    table = lax.fori_loop(np.uint32(0), number, one_leaf, table)
  level, cut, finite = search.found(table, group.key_dtype)
  is_float = np.array([jnp.issubdtype(d, jnp.floating) for d in dtypes])
  return [level, cut, finite | ~is_float]


def split(sizes: np.ndarray, is_sharded: bool) -> tuple[list[int], list[int]]:
  """Return the leaves that are copied before they are counted, and the others.

  What XLA does: it optimizes every leaf's count by itself, in 20 ms or more,
  even if the kernels are equal. What we do: the keys of small leaves are
  copied to an array of one length, which one kernel counts. What it saves:
  half of the time to compile 60 equal leaves. It costs the memory of one such
  leaf, and at most a pass over padding. When it can go: when XLA does not
  inline calls.
  """
  limit = max(COPIED, int(sizes.sum()) // max(len(sizes), 50))
  is_small = (sizes <= limit) & (not is_sharded)
  return np.flatnonzero(is_small).tolist(), np.flatnonzero(~is_small).tolist()


def counter(group: Group, is_sharded: bool) -> Callable[..., Counts]:
  """Return `count(leaf, packed)`: how many scores of a leaf reach each probe.

  Args:
    group: the leaves.
    is_sharded: whether leaves may be spread over devices.

  Returns:
    A function of the traced leaf index and of the packed state of its segment.
  """
  small, large = split(group.sizes, is_sharded)
  length = int(group.sizes[small].max(initial=0))
  # Of each leaf: its place, small ones first; its offset; its size.
  facts = np.stack([np.argsort(small + large), group.offsets, group.sizes], 1)
  facts = facts.astype(np.uint32)

  def copy(leaf: int) -> Int[Array, " length"]:
    keys = group.keys(group.leaves[leaf]).reshape(-1)
    lowest = np.iinfo(keys.dtype).min  # no probe is as low
    return jnp.pad(keys, (0, length - keys.size), constant_values=lowest)

  def from_copy(packed: Array, fact: Array) -> list[Array]:
    keys = switch(fact[0], [functools.partial(copy, leaf) for leaf in small])
    index = flat_index(keys.shape)
    # Padding gets an index whose key is below all probes.
    index = jnp.where(index < fact[2], index + fact[1], _LAST)
    return search.reached(keys, index, packed, None, COUNT)

  def large_leaf(packed: Array, offset: Array, leaf: int) -> list[Array]:
    count: Callable[..., list[Array]] = lambda by_index: _count_leaf(
      group.keys(group.leaves[leaf]), packed, offset, by_index, is_sharded
    )
    if group.key_dtype.itemsize > 2 and len(group.leaves) > 1:
      return count(None)
    # Keys of 16 bits are compared as such, twice as many at once as indices.
    # And what XLA does: it moves what no pass changes, the keys, out of the
    # loop and stores them. What we do: a conditional in the loop, out of which
    # nothing is moved; a `switch` over leaves is one. What it saves: 4 bytes
    # per weight. When it can go: when that motion weighs memory.
    return lax.cond(
      search.unpack(packed).by_index,
      lambda: count(True),
      lambda: count(False),
    )

  def in_place(packed: Array, fact: Array) -> list[Array]:
    run = functools.partial(large_leaf, packed, fact[1])
    place = fact[0] - np.uint32(len(small))
    return switch(place, [functools.partial(run, leaf) for leaf in large])

  def count(leaf: Any, packed: Array) -> Array:
    fact = row(jnp.asarray(facts), leaf)
    if not (small and large):
      return jnp.stack((from_copy if small else in_place)(packed, fact))
    is_small = fact[0] < len(small)
    return jnp.stack(lax.cond(is_small, from_copy, in_place, packed, fact))

  return count


def switch(place: Array, branches: list[Callable[[], Any]]) -> Any:
  """Return `branches[place]()` for a traced place.

  What JAX does: it hands every branch the inputs of all, of a hundred leaves
  ten thousand. What we do: a tree of switches of `BRANCHES`. What it saves:
  seconds of tracing and lowering for hundreds of leaves. When it can go: when
  a branch is given only what it reads.
  """
  if len(branches) == 1:
    return branches[0]()
  step = BRANCHES ** int(math.log(len(branches) - 1, BRANCHES))
  parts = [branches[i : i + step] for i in range(0, len(branches), step)]
  rest = lax.rem(place, np.uint32(step))
  branch = lax.div(place, np.uint32(step)).astype(np.int32)
  return lax.switch(branch, [functools.partial(switch, rest, p) for p in parts])


def _rows(size: int) -> int:
  """Return in how many rows to see a leaf: threads share them."""
  near = range(math.isqrt(size) if size > search.ONE_THREAD else 0, 7, -1)
  return next((rows for rows in near if size % rows == 0), 1)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _count_leaf(
  keys: Keys,
  packed: Row,
  offset: Array,
  by_index: bool | None,
  is_sharded: bool,
) -> list[Array]:
  """Count how many keys of a leaf reach each probe, where they are.

  Args:
    keys: the keys of the leaf.
    packed: the packed state of its segment.
    offset: the index in the segment at which the leaf starts.
    by_index: as in `search.reached`.
    is_sharded: whether the leaf may be spread over devices.
  """
  rows = _rows(keys.size)
  if not is_sharded:
    keys = keys.reshape(rows, -1) if rows > 1 else keys.reshape(-1)
  is_narrow = keys.dtype.itemsize <= 2 and math.prod(keys.shape[-1:]) < 1 << 16
  word = jnp.uint16 if is_narrow else COUNT
  index = flat_index(keys.shape) + offset
  word = None if is_sharded else word
  return search.reached(keys, index, packed, by_index, word)


# Where the first probes go, in standard deviations of the sample's rank.
_FIRST = np.array([3.5, 0.9, -0.9, -3.5], np.float32)


def _sample(group: Group, keep: PerSegment) -> Int[Array, "segments probes-2"]:
  """Return keys around the threshold of a sample."""
  sizes, kind = group.segment_sizes, order.search_dtype(group.key_dtype)
  wanted = max(SAMPLE, 2 * math.isqrt(int(sizes.mean())))
  strides = np.broadcast_to(np.maximum(sizes // wanted, 1), len(group.leaves))
  parts = [
    group.keys(leaf).reshape(-1)[:: int(stride)].astype(kind)
    for leaf, stride in zip(group.leaves, strides, strict=True)
  ]
  parts = [jnp.concatenate(parts)] if group.together else parts
  taken = np.array([part.size for part in parts])
  lowest, width = np.iinfo(kind).min, int(taken.max())
  pad = lambda x: jnp.pad(x, (width - x.size, 0), constant_values=lowest)
  sample = jnp.sort(jnp.stack([pad(part) for part in parts]), 1)
  share = keep.astype(jnp.float32) / sizes.astype(np.float32)
  spread = jnp.sqrt(taken * share * (1 - share)) + 1
  ranks = (share * taken)[:, None] + spread[:, None] * _FIRST
  # Ranks are from the top.
  place = (width - jnp.clip(ranks, 1, taken[:, None])).astype(np.int32)
  return jnp.take_along_axis(sample, place, 1, mode="promise_in_bounds")
