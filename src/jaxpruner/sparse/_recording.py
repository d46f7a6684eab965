"""Record how a program uses its weights.

A `Recorder` goes through the program in the place of a weight. It remembers how
it was transposed, reshaped and sliced, so that a use is told in terms of the
parameter's own axes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import ops
from jaxpruner.sparse._parts import (
  Movable,
  permuted,
  regroup,
  reshaped,
  resized,
)


class Piece(NamedTuple):
  """A range of a parameter along one axis."""

  axis: int
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Use:
  """One place where the program consumes a weight."""

  operation: str  # "dot", "conv", "take"; "" if it can't be replaced
  contract: tuple[int, ...] = ()
  stacked: bool = False
  x: Any = None  # shape and dtype of the other operand
  run: Any = None  # run(x, w) repeats the product
  piece: Piece | None = None  # what is used; None: all of it
  why: str = ""  # why it can't be replaced
  # The axes of the features of an image and of its convolution.
  features: tuple[int, int] | None = None


class Transpose(NamedTuple):
  """A step: the order of the axes."""

  order: tuple[int, ...]


class Reshape(NamedTuple):
  """A step: the shape before, and the shape after."""

  old: tuple[int, ...]
  new: tuple[int, ...]


class Recorder(Movable):
  """A dense weight that records the operations that use it."""

  def __init__(
    self,
    dense: Any,
    uses: list[Use],
    steps: tuple[Transpose | Reshape | Piece, ...] = (),
    stacked: bool = False,
  ):
    self.dense, self.uses, self.stacked = dense, uses, stacked
    self.steps = steps  # what was done to the parameter
    self.shape = dense.shape

  @property
  def dtype(self) -> np.dtype:
    return self.dense.dtype

  def todense(self) -> jax.Array:
    return self.dense

  def like(self, dense: Any, *steps: Transpose | Reshape | Piece) -> "Recorder":
    """Return a recorder of the result of one more step."""
    return Recorder(dense, self.uses, self.steps + steps, self.stacked)

  def permuted(self, order: Sequence[int]) -> "Recorder":
    step = Transpose(tuple(order))
    return self.like(jnp.transpose(self.dense, order), step)

  def reshaped(self, shape: Sequence[int]) -> "Recorder":
    step = Reshape(tuple(self.shape), tuple(shape))
    return self.like(self.dense.reshape(shape), step)

  def sliced(self, axis: int, start: int, stop: int) -> "Recorder":
    part = jax.lax.slice_in_dim(self.dense, start, stop, axis=axis)
    return self.like(part, Piece(axis, start, stop))

  def cast(self, dtype: Any) -> "Recorder":
    return self.like(self.dense.astype(dtype))

  def layer(self, dense: Any) -> "Recorder | None":
    """Return a recorder of one layer of a stack, if this is one.

    Only a stack along the parameter's own first axis can be packed as one.
    """
    steps = []
    for step in self.steps:
      if not isinstance(step, Transpose) or step.order[0] != 0:
        return None
      steps.append(Transpose(tuple(d - 1 for d in step.order[1:])))
    return None if self.stacked else Recorder(dense, self.uses, (*steps,), True)

  def refuse(self, why: str) -> None:
    """Record a use that can't be replaced."""
    self.uses.append(Use("", stacked=self.stacked, why=why))

  def record(
    self,
    operation: str,
    contract: Sequence[int],
    x: Any = None,
    product: Callable[[Any, Any], Any] | None = None,
    piece: Piece | None = None,
    features: tuple[int, int] | None = None,
  ) -> None:
    """Record a use in terms of the parameter's own axes."""
    steps = self.steps
    found = _origin(steps, list(contract), piece)
    if isinstance(found, str):
      self.refuse(found)
      return

    def run(x, w):
      assert product is not None
      return product(x, replay(steps, w))

    shape = None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
    axes, piece = found
    self.uses.append(
      Use(
        operation, tuple(axes), self.stacked, shape, run, piece,
        features=features,
      )
    )  # fmt: skip


def _origin(
  steps: Sequence[Transpose | Reshape | Piece],
  contract: list[int],
  piece: Piece | None,
) -> tuple[list[int], Piece | None] | str:
  """Return the parameter's axes and range for those after some steps."""
  for step in reversed(steps):
    if isinstance(step, Transpose):
      contract = [step.order[d] for d in contract]
      if piece is not None:
        piece = piece._replace(axis=step.order[piece.axis])
    elif isinstance(step, Piece):
      if piece is None:
        piece = step
      elif piece.axis == step.axis:
        begin = step.start
        piece = Piece(step.axis, begin + piece.start, begin + piece.stop)
      else:
        return "sliced along two axes before its product"
    else:
      groups = regroup(step.old, step.new)
      axes = _before(groups, contract)
      if axes is None:
        return "reshaped before its product, across axes it is summed over"
      contract = axes
      if piece is not None:
        moved = _unshaped(step, groups, piece)
        if moved is None:
          return "reshaped, then sliced before its product"
        piece = moved
  return contract, piece


def _before(groups: Any, contract: list[int]) -> list[int] | None:
  """Return the contracted axes before a reshape."""
  found: list[tuple[int, list[int]]] = []
  for old, new in groups:
    inside = [d for d in new if d in contract]
    if not inside:
      continue
    if inside != new:
      return None
    found.append((contract.index(new[0]), old))
  return [d for _, old in sorted(found) for d in old]


def _unshaped(step: Reshape, groups: Any, piece: Piece) -> Piece | None:
  """Return a range before a reshape: that of the first axis of its group."""
  for old, new in groups:
    if piece.axis == new[0]:
      before, after = step.old[old[0]], step.new[piece.axis]
      start, stop = piece.start * before, piece.stop * before
      if start % after == stop % after == 0:
        return Piece(old[0], start // after, stop // after)
  return None


def replay(steps: Sequence[Transpose | Reshape | Piece], w: Any) -> Any:
  """Do the steps to the range of a parameter that they lead to."""
  for step in steps:
    if isinstance(step, Transpose):
      w = _or_decoded(permuted, w, step.order)
    elif isinstance(step, Reshape):
      shape = resized(step.old, step.new, w.shape)
      assert shape is not None  # or the use would have been refused
      w = _or_decoded(reshaped, w, shape)
  return w


def _or_decoded(move: Callable[[Any, Any], Any], w: Any, how: Any) -> Any:
  moved = move(w, how)
  return move(ops.decode(w), how) if moved is None else moved
