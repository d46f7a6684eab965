"""Sparsity types: what shapes may a mask take?

A type sees a leaf as an array of *units*: single weights, blocks, or channels.
`pool` turns scores of weights into scores of units, the engine chooses units,
`expand` turns the choice back into a mask of the leaf's shape. A type of your
own is a frozen dataclass with `mask(scores, sparsity)`.
"""

import dataclasses
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxpruner import mask_calculator

Array: TypeAlias = jax.Array
Shape: TypeAlias = tuple[int, ...]


def check_positive(owner: Any, argument: str, value: Any) -> None:
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(
      f"{type(owner).__name__}: {argument}={value!r} must be an integer of at "
      "least 1"
    )


def check_axis(owner: Any, axis: Any) -> None:
  if isinstance(axis, bool) or not isinstance(axis, int):
    raise ValueError(
      f"{type(owner).__name__}: axis={axis!r} must be an integer, such as -2"
    )


def check_has_axis(owner: Any, shape: Shape, axis: int, name: str) -> None:
  if not -len(shape) <= axis < len(shape):
    raise ValueError(
      f"{name}: shape {shape} has no axis {axis}; pass "
      f"{type(owner).__name__}(axis=…), or leave it out with filter_fn"
    )


def check_sparsity(sparsity: Any, argument: str = "sparsity") -> float:
  """Return a sparsity as a float, or raise."""
  try:
    value = float(sparsity)
  except (TypeError, ValueError):
    value = math.nan
  if isinstance(sparsity, bool | str) or not 0 <= value < 1:
    raise ValueError(
      f"{argument}={sparsity!r}: the fraction of weights removed must satisfy "
      "0 <= sparsity < 1, such as 0.8"
    )
  return value


def pairwise_sum(x: Array, axis: int) -> Array:
  """Sum along an axis by halving it, in an order no compiler changes.

  A plain reduction rounds differently when fused or sharded differently, and
  then two nearly equal units could swap places between 1 and 8 devices.
  """
  size = x.shape[axis]
  width = 1 << max(size - 1, 0).bit_length()
  if width != size:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, width - size)
    x = jnp.pad(x, padding)
  while width > 1:
    width //= 2
    x = jax.lax.slice_in_dim(x, 0, width, axis=axis) + jax.lax.slice_in_dim(
      x, width, 2 * width, axis=axis
    )
  return jax.lax.squeeze(x, (axis % x.ndim,))


@dataclasses.dataclass(frozen=True)
class SparsityType:
  """Base of the types whose units are chosen freely over the whole leaf."""

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    """Raise if a leaf of this shape cannot take this structure."""
    if not isinstance(sparsity, jax.Array | mask_calculator.AtStep):
      check_sparsity(sparsity, f"{name}: sparsity")
    if math.prod(shape) == 0:
      raise ValueError(
        f"{name}: shape {shape} holds no weights, nothing can be kept; leave "
        "it out with filter_fn"
      )

  def pool(self, scores: Array) -> Array:
    """Return one score per unit."""
    return scores

  def expand(self, units: Array, shape: Shape) -> Array:
    """Return the mask of a leaf whose units are chosen."""
    del shape
    return units

  def units(self, shape: Shape) -> int:
    """Return among how many units of a leaf the choice is made."""
    return math.prod(shape)

  def groups(self, shape: Shape) -> int:
    """Return how many such choices a leaf holds: one, unless grouped."""
    del shape
    return 1

  def ones(self, shape: Shape, sparsity: Any) -> Any:
    """Return how many of these units are kept."""
    return mask_calculator.num_ones(self.units(shape), sparsity)

  def kept(self, shape: Shape, sparsity: float) -> int:
    """Return how many weights of a leaf are kept (edge blocks on average)."""
    return round(
      self.ones(shape, sparsity) * math.prod(shape) / self.units(shape)
    )

  def mask(self, scores: Array, sparsity: Any) -> Array:
    """Keep the highest scores at this sparsity; ties: the lower index."""
    scores = jnp.asarray(scores)
    self.check(scores.shape, sparsity)
    from jaxpruner.sparsity_types import masks

    return masks.create_masks([self], [scores], [sparsity])[0]


@dataclasses.dataclass(frozen=True)
class Unstructured(SparsityType):
  """Any weight may go."""
