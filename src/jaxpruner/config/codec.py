"""Read and write configuration: objects from names, and names from objects."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpruner import _leaves, _tools, sparsity_types
from jaxpruner.algorithms import criteria, redistribution
from jaxpruner.sparsity_distributions.table import DISTRIBUTIONS
from jaxpruner.sparsity_schedules import SCHEDULES, NoUpdateSchedule
from jaxpruner.sparsity_types import _spec

CRITERIA = {
  "magnitude": criteria.Magnitude,
  "gradient": criteria.Gradient,
  "momentum": criteria.Momentum,
  "random": criteria.Random,
  "magnitude_gradient": criteria.MagnitudeGradient,
  "signal_to_noise": criteria.SignalToNoise,
}

# Fields that hold an object -> the names of these objects in configuration.
PARTS = {
  "drop": CRITERIA,
  "grow": CRITERIA,
  "redistribute": {
    "momentum": redistribution.ByMomentum,
    "survivors": redistribution.BySurvivors,
  },
}


def parse_sparsity_type(spec: Any) -> Any:
  """Return the sparsity type that a string describes.

  Args:
    spec: one of

      - `"2:4"`, `"nm_2,4"`, `"nm_2,4,-1"` (with the axis), `"nm_2,4,,128"`
        (with the stride): N:M,
      - `"4x4"`, `"block_4,4"`, `"maxblock_4,4"`: blocks,
      - `"channel_0"`, `"fan_in"`, `"transposable_2,4"`, `"diagonal_4"`,
        `"strided_4"`, `"unstructured"`,
      - a name given to `register_sparsity_type`, with the field values after
        it,
      - a mapping from path or glob to any of these,
      - a `SparsityType`, or a function; they are returned unchanged.

  Returns:
    The type; for a mapping, a mapping to types.

  Raises:
    ValueError: the string describes no registered type.

  Example:
    >>> parse_sparsity_type("2:4")
    NByM(n=2, m=4, axis=None, stride=1)
    >>> parse_sparsity_type({"*/kernel": "4x4"})
    {'*/kernel': Block(block_shape=(4, 4), use_avg_pooling=True)}
  """
  if isinstance(spec, Mapping):
    return {key: parse_sparsity_type(value) for key, value in spec.items()}
  if spec is None:
    return sparsity_types.Unstructured()
  if not isinstance(spec, str):
    return spec
  found = _spec.parse(spec.replace(" ", ""))
  if found is None:
    raise ValueError(
      f"sparsity_type={spec!r} is not understood; write '2:4' or 'nm_2,4' for "
      "N:M, '4x4' or 'block_4,4' for blocks, 'channel_0' for channels, or the "
      f"name of a registered one. Sparsity types are: {', '.join(_spec.TYPES)}"
    )
  return found


def build_part(field: str, spec: Any) -> Any:
  """Return the object that a name, or a mapping with a name, describes.

  Args:
    field: `"drop"`, `"grow"` or `"redistribute"`.
    spec: a name, a mapping `{"name": …, field: value}`, or the object itself.

  Returns:
    The object.

  Raises:
    ValueError: a number, an unknown name or an unknown field.

  Example:
    >>> build_part("grow", "gradient")
    Gradient()
  """
  if isinstance(spec, int | float):
    share = f", or give the share of weights as drop_fraction={spec!r}"
    raise ValueError(
      f"{field}={spec!r} is a number; name one of {', '.join(PARTS[field])}"
      + (share if field == "drop" else "")
    )
  if not isinstance(spec, str | Mapping):
    return spec
  options = {"name": spec} if isinstance(spec, str) else dict(spec)
  name = str(options.pop("name", ""))
  cls = PARTS[field].get(name)
  if cls is None:
    raise ValueError(
      f"{field}={spec!r} is unknown; {_tools.nearest(name, PARTS[field])}"
    )
  known = {f.name for f in dataclasses.fields(cls)}
  for option in options:
    if option not in known:
      raise ValueError(
        f"{field}={spec!r}: {name!r} has no {option!r}; "
        f"{_tools.nearest(option, known)}"
      )
  return cls(**options)


def spell_part(field: str, part: Any) -> Any:
  """Return the configuration of a part; the inverse of `build_part`.

  Args:
    field: `"drop"`, `"grow"` or `"redistribute"`.
    part: the object.

  Returns:
    Its name; a mapping with its fields where one differs from its default.

  Example:
    >>> spell_part("grow", criteria.Gradient())
    'gradient'
  """
  names = {cls: name for name, cls in PARTS[field].items()}
  if type(part) not in names:
    return spell_value(field, part)
  name, plain = names[type(part)], type(part)()
  if part == plain:
    return name
  return {"name": name, **dataclasses.asdict(part)}


def spell_value(name: str, value: Any) -> Any:
  """Return a value that JSON can store, or raise."""
  if isinstance(value, bool | int | float | str):
    return value
  raise ValueError(
    f"{name}={value!r} cannot be written to JSON; use a plain value, or keep "
    "the updater in code"
  )


def spell_map(value: Mapping[Any, Any]) -> dict[str, Any]:
  """Return a mapping whose keys, the paths, are strings."""
  return {
    _leaves.join(key) if isinstance(key, tuple) else key: entry
    for key, entry in value.items()
  }


def spell_type(kind: Any) -> Any:
  """Return the string that `parse_sparsity_type` reads back."""
  if isinstance(kind, Mapping):
    return {k: spell_type(v) for k, v in spell_map(kind).items()}
  if not isinstance(kind, sparsity_types.SparsityType):
    return spell_value("sparsity_type", kind)
  return _spec.spell(kind)


def spell_schedule(scheduler: Any) -> dict[str, Any]:
  """Return the configuration keys of a schedule, with values."""
  if type(scheduler) is NoUpdateSchedule:
    return {}
  name = SCHEDULES.name_of(type(scheduler))
  if name is None:
    return {"schedule": spell_value("scheduler", scheduler)}
  config = {k: spell_value(k, v) for k, v in scheduler.to_config().items()}
  return {"schedule": name, **config}


def spell_distribution(fn: Any) -> dict[str, Any]:
  """Return the configuration keys of a distribution, with values."""
  name = DISTRIBUTIONS.name_of(getattr(fn, "func", None))
  if name is None or fn.args:
    unknown = "sparsity_distribution_fn"
    return {unknown: spell_value(unknown, fn)}
  config: dict[str, Any] = {"dist_type": name}
  for key, value in fn.keywords.items():
    if key != "custom_sparsity_map":
      config[key] = spell_value(key, value)
    elif value:
      config[key] = spell_map(value)
  return config
