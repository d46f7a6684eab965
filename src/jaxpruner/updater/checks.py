"""What is refused, and what is warned of, before and during training."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, _tools, sparsity_schedules
from jaxpruner._leaves import PyTree, is_absent
from jaxpruner.sparsity_distributions import stacking
from jaxpruner.updater import hidden, moments
from jaxpruner.updater.masks import check_masks
from jaxpruner.updater.prunable import Prunable
from jaxpruner.updater.seeds import check_seed
from jaxpruner.updater.state import SparseState

_SWITCHES = (
  "skip_gradients",
  "is_sparse_gradients",
  "use_packed_masks",
  "track_exploration",
  "continue_sparse",
)
# Field -> a function that it may be.
_FUNCTIONS = {
  "sparsity_distribution_fn": ", such as functools.partial("
  "jaxpruner.sparsity_distributions.uniform, sparsity=0.8)",
  "topk_fn": " (scores, sparsity) -> mask",
}


def check_fields(updater: Any) -> None:
  """Raise if a field of an updater makes no sense."""
  for name in ("is_mask_update_iter", "get_sparsity_at_step"):
    if not _has_method(updater.scheduler, name):
      raise ValueError(
        f"scheduler={updater.scheduler!r} has no method {name}; use one of "
        "jaxpruner.sparsity_schedules, such as OneShotSchedule(0)"
      )
  for name in _SWITCHES:
    if not isinstance(getattr(updater, name), bool | np.bool_):
      raise ValueError(
        f"{name}={getattr(updater, name)!r} must be True or False"
      )
  for name, example in _FUNCTIONS.items():
    value = getattr(updater, name)
    if value is not None and not callable(value):
      raise ValueError(f"{name}={value!r} must be a function{example}")
  kinds = updater.sparsity_type
  for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
    _check_kind(kind)
  stacking.check_stacked_axis(updater.stacked_axis)
  if updater.stacked_axis is None:  # configuration has no None
    updater.stacked_axis = "none"
  if updater.rng_seed is not None:
    check_seed(updater.rng_seed)


def _check_kind(kind: Any) -> None:
  is_function = callable(kind) and not isinstance(kind, type)
  if not is_function and not _has_method(kind, "mask"):
    raise ValueError(
      f"sparsity_type={kind!r} is not a sparsity type; use one of "
      "jaxpruner.sparsity_types, such as NByM(2, 4)"
    )


def _has_method(part: Any, name: str) -> bool:
  """Tell whether an object, no class, has a method."""
  return not isinstance(part, type) and callable(getattr(part, name, None))


def check_number(updater: Any, name: str, above: float = 0.0) -> None:
  """Raise if a field is no finite number greater than `above`."""
  value = getattr(updater, name)
  if not (_tools.is_number(value) and above < value < float("inf")):
    raise ValueError(
      f"{type(updater).__name__}: {name}={value!r} must be a number above "
      f"{above:g}"
    )


def check_share(updater: Any, name: str) -> None:
  """Raise if a field is no number from 0 to 1."""
  value = getattr(updater, name)
  if not (_tools.is_number(value) and 0 <= value <= 1):
    raise ValueError(
      f"{type(updater).__name__}: {name}={value!r} must lie between 0 and 1, "
      "such as 0.3"
    )


def check_whole(updater: Any, name: str, least: int) -> None:
  """Raise if a field is no integer of at least `least`."""
  owner, value = type(updater).__name__, getattr(updater, name)
  _tools.check_int(owner, name, value, least)


def blame_keys(params: PyTree, error: Exception) -> None:
  """Raise an error that names the first PRNG key among the parameters."""
  for names, leaf in _leaves.flatten_with_names(params)[0]:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
      raise ValueError(
        f"params leaf {_leaves.join(names)!r} is a PRNG key, {dtype} of shape "
        f"{leaf.shape}, which has no score; keep keys out of params: "
        "eqx.partition(model, eqx.is_inexact_array), nnx.split(model, "
        "nnx.Param, ...)"
      ) from error


def check_scores(updater: Any, view: Prunable, scores: PyTree) -> None:
  """Raise if the scores do not fit the parameters."""
  entries = _leaves.align(view.params, scores, "scores")
  leaves = jax.tree.leaves(view.params)
  for place, names in dict(zip(view.places, view.names, strict=True)).items():
    score, param = entries[place], leaves[place]
    shape = getattr(score, "shape", None)
    if shape != param.shape or jnp.iscomplexobj(score):
      found = f"{score.dtype} of shape {shape}" if shape else repr(score)
      raise ValueError(
        f"scores of {_leaves.join(names)!r} are {found}; "
        f"{type(updater).__name__}.calculate_scores must return real numbers "
        f"of the parameter's shape {param.shape}"
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
  named, _ = _leaves.flatten_with_names(params)
  masks = _leaves.align(params, state.masks)
  for i, ((names, _), mask) in enumerate(zip(named, masks, strict=True)):
    if (mask is not None) != (i in view.places):
      problem = (
        f"holds no mask, but {name} prunes it"
        if mask is None
        else f"holds a mask, but {name} does not prune it"
      )
      raise ValueError(
        f"params leaf {_leaves.join(names)!r}: the state {problem}; {cure}"
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


def checked(updater, grads, state, params) -> SparseState:
  """Return the state, or raise if the arguments of `update` do not fit."""
  if params is None:
    raise ValueError(
      f"{type(updater).__name__}.wrap_optax(…).update needs params: call "
      "tx.update(grads, opt_state, params)"
    )
  if not isinstance(state, SparseState):
    raise ValueError(
      f"opt_state is {type(state).__name__}, not SparseState: pass what "
      "tx.init(params) of this same transformation returned; "
      "jaxpruner.find_state finds the SparseState inside a chain's state"
    )
  state = state.without_none()
  check_masks(
    params, state.masks, updater.use_packed_masks, state.target_sparsities
  )
  check_made_by(updater, params, state)
  if updater.is_sparse_gradients or "gradients" in updater.needs:
    _leaves.align(params, grads, "grads")  # raises where they differ
  hides = hidden.hides(updater) and jax.tree.leaves(state.masks)
  if hides and is_absent(state.hidden):
    raise ValueError(
      f"the state holds no hidden weights, which {type(updater).__name__} "
      "trains; restore it into the structure that tx.init(params) gives"
    )
  return state


def check_structure(updater: Any, old: SparseState, new: Any) -> None:
  """Raise if `update_state` returned no state, or one of another structure."""
  if not isinstance(new, SparseState):
    raise ValueError(
      f"{type(updater).__name__}.update_state returned {new!r}; it must "
      "return the SparseState, such as sparse_state._replace(masks=masks)"
    )
  shape = lambda state: jax.tree.structure(state.without_none())
  given, got = shape(old), shape(new)
  if got != given:
    raise ValueError(
      f"{type(updater).__name__}.update_state must return a SparseState of the "
      f"structure it was given; got {got}, not {given}"
    )


def warn_if_never_updates(updater: Any) -> None:
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


def warn_if_moments_stay(updater, inner_state, params, masks) -> None:
  if not updater.regrows:
    return
  stay = moments.unmatched(inner_state, params, _leaves.align(params, masks))
  if stay:
    warnings.warn(
      f"{type(updater).__name__}: the optimizer keeps shared statistics "
      f"({stay[0]} and {len(stay) - 1} more) that belong to no single "
      "weight; they are not reset when a weight grows",
      stacklevel=4,
    )
