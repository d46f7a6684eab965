"""Kept weights side by side, as fused gates (of an LSTM) concatenate them.

A product with weights that are joined along an axis it does not contract is
the products with each of them, side by side.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxpruner.kept.views import is_view
from jaxpruner.program import Node, bind
from jaxpruner.sparse import formats

Rule = Callable[..., list[Any] | None]


@formats.register
class Joined:
  """Weights, kept and dense, along one axis.

  Attributes:
    parts: views and arrays, at least one view.
    axis: the axis.
  """

  parts: tuple[Any, ...]
  axis: int = formats.static()

  @property
  def tensor(self) -> Any:
    """The first kept weight, which stands for all in errors."""
    return next(p.tensor for p in self.parts if is_view(p))

  def todense(self) -> Array:
    dense = [p.todense() if is_view(p) else p for p in self.parts]
    return jnp.concatenate(dense, self.axis)


def is_joined(value: Any) -> bool:
  return isinstance(value, Joined)


def concatenate(node: Node, *parts: Any) -> list[Any] | None:
  """Join weights; a stack of layers has no joined form."""
  if any(is_joined(p) or (is_view(p) and p.stacked) for p in parts):
    return None
  return [Joined(parts, node.params["dimension"])]


def apply(rule: Rule, node: Node, *args: Any) -> list[Any] | None:
  """Apply the rule of an operation to each part of a joined operand.

  Args:
    rule: what the operation does to a view.
    node: the operation.
    *args: its operands, one of them joined.

  Returns:
    Its results, or None if this use has no sparse form.
  """
  if sum(map(is_joined, args)) > 1:
    return None
  at = next(i for i, a in enumerate(args) if is_joined(a))
  joined = args[at]
  axis = _axis_of_result(node, joined.axis, at, args)
  if axis is None:
    return None
  found = []
  for part in joined.parts:
    own = [*args[:at], part, *args[at + 1 :]]
    results = rule(node, *own) if is_view(part) else bind(node, own)
    if results is None:
      return None
    found.append(results[0])
  if any(map(is_view, found)):
    return [Joined(tuple(found), axis)]
  return [jnp.concatenate(found, axis)]


def _axis_of_result(
  node: Node, axis: int, at: int, args: tuple[Any, ...]
) -> int | None:
  """Return where the joined axis is in the result; None: nowhere."""
  if node.name in ("convert_element_type", "stop_gradient"):
    return axis
  if node.name == "transpose":
    return list(node.params["permutation"]).index(axis)
  if node.name != "dot_general":
    return None
  contract, batch = node.params["dimension_numbers"]
  gone = {*contract[at], *batch[at]}
  if axis in gone:
    return None
  before = len([d for d in range(axis) if d not in gone]) + len(batch[at])
  if at == 1:
    other = args[0]
    before += other.ndim - len(contract[0]) - len(batch[0])
  return before
