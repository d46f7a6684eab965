"""Select where scores may be sharded: only counters cross devices.

Each pass is one sum over all axes of a leaf, without a reshape, which the
partitioner turns into local sums and an exchange of `PROBES` numbers. Ties are
found by a second counting search, in which an element's score is its index.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner.engine import search as sel
from jaxpruner.engine import warm_start as _trails
from jaxpruner.engine.search import COUNT, PROBES, Bracket, Plan, Selected, at

_LAST = np.int32(np.iinfo(np.int32).max)


def _rank(shape: tuple[int, ...]) -> Array:
  """Images of the flat index, highest first."""
  return _LAST - lax.bitcast_convert_type(sel.flat_index(shape), jnp.int32)


def _counter(plan: Plan, segments: np.ndarray, ranked):
  """A `count` for `sel.search`; `ranked(i)` -> (scores, which of them)."""

  def count(probes, active, carry):
    def run(probes):
      counts = []
      for i, leaf in enumerate(plan.leaves):
        scores, among = ranked(i)
        levels = at(probes, int(segments[i]))
        hits = [among & (scores >= at(levels, p)) for p in range(PROBES)]
        hits = [h.astype(COUNT) for h in hits]
        axes = tuple(range(len(leaf.shape)))
        counts.append(jnp.stack(sel.sums(hits, axes)))
      return sel.vary(jnp.stack(counts), (probes, plan.inputs))

    # Inside a conditional nothing is hoisted out of the loop, where it would
    # be stored.
    blank = jnp.zeros((len(plan.leaves), PROBES), COUNT)
    skip = lambda probes: sel.vary(blank, (probes, plan.inputs))
    counts = lax.cond(jnp.any(active), run, skip, probes)
    return counts, np.float32(0), carry

  return count


def select(plan: Plan, ones: Array, trails: Array | None, dtype) -> Selected:
  """Keep `ones` [S] per segment, of leaves of any sharding."""
  whole = plan.whole(jnp.asarray(plan.sizes, COUNT))
  wanted = jnp.maximum(ones, 1)
  count_leaves = _counter(
    plan, plan.segments, lambda i: (plan.image(i), np.True_)
  )

  def count(probes, active, carry):
    counts, room, carry = count_leaves(probes, active, carry)
    return plan.per_segment(counts), room, carry

  first = None if trails is None else _trails.probes(trails, plan.dtype)
  bracket, _ = sel.search(
    count, wanted, whole, whole.high, anchor=plan.inputs, first=first
  )
  sizes = jnp.asarray(plan.leaf_sizes)
  low = bracket.low[plan.segments]
  tied = (bracket.reach != wanted)[plan.segments]

  def equal(i):
    scores = plan.image(i)
    return scores == at(low, i)

  def cut():
    every = np.arange(len(plan.leaves))
    ranked = lambda i: (_rank(plan.leaves[i].shape), equal(i))
    count = _counter(plan, every, ranked)
    first = _LAST - lax.bitcast_convert_type(sizes - 1, jnp.int32)
    last = jnp.full_like(first, _LAST)
    ends = jnp.tile(first[:, None], PROBES)
    ties = count(ends, tied, None)[0][:, 0]
    kept = (wanted - bracket.beyond)[plan.segments]
    if plan.together:
      kept = sel.split_ties(kept, ties)
    # Nothing to search for where all ties are kept, or none.
    some = tied & (kept > 0) & (kept < ties)
    start = Bracket(first, last, jnp.where(some, ties, 1), jnp.zeros_like(ties))
    found, _ = sel.search(
      count, jnp.where(some, kept, 1), start, last, anchor=plan.inputs
    )
    end = lax.bitcast_convert_type(_LAST - found.low, COUNT) + 1
    return jnp.where(some, end, jnp.where(tied & (kept == 0), 0, sizes))

  keep_all = lambda: sel.vary(sizes, (tied, plan.inputs))
  cuts = lax.cond(jnp.any(tied), cut, keep_all)
  levels = jnp.where(ones == 0, whole.high, bracket.low)
  cuts = jnp.where((ones == 0)[plan.segments], 0, cuts)
  found = plan.masks(levels[plan.segments], cuts, dtype)
  return Selected(found, plan.finite(), _least(plan, levels, trails))


def _least(plan: Plan, levels: Array, trails: Array | None) -> Array:
  """The least images that reach the levels [S], which may be in between."""
  if trails is None:
    return levels
  top = sel.bounds(plan.dtype)[1]

  def least(i):
    image = plan.image(i)
    return jnp.min(jnp.where(image >= at(levels, i), image, top))

  return jnp.stack([least(i) for i in range(len(plan.leaves))])
