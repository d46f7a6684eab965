"""The step of `wrap_optax`: scores, masks, optimizer, zeros, state."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import _leaves, _moments, engine, sparsity_schedules
from jaxpruner._leaves import ABSENT, PyTree, is_absent
from jaxpruner._state import SparseState, check_fit, count_changes

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
  _warn_if_never_updates(updater)
  inner = optax.with_extra_args_support(inner)
  init = make_init(updater, inner)

  def update(updates, state, params: Any = None, **extra):
    state = _checked(updater, updates, state, params)
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
    _check_structure(updater, old, new)
    view = updater.view(params)
    new = count_changes(view, old, new.without_none(), updater.regrows)
    return {name: getattr(new, name) for name in names}

  fields = {name: getattr(state, name) for name in names}
  return state._replace(**engine.run_if(due, change, fields))


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
    _warn_if_moments_stay(updater, inner_state, params, state.masks)
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
    hidden=params if updater.hides else ABSENT,
  )


def _without_params(state: SparseState) -> SparseState:
  """Return a state without the fields that are like params."""
  return state._replace(
    stored_masks=ABSENT, inner_state=ABSENT, explored=ABSENT, hidden=ABSENT
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
  keep = _moments.keepers(state.inner_state, params, masks, fresh, rest)
  updates, inner_state = _moments.update(step, state.inner_state, keep)
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


def check_masks(
  params: PyTree, masks: PyTree, is_packed: bool, targets: PyTree = None
) -> None:
  """Raise if a mask does not fit its parameter, or is missing."""
  for (names, param), mask, target in zip(
    _leaves.flatten_with_names(params)[0],
    _leaves.align(params, masks),
    _leaves.align(params, targets, "target_sparsities"),
    strict=True,
  ):
    if mask is not None:
      check_fit(mask, param.shape, is_packed, _leaves.join(names))
    elif target is not None:
      raise ValueError(
        f"params leaf {_leaves.join(names)!r}: the state holds a target "
        "sparsity but no mask; restore checkpoints into the structure that "
        "tx.init(params) gives"
      )


def check_made_by(updater: Any, params: PyTree, state: SparseState) -> None:
  """Raise if another configuration made a state.

  Its masks must be those of the updater's prunable leaves, which is known while
  tracing too. Target sparsities are compared outside `jit`, where their values
  are known.
  """
  if updater.category.start == "dense" or is_absent(state.target_sparsities):
    return
  view, name = updater.view(params), type(updater).__name__
  cure = (
    "the state was made under another configuration: restore it with the "
    "pruner that made it, or call tx.init(params) with continue_sparse=True "
    "to go on from its zeros"
  )
  for i, mask in enumerate(_leaves.align(params, state.masks)):
    if (mask is not None) != (i in view.places):
      raise ValueError(
        f"params leaf {_leaves.join(view.among[i])!r}: the state "
        f"{'holds no mask, but' if mask is None else 'holds a mask, but not'} "
        f"{name} prunes it; {cure}"
      )
  stored = view.of(state.target_sparsities, "target_sparsities")
  for names, wanted, found in zip(
    view.names, view.targets, stored, strict=True
  ):
    known = isinstance(wanted, float) and np.ndim(found) == 0
    if known and not isinstance(found, jax.core.Tracer):
      if abs(float(found) - wanted) > 1e-6:
        raise ValueError(
          f"params leaf {_leaves.join(names)!r}: the state's target sparsity "
          f"is {float(found):g}, that of {name} is {wanted:g}; {cure}"
        )


def _checked(updater, grads, state, params) -> SparseState:
  """Return the state, or raise if the arguments of `update` do not fit."""
  if params is None:
    raise ValueError(
      f"{type(updater).__name__}.wrap_optax(…).update needs params: call "
      "tx.update(grads, opt_state, params)"
    )
  state = state.without_none()
  check_masks(
    params, state.masks, updater.use_packed_masks, state.target_sparsities
  )
  check_made_by(updater, params, state)
  if updater.is_sparse_gradients or "gradients" in updater.needs:
    _leaves.align(params, grads, "grads")  # raises where they differ
  if updater.hides and is_absent(state.hidden) and jax.tree.leaves(state.masks):
    raise ValueError(
      f"the state holds no hidden weights, which {type(updater).__name__} "
      "trains; restore it into the structure that tx.init(params) gives"
    )
  return state


def _check_structure(updater: Any, old: SparseState, new: Any) -> None:
  shape = lambda state: jax.tree.structure(state.without_none())
  given, got = shape(old), shape(new)
  if got != given:
    raise ValueError(
      f"{type(updater).__name__}.update_state must return a SparseState of the "
      f"structure it was given; got {got}, not {given}"
    )


def _warn_if_never_updates(updater: Any) -> None:
  if (
    isinstance(updater.scheduler, sparsity_schedules.NoUpdateSchedule)
    and not updater.reselects
    and (updater.category.start == "dense-to-sparse" or updater.regrows)
  ):
    warnings.warn(
      f"{type(updater).__name__} will never change its masks: its scheduler is "
      "NoUpdateSchedule; pass scheduler=jaxpruner.sparsity_schedules."
      + ("PeriodicSchedule(…)" if updater.regrows else "PolynomialSchedule(…)"),
      stacklevel=4,
    )


def _warn_if_moments_stay(updater, inner_state, params, masks) -> None:
  if not updater.regrows:
    return
  stay = _moments.unmatched(inner_state, params, _leaves.align(params, masks))
  if stay:
    warnings.warn(
      f"{type(updater).__name__}: the optimizer keeps shared statistics "
      f"({stay[0]} and {len(stay) - 1} more) that belong to no single "
      "weight; they are not reset when a weight grows",
      stacklevel=4,
    )
