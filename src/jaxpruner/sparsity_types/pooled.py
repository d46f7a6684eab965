"""Types that keep or remove whole units: blocks and channels."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.sparsity_types import _spec
from jaxpruner.sparsity_types.base import (
  Array,
  Shape,
  SparsityType,
  check_axis,
  check_has_axis,
  pairwise_sum,
)


@dataclasses.dataclass(frozen=True)
class Block(SparsityType):
  """Keep or remove whole blocks of the last two dimensions.

  Blocks at the edge are smaller where the block shape does not divide the
  leaf's. Leading dimensions (stacked layers, convolution windows) have blocks
  of their own. GPU kernels for blocks: Gray et al., "GPU Kernels for
  Block-Sparse Weights", 2017.

  Attributes:
    block_shape: rows and columns of a block.
    use_avg_pooling: whether the score of a block is the mean of its scores;
      otherwise it is the maximum.

  Example:
    >>> scores = jnp.array([[1.0, 2.0, 8.0, 9.0], [3.0, 4.0, 7.0, 6.0]])
    >>> Block((2, 2)).mask(scores, 0.5).tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1]]
  """

  block_shape: tuple[int, int] = (4, 4)
  use_avg_pooling: bool = True

  def __post_init__(self):
    shape = self.block_shape
    if (
      not isinstance(shape, Sequence)
      or len(shape) != 2
      or not all(type(side) is int and side > 0 for side in shape)
    ):
      raise ValueError(
        f"Block: block_shape={shape!r} must be two integers of at least 1, "
        "such as (4, 4)"
      )
    object.__setattr__(self, "block_shape", tuple(shape))
    if not isinstance(self.use_avg_pooling, bool):
      raise ValueError(
        f"Block: use_avg_pooling={self.use_avg_pooling!r} must be True or False"
      )

  def spec(self) -> str:
    """Return `block_4,4`, or `maxblock_4,4` if blocks score by maximum."""
    height, width = self.block_shape
    prefix = "" if self.use_avg_pooling else "max"
    return f"{prefix}{_spec.registered_name(type(self))}_{height},{width}"

  @classmethod
  def from_spec(cls, spec: str) -> SparsityType | None:
    """Read `block_4,4`, `maxblock_4,4`; only `Block` itself also `4x4`."""
    name = re.escape(_spec.registered_name(cls))
    found = re.fullmatch(rf"(max)?{name}_(\d+),(\d+)", spec)
    if not found and cls is Block:
      found = re.fullmatch(r"()(\d+)x(\d+)", spec)
    if not found:
      return None
    return cls((int(found[2]), int(found[3])), not found[1])

  def on_matrix(self, axes: tuple[int, int] | None) -> SparsityType | None:
    if axes is None or type(self) is not Block:
      return None
    height, width = self.block_shape
    shape = (height, width) if axes == (-2, -1) else (width, height)
    return Block(shape, self.use_avg_pooling)

  @property
  def inputs_together(self) -> int:
    return self.block_shape[0]

  def _units(self, shape: Shape) -> tuple[Shape, Shape, tuple[int, int]]:
    """Return the leaf's shape as at least 2-D, that of its units, a block's.

    A block that is longer than its leaf is as long as the leaf.
    """
    matrix = (1, *shape)[-2:] if len(shape) < 2 else shape
    height, width = (
      min(side, max(size, 1))
      for size, side in zip(matrix[-2:], self.block_shape, strict=True)
    )
    units = (*matrix[:-2], -(-matrix[-2] // height), -(-matrix[-1] // width))
    return matrix, units, (height, width)

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    if not shape:
      raise ValueError(
        f"{name}: a scalar has no blocks; leave it out with filter_fn"
      )

  def pool(self, scores: Array) -> Array:
    matrix, (*lead, rows, columns), (height, width) = self._units(scores.shape)
    padding = [(0, 0)] * len(lead) + [
      (0, rows * height - matrix[-2]),
      (0, columns * width - matrix[-1]),
    ]
    split = (*lead, rows, height, columns, width)
    scores = scores.reshape(matrix).astype(jnp.float32)

    def blocks(x, fill):
      if any(extra for _, extra in padding):
        x = jnp.pad(x, padding, constant_values=fill)
      return x.reshape(split)

    if not self.use_avg_pooling:
      return jnp.max(blocks(scores, -jnp.inf), axis=(-3, -1))
    total = pairwise_sum(pairwise_sum(blocks(scores, 0), -1), -2)
    ones = jnp.ones(matrix, jnp.float32)
    return total / jnp.sum(blocks(ones, 0), axis=(-3, -1))

  def expand(self, units: Array, shape: Shape) -> Array:
    matrix, (*lead, rows, columns), (height, width) = self._units(shape)
    mask = jnp.broadcast_to(
      units[..., :, None, :, None], (*lead, rows, height, columns, width)
    ).reshape(*lead, rows * height, columns * width)
    return mask[..., : matrix[-2], : matrix[-1]].reshape(shape)

  def units(self, shape: Shape) -> int:
    return math.prod(self._units(shape)[1])


@dataclasses.dataclass(frozen=True)
class Channel(SparsityType):
  """Keep or remove whole slices along an axis, by their mean score.

  A removed filter or neuron makes the dense network smaller (Li et al.,
  "Pruning Filters for Efficient ConvNets", 2017); see `sparse.shrink`.

  Attributes:
    axis: the axis that numbers the channels.

  Example:
    >>> scores = jnp.array([[1.0, 5.0], [2.0, 6.0]])
    >>> Channel().mask(scores, 0.5).tolist()
    [[0, 1], [0, 1]]
  """

  axis: int = -1

  def __post_init__(self):
    check_axis(self, self.axis)

  @classmethod
  def from_spec(cls, spec: str) -> SparsityType | None:
    """Read `channel_0`; the axis is required."""
    if cls is Channel and spec == _spec.registered_name(cls):
      return None
    return super().from_spec(spec)

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    check_has_axis(self, shape, self.axis, name)

  def pool(self, scores: Array) -> Array:
    channels = self.axis % scores.ndim
    total = scores.astype(jnp.float32)
    for axis in reversed(range(scores.ndim)):
      if axis != channels:
        total = pairwise_sum(total, axis)
    return total / (scores.size // scores.shape[channels])

  def expand(self, units: Array, shape: Shape) -> Array:
    return jax.lax.broadcast_in_dim(units, shape, (self.axis % len(shape),))

  def units(self, shape: Shape) -> int:
    return shape[self.axis]
