"""Search the sparsity of each layer, by evolution on the model's output."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner.post_training import calibration, pruning, solve_layer
from jaxpruner.post_training.calibration import ApplyFn, FilterFn
from jaxpruner.sparsity_distributions import default_filter
from jaxpruner.sparsity_types import Unstructured

Levels = tuple[int, ...]


def search_levels(
  apply_fn: ApplyFn,
  params: Any,
  batches: Iterable[Any],
  *,
  sparsity: float,
  method: Any = "sparsegpt",
  step: float = 0.05,
  reach: int = 3,
  generations: int = 20,
  offspring: int = 16,
  survivors: Sequence[int] = (4, 1),
  filter_fn: FilterFn = default_filter,
  seed: int = 0,
  progress: Callable[[int, float], None] | None = None,
) -> dict[str, float]:
  """Find a sparsity for each leaf; the total stays as it is.

  Every leaf is pruned beforehand at `sparsity + k·step`, |k| ≤ `reach`. Then
  levels evolve (Sieberling et al., "EvoPress", 2024): a child differs from its
  parent by one to three switches, each of which raises the level of a leaf and
  lowers that of another of the same size. Children are judged on few batches,
  the best of them on more, the last one on all, as its parent. The judgement is
  the mean of KL(dense ‖ pruned) over the positions, the last axis of the
  output being that of the classes.

  Cost: one pass over the batches, 2·`reach` + 1 times the solver, and as many
  models in memory; then per generation some `offspring` forward passes over one
  batch.

  Args:
    apply_fn: `apply_fn(params, batch) -> logits`.
    params: its parameters.
    batches: batches of equal shapes, to calibrate on and to judge by.
    sparsity: of every leaf at the start, and of the whole.
    method: as in `prune`.
    step: between two levels.
    reach: levels above the start, and below it.
    generations: how often children are drawn.
    offspring: children per generation.
    survivors: how many children pass each selection; the last number is 1.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    seed: of the search.
    progress: called with (generations done, the best divergence).

  Returns:
    Path -> sparsity, for `custom_sparsity_map` of `prune` or `prune_blocks`.

  Example:
    >>> rng = np.random.default_rng(0)
    >>> params = {k: rng.normal(size=(8, 8)).astype(np.float32) for k in "ab"}
    >>> data = [rng.normal(size=(16, 8)).astype(np.float32)]
    >>> apply_fn = lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"]
    >>> found = search_levels(apply_fn, params, data, sparsity=0.5,
    ...                       step=0.125, generations=3)
    >>> sorted(found), sum(found.values())
    (['a', 'b'], 1.0)
  """
  rows = list(batches)
  levels = [sparsity + k * step for k in range(-reach, reach + 1)]
  if not (0 <= levels[0] and levels[-1] < 1 and reach > 0 and step > 0):
    raise ValueError(
      f"sparsity={sparsity!r}, step={step!r}, reach={reach!r}: levels from "
      f"{levels[0]:g} to {levels[-1]:g} must lie in [0, 1)"
    )
  _check(generations, offspring, survivors)
  model = calibration.Model(apply_fn, params, rows, filter_fn)
  columns = pruned_at(model, levels, method)
  named, treedef = _leaves.flatten_with_names(params)
  places = sorted({model.places[part.leaf] for part in model.parts})
  leaves = [leaf for _, leaf in named]
  divergence = jax.jit(lambda p, x, goal: _divergence(apply_fn(p, x), goal))
  goals = [np.asarray(apply_fn(params, row)) for row in rows]

  def judge(chosen: Levels, count: int) -> float:
    whole = list(leaves)
    for place, level in zip(places, chosen, strict=True):
      whole[place] = columns[level][place]
    tree = treedef.unflatten(whole)
    pairs = [*zip(rows, goals, strict=True)][:count]
    return float(np.mean([divergence(tree, x, goal) for x, goal in pairs]))

  best, _ = evolve(
    (reach,) * len(places),
    [np.size(leaves[i]) for i in places],
    2 * reach,
    judge,
    len(rows),
    generations=generations,
    offspring=offspring,
    survivors=survivors,
    seed=seed,
    progress=progress,
  )
  return {
    _leaves.join(named[i][0]): levels[k]
    for i, k in zip(places, best, strict=True)
  }


def pruned_at(
  model: calibration.Model, levels: Sequence[float], method: Any
) -> list[list[Any]]:
  """Return per level the leaves of the parameters, as `prune` gives them.

  All levels are solved on the moments of one pass through the dense model.
  """
  settings = solve_layer.Settings(method)
  leaves = {part.leaf for part in model.parts}
  jobs = [
    pruning.Job(model, dict.fromkeys(leaves, level), Unstructured(), settings)
    for level in levels
  ]
  if settings.needs == "none":
    for part, job in itertools.product(model.parts, jobs):
      job.prune(part, None)
  else:
    gram = settings.needs == "gram"
    _, cuts = model.stream(gram, False, lambda _: False)
    with contextlib.closing(cuts):
      for cut, sums in cuts:
        for part in cut.parts:
          seen = calibration.statistics(part, sums)
          for job in jobs:
            job.prune(part, seen)
  return [jax.tree.leaves(model.tree(job.leaves)) for job in jobs]


def evolve(
  start: Levels,
  sizes: Sequence[int],
  top: int,
  judge: Callable[[Levels, int], float],
  batches: int,
  *,
  generations: int,
  offspring: int,
  survivors: Sequence[int],
  seed: int = 0,
  progress: Callable[[int, float], None] | None = None,
) -> tuple[Levels, float]:
  """Return the best levels found, and their judgement; never above the start's.

  Args:
    start: the first parent's levels, each from 0 to `top`.
    sizes: of the leaves; only leaves of one size exchange levels.
    top: the highest level.
    judge: `(levels, batches to use) -> what to make small`.
    batches: how many there are.
    generations: see `search_levels`.
    offspring: see `search_levels`.
    survivors: see `search_levels`.
    seed: see `search_levels`.
    progress: see `search_levels`.
  """
  rng = np.random.default_rng(seed)
  parent, least = tuple(start), judge(tuple(start), batches)
  stages = len(survivors)
  for done in range(generations):
    drawn = (_mutated(parent, sizes, top, rng) for _ in range(offspring))
    children = [c for c in dict.fromkeys(drawn) if c != parent]
    for stage, count in enumerate(survivors):
      # The last selection, of the child that meets its parent, sees the most.
      used = max(1, batches * (stage + 1) // stages)
      children = sorted(children, key=lambda c, n=used: judge(c, n))[:count]
    for child in children:
      found = judge(child, batches)
      if found < least:
        parent, least = child, found
    if progress is not None:
      progress(done + 1, least)
  return parent, least


def _mutated(
  parent: Levels, sizes: Sequence[int], top: int, rng: np.random.Generator
) -> Levels:
  """Return a child: a few pairs of leaves of one size exchange a level."""
  child = list(parent)
  switches = min(rng.integers(1, 4), rng.integers(1, 4))
  for _ in range(switches):
    pairs = [
      (i, j)
      for i in range(len(child))
      for j in range(len(child))
      if i != j and sizes[i] == sizes[j] and child[i] < top and child[j] > 0
    ]
    if pairs:
      up, down = pairs[rng.integers(len(pairs))]
      child[up], child[down] = child[up] + 1, child[down] - 1
  return tuple(child)


def _check(generations: int, offspring: int, survivors: Sequence[int]) -> None:
  counts = [offspring, *survivors]
  falling = all(a >= b for a, b in zip(counts, counts[1:], strict=False))
  if generations < 0 or not survivors or counts[-1] != 1 or not falling:
    raise ValueError(
      f"generations={generations!r} must be at least 0, and "
      f"offspring={offspring!r}, survivors={tuple(survivors)!r} fall to 1"
    )


def _divergence(logits: Any, goal: Any) -> jax.Array:
  p, q = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (goal, logits))
  return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1))
