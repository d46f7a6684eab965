"""The step of `wrap_optax`: scores, masks, optimizer, zeros, state."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import _leaves, engine
from jaxpruner._leaves import PyTree
from jaxpruner.updater import checks, moments
from jaxpruner.updater.masks import count_changes
from jaxpruner.updater.state import SparseState

# What a mask update changes; the optimizer's state is not part of it.
_CHANGING = ("stored_masks", "skipped", "explored", "tally")


def wrap(
  updater: Any, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
  """Return `inner`, its updates confined to the sparse set of an updater.

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

  def init(params: PyTree) -> SparseState:
    if is_placeholder(params):
      return placeholders(updater, inner, params)
    state = updater.init_state(params)
    inner_state = inner.init(updater.dense_params(params, state))
    checks.warn_if_moments_stay(updater, inner_state, params, state.masks)
    return state._replace(inner_state=inner_state)

  def update(updates, state, params: Any = None, **extra):
    state = checks.checked(updater, updates, state, params)
    shown, params = params, updater.dense_params(params, state)
    grads = updater.backward(updates, state, params)
    if updater.master_dtype is not None:
      grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    state = updater.on_gradients(state, params, grads).without_none()
    due = updater.scheduler.is_mask_update_iter(state.count)
    if not updater.reselects:
      state = _new_masks(updater, due, state, params, grads, extra)
    seen = updater.prepare_gradients(grads, state, params)
    step = lambda old: inner.update(seen, old, params, **extra)
    rest = updater.skip_gradients and due
    updates, inner_state = _optimize(updater, inner, step, state, params, rest)
    updates = updater.hold_zeros(updates, state, params)
    count = optax.safe_increment(state.count)
    state = state._replace(inner_state=inner_state, count=count)
    if updater.reselects or updater.hides:
      updates = _leaves.like(params, updates, "updates")
      moved = optax.apply_updates(params, updates)
      if updater.reselects:
        state = _new_masks(updater, True, state, moved, grads, extra)
      if updater.hides:
        updates, state = _hide(updater, updates, state, shown, moved)
    return updates, state

  return optax.GradientTransformationExtraArgs(init, update)


def _hide(updater, updates, state, params, moved) -> tuple[Any, SparseState]:
  """Return the updates from the present to the next masked params.

  The state takes the dense weights `moved`. The difference is taken in float32
  and is exact if a weight changes by less than a factor of two, is masked or
  returns. Else params may show the next weight rounded in its last bit, which
  counts as a change from outside: the next step starts from the rounded weight.
  """
  seen = _leaves.align(params, updater.forward(moved, state))
  olds = _leaves.align(params, state.hidden)
  news, found = [], []
  for p, u, w, s, old in zip(
    jax.tree.leaves(params),
    _leaves.align(params, updates),
    jax.tree.leaves(moved),
    seen,
    olds,
    strict=True,
  ):
    if old is not None:
      dtype = jnp.promote_types(jnp.promote_types(p.dtype, u.dtype), "float32")
      u = s.astype(p.dtype).astype(dtype) - p.astype(dtype)
    found.append(u)
    news.append(old if old is None else w)
  hidden = _leaves.fill(params, news)
  updates = jax.tree.structure(params).unflatten(found)
  return updates, state._replace(hidden=hidden)


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
    options = accepted(updater.update_state, extra)
    new = updater.update_state(old, params, grads, **options)
    checks.check_structure(updater, old, new)
    view = updater.view(params)
    new = count_changes(view, old, new.without_none(), updater.regrows)
    return {name: getattr(new, name) for name in names}

  fields = {name: getattr(state, name) for name in names}
  return state._replace(**engine.run_if(due, change, fields))


def is_placeholder(params: PyTree) -> bool:
  """Tell whether `optax.tree_map_params` asks which fields are like params."""
  return type(params).__name__ == "_ParamsPlaceholder"


def placeholders(updater: Any, inner: Any, params: PyTree) -> SparseState:
  """Return a state with the placeholder in every field that is like params."""
  leaf = np.zeros([], np.int32)
  return SparseState(
    masks=params,
    inner_state=inner.init(params),
    target_sparsities=leaf,
    count=leaf,
    key=leaf,
    skipped=leaf,
    stats=leaf,
    explored=params if updater.track_exploration else leaf,
    tally=leaf,
    hidden=params if updater.hides else leaf,
  )


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
    masks = [m if m is None else _leaves.unpack(m, p) for m, p in pairs]
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
