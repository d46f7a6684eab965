# pyright: strict
"""The evaluator under the names and arguments it had before `run`."""

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
  """Return the results of an open jaxpr: `run` with `visit(eqn, values)`."""

  def per_equation(node: Node, values: list[Any]) -> list[Any]:
    return visit(node.eqn, values)

  return run(read(jaxpr, constants=constants), args, per_equation)
