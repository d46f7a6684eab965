"""Continue to train a pruned model with any Optax optimizer."""

from typing import Any

import jax.numpy as jnp
import optax

from jaxpruner import _leaves


def hold_masks(
  tx: optax.GradientTransformation, masks: Any
) -> optax.GradientTransformationExtraArgs:
  """Wrap an optimizer so that pruned weights stay exactly +0.0.

  The inner optimizer gets a zero gradient for each pruned weight, and the
  update of a pruned weight is minus its value.

  Args:
    tx: any Optax optimizer.
    masks: the masks that `prune` returned; leaves without a mask are trained
      without constraint.

  Returns:
    The transformation; its `update` needs `params`.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.array([1.0, 0.0])}
    >>> tx = hold_masks(optax.sgd(1.0), {"w": jnp.array([1, 0], jnp.uint8)})
    >>> updates, _ = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["w"].tolist()
    [0.0, 0.0]
  """
  inner = optax.with_extra_args_support(tx)

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError(
        "hold_masks needs the parameters: call tx.update(grads, state, params)"
      )

    def only(names, grad, mask):
      del names
      return grad if mask is None else jnp.where(mask, grad, 0)

    updates = _leaves.map_masks(only, updates, masks)
    updates, state = inner.update(updates, state, params, **extra)

    def held(names, param, change, mask):
      del names
      if mask is None:
        return change
      return jnp.where(mask, change, -param)

    return _leaves.map_masks(held, params, updates, masks), state

  return optax.GradientTransformationExtraArgs(inner.init, update)
