"""What an updater refuses, and what it warns of."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, _moments, sparsity_schedules
from jaxpruner._state import PyTree, SparseState, check_fit, check_seed


def check_fields(updater: Any) -> None:
  """Raise if a field of an updater makes no sense."""
  for name in ("is_mask_update_iter", "get_sparsity_at_step"):
    if isinstance(updater.scheduler, type) or not callable(
      getattr(updater.scheduler, name, None)
    ):
      raise ValueError(
        f"scheduler={updater.scheduler!r} has no method {name}; use one of "
        "jaxpruner.sparsity_schedules, such as OneShotSchedule(0)"
      )
  for name in (
    "skip_gradients",
    "is_sparse_gradients",
    "use_packed_masks",
    "track_exploration",
    "continue_sparse",
  ):
    if not isinstance(getattr(updater, name), bool | np.bool_):
      raise ValueError(
        f"{name}={getattr(updater, name)!r} must be True or False"
      )
  for name in ("sparsity_distribution_fn", "topk_fn"):
    value = getattr(updater, name)
    if value is not None and not callable(value):
      raise ValueError(
        f"{name}={value!r} must be a function, such as functools.partial("
        "jaxpruner.sparsity_distributions.uniform, sparsity=0.8)"
        if name == "sparsity_distribution_fn"
        else f"{name}={value!r} must be a function (scores, sparsity) -> mask"
      )
  kinds = updater.sparsity_type
  kinds = kinds.values() if isinstance(kinds, Mapping) else [kinds]
  for kind in kinds:
    if isinstance(kind, type) or not (
      callable(kind) or callable(getattr(kind, "mask", None))
    ):
      raise ValueError(
        f"sparsity_type={kind!r} is not a sparsity type; use one of "
        "jaxpruner.sparsity_types, such as NByM(2, 4)"
      )
  if updater.rng_seed is not None:
    check_seed(updater.rng_seed)


def check_number(updater: Any, name: str, above: float = 0.0) -> None:
  """Raise if a field is no finite number greater than `above`."""
  value = getattr(updater, name)
  if (
    isinstance(value, bool)
    or not isinstance(value, int | float)
    or not above < value < float("inf")
  ):
    raise ValueError(
      f"{type(updater).__name__}: {name}={value!r} must be a number above "
      f"{above:g}"
    )


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


def check_scores(
  updater: Any, params: PyTree, targets: PyTree, scores: PyTree
) -> None:
  """Raise if the scores do not fit the parameters."""
  for (names, param), target, score in zip(
    _leaves.flatten_with_names(params)[0],
    _leaves.align(params, targets),
    _leaves.align(params, scores, "scores"),
    strict=True,
  ):
    if target is None:
      continue
    shape = getattr(score, "shape", None)
    if shape != param.shape or jnp.iscomplexobj(score):
      found = f"{score.dtype} of shape {shape}" if shape else repr(score)
      raise ValueError(
        f"scores of {_leaves.join(names)!r} are {found}; "
        f"{type(updater).__name__}.calculate_scores must return real numbers "
        f"of the parameter's shape {param.shape}"
      )


def check_structure(updater: Any, old: SparseState, new: Any) -> None:
  """Raise if `update_state` returned another kind of state."""
  given, got = jax.tree.structure(old), jax.tree.structure(new)
  if got != given:
    raise ValueError(
      f"{type(updater).__name__}.update_state must return a SparseState of the "
      f"structure it was given; got {got}, not {given}"
    )


def say_if_idle(updater: Any) -> None:
  """Warn of a schedule that never changes the masks."""
  name = type(updater).__name__
  if (
    isinstance(updater.scheduler, sparsity_schedules.NoUpdateSchedule)
    and updater.holds_zeros
    and (updater.category.start == "dense-to-sparse" or updater.regrows)
  ):
    warnings.warn(
      f"{name} will never change its masks: its scheduler is "
      "NoUpdateSchedule; pass scheduler=jaxpruner.sparsity_schedules."
      + ("PeriodicSchedule(…)" if updater.regrows else "PolynomialSchedule(…)"),
      stacklevel=4,
    )


def say_if_zero(updater: Any, targets: PyTree) -> None:
  """Warn of targets that remove nothing."""
  wanted = jax.tree.leaves(targets)
  if wanted and all(isinstance(s, float) and s == 0 for s in wanted):
    warnings.warn(
      f"{type(updater).__name__} will never prune: its target sparsity is 0; "
      "pass sparsity_distribution_fn=functools.partial("
      "jaxpruner.sparsity_distributions.uniform, sparsity=0.8)",
      stacklevel=5,
    )


def say_if_moments_stay(
  updater: Any, inner_state: PyTree, params: PyTree, masks: PyTree
) -> None:
  """Warn of optimizer statistics that cannot be reset by weight."""
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
