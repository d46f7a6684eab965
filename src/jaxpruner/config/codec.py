"""The words of configuration, and the objects they stand for, both ways."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxpruner import (
  _leaves,
  sparsity_distributions,
  sparsity_schedules,
  sparsity_types,
  structures,
)
from jaxpruner.algorithms import criteria, redistribution

DISTRIBUTIONS = {
  "uniform": sparsity_distributions.uniform,
  "erk": sparsity_distributions.erk,
}

# Spelling -> type. The first group of each pair is the paper's.
TYPES = (
  (r"unstructured", lambda: sparsity_types.Unstructured()),
  (r"nm_(\d+),(\d+)|(\d+):(\d+)", lambda n, m: sparsity_types.NByM(n, m)),
  (
    r"nm_(\d+),(\d+),(-?\d+)",
    lambda n, m, axis: sparsity_types.NByM(n, m, axis),
  ),
  (
    r"block_(\d+),(\d+)|(\d+)x(\d+)",
    lambda h, w: sparsity_types.Block((h, w)),
  ),
  (
    r"maxblock_(\d+),(\d+)",
    lambda h, w: sparsity_types.Block((h, w), use_avg_pooling=False),
  ),
  (r"channel_(-?\d+)", lambda axis: sparsity_types.Channel(axis)),
  (
    r"transposable_(\d+),(\d+)",
    lambda n, m: structures.TransposableNByM(n, m),
  ),
  (r"diagonal_(\d+)", lambda blocks: structures.BlockDiagonal(blocks)),
  (r"strided_(\d+)", lambda blocks: structures.BlockDiagonal(blocks, True)),
  (r"fan_in", lambda: sparsity_types.ConstantFanIn()),
  (r"fan_in_(-?\d+)", lambda axis: sparsity_types.ConstantFanIn(axis)),
)

SCHEDULES = {
  "none": sparsity_schedules.NoUpdateSchedule,
  "one_shot": sparsity_schedules.OneShotSchedule,
  "periodic": sparsity_schedules.PeriodicSchedule,
  "polynomial": sparsity_schedules.PolynomialSchedule,
  "alternating": sparsity_schedules.AlternatingSchedule,
  "geometric": sparsity_schedules.GeometricSchedule,
}


CRITERIA = {
  "magnitude": criteria.Magnitude,
  "gradient": criteria.Gradient,
  "momentum": criteria.Momentum,
  "random": criteria.Random,
  "magnitude_gradient": criteria.MagnitudeGradient,
}

# Fields that hold an object, and the names these have in configuration.
PARTS = {
  "drop": CRITERIA,
  "grow": CRITERIA,
  "redistribute": {
    "momentum": redistribution.ByMomentum,
    "survivors": redistribution.BySurvivors,
  },
}


def parse_sparsity_type(spec: Any) -> Any:
  """Return the sparsity type a configuration asks for.

  Takes a type, `"2:4"`, `"nm_2,4"`, `"nm_2,4,-1"` (axis), `"4x4"`,
  `"block_4,4"`, `"maxblock_4,4"`, `"channel_0"`, `"fan_in"`, `"unstructured"`,
  a mapping from path or glob to any of these, or a function.
  """
  if isinstance(spec, Mapping):
    return {key: parse_sparsity_type(value) for key, value in spec.items()}
  if spec is None:
    return sparsity_types.Unstructured()
  if not isinstance(spec, str):
    return spec
  for pattern, build in TYPES:
    found = re.fullmatch(pattern, spec.replace(" ", ""))
    if found:
      return build(*(int(g) for g in found.groups() if g is not None))
  raise ValueError(
    f"sparsity_type={spec!r} is not understood; write '2:4' or 'nm_2,4' for "
    "N:M, '4x4' or 'block_4,4' for blocks, 'channel_0' for channels"
  )


def build_part(field: str, spec: Any) -> Any:
  """Return the object that a name, or a mapping with one, stands for."""
  if not isinstance(spec, str | Mapping):
    return spec
  options = {"name": spec} if isinstance(spec, str) else dict(spec)
  name = str(options.pop("name", ""))
  cls = PARTS[field].get(name)
  if cls is None:
    raise ValueError(
      f"{field}={spec!r} is unknown; {_leaves.nearest(name, PARTS[field])}"
    )
  known = {f.name for f in dataclasses.fields(cls)}
  for option in options:
    if option not in known:
      raise ValueError(
        f"{field}={spec!r}: {name!r} has no {option!r}; "
        f"{_leaves.nearest(option, known)}"
      )
  return cls(**options)


def spell_part(field: str, part: Any) -> Any:
  names = {cls: name for name, cls in PARTS[field].items()}
  if type(part) not in names:
    return spell_value(field, part)
  name, plain = names[type(part)], type(part)()
  if part == plain:
    return name
  return {"name": name, **dataclasses.asdict(part)}


def spell_value(name: str, value: Any) -> Any:
  if isinstance(value, bool | int | float | str):
    return value
  raise ValueError(
    f"{name}={value!r} cannot be written to JSON; use a plain value, or keep "
    "the updater in code"
  )


def spell_map(value: Mapping[Any, Any]) -> dict[str, Any]:
  return {
    _leaves.join(key) if isinstance(key, tuple) else key: entry
    for key, entry in value.items()
  }


def spell_type(kind: Any) -> Any:
  if isinstance(kind, Mapping):
    return {k: spell_type(v) for k, v in spell_map(kind).items()}
  match kind:
    case sparsity_types.Unstructured():
      return "unstructured"
    case structures.TransposableNByM(n, m):
      return f"transposable_{n},{m}"
    case structures.BlockDiagonal(blocks, strided):
      return f"{'strided' if strided else 'diagonal'}_{blocks}"
    case sparsity_types.NByM(n, m, axis):
      return f"nm_{n},{m},{axis}"
    case sparsity_types.Block((height, width), average):
      return f"{'' if average else 'max'}block_{height},{width}"
    case sparsity_types.Channel(axis):
      return f"channel_{axis}"
    case sparsity_types.ConstantFanIn(axis):
      return f"fan_in_{axis}"
  return spell_value("sparsity_type", kind)


def spell_schedule(scheduler: Any) -> dict[str, Any]:
  names = {cls: name for name, cls in SCHEDULES.items()}
  name = names.get(type(scheduler))
  if name is None:
    return {"schedule": spell_value("scheduler", scheduler)}
  if name == "none":
    return {}
  if name == "one_shot":
    step = scheduler.target_step
    return {"update_start_step": step, "update_end_step": step}
  config = {"schedule": name, **dataclasses.asdict(scheduler)}
  return {key: value for key, value in config.items() if value is not None}


def spell_distribution(fn: Any) -> dict[str, Any]:
  keywords = dict(getattr(fn, "keywords", {}))
  for name, function in DISTRIBUTIONS.items():
    if getattr(fn, "func", None) is function and not fn.args:
      config: dict[str, Any] = {"dist_type": name}
      custom = keywords.pop("custom_sparsity_map", None)
      if custom:
        config["custom_sparsity_map"] = spell_map(custom)
      for key, value in keywords.items():
        config[key] = spell_value(key, value)
      return config
  return {
    "sparsity_distribution_fn": spell_value("sparsity_distribution_fn", fn)
  }
