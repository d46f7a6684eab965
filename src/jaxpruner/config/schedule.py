"""Build the schedule that a configuration describes.

The key `schedule` names it; without this key it follows from the given steps
and from the algorithm. The schedule's class lists the keys that it needs
(`needs`) and reads (`config_keys`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpruner import _tools
from jaxpruner.sparsity_schedules import (
  SCHEDULES,
  BaseSchedule,
  NoUpdateSchedule,
  OneShotSchedule,
)

# Key -> its smallest value. Every schedule accepts these keys.
STEPS = {
  "update_freq": 1,
  "update_start_step": 0,
  "update_end_step": 0,
  "total_steps": 1,
}


def keys() -> dict[str, str]:
  """Return the keys that only one schedule reads -> its name."""
  return {
    key: name
    for name, kind in SCHEDULES.items()
    for key in kind.config_keys()
    if key not in STEPS
  }


def build(cls: Any, config: Mapping[str, Any]) -> BaseSchedule:
  """Return the schedule that a configuration gives to an algorithm.

  Args:
    cls: the algorithm's class.
    config: its configuration.

  Returns:
    The schedule.

  Raises:
    ValueError: a key is missing, has a wrong value, or belongs to another
      schedule.
  """
  _check_steps(config)
  config = {**_from_total_steps(cls, config), **config}
  name = config.get("schedule") or _implied(cls, config)
  kind = SCHEDULES.find(name)
  for key in (*kind.needs, *_required(kind)):
    if key not in config:
      raise ValueError(
        f"sparsity_config: schedule={name!r} needs {key!r}; give it, or "
        "'total_steps'"
      )
  _refuse_others(kind, name, config, {f.name for f in dataclasses.fields(cls)})
  return kind.from_config(config)


def _check_steps(config: Mapping[str, Any]) -> None:
  for key, least in STEPS.items():
    _tools.check_int("sparsity_config", key, config.get(key, least), least)


def _rewires(cls: Any) -> bool:
  """Return whether masks change while the sparsity stays the same."""
  return cls.category.dynamic and cls.category.start == "sparse-to-sparse"


def _from_total_steps(cls: Any, config: Mapping[str, Any]) -> dict[str, int]:
  """Return the steps that `total_steps` implies."""
  total = config.get("total_steps")
  if total is None:
    return {}
  end = config.get("update_end_step", total * 3 // 4)
  # A tenth of the steps up to the end, so that a short training has several
  # updates: a ramp that starts a third of the way has seven or more.
  every = cls.category.update_every or max(1, min(100, end // 10))
  freq = config.get("update_freq", every)
  start = min(freq, end) if _rewires(cls) else min(total // 4, end)
  return {
    "update_freq": freq,
    "update_start_step": start,
    "update_end_step": end,
  }


def _implied(cls: Any, config: Mapping[str, Any]) -> str:
  """Return the name of the schedule for these steps and this algorithm."""
  start = config.get("update_start_step")
  if start is None:
    for key in ("update_end_step", "update_freq", "power"):
      if key in config:
        raise ValueError(
          f"sparsity_config has {key!r} but no 'update_start_step': nothing "
          "would be updated; give the first step, or 'total_steps'"
        )
    return "none"
  if start == config.get("update_end_step"):
    return "one_shot"
  if cls.category.default_schedule:
    return cls.category.default_schedule
  return "periodic" if _rewires(cls) else "polynomial"


def _required(kind: Any) -> list[str]:
  """Return the fields of a schedule without a default."""
  return [
    field.name
    for field in dataclasses.fields(kind)
    if field.default is dataclasses.MISSING
    and field.default_factory is dataclasses.MISSING
  ]


def _refuse_others(
  kind: Any, name: str, config: Mapping[str, Any], fields: set[str]
) -> None:
  """Raise for keys that only another schedule reads."""
  # These two replace a ramp: its keys may stay in the configuration.
  if kind is OneShotSchedule or (
    kind is NoUpdateSchedule and "schedule" in config
  ):
    return
  for key, owner in keys().items():
    if key in config and key not in kind.config_keys() and key not in fields:
      raise ValueError(
        f"sparsity_config: {key}={config[key]!r} needs schedule={owner!r}; "
        f"{config['algorithm']!r} has schedule={name!r}: drop it"
      )
