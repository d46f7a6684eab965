"""Evaluate a traced function, with a say in each of its operations."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.extend import core


def apply(operation: Any, inputs: Sequence[Any]) -> list[Array]:
  """Return the results of an operation: what has `primitive` and `params`."""
  primitive = operation.primitive
  params = primitive.get_bind_params(operation.params)
  # Older JAX returns functions to bind apart from the parameters.
  first, params = params if isinstance(params, tuple) else ((), params)
  outputs = primitive.bind(*first, *inputs, **params)
  return list(outputs) if primitive.multiple_results else [outputs]


def bind(eqn: Any, inputs: Sequence[Any]) -> list[Array]:
  """Return the results of an equation, in the context it was traced in."""
  with eqn.ctx.manager:
    return apply(eqn, inputs)


def evaluate(
  jaxpr: Any,
  constants: Sequence[Any],
  args: Sequence[Any],
  run: Callable[[Any, list[Any]], list[Any]] = bind,
) -> list[Array]:
  """Return the results of a jaxpr, each operation being `run(eqn, inputs)`."""
  values = dict(zip(jaxpr.constvars, constants, strict=True))
  values |= zip(jaxpr.invars, args, strict=True)

  def read(atom):
    return atom.val if isinstance(atom, core.Literal) else values[atom]

  for eqn in jaxpr.eqns:
    outputs = run(eqn, [read(atom) for atom in eqn.invars])
    values |= zip(eqn.outvars, outputs, strict=True)
  return [read(atom) for atom in jaxpr.outvars]


def consists_of(eqn: Any, names: frozenset[str]) -> bool:
  """Tell whether an operation is among `names`, or made of such."""
  name = eqn.primitive.name
  if name in ("jit", "pjit"):
    inner = eqn.params["jaxpr"].jaxpr.eqns
    return all(consists_of(part, names) for part in inner)
  return name in names
