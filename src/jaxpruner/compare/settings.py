"""The settings of a comparison, checked before anything starts."""

import dataclasses
import hashlib
import importlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

import jaxpruner
from jaxpruner import _tools
from jaxpruner.compare import tasks


@dataclasses.dataclass(frozen=True)
class ComparisonSettings:
  """All options of the user that determine the numbers of a comparison.

  Attributes:
    task: a name in `tasks.TASKS`.
    algorithms: registered names. Empty means `cells.DEFAULT` and those
      registered outside the library; "all" means every algorithm that fits a
      training loop.
    sparsity: fractions of weights removed.
    seeds: the number of seeds; they are 0, 1, ...
    type: a sparsity type such as "2:4"; "" is unstructured.
    distribution: "erk" or "uniform"; "" is the task's default.
    options: values for the task's fields (steps, width, ...).
    devices: the number of devices for one cell.
    data: a folder to read the task's data from.
    imports: modules named by --import, which register algorithms or tasks.

  Example:
    >>> ComparisonSettings(seeds=0)
    Traceback (most recent call last):
    ...
    ValueError: --seeds 0: must be a whole number of at least one
  """

  task: str = "digits"
  algorithms: tuple[str, ...] = ()
  sparsity: tuple[float, ...] = (0.8, 0.95)
  seeds: int = 3
  type: str = ""
  distribution: str = ""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  devices: int = 1
  data: str = ""
  imports: tuple[str, ...] = ()

  def __post_init__(self):
    for name in ("task", "type", "distribution", "data"):
      _check_text(f"--{name}", getattr(self, name))
    for name in ("seeds", "devices"):
      _check_count(f"--{name}", getattr(self, name))
    for name, option in (("algorithms", "algorithms"), ("imports", "import")):
      _check_tuple(f"--{option}", getattr(self, name))
      for value in getattr(self, name):
        _check_text(f"--{option}", value)
    _check_sparsity(self.sparsity)
    _check_options(self.task, self.options)
    type_sparsity(self.type)

  def digest(self) -> str:
    """Return a short hash of these settings, the same in every process."""
    text = json.dumps(dataclasses.asdict(self), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]

  def to_json(self) -> dict[str, Any]:
    """Return the settings as JSON stores them: lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(self)))


def from_json(values: Any, where: str = "settings") -> ComparisonSettings:
  """Return the settings from the result of `to_json`; import nothing.

  Args:
    values: the content of a JSON or TOML file; a single value may replace a
      list of one.
    where: the name of the file, for error messages.

  Returns:
    The settings.

  Raises:
    ValueError: a key is unknown, or a value has the wrong type.

  Example:
    >>> from_json({"task": "digits", "sparsity": 0.5}).sparsity
    (0.5,)
  """
  if not isinstance(values, Mapping):
    raise ValueError(f"{where}: must be a table of settings, is {values!r:.60}")
  fields = {field.name for field in dataclasses.fields(ComparisonSettings)}
  for key in values:
    if key not in fields:
      hint = _tools.nearest(key, fields)
      raise ValueError(f"{where}: unknown key {key!r}; {hint}")
  listed = {key: _as_tuple(key, value) for key, value in values.items()}
  try:
    return ComparisonSettings(**listed)
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error


def _as_tuple(key: str, value: Any) -> Any:
  if key not in ("algorithms", "sparsity", "imports"):
    return value
  return tuple(value) if isinstance(value, list | tuple) else (value,)


def read_config(path: str) -> dict[str, Any]:
  """Return the settings in a TOML file.

  Args:
    path: the file.

  Returns:
    Setting -> value, only for the keys in the file.

  Raises:
    ValueError: the file cannot be read, a key is unknown, or a value has the
      wrong type.

  Example of a file::

    task = "fashion"
    sparsity = [0.8, 0.9]
    seeds = 3
    [options]
    steps = 500
  """
  try:
    with open(path, "rb") as file:
      values = tomllib.load(file)
  except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f"--config {path}: not valid TOML ({error})") from error
  except OSError as error:
    raise ValueError(f"--config {path}: {error.strerror}") from error
  # Check all values now, so that an error message names the file.
  from_json(values, f"--config {path}")
  return {key: _as_tuple(key, value) for key, value in values.items()}


def import_modules(names: Iterable[str]) -> None:
  """Import the modules that the user typed after --import.

  Args:
    names: module names; never strings that a file holds.

  Raises:
    ValueError: a module is missing or raises while it is imported.
  """
  for name in names:
    try:
      importlib.import_module(name)
    except Exception as error:
      raise ValueError(
        f"--import {name!r}: {type(error).__name__}: {error}; the module must "
        "be importable: install it, or put its folder into PYTHONPATH"
      ) from error


def check_algorithms(settings: ComparisonSettings) -> None:
  """Raise if an algorithm is not registered.

  Args:
    settings: the comparison.

  Raises:
    ValueError: names the unknown algorithm and the nearest one.

  Example:
    >>> check_algorithms(ComparisonSettings(algorithms=("rigl",)))
  """
  known = ("all", *jaxpruner.all_algorithm_names())
  for name in settings.algorithms:
    if name not in known:
      hint = _tools.nearest(name, known)
      raise ValueError(
        f"--algorithms {name!r} is unknown; {hint} (`jaxpruner compare --list` "
        "shows all)"
      )


def type_sparsity(name: str) -> float | None:
  """Return the sparsity that a type implies (0.5 for 2:4), else None.

  Args:
    name: a sparsity type, such as "2:4"; "" is unstructured.

  Returns:
    The sparsity, or None.

  Example:
    >>> type_sparsity("1:4"), type_sparsity("4x4")
    (0.75, None)
  """
  if not name:
    return None
  try:
    kind = jaxpruner.parse_sparsity_type(name)
  except ValueError as error:
    raise ValueError(f"--type {name!r}: {error}") from error
  sparsity = getattr(kind, "sparsity", None)
  if sparsity is not None and not 0 < sparsity < 1:
    raise ValueError(f"--type {name!r}: N:M keeps N of M, 0 < N < M")
  return sparsity


def _check_text(option: str, value: Any) -> None:
  if not isinstance(value, str):
    raise ValueError(f"{option} {value!r}: must be text, in quotes")


def _check_tuple(option: str, value: Any) -> None:
  if not isinstance(value, tuple):
    raise ValueError(f"{option} {value!r}: must be a list")


def _is_whole(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
  real = isinstance(value, int | float) and not isinstance(value, bool)
  return real and math.isfinite(value)


def _check_count(option: str, value: Any) -> None:
  if not _is_whole(value) or value < 1:
    raise ValueError(
      f"{option} {value!r}: must be a whole number of at least one"
    )


def _check_sparsity(values: Any) -> None:
  _check_tuple("--sparsity", values)
  if not values:
    raise ValueError("--sparsity is empty: give fractions such as 0.8,0.95")
  for value in values:
    if not _is_number(value) or not 0 < value < 1:
      raise ValueError(
        f"--sparsity {value!r}: the fraction removed must be a number "
        "strictly between 0 and 1 (0.8 removes 80 %)"
      )


def _check_options(task: str, options: Any) -> None:
  """Check overrides against the task's fields and their types."""
  if not isinstance(options, Mapping):
    raise ValueError(f"[options] {options!r}: must be a table of task fields")
  made = tasks.make_task(task, options)  # refuses unknown tasks and fields
  for field in dataclasses.fields(made):
    if field.name not in options:
      continue
    value, name = options[field.name], f"--set {field.name}="
    if field.name == "steps":
      name = "--steps "
    if _is_whole(field.default):
      if not _is_whole(value) or value < 1:
        raise ValueError(
          f"{name}{value}: {task}'s {field.name} must be a whole number of at "
          f"least one (default {field.default})"
        )
    elif isinstance(field.default, float):
      if not _is_number(value):
        raise ValueError(
          f"{name}{value}: {task}'s {field.name} must be a finite number "
          f"(default {field.default})"
        )
