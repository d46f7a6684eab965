# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Count on one device: leaf after leaf, small ones from a copy.

The keys of a small leaf are copied to an array of one length, so that one
compiled count serves small leaves of all shapes; a large leaf is counted where
it is, and equal leaves share the compiled count. A strided, sorted sample says
where to look first.
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

FETCHED = 1 << 15  # scores of a leaf that is always copied: 128 kB of keys
SAMPLE = 1 << 10
BRANCHES = 1 << 3


def _rows(size: int) -> int:
  """Return in how many rows to see a leaf: threads share them."""
  near = range(math.isqrt(size), 7, -1)
  return next((rows for rows in near if size % rows == 0), 1)


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


@jax.jit
def _count_leaf(
  keys: Int[Array, "..."],
  row: Int[Array, "1 columns"],
  offset: UInt[Array, ""],
  size: UInt[Array, ""] | None = None,
) -> UInt[Array, " probes"]:
  """Count how many keys of a leaf reach each probe.

  Args:
    keys: the keys of the leaf, perhaps padded.
    row: the packed state of its segment.
    offset: the index in the segment at which the leaf starts.
    size: of the leaf without its padding, needed where other leaves follow it
      in the segment: padding must not have their indices.
  """
  shape = _rows(keys.size), keys.size // _rows(keys.size)
  index = flat_index(shape)
  last = np.uint32(np.iinfo(np.uint32).max)  # its index key is below all probes
  if size is None:
    index += offset
  else:
    index = jnp.where(index < size, index + offset, last)
  ranks = search.ranked(keys.reshape(shape), index, row)
  return jnp.sum(jnp.stack(search.reached(ranks, row, (1,))), 1, dtype=COUNT)


def _fetched(group: Group) -> tuple[list[int], int]:
  """Return the leaves that are copied before they are counted, and a length.

  What XLA does: it optimizes every leaf's count by itself, in 20 ms or more,
  even if the kernels are equal. What we do: the keys of small leaves are copied
  to an array of one length, which one kernel counts. What it saves: half of the
  time to compile 60 equal leaves. It costs the memory of one such leaf, and at
  most a pass over padding. When it can go: when XLA does not inline calls.
  """
  sizes = group.sizes
  most = max(FETCHED, int(sizes.sum()) // max(len(sizes), 50))
  ids = np.flatnonzero(sizes <= most).tolist()
  return ids, int(sizes[ids].max()) if ids else 0


def _counter(group: Group, inputs: list[tuple[Array, ...]]) -> search.Count:
  number = len(group.leaves)
  small, length = _fetched(group)
  large = [i for i in range(number) if i not in set(small)]
  # Of each leaf: its offset in the segment, whether it is fetched, its place
  # among those that are, or those that are not, and its size.
  facts = np.zeros((number, 4), np.uint32)
  facts[:, 0], facts[:, 3] = group.offsets, group.sizes
  facts[small, 1] = 1
  facts[small, 2], facts[large, 2] = (
    np.arange(len(small)),
    np.arange(len(large)),
  )

  def fetch(place: int) -> Int[Array, " length"]:
    keys = group.leaves[small[place]].keys(inputs[small[place]]).reshape(-1)
    lowest = np.iinfo(keys.dtype).min  # no probe is as low
    return jnp.pad(keys, (0, length - keys.size), constant_values=lowest)

  def direct(place: int, row: Array, fact: Array) -> Array:
    keys = group.leaves[large[place]].keys(inputs[large[place]])
    return _count_leaf(keys, row, fact[0])

  def count_large(row: Array, fact: Array) -> Array:
    return switch(fact[2], direct, len(large), row, fact)

  def count_small(row: Array, fact: Array) -> Array:
    keys = switch(fact[2], fetch, len(small))
    return _count_leaf(keys, row, fact[0], fact[3] if group.together else None)

  def count_any(row: Array, fact: Array) -> Array:
    if not large:
      return count_small(row, fact)
    if not small:
      return count_large(row, fact)
    return lax.cond(fact[1] == 1, count_small, count_large, row, fact)

  def count(table: Array) -> UInt[Array, "leaves probes"]:
    done = search.State.unpack(table).done
    pick = lambda x, i: lax.dynamic_slice_in_dim(x, i, 1)

    def turn(leaf: Array, counts: Array) -> Array:
      segment = np.uint32(0) if group.together else leaf

      def visit(counts: Array) -> Array:
        fact = pick(jnp.asarray(facts), leaf)[0]
        row = count_any(pick(table, segment), fact)
        return lax.dynamic_update_index_in_dim(counts, row, leaf, 0)

      return lax.cond(pick(done, segment)[0], lambda c: c, visit, counts)

    blank = vary(jnp.zeros((number, PROBES), COUNT), (table, inputs))
    return lax.fori_loop(np.uint32(0), np.uint32(number), turn, blank)

  return count


def _sample(
  group: Group, inputs: list[tuple[Array, ...]], keep: UInt[Array, " segments"]
) -> Int[Array, "segments 6"]:
  """Return keys around the threshold of a sample."""
  sizes = group.segment_sizes
  wanted = max(SAMPLE, 2 * math.isqrt(int(sizes.mean())))
  strides = np.maximum(sizes // wanted, 1)[group.segments]
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


def find_thresholds(
  group: Group,
  inputs: list[tuple[Array, ...]],
  keep: UInt[Array, " segments"],
  hint: Float[Array, "leaves 3"] | None,
) -> search.Found:
  """Find the thresholds of leaves on one device."""
  if hint is None:
    guess = _sample(group, inputs, keep)
  else:
    guess = warm_start.guess(hint, group.dtype)
  return search.search(group, _counter(group, inputs), keep, guess, inputs)
