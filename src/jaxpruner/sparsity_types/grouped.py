"""Types that keep the same number of weights per group: N:M, fan-in."""

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp

from jaxpruner import _tools, mask_calculator
from jaxpruner.sparsity_types import _spec
from jaxpruner.sparsity_types.base import (
  Array,
  Shape,
  SparsityType,
  check_axis,
  check_has_axis,
)


@dataclasses.dataclass(frozen=True)
class NByM(SparsityType):
  """Keep `n` of every `m` weights along the axis that a product sums over.

  While a schedule raises the sparsity, each group keeps `m`, `m-1`, … and
  finally `n` weights. Sparse hardware needs groups along the axis that a matrix
  product sums over (Mishra et al., "Accelerating Sparse Deep Neural Networks",
  2021).

  Attributes:
    n: the number of **kept** weights per group.
    m: the size of a group.
    axis: the axis that groups lie along. None is the input axis of a Flax or
      Haiku kernel, -2; in attention kernels of three dimensions it is what the
      path tells: the first axis of a query, key or value kernel, and the first
      two, read as one, of an output kernel. Use -1 for out × in, as in Equinox.
      A tuple names neighbouring axes that are read as one.
    stride: the distance between the weights of a group. With 128, a group of 4
      has the indices 0, 128, 256, 384: what TPU kernels read fast (Qwix calls
      it `offset`).

  Example:
    >>> scores = jnp.array([[3.0], [1.0], [2.0], [4.0]])
    >>> NByM(2, 4).mask(scores, 0.5).ravel().tolist()
    [1, 0, 0, 1]
    >>> NByM(1, 2, stride=2).mask(scores, 0.5).ravel().tolist()
    [1, 0, 0, 1]
  """

  n: int
  m: int
  axis: int | tuple[int, ...] | None = None
  stride: int = 1

  def __post_init__(self):
    _tools.check_int(type(self).__name__, "n", self.n)
    _tools.check_int(type(self).__name__, "m", self.m)
    _tools.check_int(type(self).__name__, "stride", self.stride)
    if isinstance(self.axis, list | tuple):
      object.__setattr__(self, "axis", tuple(self.axis))
    for axis in self._given:
      check_axis(self, axis)
    if self.n > self.m:
      raise ValueError(
        f"NByM: n={self.n} exceeds m={self.m}; n counts the weights kept of "
        "every m and must not be larger"
      )

  def __str__(self) -> str:
    return f"{self.n}:{self.m}"

  @property
  def _given(self) -> tuple[int, ...]:
    axis = -2 if self.axis is None else self.axis
    return axis if isinstance(axis, tuple) else (axis,)

  @property
  def sparsity(self) -> float:
    """The sparsity of this structure, 1 - n/m."""
    return 1 - self.n / self.m

  def for_leaf(self, names: tuple[str, ...], shape: Shape) -> SparsityType:
    """Return this type with the axis that the path of a leaf tells.

    Args:
      names: the path of the leaf.
      shape: its shape.

    Returns:
      The type itself if its axis is given.
    """
    if self.axis is not None:
      return self
    return dataclasses.replace(self, axis=contraction_axes(names, shape))

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    for axis in self._given:
      check_has_axis(self, shape, axis, name)
    axes = [axis % len(shape) for axis in self._given]
    if axes != [*range(axes[0], axes[0] + len(axes))]:
      raise ValueError(
        f"{name}: axis={self.axis} must name neighbouring axes in their order, "
        "such as (0, 1)"
      )
    size, group = math.prod(shape[axis] for axis in axes), self.m * self.stride
    if size % group:
      where = self._given[0] if len(axes) == 1 else self._given
      stride = f" times stride={self.stride}" if self.stride > 1 else ""
      raise ValueError(
        f"{name}: axis {where} has length {size}, not divisible by "
        f"m={self.m}{stride}; pad it, choose another axis, or leave it out "
        "with filter_fn"
      )
    if isinstance(sparsity, float) and sparsity > self.sparsity + 1e-6:
      raise ValueError(
        f"{name}: sparsity={sparsity} contradicts {self.n}:{self.m}, which "
        f"removes exactly {self.sparsity:g}; drop the sparsity or change n, m"
      )

  def spec(self) -> str:
    """Return `nm_2,4`; the axis and the stride follow if they are set."""
    if dataclasses.fields(self) != dataclasses.fields(NByM):
      return super().spec()
    axis = "" if self.axis is None else "+".join(map(str, self._given))
    parts = [str(self.n), str(self.m), axis, str(self.stride)]
    if self.stride == 1:
      parts = parts[:3] if axis else parts[:2]
    return f"{_spec.registered_name(type(self))}_{','.join(parts)}"

  @classmethod
  def from_spec(cls, spec: str) -> SparsityType | None:
    """Read `nm_2,4`, `nm_2,4,-1`, `nm_2,4,0+1` (two axes), `nm_2,4,,128`.

    Only `NByM` itself also reads `2:4`.
    """
    if cls is NByM and (short := re.fullmatch(r"(\d+):(\d+)", spec)):
      return cls(int(short[1]), int(short[2]))
    name = re.escape(_spec.registered_name(cls))
    axes = r"(?:,(-?\d+(?:\+-?\d+)*)?)?"
    found = re.fullmatch(rf"{name}_(\d+),(\d+){axes}(?:,(\d+))?", spec)
    if not found or dataclasses.fields(cls) != dataclasses.fields(NByM):
      return super().from_spec(spec)
    axis = tuple(map(int, found[3].split("+"))) if found[3] else None
    if axis is not None and len(axis) == 1:
      axis = axis[0]
    return cls(int(found[1]), int(found[2]), axis, int(found[4] or 1))

  def on_matrix(self, axes: tuple[int, int] | None) -> SparsityType | None:
    # Hardware needs groups along the inputs, in every layout.
    del axes
    plain = type(self) is NByM and self.stride == 1
    return NByM(self.n, self.m, axis=-2) if plain else None

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
    split, axis = self.split(scores.shape)
    mask = mask_calculator.n_by_m_mask(
      scores.reshape(split), ones, self.m, axis
    )
    return mask.reshape(scores.shape)

  def split(self, shape: Shape) -> tuple[Shape, int]:
    """Return the shape in which groups have an axis of their own, and which.

    Args:
      shape: the shape of the weights.

    Returns:
      `(shape, axis)`; the axis has length `m`.

    Example:
      >>> NByM(2, 4).split((8, 3))
      ((2, 4, 1, 3), 1)
    """
    first = self._given[0] % len(shape)
    last = first + len(self._given)
    length = math.prod(shape[first:last])
    blocks = length // (self.m * self.stride)
    split = (*shape[:first], blocks, self.m, self.stride, *shape[last:])
    return split, first + 1

  def ones(self, shape: Shape, sparsity: Any) -> Any:
    """Return the number of kept weights per group, at least `n`."""
    kept = super().ones(shape, sparsity)
    if isinstance(kept, int):
      return max(kept, self.n)
    return jnp.maximum(kept, self.n)


