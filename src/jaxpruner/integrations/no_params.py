"""Trainers that call `tx.update(grads, state)` without the parameters (Brax).

A pruner needs the parameters. `keep_params` stores a copy in the optimizer
state and applies to it the same updates as the trainer.
"""

from typing import Any, NamedTuple

import optax


class KeepParamsState(NamedTuple):
  """The state of `keep_params`.

  Attributes:
    params: a copy of the trainer's parameters.
    inner_state: the state of the wrapped transformation.

  Example:
    >>> state = keep_params(optax.sgd(0.1)).init({"w": 1.0})
    >>> type(state).__name__, state.params
    ('KeepParamsState', {'w': 1.0})
  """

  params: Any
  inner_state: Any


def keep_params(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Wrap `tx` for trainers that do not pass params to `update`.

  The trainer must apply the updates with `optax.apply_updates` and change the
  parameters in no other way. If the trainer does pass params, these are used
  instead of the copy.

  Args:
    tx: the transformation of a pruner, or any other that needs params.

  Returns:
    A transformation whose state holds a copy of the parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {"w": jnp.array([1.0, 2.0])}
    >>> tx = keep_params(optax.add_decayed_weights(0.5))  # needs params
    >>> updates, state = tx.update({"w": jnp.zeros(2)}, tx.init(params))
    >>> updates["w"].tolist(), state.params["w"].tolist()
    ([0.5, 1.0], [1.5, 3.0])
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
