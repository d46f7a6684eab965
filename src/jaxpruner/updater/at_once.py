"""Pruning at once, without training."""

import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, engine
from jaxpruner._leaves import PyTree
from jaxpruner.updater import checks, prunable, ranking, selecting
from jaxpruner.updater.prunable import Prunable


def prune_at_once(
  updater: Any, params: PyTree, grads: PyTree, extra: dict[str, Any]
) -> tuple[PyTree, PyTree]:
  """Return pruned params and masks; see `BaseUpdater.instant_sparsify`."""
  name = type(updater).__name__
  if updater.category.start == "sparse-to-sparse":
    raise RuntimeError(
      f"{name} trains sparse from the start, it prunes nothing at once: use "
      "wrap_optax, and params = pruner.post_gradient_update(params, "
      "opt_state) after init; for a random mask use RandomPruning"
    )
  if updater.sparsity_distribution_fn is None and updater.ranking != "global":
    raise ValueError(
      "instant_sparsify: sparsity_distribution_fn=None says nothing about "
      "how much to remove; pass functools.partial("
      "jaxpruner.sparsity_distributions.uniform, sparsity=0.8)"
    )
  if "gradients" in updater.needs and grads is None:
    raise ValueError(
      f"instant_sparsify: {name} scores weights by their gradients; pass grads="
    )
  view = updater.view(params)
  taken = selecting.accepted(updater.calculate_scores, extra)
  if len(taken) < len(extra):
    raise TypeError(
      f"instant_sparsify: {name}.calculate_scores takes no "
      f"{', '.join(sorted(extra.keys() - taken.keys()))}; leave it out, or "
      "name it in the signature"
    )
  masks = None if extra else select_at_once(updater, view, grads)
  if masks is None:
    scores = selecting.calculate(updater, params, grads=grads, **extra)
    checks.check_scores(updater, view, scores)
    entries = view.of(scores, "scores", packed=False)
    masks = view.put(None, updater._select(view, entries, view.targets).masks)
  stored = view.store(view.of(masks, packed=False))
  pruned = updater.apply_masks(params, masks, is_packed=False)
  return pruned, _leaves.with_none(stored)


def select_at_once(updater: Any, view: Prunable, grads: PyTree) -> PyTree:
  """Return the masks of `instant_sparsify` from one compiled function.

  Inside it, scores are expressions that are never stored.

  Args:
    updater: a `BaseUpdater`.
    view: the prunable leaves.
    grads: the gradients, or None.

  Returns:
    The masks, not packed; None if the updater runs code of the user, which may
    read values, or if there are other leaves than arrays.
  """
  topk_fn = prunable.given_topk_fn(updater)
  parts = [updater.calculate_scores, updater.create_masks]
  parts += [type(kind) for kind in view.kinds]
  parts += [] if topk_fn is None else [topk_fn]
  leaves, treedef = _leaves.flatten_with_names(view.params)
  arrays = jax.tree.leaves((view.params, grads))
  if (
    not view.names
    or not all(map(_is_ours, parts))
    or "loss" in updater.needs
    or prunable.cache_key(updater, leaves, treedef) is None
    or not all(isinstance(x, jax.Array | np.ndarray) for x in arrays)
    or any(isinstance(x, jax.core.Tracer) for x in arrays)
  ):
    return None
  masks, wrong = _selected(updater, view.params, grads)
  wrong = np.asarray(wrong)
  if wrong.any():
    return None  # the usual path names the leaf
  if updater.ranking == "global":
    ranking.warn_if_emptied(view, view.of(masks, packed=False))
  return masks


def _is_ours(part: Any) -> bool:
  """Tell whether a function or a class is of this package."""
  return str(getattr(part, "__module__", None)).startswith("jaxpruner.")


@functools.partial(jax.jit, static_argnums=0)
def _selected(updater: Any, params: PyTree, grads: PyTree) -> Any:
  view = updater.view(params)
  scores = selecting.scores_of(updater, view, None, grads, {})
  masks = updater._select(view, scores, view.targets).masks
  isnan = lambda s: jnp.any(jnp.isnan(engine.value(s)))
  return view.put(None, masks), jnp.stack([isnan(s) for s in scores])
