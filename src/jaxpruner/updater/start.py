"""The state of step 0."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import _leaves, mask_calculator
from jaxpruner._leaves import PyTree
from jaxpruner.updater import hidden, seeds
from jaxpruner.updater.masks import new_tally
from jaxpruner.updater.state import SparseState


def first_state(updater: Any, params: PyTree) -> SparseState:
  """Return the state of step 0; see `BaseUpdater.init_state`."""
  view = updater.view(params)
  if view.targets and all(
    isinstance(s, float) and s == 0 for s in view.targets
  ):
    warnings.warn(
      f"{type(updater).__name__} will never prune: its target sparsity is 0; "
      "pass sparsity_distribution_fn=functools.partial("
      "jaxpruner.sparsity_distributions.uniform, sparsity=0.8)",
      stacklevel=5,
    )
  if updater.continue_sparse:
    kept = [(p != 0).astype(mask_calculator.MASK_DTYPE) for p in view.leaves]
    masks = view.put(None, kept)
  else:
    masks = updater.get_initial_masks(params, view.put(None, view.targets))
  stats = updater.init_extra(params, masks)
  masks = view.store(view.of(masks, packed=False))
  wanted = [jnp.asarray(s, jnp.float32) for s in view.targets]
  state = SparseState(
    masks=masks,
    target_sparsities=view.store(wanted),
    count=jnp.zeros([], jnp.int32),
    key=seeds.key_of(updater, params) if "random" in updater.needs else None,
    stats=stats,
    hidden=hidden.copies(updater, view),
  ).without_none()
  if not view.names:  # checkpoints refuse empty arrays
    return state
  tracked = updater.track_exploration
  return state._replace(
    skipped=jnp.zeros([len(view.names)], jnp.int32),
    explored=jax.tree.map(jnp.copy, masks) if tracked else _leaves.ABSENT,
    tally=new_tally(view, masks, tracked),
  )
