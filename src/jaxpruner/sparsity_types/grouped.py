"""Types that keep the same number of weights per group: N:M, fan-in."""

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp

from jaxpruner import _tools, mask_calculator
from jaxpruner.sparsity_types.base import (
  Array,
  Shape,
  SparsityType,
  check_axis,
  check_has_axis,
)


@dataclasses.dataclass(frozen=True)
class NByM(SparsityType):
  """Keep `n` of every `m` consecutive weights along `axis`.

  While a schedule raises the sparsity, each group keeps `m`, `m-1`, … and
  finally `n` weights. Sparse hardware needs groups along the axis that a matrix
  product sums over (Mishra et al., "Accelerating Sparse Deep Neural Networks",
  2021).

  Attributes:
    n: the number of **kept** weights per group.
    m: the size of a group.
    axis: the axis that groups lie along. The default is the input axis of a
      Flax or Haiku kernel (in × out); use -1 for out × in, as in Equinox.

  Example:
    >>> scores = jnp.array([[3.0], [1.0], [2.0], [4.0]])
    >>> NByM(2, 4).mask(scores, 0.5).ravel().tolist()
    [1, 0, 0, 1]
  """

  n: int
  m: int
  axis: int = -2

  def __post_init__(self):
    _tools.check_int(type(self).__name__, "n", self.n)
    _tools.check_int(type(self).__name__, "m", self.m)
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
    """The sparsity of this structure, 1 - n/m."""
    return 1 - self.n / self.m

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    check_has_axis(self, shape, self.axis, name)
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
    """Read `nm_2,4` and `nm_2,4,-1`; only `NByM` itself also reads `2:4`."""
    if cls is NByM and (short := re.fullmatch(r"(\d+):(\d+)", spec)):
      return cls(int(short[1]), int(short[2]))
    return super().from_spec(spec)

  def on_matrix(self, axes: tuple[int, int] | None) -> SparsityType | None:
    # Hardware needs groups along the inputs, in every layout.
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
    """Return the mask that keeps `ones` weights in every group."""
    return mask_calculator.n_by_m_mask(scores, ones, self.m, self.axis)

  def ones(self, shape: Shape, sparsity: Any) -> Any:
    """Return the number of kept weights per group, at least `n`."""
    kept = super().ones(shape, sparsity)
    if isinstance(kept, int):
      return max(kept, self.n)
    return jnp.maximum(kept, self.n)


@dataclasses.dataclass(frozen=True)
class ConstantFanIn(SparsityType):
  """Keep the same number of input weights for every neuron.

  Introduced with SRigL (Lasby et al., "Dynamic Sparse Training with Structured
  Sparsity", 2023).

  Attributes:
    axis: the axis that numbers the neurons; all other axes are their inputs.
      The default is the output axis of a Flax or Haiku kernel.

  Example:
    >>> scores = jnp.array([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0], [4.0, 8.0]])
    >>> ConstantFanIn().mask(scores, 0.5).tolist()
    [[0, 0], [0, 0], [1, 1], [1, 1]]
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
    """Return the mask that keeps `ones` weights of every neuron."""
    moved = jnp.moveaxis(scores, self.axis, 0)
    rows = mask_calculator.rank(moved.reshape(moved.shape[0], -1)) < ones
    mask = rows.reshape(moved.shape).astype(mask_calculator.MASK_DTYPE)
    return jnp.moveaxis(mask, 0, self.axis)


# The paper's spelling.
NbyM = NByM
