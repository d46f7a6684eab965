"""From scores to masks: what an updater asks of the engine."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxpruner import _legacy, engine, mask_calculator, sparsity_types
from jaxpruner._leaves import PyTree
from jaxpruner.updater import checks, ranking
from jaxpruner.updater.prunable import Prunable
from jaxpruner.updater.state import SparseState, refuse_nan


@functools.lru_cache(maxsize=256)
def _named(fn: Callable[..., Any]) -> frozenset[str] | None:
  """Return the names of a function's arguments; None if it takes any."""
  found = inspect.signature(fn).parameters.values()
  if any(p.kind is p.VAR_KEYWORD for p in found):
    return None
  return frozenset(p.name for p in found if p.kind is not p.POSITIONAL_ONLY)


def accepted(
  method: Callable[..., Any], extra: dict[str, Any]
) -> dict[str, Any]:
  """Return the keyword arguments that a method takes.

  Args:
    method: a bound method, such as a user's `calculate_scores`.
    extra: what the caller of `tx.update` passed along.

  Returns:
    All of them if the method has `**extra`, else those it names.
  """
  names = _named(getattr(method, "__func__", method)) if extra else None
  return {k: v for k, v in extra.items() if names is None or k in names}


def calculate(updater: Any, params: PyTree, **options: Any) -> PyTree:
  """Return the scores; an error that a PRNG key causes names its path."""
  try:
    return updater.calculate_scores(params, **options)
  except TypeError as error:
    checks.blame_keys(params, error)
    raise


def scores_of(
  updater: Any,
  view: Prunable,
  state: SparseState | None,
  grads: PyTree,
  extra: dict[str, Any],
) -> list[Any]:
  """Return the scores of the prunable leaves, cheap ones as expressions."""
  extra = accepted(updater.calculate_scores, extra)
  scores = engine.defer(
    lambda p, s, g: calculate(updater, p, sparse_state=s, grads=g, **extra),
    view.params,
    state,
    grads,
  )
  return view.of(scores, "scores", packed=False)


def keep_highest(
  updater: Any, view: Prunable, scores: list[Any], sparsities: Any, hint: Any
) -> engine.Selection:
  """Return the selection of the highest scores, arrays or expressions."""
  refuse_nan(list(zip(view.names, scores, strict=True)))
  if updater.ranking == "global":
    return ranking.select_globally(updater, view, scores, sparsities)
  return sparsity_types.select_masks(
    view.kinds, scores, sparsities, hint, view.stacks
  )


def by_create_masks(
  updater: Any, view: Prunable, scores: list[Any], sparsities: Any, hint: Any
) -> engine.Selection:
  """Return the selection of a `create_masks` override, which gets arrays."""
  refuse_nan(list(zip(view.names, scores, strict=True)))
  scores = [engine.value(s) for s in scores]
  shown = view.put(view.params, scores)
  masks = updater.create_masks(shown, view.put(None, sparsities))
  finite = jnp.stack([engine.all_finite(s) for s in scores])
  return engine.Selection(view.of(masks, packed=False), finite, hint)


def create_masks(updater: Any, scores: PyTree, sparsities: Any) -> PyTree:
  """Return masks of the highest scores; see `Hooks.create_masks`."""
  if updater.ranking == "global" and isinstance(sparsities, float):
    sparsities = _legacy.spread(updater, scores, sparsities)
  view = updater.view(scores, sparsities)
  found = keep_highest(updater, view, view.leaves, view.targets, None)
  return view.put(None, found.masks)


def new_masks(
  updater: Any,
  state: SparseState,
  params: PyTree,
  grads: PyTree,
  extra: dict[str, Any],
) -> SparseState:
  """Return the state with new masks; see `Hooks.update_state`."""
  view = updater.view(params)
  if not view.names or updater.category.when == "before":
    return state
  scores = scores_of(updater, view, state, grads, extra)
  wanted = updater.sparsities_at(view, state, state.count)
  hint = state.stats.get("hint") if isinstance(state.stats, dict) else None
  found = updater._select(view, scores, wanted, hint)
  if hint is not None and found.hint is not None:
    state = state._replace(stats={**state.stats, "hint": found.hint})
  return updater._replace_masks(view, state, found.masks, found.finite)


def sparsities_at(
  updater: Any, view: Prunable, state: SparseState, step: Any
) -> list[Any]:
  """Return the sparsity of each leaf; see `Hooks.sparsities_at`."""
  stored = view.of(state.target_sparsities, "target_sparsities")
  if not stored:
    return []
  stored = jnp.stack([jnp.asarray(s, jnp.float32) for s in stored])
  now = updater.scheduler.get_sparsity_at_step(stored, step)
  return [
    mask_calculator.AtStep(now[i], s) if isinstance(s, float) else now[i]
    for i, s in enumerate(view.targets)
  ]
