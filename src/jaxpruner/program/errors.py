# pyright: strict
"""Errors for primitives that an analysis has no rule for."""

from jaxpruner.program import primitives
from jaxpruner.program.tracing import Node


class Unsupported(ValueError):
  """An analysis has no rule for an operation, and cannot leave it unchanged.

  Attributes:
    primitive: the name of the operation.
    path: the path of the parameter concerned, or "".

  Example:
    >>> Unsupported("count_flops: …", "my_kernel").primitive
    'my_kernel'
  """

  def __init__(self, message: str, primitive: str, path: str = ""):
    super().__init__(message)
    self.primitive, self.path = primitive, path


def describe(name: str) -> str:
  """Return the name of a primitive, with a note if no table lists it.

  Args:
    name: the name of the primitive.

  Returns:
    A text for reports and errors.

  Example:
    >>> describe("sort"), describe("my_kernel")
    ('sort', 'my_kernel (a primitive unknown to jaxpruner.program)')
  """
  if name in primitives.KNOWN:
    return name
  return f"{name} (a primitive unknown to jaxpruner.program)"


def unsupported(
  task: str, node: Node, reason: str, cure: str, path: str = ""
) -> Unsupported:
  """Return the error for an operation that an analysis has no rule for.

  Args:
    task: the public function that fails, such as "count_flops".
    node: the operation.
    reason: why it cannot be analysed.
    cure: what the user can do instead.
    path: the path of the parameter concerned, or "".

  Returns:
    The exception, to be raised by the caller.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner.program import trace
    >>> node = trace(jnp.sort, jnp.ones(3)).nodes[0]
    >>> error = unsupported("count_flops", node, "no rule", "leave it out")
    >>> str(error).split(" at ")[0], str(error).split(": ")[-1]
    ('count_flops: sort', 'no rule; leave it out')
  """
  about = f" of the parameter {path!r}" if path else ""
  message = (
    f"{task}: {describe(node.name)} at {node.source}{about}: {reason}; {cure}"
  )
  return Unsupported(message, node.name, path)
