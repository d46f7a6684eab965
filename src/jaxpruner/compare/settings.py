"""The settings of a comparison, checked before anything starts."""

import dataclasses
import hashlib
import inspect
import json
import sys
import tomllib
from collections.abc import Mapping
from typing import Any

import jaxpruner
from jaxpruner import _tools
from jaxpruner._tools import regular
from jaxpruner.compare import spelling, tasks
from jaxpruner.post_training.solvers.table import SOLVERS
from jaxpruner.sparsity_distributions.table import DISTRIBUTIONS

# Settings that are lists -> the option that sets them.
_LISTS = {
  "algorithms": "algorithms",
  "sparsity": "sparsity",
  "type": "type",
  "distribution": "distribution",
  "optimizer": "optimizer",
  "imports": "import",
}


@dataclasses.dataclass(frozen=True)
class ComparisonSettings:
  """All options of the user that determine the numbers of a comparison.

  Attributes:
    task: a name in `tasks.TASKS`, or `module:NAME` of a task of the user's.
    algorithms: registered names. Empty means `groups.DEFAULT` and those
      registered outside the library; "all" means every algorithm that fits a
      training loop.
    sparsity: fractions of weights removed.
    seeds: the number of seeds; they are 0, 1, ...
    type: sparsity types such as "2:4"; none is unstructured.
    distribution: names such as "erk"; none is the task's default.
    options: values for the task's options (steps, width, ...); a list is an
      axis of the comparison.
    optimizer: names of optimizers; none is the task's own.
    all_layers: whether structured types prune the first and the output layer.
    devices: the number of devices for one cell.
    data: a folder to read the task's data from.
    imports: modules named by --import, which register algorithms or tasks.
    checkpoint: weights that every row starts from, instead of random weights.
    question: the name of a question; its report follows the table.

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
  type: tuple[str, ...] = ()
  distribution: tuple[str, ...] = ()
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  optimizer: tuple[str, ...] = ()
  all_layers: bool = False
  devices: int = 1
  data: str = ""
  imports: tuple[str, ...] = ()
  checkpoint: str = ""
  question: str = ""

  def __post_init__(self):
    for name in ("type", "distribution", "optimizer"):
      # A single text may stand for a list of one; older runs stored it so.
      if isinstance(value := getattr(self, name), str):
        object.__setattr__(self, name, (value,) if value else ())
    for name in ("task", "data", "checkpoint", "question"):
      _check_text(f"--{name}", getattr(self, name))
    for name in ("seeds", "devices"):
      _check_count(f"--{name}", getattr(self, name))
    for name, option in _LISTS.items():
      if option == "sparsity":
        continue
      _check_tuple(f"--{option}", getattr(self, name))
      for value in getattr(self, name):
        _check_text(f"--{option}", value)
    _check_sparsity(self.sparsity)
    if not isinstance(self.options, Mapping):
      raise ValueError(
        f"[options] {self.options!r}: must be a table of task fields"
      )
    if not isinstance(self.all_layers, bool):
      raise ValueError(f"--all-layers {self.all_layers!r}: true or false")
    for kind in self.type:
      type_sparsity(kind)

  def digest(self) -> str:
    """Return a short hash of these settings, the same in every process."""
    text = json.dumps(self.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]

  def to_json(self) -> dict[str, Any]:
    """Return the settings as JSON stores them: lists for tuples."""
    values = dataclasses.asdict(self)
    # Absent unless used: the folders of other comparisons stay valid.
    for name in ("checkpoint", "question"):
      if not values[name]:
        del values[name]
    return json.loads(json.dumps(values))


def default_folder(settings: ComparisonSettings) -> str:
  """Return the run folder of a comparison: `runs/TASK-HASH`.

  Args:
    settings: the comparison.

  Returns:
    The path, relative to the current folder.

  Example:
    >>> default_folder(ComparisonSettings(task="my.module:Task"))[:20]
    'runs/my.module.Task-'
  """
  return f"runs/{settings.task.replace(':', '.')}-{settings.digest()}"


def from_json(values: Any, where: str = "settings") -> ComparisonSettings:
  """Return the settings from the result of `to_json`; import nothing.

  Names of tasks, their options and algorithms are not looked up: the folder of
  a run can be read without the modules that it used (see `check_names`).

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
  if key not in _LISTS:
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
    with regular.open_bytes(path) as file:
      values = tomllib.load(file)
  except (ValueError, RecursionError) as error:  # nested, huge or no TOML
    raise ValueError(f"--config {path}: not valid TOML ({error})") from error
  except OSError as error:
    raise ValueError(f"--config {path}: {error.strerror or error}") from error
  # Check all values now, so that an error message names the file.
  found = from_json(values, f"--config {path}")
  try:
    # A module of the user's is not imported on the word of a file.
    if ":" not in found.task or found.task in tasks.TASKS:
      check_options(found.task, found.options)
  except ValueError as error:
    raise ValueError(f"--config {path}: {error}") from error
  return {key: _as_tuple(key, value) for key, value in values.items()}


