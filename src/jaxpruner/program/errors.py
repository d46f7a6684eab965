# pyright: strict
"""What users are told of a primitive that an analysis has no rule for."""

from jaxpruner.program import primitives
from jaxpruner.program.tracing import Node


class Unsupported(ValueError):
  """An operation that an analysis can't treat, and can't leave alone.

  Attributes:
    primitive: its name.
    path: the parameter it was about, or "".
  """

  def __init__(self, message: str, primitive: str, path: str = ""):
    super().__init__(message)
    self.primitive, self.path = primitive, path


def describe(name: str) -> str:
  """Return the name of a primitive, and whether no table knows it.

  Reports use it to say which operation keeps a weight as it is.

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
  """Return the error to raise where an operation can't be left alone.

  Args:
    task: the public function that fails, such as "count_flops".
    node: the operation.
    reason: why it can't be treated.
    cure: what the user can do instead.
    path: the parameter concerned, if one is.
  """
  about = f" of the parameter {path!r}" if path else ""
  message = (
    f"{task}: {describe(node.name)} at {node.source}{about}: {reason}; {cure}"
  )
  return Unsupported(message, node.name, path)
