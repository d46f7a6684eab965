"""Schedules: when are masks updated, and how far along is the sparsity?

A schedule of your own is a frozen dataclass with the two methods of
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

from jaxpruner import _registry

Kind = TypeVar("Kind", bound="type[BaseSchedule]")


def _step(owner: Any, argument: str, value: Any, least: int = 0) -> None:
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    raise ValueError(
      f"{type(owner).__name__}: {argument}={value!r} must be an integer of at "
      f"least {least}"
    )


@dataclasses.dataclass(frozen=True)
class BaseSchedule:
  """The two questions every schedule answers.

  In configuration a schedule is its name and its fields:
  `{"schedule": "periodic", "update_freq": 10, "update_start_step": 0}`.

  Attributes:
    needs: keys that configuration must give, or derive from `total_steps`.

  Example:
    >>> PeriodicSchedule(10, 0).to_config()
    {'update_freq': 10, 'update_start_step': 0}
  """

  needs: ClassVar[tuple[str, ...]] = ()

  def is_mask_update_iter(self, step: Any) -> Any:
    """Tell whether masks are updated at this step."""
    del step
    return False

  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    """Return the sparsities (a number or an array) in force at this step."""
    del step
    return target_sparsities

  @classmethod
  def config_keys(cls) -> tuple[str, ...]:
    """Return the keys of a configuration that this schedule reads."""
    return tuple(field.name for field in dataclasses.fields(cls))

  @classmethod
  def from_config(cls, config: Mapping[str, Any]) -> "BaseSchedule":
    """Return the schedule that a configuration describes.

    Args:
      config: keys and values; those among `config_keys()` are taken.
        `update_freq`, `update_start_step` and `update_end_step` were filled
        in from `total_steps`, where that is given.
    """
    return cls(
      **{key: config[key] for key in cls.config_keys() if key in config}
    )

  def to_config(self) -> dict[str, Any]:
    """Return the keys and values from which `from_config` makes this again."""
    fields = dataclasses.asdict(self)
    return {key: value for key, value in fields.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class NoUpdateSchedule(BaseSchedule):
  """Never update the masks."""


@dataclasses.dataclass(frozen=True)
class OneShotSchedule(BaseSchedule):
  """Update once, at `target_step`: dense before, the target from then on."""

  target_step: int = 0

  needs: ClassVar[tuple[str, ...]] = ("update_start_step",)

  def __post_init__(self):
    _step(self, "target_step", self.target_step)

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

  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    target = jnp.asarray(target_sparsities, jnp.float32)
    return jnp.where(jnp.less(step, self.target_step), 0, target)


@dataclasses.dataclass(frozen=True)
class PeriodicSchedule(BaseSchedule):
  """Update every `update_freq` steps from start to end, and at the end.

  The update at `update_end_step` happens whether or not `update_freq` divides
  the interval; `None` means for ever.
  """

  update_freq: int = 100
  update_start_step: int = 0
  update_end_step: int | None = None

  needs: ClassVar[tuple[str, ...]] = ("update_start_step", "update_freq")

  def __post_init__(self):
    _step(self, "update_freq", self.update_freq, least=1)
    _step(self, "update_start_step", self.update_start_step)
    if self.update_end_step is not None:
      _step(self, "update_end_step", self.update_end_step)
      if self.update_end_step < self.update_start_step:
        raise ValueError(
          f"{type(self).__name__}: update_end_step={self.update_end_step} "
          f"comes before update_start_step={self.update_start_step}; choose "
          "a later one"
        )

  def is_mask_update_iter(self, step: Any) -> Any:
    elapsed = jnp.subtract(step, self.update_start_step)
    due = (elapsed >= 0) & (elapsed % self.update_freq == 0)
    if self.update_end_step is None:
      return due
    end = self.update_end_step
    return (due & jnp.less(step, end)) | jnp.equal(step, end)


@dataclasses.dataclass(frozen=True)
class PolynomialSchedule(PeriodicSchedule):
  """Raise the sparsity along a polynomial (Zhu & Gupta, 2017).

  `s(t) = S · (1 - (1 - (t - start)/(end - start))^power)`: 0 at the start,
  exactly the target `S` from the end on, never falling. `power=3` is the
  paper's cubic, `power=1` a straight line.
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
    if (
      isinstance(self.power, bool)
      or not isinstance(self.power, int | float)
      or not 0 < self.power < math.inf
    ):
      raise ValueError(
        f"PolynomialSchedule: power={self.power!r} must be a positive number"
      )

  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    target = jnp.asarray(target_sparsities, jnp.float32)
    start, end = self.update_start_step, self.update_end_step
    assert end is not None  # for the type checker: __post_init__ refuses it
    step = jnp.asarray(step)
    # A product: in `jit` a division by a constant is turned into one.
    left = (end - step).astype(jnp.float32) * (1 / max(end - start, 1))
    ramp = target * (1 - _power(jnp.maximum(left, 0), self.power))
    # Rounding must neither overshoot the target nor miss it at the end.
    ramp = jnp.where(jnp.less_equal(step, start), 0, jnp.minimum(ramp, target))
    return jnp.where(jnp.greater_equal(step, end), target, ramp)


