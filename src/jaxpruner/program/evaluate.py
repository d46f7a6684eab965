# pyright: strict
"""The evaluator with its old name and arguments; new code calls `run`."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxpruner.program.running import bind, consists_of, run
from jaxpruner.program.tracing import Node, read

__all__ = ["bind", "consists_of", "evaluate"]


def evaluate(
  jaxpr: Any,
  constants: Sequence[Any],
  args: Sequence[Any],
  visit: Callable[[Any, list[Any]], list[Any]] = bind,
) -> list[Any]:
  """Return the results of an open jaxpr, with `visit(eqn, values)`.

  Args:
    jaxpr: the jaxpr without its constants.
    constants: the values of its constants.
    args: one value for each of its inputs.
    visit: returns the results of an equation, by default those of `bind`.

  Returns:
    One value for each output.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> closed = jax.make_jaxpr(lambda x: x + 1)(1.0)
    >>> float(evaluate(closed.jaxpr, closed.consts, [jnp.float32(2.0)])[0])
    3.0
  """

  def per_equation(node: Node, values: list[Any]) -> list[Any]:
    return visit(node.eqn, values)

  return run(read(jaxpr, constants=constants), args, per_equation)
