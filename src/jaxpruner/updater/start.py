"""The state of step 0, and the `init` that gives it to Optax."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import _leaves, mask_calculator
from jaxpruner._leaves import ABSENT, PyTree
from jaxpruner.updater import checks, hidden, seeds, selecting
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
    explored=jax.tree.map(jnp.copy, masks) if tracked else ABSENT,
    tally=new_tally(view, masks, tracked),
  )


def first_masks(updater: Any, params: PyTree, targets: PyTree) -> PyTree:
  """Return the masks of step 0; see `Hooks.get_initial_masks`."""
  view = updater.view(params, targets)
  if updater.reselects and "gradients" not in updater.needs:
    scores = view.of(selecting.calculate(updater, params), "scores")
    state = SparseState(target_sparsities=targets, count=0)
    wanted = updater.sparsities_at(view, state, 0)
    return view.put(None, updater._select(view, scores, wanted).masks)
  ones = lambda p: jnp.ones_like(p, dtype=mask_calculator.MASK_DTYPE)
  return view.put(None, [_leaves.shard_like(ones(p), p) for p in view.leaves])


def make_init(updater: Any, inner: Any) -> optax.TransformInitFn:
  """Return the `init` of a wrapped optimizer.

  Args:
    updater: a `BaseUpdater`.
    inner: the optimizer.

  Returns:
    A function from parameters to a `SparseState`.
  """
  made: set[Any] = set()  # structures of the states so far

  def init(params: PyTree) -> SparseState:
    # `optax.tree_map_params` asks which fields are like params.
    if type(params).__name__ == "_ParamsPlaceholder":
      return _placeholders(updater, inner, params, made)
    state = updater.init_state(params)
    inner_state = inner.init(updater.dense_params(params, state))
    checks.warn_if_moments_stay(updater, inner_state, params, state.masks)
    made.add(jax.tree.structure(_without_params(state)))
    return state._replace(inner_state=inner_state)

  return init


def _placeholders(
  updater: Any, inner: Any, params: PyTree, made: set[Any]
) -> SparseState:
  """Return a state with the placeholder in every field that is like params.

  The other fields have the structure of the states that `init` made before, so
  that each of their leaves is handed over by itself; if there were none, or
  different ones, each of these fields is handed over as a whole.
  """
  leaf = np.zeros([], np.int32)
  if len(made) == 1:
    (structure,) = made
    rest = structure.unflatten([leaf] * structure.num_leaves)
  else:
    rest = SparseState(
      target_sparsities=leaf,
      count=leaf,
      key=leaf,
      skipped=leaf,
      stats=leaf,
      tally=leaf,
    )
  return rest._replace(
    stored_masks=params,
    inner_state=inner.init(params),
    explored=params if updater.track_exploration else ABSENT,
    hidden=params if hidden.hides(updater) else ABSENT,
  )


def _without_params(state: SparseState) -> SparseState:
  """Return a state without the fields that are like params."""
  return state._replace(
    stored_masks=ABSENT, inner_state=ABSENT, explored=ABSENT, hidden=ABSENT
  )
