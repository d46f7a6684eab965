"""What a comparison consists of: its settings, and the cells they imply."""

import dataclasses
import difflib
import hashlib
import importlib
import json
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jaxpruner
from jaxpruner.compare import tasks

BASELINES = ("dense", "small_dense")
# What a comparison shows unless told otherwise: the paper's algorithms, in few
# minutes on two cores. "all" names every one.
DEFAULT = (
  "magnitude",
  "random",
  "saliency",
  "magnitude_ste",
  "random_ste",
  "global_magnitude",
  "global_saliency",
  "static_sparse",
  "set",
  "rigl",
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Everything that determines the numbers of a comparison.

  Attributes:
    task: a name in `tasks.TASKS`.
    algorithms: registry names; empty means `DEFAULT` and those registered
      outside the library, "all" every one that fits a training loop.
    sparsity: fractions of weights removed.
    seeds: how many seeds, 0, 1, ...
    type: a sparsity type such as "2:4"; "" is unstructured.
    distribution: "erk" or "uniform"; "" is the task's own choice.
    options: overrides of the task's fields (steps, width, ...).
    devices: devices one cell is spread over.
    data: a folder to read the task's data from.
    imports: modules to import first, which register algorithms of yours.
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
    tasks.make_task(self.task, self.options)
    if self.seeds < 1:
      raise ValueError(f"--seeds {self.seeds}: need at least one")
    if self.devices < 1:
      raise ValueError(f"--devices {self.devices}: need at least one")
    if not self.sparsity:
      raise ValueError("--sparsity is empty: give fractions such as 0.8,0.95")
    for value in self.sparsity:
      if not 0 < value < 1:
        raise ValueError(
          f"--sparsity {value}: the fraction removed must lie strictly "
          "between 0 and 1 (0.8 removes 80 %)"
        )
    known = ("all", *jaxpruner.all_algorithm_names())
    for name in self.algorithms:
      if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
          f"--algorithms {name!r} is unknown; {hint}known: {', '.join(known)}"
        )

  def digest(self) -> str:
    """Return a short name for these settings, the same in every process."""
    text = json.dumps(dataclasses.asdict(self), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def as_dict(settings: Settings) -> dict[str, Any]:
  """Return the settings as JSON has them: lists for tuples."""
  return json.loads(json.dumps(dataclasses.asdict(settings)))


def from_dict(values: Mapping[str, Any]) -> Settings:
  """Return the settings that `as_dict` gave, importing what they name."""
  listed: dict[str, Any] = {
    k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
  }
  for module in listed.get("imports", ()):
    importlib.import_module(module)
  return Settings(**listed)


class Cell(NamedTuple):
  """One entry of the table: an algorithm at a sparsity, over all seeds."""

  algorithm: str
  sparsity: float

  @property
  def id(self) -> str:
    """Return a name fit for a file."""
    if self.algorithm == "dense":
      return "dense"
    return f"{self.algorithm}@{self.sparsity:g}"


def fitting_algorithms() -> list[str]:
  """Return the registered algorithms that can run inside a training loop.

  Left out: the ones that do not prune, and those that prune a finished model
  or need calibration data, which a training loop does not give them.
  """
  return [
    name
    for name in jaxpruner.all_algorithm_names()
    if name != "no_prune" and _fits(jaxpruner.algorithm_category(name))
  ]


def _fits(category: Any) -> bool:
  return category.when != "after" and not (
    set(category.needs) & {"data", "activations"}
  )


def default_algorithms() -> list[str]:
  """Return the paper's algorithms, and those you registered yourself."""
  return [
    name
    for name in fitting_algorithms()
    if name in DEFAULT or not _is_ours(jaxpruner.algorithm_class(name))
  ]


def _is_ours(algorithm: type) -> bool:
  return algorithm.__module__.partition(".")[0] == "jaxpruner"


def cells(settings: Settings) -> list[Cell]:
  """Return the baselines and the algorithms at every sparsity, in order."""
  names = list(settings.algorithms) or default_algorithms()
  if "all" in names:
    names = fitting_algorithms()
  plan = [Cell("dense", 0.0)]
  for sparsity in settings.sparsity:
    plan += [Cell(name, sparsity) for name in ("small_dense", *names)]
  return plan


class Group(NamedTuple):
  """A category of algorithms that may fairly be compared with each other."""

  order: int
  title: str


def group(algorithm: str) -> Group:
  """Return the group an algorithm is listed under."""
  if algorithm in BASELINES:
    return Group(0, "Baselines")
  category = jaxpruner.algorithm_category(algorithm)
  if category.when == "after":
    return Group(5, "After training")
  if category.start == "sparse-to-sparse":
    if category.dynamic:
      return Group(4, "Sparse to sparse, dynamic: sparse cost from the start")
    return Group(3, "Sparse to sparse, static: sparse cost from the start")
  if category.when == "before":
    return Group(2, "Pruned before training")
  return Group(1, "Dense to sparse: training starts at the dense cost")


def read_config(path: str) -> dict[str, Any]:
  """Return the settings in a TOML file; unknown keys raise.

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
  except tomllib.TOMLDecodeError as error:
    raise ValueError(f"--config {path}: not valid TOML ({error})") from error
  except OSError as error:
    raise ValueError(f"--config {path}: {error.strerror}") from error
  fields = {field.name for field in dataclasses.fields(Settings)}
  for key in values:
    if key not in fields:
      near = difflib.get_close_matches(key, fields, 1)
      hint = f"; did you mean {near[0]!r}?" if near else ""
      raise ValueError(f"--config {path}: unknown key {key!r}{hint}")
  for key in ("algorithms", "sparsity", "imports"):
    if key in values:
      values[key] = tuple(values[key])
  return values


def type_sparsity(name: str) -> float | None:
  """Return the sparsity a type dictates (2:4 removes 0.5), else None."""
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
