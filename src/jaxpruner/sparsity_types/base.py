"""Sparsity types: which masks are allowed?

A type divides a leaf into *units*: single weights, blocks, or channels. `pool`
turns scores of weights into scores of units, the engine selects units, and
`expand` turns the selected units into a mask of the leaf's shape. The docstring
of `SparsityType` lists the methods that a new type defines.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jaxpruner import mask_calculator
from jaxpruner.sparsity_types import _spec

Array: TypeAlias = jax.Array
Shape: TypeAlias = tuple[int, ...]
Kind = TypeVar("Kind", bound="type[SparsityType]")


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
  """Return a sparsity as a float, or raise.

  Args:
    sparsity: the fraction of weights removed, `0 <= sparsity < 1`.
    argument: the name of the argument, for the error message.

  Returns:
    The sparsity as a Python float.

  Raises:
    ValueError: the value is not a number, or lies outside the range.

  Example:
    >>> check_sparsity(0.8)
    0.8
    >>> check_sparsity(80)
    Traceback (most recent call last):
    ValueError: sparsity=80: the fraction of weights removed must satisfy \
0 <= sparsity < 1, such as 0.8
  """
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
  """Sum along an axis by adding its two halves until one entry is left.

  What XLA does: the order of additions in a reduction depends on fusion and
  sharding, so the rounding does too. What this does: it fixes the order. What
  it saves: two units with nearly equal sums keep their rank on 1 and on 8
  devices. It can go when XLA offers reductions with a fixed order.

  Args:
    x: the array.
    axis: the axis to remove.

  Returns:
    The sums, an array without that axis.

  Example:
    >>> pairwise_sum(jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), 1).tolist()
    [6.0, 15.0]
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
  """Base class of all sparsity types; by itself it is unstructured.

  A new type is a frozen dataclass that inherits from this class and defines
  one of these three sets of methods:

  - `pool`, `expand` and `units`: the scores of the units, the mask of the
    selected units, and the number of units in a leaf. Such a type works in
    every algorithm, also in those that drop and grow weights (SET, RigL), and
    its leaves are searched together with all others.
  - `choose(scores, ones)`, `units` and `groups`: the mask with `ones` kept
    units in each group, the number of units per group, and the number of
    groups. A type whose groups round their counts also defines `kept`.
  - `mask(scores, sparsity)`: the mask itself, for types that need no search.

  Further methods are optional:

  - `check` raises for shapes that cannot have the structure.
  - A property `sparsity` is for structures with a single sparsity, such as
    N:M.
  - `for_leaf` returns the type with what the path of a leaf tells.
  - `on_matrix` makes the type usable in pruning after training.
  - `spec` and `from_spec` write and read its name in configuration. The
    inherited ones write the field values after the registered name.

  Example:
    >>> import dataclasses, jax.numpy as jnp
    >>> @dataclasses.dataclass(frozen=True)
    ... class Rows(SparsityType):
    ...   def pool(self, scores): return scores.sum(1)
    ...   def expand(self, units, shape):
    ...     return jnp.broadcast_to(units[:, None], shape)
    ...   def units(self, shape): return shape[0]
    >>> Rows().mask(jnp.array([[1.0, 2.0], [3.0, 4.0]]), 0.5).tolist()
    [[0, 0], [1, 1]]
  """

  def check(self, shape: Shape, sparsity: Any, name: str = "scores") -> None:
    """Raise if a leaf of this shape cannot have this structure.

    Args:
      shape: the shape of the leaf.
      sparsity: the requested sparsity; not checked if it is traced.
      name: the path of the leaf, for the error message.

    Raises:
      ValueError: names the leaf, its shape and the rule.
    """
    if not isinstance(sparsity, jax.Array | mask_calculator.AtStep):
      check_sparsity(sparsity, f"{name}: sparsity")
    if math.prod(shape) == 0:
      raise ValueError(
        f"{name}: shape {shape} holds no weights, nothing can be kept; leave "
        "it out with filter_fn"
      )

  def for_leaf(self, names: tuple[str, ...], shape: Shape) -> "SparsityType":
    """Return the type to use for a leaf; by default the type itself.

    Args:
      names: the path of the leaf.
      shape: its shape.

    Returns:
      A type whose fields may depend on the leaf.
    """
    del names, shape
    return self

  def pool(self, scores: Array) -> Array:
    """Return the scores of the units, given the scores of the weights."""
    return scores

  def expand(self, units: Array, shape: Shape) -> Array:
    """Return the mask of a leaf, given its selected units.

    Args:
      units: an array like the result of `pool`, 1 where a unit is kept.
      shape: the shape of the leaf.

    Returns:
      An array of this shape, 1 where a weight is kept.
    """
    del shape
    return units

  def units(self, shape: Shape) -> int:
    """Return the number of units in a leaf, or in each of its groups."""
    return math.prod(shape)

  def groups(self, shape: Shape) -> int:
    """Return the number of groups in a leaf; 1 if units are not grouped."""
    del shape
    return 1

  def ones(self, shape: Shape, sparsity: Any) -> Any:
    """Return the number of kept units in a leaf, or in each of its groups."""
    return mask_calculator.num_ones(self.units(shape), sparsity)

  def kept(self, shape: Shape, sparsity: float) -> int:
    """Return the number of kept weights in a leaf.

    Smaller units at the edge of a leaf count with the average size.
    """
    return round(
      self.ones(shape, sparsity) * math.prod(shape) / self.units(shape)
    )

  def mask(self, scores: Array, sparsity: Any) -> Array:
    """Keep the units with the highest scores.

    Args:
      scores: one score per weight.
      sparsity: the fraction of weights to remove.

    Returns:
      The uint8 mask, 1 where a weight is kept. Among equal scores the lower
      index is kept first.
    """
    scores = jnp.asarray(scores)
    self.check(scores.shape, sparsity)
    from jaxpruner.sparsity_types import masks

    return masks.create_masks([self], [scores], [sparsity])[0]

  def spec(self) -> str:
    """Return the name in configuration that stands for this type.

    Returns:
      The registered name and the fields behind it, such as `"nm_2,4"`.
    """
    return _spec.write(_spec.registered_name(type(self)), self)

  @classmethod
  def from_spec(cls, spec: str) -> "SparsityType | None":
    """Return the type that a name in configuration stands for.

    Args:
      spec: the string from the configuration, without spaces.

    Returns:
      The type, or None if the string does not describe this class.
    """
    return _spec.read(cls, _spec.registered_name(cls), spec)

  def on_matrix(self, axes: tuple[int, int] | None) -> "SparsityType | None":
    """Return this type for a leaf that is read as an (inputs, outputs) matrix.

    Args:
      axes: the input axis and the output axis of the leaf: (-2, -1) for an
        in × out kernel, (-1, -2) for out × in; None where they are not the
        last two.

    Returns:
      The type to use on the matrix, or None if there is none: pruning after
      training then refuses the type.
    """
    del axes
    return None

  @property
  def inputs_together(self) -> int:
    """The number of neighbouring inputs in one unit or group of a matrix."""
    return 1


