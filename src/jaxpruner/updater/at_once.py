"""The masks of `instant_sparsify`, from one compiled function."""

import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, engine
from jaxpruner._leaves import PyTree
from jaxpruner.updater import prunable, ranking
from jaxpruner.updater.prunable import Prunable


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
  own = (updater.calculate_scores, updater.create_masks, updater._choose)
  leaves, treedef = _leaves.flatten_with_names(view.params)
  arrays = jax.tree.leaves((view.params, grads))
  if (
    not view.names
    or any(not fn.__module__.startswith("jaxpruner.") for fn in own)
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
  found = view.split(_leaves.align(view.params, masks))
  if updater.ranking == "global":
    ranking.warn_if_emptied(view, found)
  return masks


@functools.partial(jax.jit, static_argnums=0)
def _selected(updater: Any, params: PyTree, grads: PyTree) -> Any:
  view = updater.view(params)
  scores = updater._scores(view, None, grads, {})
  masks = updater._select(view, scores, view.targets).masks
  isnan = lambda s: jnp.any(jnp.isnan(engine.value(s)))
  return view.put(None, masks), jnp.stack([isnan(s) for s in scores])
