"""Sparsity types: what shapes may a mask take?

A type sees a leaf as an array of *units*: single weights, blocks, or channels.
`pool` turns scores of weights into scores of units, the engine chooses units,
`expand` turns the choice back into a mask of the leaf's shape. `SparsityType`
says what a type of your own must define.
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
  """Base of all types; as it is, any weight may go.

  A type of your own is a frozen dataclass that inherits from this class.

  - For masks it defines either `mask(scores, sparsity)`, which decides alone,
    or `pool`, `expand` and `units`: scores of units, the mask of the chosen
    units, how many units a leaf has. With the latter three it also works in
    algorithms that drop and grow (SET, RigL) and shares the one search of all
    leaves.
  - A type that ranks within groups defines `choose(scores, ones)`, with
    `units` (per group), `groups` and, if the groups round, `kept`.
  - `check` refuses shapes that cannot take the structure.
  - A property `sparsity` is for a structure with only one sparsity, as N:M.
  - `on_matrix` lets pruning after training use it.
  - `spec` and `from_spec` are its name in configuration. The inherited ones
    write the fields behind the name given to `register_sparsity_type`.

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

  def spec(self) -> str:
    """Return the name in configuration that stands for this type.

    Returns:
      The registered name and the fields behind it, such as `"nm_2,4,-2"`.
    """
    return _spec.write(_spec.registered_name(type(self)), self)

  @classmethod
  def from_spec(cls, spec: str) -> "SparsityType | None":
    """Return the type that a name in configuration stands for.

    Args:
      spec: what the user wrote, without spaces.

    Returns:
      None if it is not a name of this class.
    """
    return _spec.read(cls, _spec.registered_name(cls), spec)

  def on_matrix(self, axes: tuple[int, int] | None) -> "SparsityType | None":
    """Return this structure for a leaf seen as an (inputs, outputs) matrix.

    Args:
      axes: the axes of the leaf that its inputs and outputs lie on: (-2, -1)
        for an in × out kernel, (-1, -2) for out × in; None where they are
        not the last two.

    Returns:
      None if the structure cannot be told on that matrix: pruning after
      training then refuses the type.
    """
    del axes
    return None

  @property
  def inputs_together(self) -> int:
    """How many neighbouring inputs of a matrix belong to one unit or group."""
    return 1


@dataclasses.dataclass(frozen=True)
class Unstructured(SparsityType):
  """Any weight may go."""

  def on_matrix(self, axes: tuple[int, int] | None) -> SparsityType:
    del axes
    return self


def register_sparsity_type(name: str) -> Callable[[Kind], Kind]:
  """Give a sparsity type a name in configuration: a class decorator.

  `sparsity_type="name"`, or `"name_2,4"` with values for the fields, then
  stands for it, and `config_from_updater` writes it so.

  Args:
    name: the name; one that already means something is refused.

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
