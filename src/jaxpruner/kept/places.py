"""What all layouts share: a dense shape, folded to a matrix, layer by layer."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Self = TypeVar("Self", bound="Places")


def fold(shape: tuple[int, ...], split: int) -> tuple[int, int]:
  """Return the rows and columns of a folded weight."""
  return int(np.prod(shape[:split])), int(np.prod(shape[split:]))


class Places:
  """The positions of the kept weights of a leaf, or of a stack of layers.

  Attributes:
    shape: the shape of the dense leaf.
    split: how many leading axes of a layer form the rows of its matrix.
    name: the path of the leaf.
    axis: the axis that numbers the layers of a stack; None if it is none.
  """

  shape: tuple[int, ...]
  split: int
  name: str
  axis: int | None

  @property
  def values_shape(self) -> tuple[int, ...]:
    """The shape of the array of values."""
    raise NotImplementedError

  def scatter(self, values: Array) -> Array:
    """Return the folded dense matrix of one layer."""
    raise NotImplementedError

  def gather(self, dense: Array) -> Array:
    """Return the entries of a folded dense matrix, by slot."""
    raise NotImplementedError

  @property
  def layers(self) -> int | None:
    """The number of layers of a stack; None if it is none."""
    return None if self.axis is None else self.shape[self.axis]

  @property
  def inner(self) -> tuple[int, ...]:
    """The shape of one layer."""
    return tuple(d for i, d in enumerate(self.shape) if i != self.axis)

  @property
  def matrix(self) -> tuple[int, int]:
    """Rows and columns of the folded matrix of a layer."""
    return fold(self.inner, self.split)

  @property
  def size(self) -> int:
    """The number of weights of the dense array."""
    return int(np.prod(self.shape))

  @property
  def nbytes(self) -> int:
    """Bytes of the indices."""
    return sum(a.nbytes for a in jax.tree.leaves(self))

  def one(self: Self) -> Self:
    """Return the layout of one layer, for the body of a map over layers."""
    changes: Any = {"shape": self.inner, "axis": None}
    return dataclasses.replace(self, **changes)  # pyright: ignore

  def over(self, fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(layout, *args)` of every layer, stacked along the first axis.

    Args:
      fn: takes the layout of one layer, and its part of each argument.
      *args: arrays (or trees) whose first axis numbers the layers.

    Returns:
      The results.
    """
    if self.axis is None:
      return fn(self, *args)
    return jax.vmap(fn)(self.one(), *args)

  def in_turn(self, fn: Callable[..., Any], *args: Any) -> Any:
    """Do as `over` does, one layer after the other: for machine code.

    Args:
      fn: takes the layout of one layer, and its part of each argument.
      *args: arrays (or trees) whose first axis numbers the layers.

    Returns:
      The results.
    """
    if self.axis is None:
      return fn(self, *args)
    return jax.lax.map(lambda each: fn(*each), (self.one(), *args))

  def todense(self, values: Array) -> Array:
    """Return the dense leaf."""
    dense = self.over(lambda l, v: l.scatter(v).reshape(l.shape), values)
    return dense if self.axis is None else jnp.moveaxis(dense, 0, self.axis)

  def pick(self, leaf: Array) -> Array:
    """Return the entries of an array like the dense leaf, by slot."""
    if self.axis is not None:
      leaf = jnp.moveaxis(leaf, self.axis, 0)
    return self.over(lambda l, a: l.gather(a.reshape(l.matrix)), leaf)

  def mask(self) -> Array:
    """Return the uint8 mask of the dense leaf, 1 = kept."""
    return self.todense(jnp.ones(self.values_shape, jnp.uint8))
