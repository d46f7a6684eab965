"""Types that keep equally many weights in every group: N:M, constant fan-in."""

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp

from jaxpruner import mask_calculator
from jaxpruner.sparsity_types.base import (
  Array,
  Shape,
  SparsityType,
  check_axis,
  check_has_axis,
  check_positive,
)


@dataclasses.dataclass(frozen=True)
class NByM(SparsityType):
  """Keep `n` of every `m` consecutive weights along `axis`.

  `n` counts the **kept** weights. The default axis is the one a Flax or Haiku
  kernel (in × out) contracts over, which is what sparse hardware needs; for
  layouts such as Equinox's (out × in) say `axis=-1`. While a schedule ramps,
  groups keep `m`, `m-1`, … down to `n`.
  """

  n: int
  m: int
  axis: int = -2

  def __post_init__(self):
    check_positive(self, "n", self.n)
    check_positive(self, "m", self.m)
    check_axis(self, self.axis)
    if self.n > self.m:
      raise ValueError(
        f"NByM: n={self.n} exceeds m={self.m}; n counts the weights kept of "
        "every m and must not be larger"
      )

  def __str__(self) -> str:
    return f"{self.n}:{self.m}"

  @property
  def sparsity(self) -> float:
    """The one sparsity this structure has: 1 - n/m."""
    return 1 - self.n / self.m

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    if not -len(shape) <= self.axis < len(shape):
      raise ValueError(
        f"{name}: shape {shape} has no axis {self.axis}; pass NByM(axis=…), or "
        "leave it out with filter_fn"
      )
    size = shape[self.axis]
    if size % self.m:
      raise ValueError(
        f"{name}: axis {self.axis} has length {size}, not divisible by "
        f"m={self.m}; pad it, choose another axis, or leave it out with "
        "filter_fn"
      )
    if isinstance(sparsity, float) and sparsity > self.sparsity + 1e-6:
      raise ValueError(
        f"{name}: sparsity={sparsity} contradicts {self.n}:{self.m}, which "
        f"removes exactly {self.sparsity:g}; drop the sparsity or change n, m"
      )

  @classmethod
  def from_spec(cls, spec: str) -> SparsityType | None:
    """Read `nm_2,4` and `nm_2,4,-1`; of this class itself also `2:4`."""
    if cls is NByM and (short := re.fullmatch(r"(\d+):(\d+)", spec)):
      return cls(int(short[1]), int(short[2]))
    return super().from_spec(spec)

  def on_matrix(self, axes: tuple[int, int] | None) -> SparsityType | None:
    # Hardware wants the groups along the inputs, whatever the layout.
    del axes
    return NByM(self.n, self.m, axis=-2) if type(self) is NByM else None

  @property
  def inputs_together(self) -> int:
    return self.m

  def units(self, shape: Shape) -> int:
    del shape
    return self.m

  def groups(self, shape: Shape) -> int:
    return math.prod(shape) // self.m

  def choose(self, scores: Array, ones: Any) -> Array:
    """Return the mask with this many ones in every group."""
    return mask_calculator.n_by_m_mask(scores, ones, self.m, self.axis)

  def ones(self, shape: Shape, sparsity: Any) -> Any:
    """Return how many weights of each group are kept."""
    kept = super().ones(shape, sparsity)
    if isinstance(kept, int):
      return max(kept, self.n)
    return jnp.maximum(kept, self.n)


@dataclasses.dataclass(frozen=True)
class ConstantFanIn(SparsityType):
  """Keep equally many weights of every neuron (Lasby et al., 2023).

  A neuron is an index of `axis`, the output axis of a Flax or Haiku kernel by
  default; all other axes are its inputs.
  """

  axis: int = -1

  def __post_init__(self):
    check_axis(self, self.axis)

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    check_has_axis(self, shape, self.axis, name)

  def units(self, shape: Shape) -> int:
    return math.prod(shape) // shape[self.axis]

  def groups(self, shape: Shape) -> int:
    return shape[self.axis]

  def kept(self, shape: Shape, sparsity: float) -> int:
    return self.ones(shape, sparsity) * self.groups(shape)

  def choose(self, scores: Array, ones: Any) -> Array:
    """Return the mask with this many ones in every neuron."""
    moved = jnp.moveaxis(scores, self.axis, 0)
    rows = mask_calculator.rank(moved.reshape(moved.shape[0], -1)) < ones
    mask = rows.reshape(moved.shape).astype(mask_calculator.MASK_DTYPE)
    return jnp.moveaxis(mask, 0, self.axis)


# The paper's spelling.
NbyM = NByM
