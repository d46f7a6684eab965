"""Trainers that call `tx.update(grads, state)` without the parameters (Brax).

A pruner needs them. `keep_params` holds a copy in the optimizer state, and
moves it by the very updates the trainer applies.
"""

from typing import Any, NamedTuple

import optax


class KeepParamsState(NamedTuple):
  """The optimizer's state, and the parameters as the trainer has them."""

  params: Any
  inner_state: Any


def keep_params(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Return `tx` for trainers that never pass params to `update`.

  The trainer must apply the updates with `optax.apply_updates` and change the
  parameters in no other way; parameters that are passed after all win.
  """
  inner = optax.with_extra_args_support(tx)

  def init(params):
    return KeepParamsState(params, inner.init(params))

  def update(updates, state, params=None, **extra):
    params = state.params if params is None else params
    updates, inner_state = inner.update(
      updates, state.inner_state, params, **extra
    )
    return updates, KeepParamsState(
      optax.apply_updates(params, updates), inner_state
    )

  return optax.GradientTransformationExtraArgs(init, update)
