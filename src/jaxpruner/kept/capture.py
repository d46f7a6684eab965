"""Note what multiplies a kept weight: its inputs and its output cotangents.

The gradient of a weight that is not there is a product of these two. A zero is
added to the output of every use; its derivative is the cotangent.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Zeros = dict[str, list[Array]]


class Use(NamedTuple):
  """One use of a kept weight: the other operand of a product.

  Attributes:
    x: its last axis is contracted; or the int rows that are looked up.
    columns: whether it contracts the columns of the weight.
    axis: for a stack, the axis of `x` that numbers the layers.
  """

  x: Any
  columns: bool
  axis: int | None = None

  def pair(self, x: Array, dy: Array) -> tuple[Array, Array]:
    """Return what has the rows last and what has the columns, layers first."""
    if self.axis is not None:
      x, dy = (jnp.moveaxis(a, self.axis, 0) for a in (x, dy))
    return (dy, x) if self.columns else (x, dy)

  def in_scan(self, slices: bool) -> "Use":
    """Return the use as the steps of a scan stack it.

    Args:
      slices: whether the scan itself goes through the layers of the weight.
    """
    if slices:
      return self._replace(axis=0)
    return self if self.axis is None else self._replace(axis=self.axis + 1)


class Capture:
  """The uses of kept weights during one trace, by the name of the weight.

  Attributes:
    zeros: what is added to the outputs; None while only shapes are wanted.
    shapes: the shape of each output.
    inputs: the uses.
  """

  def __init__(self, zeros: Zeros | None):
    self.zeros = zeros
    self.shapes: dict[str, list[Any]] = {}
    self.inputs: dict[str, list[Use]] = {}

  def add(self, name: str, like: Any) -> Array | None:
    """Note an output of this shape; return the zero to add to it."""
    seen = self.shapes.setdefault(name, [])
    seen.append(jax.ShapeDtypeStruct(like.shape, like.dtype))
    return None if self.zeros is None else self.zeros[name][len(seen) - 1]

  def use(self, name: str, use: Use, y: Array) -> Array:
    """Note one use, y = product of x and the weight; return y."""
    zero = self.add(name, y)
    self.inputs.setdefault(name, []).append(use)
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