@dataclasses.dataclass(frozen=True)
class Unstructured(SparsityType):
  """Keep or remove every weight on its own.

  Example:
    >>> Unstructured().mask(jnp.array([3.0, 1.0, 2.0, 4.0]), 0.5).tolist()
    [1, 0, 0, 1]
  """

  def on_matrix(self, axes: tuple[int, int] | None) -> SparsityType:
    del axes
    return self


def register_sparsity_type(name: str) -> Callable[[Kind], Kind]:
  """Give a sparsity type a name in configuration: a class decorator.

  Afterwards `sparsity_type="name"` selects the type, `"name_2,4"` also sets
  its fields, and `config_from_updater` writes this string.

  Args:
    name: the name; a name that is taken is refused.

  Returns:
    A function that registers a subclass of `SparsityType` and returns it.

  Example:
    >>> import dataclasses, jaxpruner
    >>> @jaxpruner.register_sparsity_type("stripes")
    ... @dataclasses.dataclass(frozen=True)
    ... class Stripes(jaxpruner.Channel):
    ...   axis: int = 0
    >>> jaxpruner.parse_sparsity_type("stripes_1")
    Stripes(axis=1)
    >>> Stripes(1).spec()
    'stripes_1'
  """

  def register(cls: Kind) -> Kind:
    if not (isinstance(cls, type) and issubclass(cls, SparsityType)):
      raise ValueError(
        f"sparsity_type={cls!r} must be a subclass of "
        "jaxpruner.sparsity_types.SparsityType"
      )
    found = _spec.parse(name) if isinstance(name, str) else None
    if found is not None and _spec.TYPES.name_of(type(found)) != name:
      raise ValueError(
        f"name={name!r} already stands for {found!r}; choose another for "
        f"{cls.__module__}.{cls.__qualname__}"
      )
    _spec.TYPES.register(name, cls)
    return cls

  return register