_INPUTS = frozenset("query key value qkv kv q k v".split())
_OUTPUTS = frozenset("out output o".split())
_ATTENTION = frozenset(
  "attention attn mha selfattention crossattention".split()
)


def contraction_axes(
  names: tuple[str, ...], shape: Shape
) -> int | tuple[int, ...]:
  """Return the axes of a kernel that a product sums over.

  The kernels of Flax attention are (d, heads, head_dim) for queries, keys and
  values, and (heads, head_dim, d) for the output; all others end in in × out.

  Args:
    names: the path of the kernel.
    shape: its shape.

  Returns:
    An axis, or neighbouring axes.

  Raises:
    ValueError: the kernel belongs to an attention and its role is unknown.

  Example:
    >>> contraction_axes(("attention", "query", "kernel"), (512, 8, 64))
    0
    >>> contraction_axes(("attention", "out", "kernel"), (8, 64, 512))
    (0, 1)
    >>> contraction_axes(("conv", "kernel"), (3, 3, 64, 128))
    -2
  """
  parts = [[w.lower() for w in _tools.words(n)] for n in names[:-1]]
  above = {word for part in parts[:-1] for word in part}
  parent = set(parts[-1]) if parts else set()
  if len(shape) == 3 and parent & _INPUTS:
    return 0
  in_attention = bool(_ATTENTION & (above | parent))
  if len(shape) == 3 and parent & _OUTPUTS and in_attention:
    return (0, 1)
  if len(shape) > 2 and in_attention:
    raise ValueError(
      f"params leaf {'/'.join(names)!r} of shape {shape} belongs to an "
      "attention, and its name does not tell which axes a product sums over; "
      "pass sparsity_type={path: NByM(n, m, axis=…)} for it, or leave it out "
      "with filter_fn"
    )
  return -2


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
