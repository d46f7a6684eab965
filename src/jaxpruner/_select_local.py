"""Select on one device: scores seen as a matrix, counted row by row.

A strided sample brackets the thresholds first; leaves no larger than their
sample are solved there. Then passes over the large leaves count per row, so
that the last pass also tells the row in which ties are cut: cutting them takes
one row, not another pass.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner import _select_many
from jaxpruner import _selection as sel
from jaxpruner._recipe import Recipe
from jaxpruner._selection import COUNT, PROBES, Bracket, Plan, at

_RUN = 16  # neighbours a sample takes together: a cache line of float32
_COMPARISONS = 1 << 22  # so many take about a millisecond
_FEW = 8  # leaves; more would take too long to compile each by itself
_SMALL = 1 << 25  # weights ranked together; more must take no extra memory
_GROUPS = 8  # of leaves; a group whose thresholds are known costs nothing


def _sample(plan: Plan) -> tuple[Array, np.ndarray]:
  """One row of images per segment, and how many of each row are real."""
  share = int(plan.sizes.sum()) // (256 * len(plan.sizes))
  budget = 1 << min(max(share.bit_length(), 11), 15)
  rows = []
  for segment, size in enumerate(plan.sizes):
    parts = []
    for i in np.flatnonzero(plan.segments == segment).tolist():
      scores, count = plan.image(i).reshape(-1), plan.leaves[i].size
      if size > budget:
        runs = max(1, budget * count // int(size) // _RUN)
        stride = count // runs
        if stride > _RUN:
          scores = scores[: runs * stride].reshape(runs, stride)[:, :_RUN]
      parts.append(scores.reshape(-1).astype(plan.wide))
    rows.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts))
  real = np.array([row.size for row in rows])
  bottom = jnp.iinfo(plan.wide).min
  pad = lambda x: jnp.pad(x, (0, real.max() - x.size), constant_values=bottom)
  return jnp.stack([pad(row) for row in rows]), real


def _search_sample(sample: Array, ones: Array, start: Bracket) -> Bracket:
  """Search the rows of `sample` [S, W] for several `ones` [S, T] each."""

  def count(probes, active, carry):
    del active
    probes = probes.reshape(*ones.shape, PROBES)
    hits = [sample[:, None] >= probes[:, :, j, None] for j in range(PROBES)]
    counts = sel.sums([h.astype(COUNT) for h in hits], (2,))
    return jnp.stack(counts, -1).reshape(-1, PROBES), carry

  repeat = lambda x: jnp.repeat(x, ones.shape[1])
  start = Bracket(*map(repeat, start))
  found, _, _ = sel.search(
    count, ones.reshape(-1), start, start.high, anchor=sample
  )
  return Bracket(*(x.reshape(ones.shape) for x in found))


def _columns(size: int) -> int:
  """The row length for a leaf: a divisor of its size if there is one.

  Rows are long enough to vectorize and to make counts few, and short enough
  for 16-bit counters and for the cut of the ties.
  """
  if size < 8192:
    return size
  for columns in (*range(4096, 8192), *range(4095, 1023, -1)):
    if size % columns == 0:
      return columns
  return 4096


def _row_counts(scores: Array, levels: Sequence[Array]) -> list[Array]:
  """How many images of each row reach each level: `PROBES` of [rows]."""
  columns = _columns(scores.size)
  rows = scores.size // columns
  # Narrow counters keep twice the lanes per vector for 16-bit scores.
  counter = jnp.int16 if scores.dtype.itemsize <= 2 else jnp.int32
  hits = lambda x: [(x >= level).astype(counter) for level in levels]
  scores = scores.reshape(-1)
  body = scores[: rows * columns].reshape(rows, columns)
  counts = sel.sums(hits(body), (1,))
  if rows * columns < scores.size:
    tail = sel.sums(hits(scores[rows * columns :]), (0,))
    counts = [jnp.append(c, t) for c, t in zip(counts, tail, strict=True)]
  return counts


def _first_reaching(
  values: Array, need: Array, begin, end
) -> tuple[Array, Array]:
  """Where, from `begin`, the sum of `values` first reaches `need`.

  Args:
    values: [L, W] or [1, W].
    need: [L], at least 1.
    begin: [L], the range of `values` that each sum is taken over,
    end: [L], which is also the result where `need` is never reached.

  Returns:
    The position, and the sum before it, each [L].
  """
  index = lax.broadcasted_iota(COUNT, (1, values.shape[1]), 1)
  begin, end = jnp.asarray(begin, COUNT), jnp.asarray(end, COUNT)

  def before(*positions):
    inside = index >= begin[:, None]
    chosen = [inside & (index < p[:, None]) for p in positions]
    return sel.sums([jnp.where(c, values, 0) for c in chosen], (1,))

  # Two bits of the position at a time.
  turns = (values.shape[1].bit_length() + 1) // 2

  def body(turn, position):
    unit = COUNT(1) << (2 * (turns - 1 - turn)).astype(COUNT)
    trials = [position + unit * i for i in range(1, 4)]
    for trial, total in zip(trials, before(*trials), strict=True):
      fits = (trial <= end) & (total < need)
      position = jnp.where(fits, trial, position)
    return position

  start = sel.vary(begin, (values, need))
  position = lax.fori_loop(0, turns, body, start)
  # Two operands keep the reduction in the form that `sums` is about.
  return position, before(position, end)[0]


class _Rows:
  """The rows of all large leaves, side by side."""

  def __init__(self, plan: Plan, leaves: list[int]):
    self.plan, self.leaves = plan, leaves
    sizes = [plan.leaves[i].size for i in leaves]
    self.columns = [_columns(n) for n in sizes]
    self.numbers = [
      -(-n // c) for n, c in zip(sizes, self.columns, strict=True)
    ]
    self.ends = np.cumsum(self.numbers)
    self.begins = self.ends - self.numbers
    self.segments = plan.segments[leaves]
    self.owner = np.repeat(self.segments, self.numbers)
    parts = np.array_split(np.arange(len(leaves)), min(_GROUPS, len(leaves)))
    self.groups = [part.tolist() for part in parts]

  def blank(self) -> list[Array]:
    """Counts of no pass: one [P, rows] per group."""
    lengths = [sum(self.numbers[j] for j in group) for group in self.groups]
    return [jnp.zeros((PROBES, n), COUNT) for n in lengths]

  def count(self, probes, active, carry):
    """One pass: counts per segment, and per row to carry on."""
    new = []
    for group, old in zip(self.groups, carry, strict=True):

      def run(probes, old, group=group):
        counts = []
        for j in group:
          scores = self.plan.image(self.leaves[j])
          levels = at(probes, int(self.segments[j])).astype(scores.dtype)
          levels = [at(levels, p) for p in range(PROBES)]
          counts.append(_row_counts(scores, levels))
        rows = [jnp.concatenate(c) for c in zip(*counts, strict=True)]
        return sel.vary(jnp.stack(rows).astype(COUNT), old)

      # Inside a conditional nothing is hoisted out of the loop, where it
      # would be stored.
      busy = jnp.any(active[np.unique(self.segments[group])])
      new.append(lax.cond(busy, run, lambda probes, old: old, probes, old))
    rows = jnp.concatenate(new, 1)
    number = np.arange(len(self.plan.sizes))[:, None]
    mine = jnp.asarray(self.owner == number) if len(number) > 1 else True
    totals = [jnp.where(mine, at(rows, p), 0) for p in range(PROBES)]
    totals = [t.reshape(len(number), -1) for t in totals]
    return jnp.stack(sel.sums(totals, (1,)), 1), new

  def cut(self, bracket: Bracket, probes: Array, carry, kept: Array) -> Array:
    """Where to cut the ties of each large leaf so that `kept` [S] remain."""
    plan = self.plan
    rows = jnp.concatenate(carry, 1)
    match = sel.ties_at(bracket, probes)[self.owner].T
    at_top = (bracket.low == plan.whole().high)[self.owner]
    ties = rows[:-1] - jnp.where(at_top, 0, rows[1:])
    ties = jnp.sum(jnp.where(match, ties, 0), 0, keepdims=True, dtype=COUNT)

    low, kept = bracket.low[self.segments], kept[self.segments]
    whole = jnp.asarray(plan.leaf_sizes[self.leaves])
    some = jnp.ones(kept.shape, jnp.bool_)
    if plan.together:  # else a leaf that is tied keeps some of its ties
      columns = np.arange(ties.shape[1])
      mine = (columns >= self.begins[:, None]) & (columns < self.ends[:, None])
      total = jnp.sum(jnp.where(mine, ties, 0), 1, dtype=COUNT)
      kept = sel.split_ties(kept, total)
      some = kept < total
    row, before = _first_reaching(
      ties, jnp.maximum(kept, 1), self.begins, self.ends
    )
    row -= self.begins.astype(np.uint32)

    found, starts = [], []
    for j, i in enumerate(self.leaves):
      columns, size = self.columns[j], plan.leaves[i].size
      start = at(row, j) * COUNT(columns)
      # The last row may be short: fetch a whole one that ends with it.
      fetched = jnp.minimum(start, COUNT(size - columns))
      scores = lax.dynamic_slice(
        plan.image(i).reshape(-1), (fetched,), (columns,)
      )
      equal = scores == at(low, j).astype(scores.dtype)
      equal &= lax.iota(COUNT, columns) >= start - fetched
      found.append(jnp.pad(equal, (0, max(self.columns) - columns)))
      starts.append(fetched)
    found, none = jnp.stack(found).astype(COUNT), np.zeros(len(self.leaves))
    end, _ = _first_reaching(found, kept - before, none, self.columns)
    end += jnp.stack(starts) + 1
    return jnp.where(kept == 0, 0, jnp.where(some, end, whole))


def _cut_sample(plan: Plan, sample, bracket: Bracket, kept: Array) -> Array:
  """Where to cut the ties of leaves that the sample holds whole."""
  ties = (sample == bracket.low[:, None]).astype(COUNT)
  none = np.zeros(len(plan.sizes))
  width = none + sample.shape[1]
  end = _first_reaching(ties, jnp.maximum(kept, 1), none, width)[0] + 1
  before = np.zeros(len(plan.leaves), np.uint32)
  if plan.together:
    before = np.cumsum(plan.leaf_sizes, dtype=np.uint32) - plan.leaf_sizes
  end = end[plan.segments]
  return jnp.minimum(jnp.where(end > before, end - before, 0), plan.leaf_sizes)


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


def masks(
  leaves: Sequence[Recipe], ones: Array, *, together: bool, dtype
) -> list[Array]:
  """Masks with `ones` [S] ones per segment, for leaves on one device."""
  plan = Plan.of(leaves, together)
  if int(np.sum(plan.sizes**2)) <= _COMPARISONS:
    return _by_rank(plan, ones, dtype)
  small = not together or int(plan.sizes.sum()) <= _SMALL
  if len(leaves) > _FEW and small:
    return _select_many.masks(plan, ones, dtype)
  whole, wanted = plan.whole(), jnp.maximum(ones, 1)
  sample, real = _sample(plan)
  seen = whole._replace(reach=jnp.asarray(real, COUNT))
  solved = real == plan.sizes
  large = [i for i in range(len(leaves)) if not solved[plan.segments[i]]]
  rows = _Rows(plan, large) if large else None

  if rows is None:
    bracket = _search_sample(sample, wanted[:, None], seen)
    bracket = Bracket(*(x[:, 0] for x in bracket))
    probes = carry = sample  # not read
  else:
    # The sample brackets the threshold at 3.5 standard deviations.
    share = wanted.astype(jnp.float32) / plan.sizes.astype(np.float32)
    count = real.astype(np.float32)
    spread = 3.5 * jnp.sqrt(count * share * (1 - share)) + 2
    ends = jnp.stack([share * count + spread, share * count - spread], 1)
    ends = jnp.clip(ends, 1, count[:, None]).astype(COUNT)
    ends = jnp.where(solved[:, None], wanted[:, None], ends)
    found = _search_sample(sample, ends, seen)
    exact = Bracket(*(x[:, 0] for x in found))

    low, high = found.low[:, 0], found.high[:, 1]
    width = sel.as_unsigned(jnp.maximum(high, low) - low)[:, None]
    even = np.arange(PROBES, dtype=np.float32) / (PROBES - 1)
    step = sel.part(width, even)
    step = jnp.maximum(step, jnp.arange(PROBES, dtype=step.dtype))
    # To the passes, a segment solved by the sample is settled from the start.
    start = exact._replace(reach=wanted).where(solved, whole)
    bracket, probes, carry = sel.search(
      rows.count,
      wanted,
      start,
      whole.high,
      anchor=plan.inputs,
      first=low[:, None] + sel.as_signed(step),
      carry=rows.blank(),
    )
    bracket = exact.where(solved, bracket)

  tied = bracket.reach != wanted
  kept = wanted - bracket.beyond

  def cut():
    cuts = jnp.asarray(plan.leaf_sizes)
    if solved.any():
      cuts = _cut_sample(plan, sample, bracket, kept)
    if rows is not None:
      ends = rows.cut(bracket, probes, carry, kept)
      cuts = cuts.at[np.array(large)].set(ends)
    return jnp.where(tied[plan.segments], cuts, plan.leaf_sizes)

  keep_all = lambda: sel.vary(jnp.asarray(plan.leaf_sizes), (tied, sample))
  cuts = lax.cond(jnp.any(tied), cut, keep_all)
  return plan.masks(bracket.low, cuts, ones, dtype)
