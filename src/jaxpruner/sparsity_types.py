"""Sparsity types: what shapes may a mask take?

A type sees a leaf as an array of *units*: single weights, blocks, or channels.
`pool` turns scores of weights into scores of units, the engine chooses units,
`expand` turns the choice back into a mask of the leaf's shape. A type of your
own is a frozen dataclass with `mask(scores, sparsity)`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxpruner import _lazy, _tree, mask_calculator

Array: TypeAlias = jax.Array
Shape: TypeAlias = tuple[int, ...]


def _positive(owner: Any, argument: str, value: Any) -> None:
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(
      f"{type(owner).__name__}: {argument}={value!r} must be an integer of at "
      "least 1"
    )


def _axis(owner: Any, axis: Any) -> None:
  if isinstance(axis, bool) or not isinstance(axis, int):
    raise ValueError(
      f"{type(owner).__name__}: axis={axis!r} must be an integer, such as -2"
    )


def _has_axis(owner: Any, shape: Shape, axis: int, name: str) -> None:
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
    return create_masks([self], [scores], [sparsity])[0]


@dataclasses.dataclass(frozen=True)
class Unstructured(SparsityType):
  """Any weight may go."""


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
    _positive(self, "n", self.n)
    _positive(self, "m", self.m)
    _axis(self, self.axis)
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
class Block(SparsityType):
  """Keep or remove whole blocks of the last two dimensions.

  Edge blocks are smaller where the shape does not divide. Leading dimensions
  (stacked layers, convolution windows) hold separate blocks.
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

  def _units(self, shape: Shape) -> tuple[Shape, Shape]:
    """Return the leaf's shape as at least 2-D, and the shape of its units."""
    matrix = (1, *shape)[-2:] if len(shape) < 2 else shape
    rows, columns = (
      -(-size // side)
      for size, side in zip(matrix[-2:], self.block_shape, strict=True)
    )
    return matrix, (*matrix[:-2], rows, columns)

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    if not shape:
      raise ValueError(
        f"{name}: a scalar has no blocks; leave it out with filter_fn"
      )

  def pool(self, scores: Array) -> Array:
    matrix, (*lead, rows, columns) = self._units(scores.shape)
    height, width = self.block_shape
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
    matrix, (*lead, rows, columns) = self._units(shape)
    height, width = self.block_shape
    mask = jnp.broadcast_to(
      units[..., :, None, :, None], (*lead, rows, height, columns, width)
    ).reshape(*lead, rows * height, columns * width)
    return mask[..., : matrix[-2], : matrix[-1]].reshape(shape)

  def units(self, shape: Shape) -> int:
    return math.prod(self._units(shape)[1])


@dataclasses.dataclass(frozen=True)
class Channel(SparsityType):
  """Keep or remove whole slices along `axis`, by their mean score."""

  axis: int = -1

  def __post_init__(self):
    _axis(self, self.axis)

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    _has_axis(self, shape, self.axis, name)

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


@dataclasses.dataclass(frozen=True)
class ConstantFanIn(SparsityType):
  """Keep equally many weights of every neuron (Lasby et al., 2023).

  A neuron is an index of `axis`, the output axis of a Flax or Haiku kernel by
  default; all other axes are its inputs.
  """

  axis: int = -1

  def __post_init__(self):
    _axis(self, self.axis)

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    super().check(shape, sparsity, name)
    _has_axis(self, shape, self.axis, name)

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


def select(
  types: Sequence[SparsityType], units: Sequence[Array], ones: Any
) -> list[Array]:
  """Choose the highest units of each leaf, `ones` of them: a list or an array.

  All leaves with a free choice go through one search; a type with groups ranks
  each by itself, in its own `choose`.
  """
  free = [i for i, kind in enumerate(types) if not hasattr(kind, "choose")]
  chosen: dict[int, Array] = dict(
    zip(
      free,
      mask_calculator.topk_masks(
        [units[i] for i in free], mask_calculator.pick(ones, free)
      ),
      strict=True,
    )
  )
  for i, kind in enumerate(types):
    if i not in chosen:
      scores = _lazy.value(units[i])
      chosen[i] = _tree.with_auto_axes(
        kind.choose,  # pyright: ignore[reportAttributeAccessIssue]
        scores,
        ones[i],
        like=scores,
      )
  return [chosen[i] for i in range(len(types))]


def pool(kind: SparsityType, scores: Any) -> Any:
  """Return the scores of units; those of single weights stay lazy."""
  if type(kind).pool is SparsityType.pool:
    return scores
  return _tree.with_auto_axes(kind.pool, _lazy.value(scores))


def expand(kind: SparsityType, units: Array, like: Any) -> Array:
  """Return the mask of a leaf, laid out like it."""
  if type(kind).expand is SparsityType.expand:
    return units
  return _tree.with_auto_axes(
    lambda units: kind.expand(units, like.shape),
    units,
    like=_lazy.value(like),
  )


def ones_each(
  types: Sequence[SparsityType], shapes: Sequence[Shape], sparsities: Any
) -> list[Any]:
  """Return how many units each leaf keeps.

  Scheduled counts are computed side by side: one by one, each leaf would add
  its own scalar kernels to the program.
  """
  plain = [
    i
    for i, kind in enumerate(types)
    if type(kind).ones is SparsityType.ones
    and isinstance(sparsities[i], mask_calculator.AtStep)
  ]
  counts: dict[int, Any] = {}
  if plain:
    each = mask_calculator.num_ones_each(
      [types[i].units(shapes[i]) for i in plain],
      [sparsities[i] for i in plain],
    )
    counts = {i: each[row] for row, i in enumerate(plain)}
  return [
    counts[i] if i in counts else kind.ones(shapes[i], sparsities[i])
    for i, kind in enumerate(types)
  ]


def create_masks(
  types: Sequence[Any], scores: Sequence[Array], sparsities: Sequence[Any]
) -> list[Array]:
  """Return the mask of each leaf; a type's own `mask` method has the say."""
  own = {
    i
    for i, kind in enumerate(types)
    if getattr(type(kind), "mask", None) is not SparsityType.mask
  }
  rest = [i for i in range(len(types)) if i not in own]
  units = select(
    [types[i] for i in rest],
    [pool(types[i], scores[i]) for i in rest],
    ones_each(
      [types[i] for i in rest],
      [scores[i].shape for i in rest],
      [sparsities[i] for i in rest],
    ),
  )
  masks: dict[int, Array] = {
    i: expand(types[i], unit, scores[i])
    for i, unit in zip(rest, units, strict=True)
  }
  for i in own:
    sparsity = sparsities[i]
    if isinstance(sparsity, mask_calculator.AtStep):
      sparsity = sparsity.value
    mask = types[i].mask(_lazy.value(scores[i]), sparsity)
    masks[i] = mask.astype(mask_calculator.MASK_DTYPE)
  return [masks[i] for i in range(len(types))]
