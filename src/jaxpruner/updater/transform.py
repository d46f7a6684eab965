"""The step of `wrap_optax`: scores, masks, optimizer, zeros, state."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax

from jaxpruner import _leaves
from jaxpruner.updater import checks, hidden, moments, selecting, start
from jaxpruner.updater.conditional import run_if
from jaxpruner.updater.masks import count_changes
from jaxpruner.updater.state import SparseState, unpack_mask

# What a mask update changes; the optimizer's state is not part of it.
_CHANGING = ("stored_masks", "skipped", "explored", "tally")


def wrap(
  updater: Any, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
  """Return `inner`, its updates confined to the sparse set of an updater.

  A step: scores, masks, optimizer, zeros held, state. `weights` are the ones
  that are trained: `params`, unless the state hides others behind them.

  Args:
    updater: a `BaseUpdater`.
    inner: the optimizer.

  Returns:
    The transformation; its state is a `SparseState`.
  """
  if not (hasattr(inner, "init") and hasattr(inner, "update")):
    raise ValueError(
      f"wrap_optax: inner={inner!r} must be an Optax transformation, such "
      "as optax.adam(1e-3)"
    )
  checks.warn_if_never_updates(updater)
  inner = optax.with_extra_args_support(inner)
  init = start.make_init(updater, inner)

  def update(updates, state, params: Any = None, **extra):
    state = checks.checked(updater, updates, state, params)
    weights = updater.dense_params(params, state)
    grads = updater.backward(updates, state, weights)
    if updater.master_dtype is not None:
      grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)
    state = updater.on_gradients(state, weights, grads).without_none()
    due = updater.scheduler.is_mask_update_iter(state.count)
    if not updater.reselects:
      state = _new_masks(updater, due, state, weights, grads, extra)
    seen = updater.prepare_gradients(grads, state, weights)
    step = lambda old: inner.update(seen, old, weights, **extra)
    rest = updater.skip_gradients and due
    updates, inner_state = _optimize(updater, inner, step, state, weights, rest)
    updates = updater.hold_zeros(updates, state, weights)
    count = optax.safe_increment(state.count)
    state = state._replace(inner_state=inner_state, count=count)
    if not (updater.reselects or hidden.hides(updater)):
      return updates, state
    updates = _leaves.like(weights, updates, "updates")
    moved = optax.apply_updates(weights, updates)
    if updater.reselects:
      state = _new_masks(updater, True, state, moved, grads, extra)
    if hidden.hides(updater):
      return hidden.show(updater, updates, state, params, moved)
    return updates, state

  return optax.GradientTransformationExtraArgs(init, update)


def _new_masks(updater, due, state, params, grads, extra) -> SparseState:
  """Return the state after a mask update, if it is due."""
  names = (*_CHANGING, *(n for n in updater.changes if n not in _CHANGING))
  own = "inner_state" in names  # a user's, which may change anything
  if not own and (
    updater.category.when == "before" or not jax.tree.leaves(state.stored_masks)
  ):
    return state

  def change(fields: dict[str, Any]) -> dict[str, Any]:
    old = state._replace(**fields)
    options = selecting.accepted(updater.update_state, extra)
    new = updater.update_state(old, params, grads, **options)
    checks.check_structure(updater, old, new)
    view = updater.view(params)
    new = count_changes(view, old, new.without_none(), updater.regrows)
    return {name: getattr(new, name) for name in names}

  fields = {name: getattr(state, name) for name in names}
  return state._replace(**run_if(due, change, fields))


def _optimize(updater, inner, step, state, params, rest):
  """Return the optimizer's updates and new state.

  While it rests its state stays and updates are zero. If weights regrow, the
  moments of pruned ones are made fresh at every step, in the pass that writes
  them anyway: a conditional reset on growth would copy the whole state.
  """
  if rest is False and not updater.regrows:
    return step(state.inner_state)
  masks = _leaves.align(params, state.masks)
  if updater.use_packed_masks:
    pairs = zip(masks, jax.tree.leaves(params), strict=True)
    masks = [m if m is None else unpack_mask(m, p) for m, p in pairs]
  fresh = None
  if updater.regrows:
    # Some moments start at the parameter: that of a pruned one is zero.
    fresh = inner.init(updater.apply_masks(params, state.masks))
  keep = moments.keepers(state.inner_state, params, masks, fresh, rest)
  updates, inner_state = moments.update(step, state.inner_state, keep)
  if rest is not False:
    still = lambda u: jnp.where(rest, jnp.zeros_like(u), u)
    updates = jax.tree.map(still, updates)
  return updates, inner_state
