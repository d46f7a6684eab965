"""Schedules: when are masks updated, and which sparsity applies at a step?

A new schedule is a frozen dataclass that defines the two methods of
`BaseSchedule`. Both take a step that may be traced. `register_schedule` gives
it a name in configuration.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from jaxpruner import _tools
from jaxpruner._tools import registry

Kind = TypeVar("Kind", bound="type[BaseSchedule]")


def _each(method: Callable[..., Any]) -> Callable[..., Any]:
  """Let `get_sparsity_at_step` take a tree of targets; None stays None."""

  @functools.wraps(method)
  def over_tree(self, target_sparsities, step):
    at_step = lambda target: method(self, target, step)
    return jax.tree.map(at_step, target_sparsities)

  return over_tree


@dataclasses.dataclass(frozen=True)
class BaseSchedule:
  """Base class of all schedules; by itself it never updates masks.

  A subclass defines `is_mask_update_iter` and, if the sparsity changes with the
  steps, `get_sparsity_at_step`. In configuration a schedule is written as its
  name and its fields:
  `{"schedule": "periodic", "update_freq": 10, "update_start_step": 0}`.

  Attributes:
    needs: keys that configuration must contain; `total_steps` can replace
      them.

  Example:
    >>> @dataclasses.dataclass(frozen=True)
    ... class Doubling(BaseSchedule):
    ...   def is_mask_update_iter(self, step):
    ...     return (step & (step - 1) == 0) & (step > 0)
    >>> [step for step in range(10) if Doubling().is_mask_update_iter(step)]
    [1, 2, 4, 8]
  """

  needs: ClassVar[tuple[str, ...]] = ()

  def is_mask_update_iter(self, step: Any) -> Any:
    """Return whether masks are updated at this step.

    Args:
      step: the number of the step, an integer that may be traced.

    Returns:
      A bool, or a boolean array if the step is traced.
    """
    del step
    return False

  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    """Return the sparsity that applies at this step.

    Args:
      target_sparsities: the final sparsity, a number, an array, or a tree of
        them with None for dense leaves.
      step: the number of the step, an integer that may be traced.

    Returns:
      The sparsity or sparsities at this step, in the shape of the target.
    """
    del step
    return target_sparsities

  @classmethod
  def config_keys(cls) -> tuple[str, ...]:
    """Return the configuration keys that this schedule reads."""
    return tuple(field.name for field in dataclasses.fields(cls))

  @classmethod
  def from_config(cls, config: Mapping[str, Any]) -> "BaseSchedule":
    """Return the schedule that a configuration describes.

    Args:
      config: keys and values; only those in `config_keys()` are read. Where
        `total_steps` is given, `update_freq`, `update_start_step` and
        `update_end_step` are already derived from it.

    Returns:
      The schedule.
    """
    return cls(
      **{key: config[key] for key in cls.config_keys() if key in config}
    )

  def to_config(self) -> dict[str, Any]:
    """Return the keys and values that `from_config` reads back."""
    fields = dataclasses.asdict(self)
    return {key: value for key, value in fields.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class NoUpdateSchedule(BaseSchedule):
  """Never update the masks.

  Example:
    >>> NoUpdateSchedule().is_mask_update_iter(0)
    False
  """


@dataclasses.dataclass(frozen=True)
class OneShotSchedule(BaseSchedule):
  """Update the masks once; the sparsity is 0 before and the target after.

  Attributes:
    target_step: the step of the update.

  Example:
    >>> schedule = OneShotSchedule(target_step=2)
    >>> [bool(schedule.is_mask_update_iter(step)) for step in range(4)]
    [False, False, True, False]
    >>> [float(schedule.get_sparsity_at_step(0.5, step)) for step in range(4)]
    [0.0, 0.0, 0.5, 0.5]
  """

  target_step: int = 0

  needs: ClassVar[tuple[str, ...]] = ("update_start_step",)

  def __post_init__(self):
    _tools.check_int("OneShotSchedule", "target_step", self.target_step, 0)

  @classmethod
  def config_keys(cls) -> tuple[str, ...]:
    return ("update_start_step",)

  @classmethod
  def from_config(cls, config: Mapping[str, Any]) -> BaseSchedule:
    return cls(config["update_start_step"])

  def to_config(self) -> dict[str, Any]:
    return {"update_start_step": self.target_step}

  def is_mask_update_iter(self, step: Any) -> Any:
    return jnp.equal(step, self.target_step)

  @_each
  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    target = jnp.asarray(target_sparsities, jnp.float32)
    return jnp.where(jnp.less(step, self.target_step), 0, target)


@dataclasses.dataclass(frozen=True)
class PeriodicSchedule(BaseSchedule):
  """Update the masks every `update_freq` steps, and at the last step.

  Attributes:
    update_freq: the number of steps between two updates.
    update_start_step: the step of the first update.
    update_end_step: the step of the last update, also where `update_freq` does
      not divide the interval; None for no end.

  Example:
    >>> schedule = PeriodicSchedule(2, 1, 6)
    >>> [step for step in range(9) if schedule.is_mask_update_iter(step)]
    [1, 3, 5, 6]
  """

  update_freq: int = 100
  update_start_step: int = 0
  update_end_step: int | None = None

  needs: ClassVar[tuple[str, ...]] = ("update_start_step", "update_freq")

  def __post_init__(self):
    name = type(self).__name__
    _tools.check_int(name, "update_freq", self.update_freq)
    _tools.check_int(name, "update_start_step", self.update_start_step, 0)
    if self.update_end_step is not None:
      _tools.check_int(name, "update_end_step", self.update_end_step, 0)
      if self.update_end_step < self.update_start_step:
        raise ValueError(
          f"{name}: update_end_step={self.update_end_step} "
          f"comes before update_start_step={self.update_start_step}; choose "
          "a later one"
        )

  def is_mask_update_iter(self, step: Any) -> Any:
    if step is None:
      return False
    elapsed = jnp.subtract(step, self.update_start_step)
    due = (elapsed >= 0) & (elapsed % self.update_freq == 0)
    if self.update_end_step is None:
      return due
    end = self.update_end_step
    return (due & jnp.less(step, end)) | jnp.equal(step, end)


@dataclasses.dataclass(frozen=True)
class PolynomialSchedule(PeriodicSchedule):
  """Raise the sparsity from 0 to the target along a polynomial.

  `s(t) = S · (1 - (1 - (t - start)/(end - start))^power)`: 0 at the start,
  exactly the target `S` from the end on, and never decreasing (Zhu & Gupta, "To
  prune, or not to prune", 2017).

  Attributes:
    update_freq: the number of steps between two updates.
    update_start_step: the step at which the ramp starts.
    update_end_step: the step at which the target is reached; required.
    power: the exponent; 3 is the paper's cubic ramp, 1 a straight line.

  Example:
    >>> schedule = PolynomialSchedule(1, 0, 4, power=1)
    >>> [float(schedule.get_sparsity_at_step(0.5, step)) for step in range(6)]
    [0.0, 0.125, 0.25, 0.375, 0.5, 0.5]
  """

  power: float = 3

  needs: ClassVar[tuple[str, ...]] = (
    *PeriodicSchedule.needs,
    "update_end_step",
  )

  def __post_init__(self):
    super().__post_init__()
    if self.update_end_step is None:
      raise ValueError(
        "PolynomialSchedule: update_end_step=None; a ramp needs the step at "
        "which it reaches its target"
      )
    if not (_tools.is_number(self.power) and 0 < self.power < math.inf):
      raise ValueError(
        f"PolynomialSchedule: power={self.power!r} must be a positive number"
      )

  @_each
  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    target = jnp.asarray(target_sparsities, jnp.float32)
    start, end = self.update_start_step, self.update_end_step
    assert end is not None  # for the type checker: __post_init__ refuses it
    step = jnp.asarray(step)
    # XLA turns a division by a constant into a product inside `jit`: write
    # the product, so that the last bit is the same outside `jit`.
    left = (end - step).astype(jnp.float32) * (1 / max(end - start, 1))
    ramp = target * (1 - _power(jnp.maximum(left, 0), self.power))
    # Rounding must not exceed the target, nor miss it at the end.
    ramp = jnp.where(jnp.less_equal(step, start), 0, jnp.minimum(ramp, target))
    return jnp.where(jnp.greater_equal(step, end), target, ramp)


@dataclasses.dataclass(frozen=True)
class AlternatingSchedule(PeriodicSchedule):
  """Alternate sparse and dense phases of `update_freq` steps.

  The network is dense before the start, then sparse and dense in turn, and
  sparse from the end on (Peste et al., "AC/DC", 2021).

  Attributes:
    update_freq: the number of steps in a phase.
    update_start_step: the first step of the first sparse phase.
    update_end_step: the step from which the network stays sparse; required.

  Example:
    >>> schedule = AlternatingSchedule(2, 1, 6)
    >>> [float(schedule.get_sparsity_at_step(0.5, step)) for step in range(8)]
    [0.0, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5, 0.5]
  """

  needs: ClassVar[tuple[str, ...]] = (
    *PeriodicSchedule.needs,
    "update_end_step",
  )

  def __post_init__(self):
    super().__post_init__()
    if self.update_end_step is None:
      raise ValueError(
        "AlternatingSchedule: update_end_step=None; the phases need the step "
        "from which the network stays sparse"
      )

  @_each
  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    target = jnp.asarray(target_sparsities, jnp.float32)
    elapsed = jnp.subtract(step, self.update_start_step)
    sparse = (elapsed >= 0) & (elapsed // self.update_freq % 2 == 0)
    assert self.update_end_step is not None  # as in PolynomialSchedule
    sparse |= jnp.greater_equal(step, self.update_end_step)
    return jnp.where(sparse, target, 0)


@dataclasses.dataclass(frozen=True)
class GeometricSchedule(PeriodicSchedule):
  """Remove the same fraction of the remaining weights at every update.

  The rounds of iterative magnitude pruning: the sparsity never exceeds the
  target, and equals it from the end on (Han et al., "Learning both Weights and
  Connections", 2015).

  Attributes:
    update_freq: the number of steps between two updates.
    update_start_step: the step of the first update.
    update_end_step: the step at which the target is reached; required.
    fraction: the fraction of the remaining weights that an update removes.

  Example:
    >>> schedule = GeometricSchedule(1, 0, 3, fraction=0.5)
    >>> [float(schedule.get_sparsity_at_step(0.875, step)) for step in range(4)]
    [0.5, 0.75, 0.875, 0.875]
  """

  fraction: float = 0.2

  needs: ClassVar[tuple[str, ...]] = (
    *PeriodicSchedule.needs,
    "update_end_step",
  )

  def __post_init__(self):
    super().__post_init__()
    if self.update_end_step is None:
      raise ValueError(
        "GeometricSchedule: update_end_step=None; the rounds need the step at "
        "which they reach their target"
      )
    if not isinstance(self.fraction, float) or not 0 < self.fraction < 1:
      raise ValueError(
        f"GeometricSchedule: fraction={self.fraction!r} must lie between 0 and "
        "1, such as 0.2"
      )

  @_each
  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    target = jnp.asarray(target_sparsities, jnp.float32)
    elapsed = jnp.subtract(step, self.update_start_step)
    rounds = jnp.maximum(elapsed // self.update_freq + 1, 0)
    left = jnp.float32(1 - self.fraction) ** rounds
    assert self.update_end_step is not None  # as in PolynomialSchedule
    done = jnp.greater_equal(step, self.update_end_step)
    return jnp.where(done, target, jnp.minimum(1 - left, target))


SCHEDULES: registry.Registry[type[BaseSchedule]] = registry.Registry(
  "schedule",
  "jaxpruner.register_schedule",
  {
    "none": NoUpdateSchedule,
    "one_shot": OneShotSchedule,
    "periodic": PeriodicSchedule,
    "polynomial": PolynomialSchedule,
    "alternating": AlternatingSchedule,
    "geometric": GeometricSchedule,
  },
)


def register_schedule(name: str) -> Callable[[Kind], Kind]:
  """Give a schedule a name in configuration: a class decorator.

  Afterwards `schedule="name"` selects the schedule, and its fields are further
  keys. The fields `update_freq`, `update_start_step` and `update_end_step` are
  derived from `total_steps` where it is given.

  Args:
    name: the name; a name that is taken is refused.

  Returns:
    A function that registers a subclass of `BaseSchedule` and returns it.

  Example:
    >>> import dataclasses, jaxpruner
    >>> @jaxpruner.register_schedule("two_steps")
    ... @dataclasses.dataclass(frozen=True)
    ... class TwoSteps(jaxpruner.sparsity_schedules.BaseSchedule):
    ...   first: int = 10
    ...   second: int = 20
    ...   def is_mask_update_iter(self, step):
    ...     return (step == self.first) | (step == self.second)
    >>> jaxpruner.create_updater_from_config(
    ...   {"algorithm": "magnitude", "sparsity": 0.5, "schedule": "two_steps",
    ...    "second": 30}).scheduler
    TwoSteps(first=10, second=30)
  """

  def register(cls: Kind) -> Kind:
    if not (isinstance(cls, type) and issubclass(cls, BaseSchedule)):
      raise ValueError(
        f"schedule={cls!r} must be a subclass of "
        "jaxpruner.sparsity_schedules.BaseSchedule"
      )
    SCHEDULES.register(name, cls)
    return cls

  return register


@functools.partial(jax.jit, static_argnums=1)
def _power(left: jax.Array, power: float) -> jax.Array:
  # A mask may depend on the last bit of a sparsity. What XLA does: it fuses
  # this product with the subtraction after it, with one rounding instead of
  # two. What we do: a minimum between them, and an exponent that is a constant
  # inside and outside `jit`. What it saves: both give the same bits. When it
  # can go: when XLA can be told not to contract products and sums.
  return jnp.minimum(left**power, 1)
