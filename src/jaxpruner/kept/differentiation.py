"""Differentiate a loss, and note what growth by gradient needs."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from jaxpruner.kept import capture

PyTree = Any
# Per kept leaf and use: arrays whose last axes are rows and columns.
Growth = dict[str, list[tuple[Array, Array]]]


def value_and_grad(
  loss_fn: Callable[..., Any], has_aux: bool
) -> Callable[..., tuple[Any, PyTree, Growth]]:
  """Return the function of `KeptUpdater.value_and_grad`."""

  def run(params, opt_state, *args, **kwargs):
    with capture.capturing(None) as seen:
      jax.eval_shape(lambda p: loss_fn(p, opt_state, *args, **kwargs), params)

    def noted(params, zeros):
      with capture.capturing(zeros) as now:
        out = loss_fn(params, opt_state, *args, **kwargs)
      loss, aux = out if has_aux else (out, None)
      inputs = {
        name: [use.x for use in uses] for name, uses in now.inputs.items()
      }
      return loss, (aux, inputs)

    differentiate = jax.value_and_grad(noted, (0, 1), has_aux=True)
    (loss, (aux, inputs)), (grads, dys) = differentiate(
      params, seen.make_zeros()
    )
    if inputs.keys() != seen.inputs.keys():
      raise ValueError(
        "value_and_grad: the loss was not traced anew, so the inputs of its "
        f"kept layers {sorted(seen.inputs)} were not seen; pass the loss "
        "without jit, and jit the whole step"
      )
    growth = {
      name: [
        use.pair(x, dy)
        for x, use, dy in zip(inputs[name], uses, dys[name], strict=True)
      ]
      for name, uses in seen.inputs.items()
    }
    return ((loss, aux) if has_aux else loss), grads, growth

  return run