def check_names(settings: ComparisonSettings) -> None:
  """Raise if the task, one of its options or an algorithm is unknown.

  Args:
    settings: the comparison.

  Raises:
    ValueError: names what is unknown and the nearest valid name.

  Example:
    >>> check_names(ComparisonSettings(algorithms=("rigl",)))
  """
  check_options(settings.task, settings.options)
  known = ("all", *jaxpruner.all_algorithm_names())
  after = [f"after:{name}" for name in SOLVERS]
  for text in settings.algorithms:
    name, _ = spelling.algorithm_of(text)
    name = name.removeprefix("retrain:")
    if name.startswith("after:") and name not in after:
      raise ValueError(
        f"--algorithms {name!r} is unknown; {_tools.nearest(name, after)}"
      )
    if name not in (*known, *after):
      hint = _tools.nearest(name, known)
      raise ValueError(
        f"--algorithms {name!r} is unknown; {hint} (`jaxpruner compare --list` "
        "shows all)"
      )
  shares = {*DISTRIBUTIONS, "lamp", "owl"}
  for name in settings.distribution:
    if name not in shares:
      hint = _tools.nearest(name, shares)
      raise ValueError(f"--distribution {name!r} is unknown; {hint}")
  for name in settings.optimizer:
    first = {
      key: value[0] if isinstance(value, list | tuple) else value
      for key, value in settings.options.items()
    }
    tasks.with_optimizer(tasks.make_task(settings.task, first), name)


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
  kind = spelling.parse_type(name)
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
  # By comparison: a whole number may be too large for math.isfinite.
  return real and abs(value) <= sys.float_info.max


# JAX counts steps, seeds and rows in int32.
_LARGEST = 2**31 - 1


def _check_count(option: str, value: Any) -> None:
  if not _is_whole(value) or value < 1:
    raise ValueError(
      f"{option} {value!r}: must be a whole number of at least one"
    )
  if value > _LARGEST:
    raise ValueError(f"{option} {value}: must be at most {_LARGEST:,}")


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


def check_options(task: str, options: Mapping[str, Any]) -> None:
  """Check values for the task's options against the types of their defaults.

  Args:
    task: a registered name.
    options: option -> value.

  Raises:
    ValueError: the task or an option is unknown, or a value is wrong.

  Example:
    >>> check_options("digits", {"steps": 10})
  """
  known = tasks.task_options(task)
  for key, value in options.items():
    if key not in known:
      raise ValueError(
        f"task {task!r} has no option {key!r}; {_tools.nearest(key, known)}"
      )
    default = known[key]
    if default in (None, inspect.Parameter.empty, dataclasses.MISSING):
      continue
    fits, words = _kind_of(default)
    for each in value if isinstance(value, list | tuple) else [value]:
      if not fits(each):
        option = "--steps " if key == "steps" else f"--set {key}="
        raise ValueError(
          f"{option}{each}: {task}'s {key} must be {words} (default {default})"
        )
    if isinstance(value, list | tuple) and not value:
      raise ValueError(f"--set {key}=: is empty; give a value")


def _kind_of(default: Any) -> tuple[Any, str]:
  """Return (check, words) for values of an option with this default."""
  if isinstance(default, bool):
    return lambda v: isinstance(v, bool), "true or false"
  if isinstance(default, int):
    least = min(1, default)
    fits = lambda v: _is_whole(v) and least <= v <= _LARGEST
    return fits, f"a whole number from {least} to {_LARGEST:,}"
  if isinstance(default, float):
    # A rate, a share, a deviation: none of them is negative unless it says so.
    least = min(0.0, default)
    fits = lambda v: _is_number(v) and v >= least
    return fits, f"a finite number of at least {least:g}"
  if isinstance(default, str):
    return lambda v: isinstance(v, str), "text"
  return lambda v: isinstance(v, type(default)), type(default).__name__