@dataclasses.dataclass(frozen=True)
class AlternatingSchedule(PeriodicSchedule):
  """Alternate sparse and dense phases of `update_freq` steps.

  Dense before the start, then by turns sparse and dense, sparse from the end
  on: the one schedule whose sparsity falls (Peste et al., 2021).
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

  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    target = jnp.asarray(target_sparsities, jnp.float32)
    elapsed = jnp.subtract(step, self.update_start_step)
    sparse = (elapsed >= 0) & (elapsed // self.update_freq % 2 == 0)
    assert self.update_end_step is not None  # as in PolynomialSchedule
    sparse |= jnp.greater_equal(step, self.update_end_step)
    return jnp.where(sparse, target, 0)


@dataclasses.dataclass(frozen=True)
class GeometricSchedule(PeriodicSchedule):
  """Remove the same fraction of what is left at every update.

  The rounds of iterative magnitude pruning (Han et al., 2015): a fifth, then a
  fifth of the rest, and so on; never beyond the target, and exactly at it from
  the end on.
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

  def get_sparsity_at_step(self, target_sparsities: Any, step: Any) -> Any:
    target = jnp.asarray(target_sparsities, jnp.float32)
    elapsed = jnp.subtract(step, self.update_start_step)
    rounds = jnp.maximum(elapsed // self.update_freq + 1, 0)
    left = jnp.float32(1 - self.fraction) ** rounds
    assert self.update_end_step is not None  # as in PolynomialSchedule
    done = jnp.greater_equal(step, self.update_end_step)
    return jnp.where(done, target, jnp.minimum(1 - left, target))


SCHEDULES: _registry.Registry[type[BaseSchedule]] = _registry.Registry(
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

  `schedule="name"` then stands for it, and its fields are further keys. Steps
  called `update_freq`, `update_start_step` and `update_end_step` are derived
  from `total_steps` where it is given.

  Args:
    name: the name; a taken one is refused.

  Returns:
    A function that registers a subclass of `BaseSchedule` and returns it.

  Example:
    >>> import dataclasses, jaxpruner
    >>> @jaxpruner.register_schedule("two_steps")
    ... @dataclasses.dataclass(frozen=True)
    ... class TwoSteps(jaxpruner.sparsity_schedules.BaseSchedule):
    ...   first: int = 10
    ...   second: int = 20
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
  # The same last bit inside and outside `jit`, which may decide a mask: the
  # exponent is a constant in both, and the minimum keeps the compiler from
  # fusing this product and the subtraction after it into one rounding.
  return jnp.minimum(left**power, 1)
