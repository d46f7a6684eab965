"""Note what multiplies a kept weight: its inputs and its output cotangents.

The gradient of a weight that is not there is a product of these two. A zero is
added to the output of every use; its derivative is the cotangent.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Zeros = dict[str, list[Array]]


class Capture:
  """The uses of kept weights during one trace, by the name of the weight.

  Attributes:
    zeros: what is added to the outputs; None while only shapes are wanted.
    shapes: the shape of each output.
    inputs: the other operand of each product.
  """

  def __init__(self, zeros: Zeros | None):
    self.zeros = zeros
    self.shapes: dict[str, list[Any]] = {}
    self.inputs: dict[str, list[Any]] = {}

  def add(self, name: str, like: Any) -> Array | None:
    """Note an output of this shape; return the zero to add to it."""
    seen = self.shapes.setdefault(name, [])
    seen.append(jax.ShapeDtypeStruct(like.shape, like.dtype))
    return None if self.zeros is None else self.zeros[name][len(seen) - 1]

  def use(self, name: str, x: Any, y: Array) -> Array:
    """Note one use, y = product of x and the weight; return y."""
    zero = self.add(name, y)
    self.inputs.setdefault(name, []).append(x)
    return y if zero is None else y + zero

  def make_zeros(self) -> Zeros:
    return {
      name: [jnp.zeros(s.shape, s.dtype) for s in shapes]
      for name, shapes in self.shapes.items()
    }


_active: list[Capture] = []


def active() -> Capture | None:
  """Return the capture of the innermost `capturing`, if there is one."""
  return _active[-1] if _active else None


@contextlib.contextmanager
def capturing(zeros: Zeros | None) -> Iterator[Capture]:
  """Note the uses of kept weights while the body is traced."""
  capture = Capture(zeros)
  _active.append(capture)
  try:
    yield capture
  finally:
    _active.pop()
