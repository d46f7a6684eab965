"""The cells of a comparison: every combination of its axes that makes sense.

The axes are algorithms, sparsities, sparsity types, distributions, and options
of the task (with the optimizer). A combination that cannot be gets no cell, and
a note says why.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax

import jaxpruner
from jaxpruner import _tools
from jaxpruner.compare import settings as settings_lib
from jaxpruner.compare import spelling, tasks
from jaxpruner.compare.cells import (
  AFTER,
  RETRAIN,
  RETRAIN_OPTIONS,
  Cell,
  ticket_of,
)
from jaxpruner.compare.distillation import can_distill, distillation_of
from jaxpruner.compare.groups import (
  default_algorithms,
  fitting_algorithms,
  ranks_globally,
)
from jaxpruner.compare.settings import ComparisonSettings

# Options of such a row: arguments of `post_training.prune`, and the number of
# batches to calibrate on.
AFTER_OPTIONS = (
  "block_size",
  "calibration",
  "damping",
  "refine",
  "sequential",
)


# Distributions that read trained weights or activations.
TRAINED = ("lamp", "owl")


class Plan(NamedTuple):
  """The cells of a comparison.

  Attributes:
    cells: each cell once; the dense ones first.
    notes: sentences about combinations that have no cell.
  """

  cells: list[Cell]
  notes: list[str]


def cells_of(settings: ComparisonSettings) -> list[Cell]:
  """Return the baselines and every combination that makes sense.

  Args:
    settings: the comparison.

  Returns:
    Each cell once: dense first, then sparsity by sparsity.

  Example:
    >>> settings = ComparisonSettings(algorithms=("rigl",), sparsity=(0.9,))
    >>> [cell.id for cell in cells_of(settings)]
    ['dense', 'small_dense@0.9', 'rigl@0.9']
  """
  return plan(settings).cells


def plan(settings: ComparisonSettings) -> Plan:
  """Return the cells and the notes of a comparison.

  Args:
    settings: the comparison.

  Returns:
    The plan.

  Raises:
    ValueError: an option of an algorithm is wrong, or no sparsity fits a type.

  Example:
    >>> axes = ComparisonSettings(
    ...   algorithms=("magnitude",), sparsity=(0.5,), type=("", "2:4"))
    >>> [cell.id for cell in plan(axes).cells][2:]
    ['magnitude@0.5', 'magnitude@0.5+type=2%3A4']
  """
  names = list(settings.algorithms) or default_algorithms()
  if "all" in names:
    names = fitting_algorithms()
  names = _with_tickets(names)
  _check_teachers(settings, names)
  _check_kept(settings, names)
  points = options_axis(settings)
  cells = [Cell("dense", 0.0, options=options) for options in points]
  notes: dict[str, None] = {}
  _check_types(settings)
  for sparsity, options in itertools.product(settings.sparsity, points):
    if has_small_dense(settings):
      cells.append(Cell("small_dense", sparsity, options=options))
    for name in names:
      for kind, share in _structures(name, sparsity, settings, notes):
        cells.append(Cell(name, sparsity, kind, share, options))
  return Plan(list(dict.fromkeys(cells)), list(notes))


def _with_tickets(names: list[str]) -> list[str]:
  """Return the algorithms, each after the one that finds its masks."""
  found: dict[str, None] = {}
  for name in names:
    if name.startswith(RETRAIN):
      found[ticket_of(name)[0]] = None
    found[name] = None
  return list(found)


def _check_teachers(settings: ComparisonSettings, names: list[str]) -> None:
  taught = [name for name in names if distillation_of(name)]
  if taught and (problem := can_distill(base_task(settings))):
    raise ValueError(f"--algorithms {taught[0]!r}: {problem}")


def _check_kept(settings: ComparisonSettings, names: list[str]) -> None:
  """Raise if a row is to be stored at kept size, and its task cannot be."""
  # Imported on use: it starts the training's modules.
  from jaxpruner.compare import kept_training

  for name in names:
    if spelling.algorithm_of(name)[1].get("storage") == "kept":
      taught = distillation_of(name) is not None
      try:
        kept_training.check(base_task(settings), None, taught)
      except ValueError as error:
        raise ValueError(f"--algorithms {name!r}: {error}") from error


def _check_types(settings: ComparisonSettings) -> None:
  for kind in settings.type:
    dictated = settings_lib.type_sparsity(kind)
    if dictated is not None and dictated not in settings.sparsity:
      raise ValueError(
        f"--type {kind}: removes exactly {dictated:g}; add it to --sparsity"
      )


def _structures(
  algorithm: str, sparsity: float, settings: ComparisonSettings, notes: dict
) -> list[tuple[str, str]]:
  """Return the (type, distribution) pairs of an algorithm at a sparsity."""
  name = spelling.algorithm_of(algorithm)[0].removeprefix(RETRAIN)
  is_global = not name.startswith(AFTER) and ranks_globally(
    jaxpruner.algorithm_class(name)
  )
  found = []
  for kind in settings.type or ("",):
    kind = "" if kind == "unstructured" else kind
    dictated = settings_lib.type_sparsity(kind)
    if dictated is not None and dictated != sparsity:
      continue
    shares = settings.distribution or ("",)
    if is_global:
      shares = ("",)  # the ranking decides what each leaf gives
    elif dictated is not None:
      shares = ("uniform",) if settings.distribution else ("",)
    for share in shares:
      problem = _problem(algorithm, sparsity, kind, share)
      if problem and (kind or share):
        notes[f"No row for {algorithm} with {kind or share}: {problem}"] = None
      elif problem:
        raise ValueError(f"--algorithms {algorithm!r}: {problem}")
      else:
        found.append((kind, share))
  return found


@functools.lru_cache(maxsize=1024)
def _problem(algorithm: str, sparsity: float, kind: str, share: str) -> str:
  """Return the reason why a combination cannot be, or ""."""
  name, options = spelling.algorithm_of(algorithm)
  if name.startswith(AFTER):
    return _problem_after(options, kind, share)
  if name.startswith(RETRAIN):
    return _problem_retrain(algorithm) or _problem(
      ticket_of(algorithm)[0], sparsity, kind, share
    )
  try:
    distillation_of(algorithm)
  except ValueError as error:
    return str(error)
  for key in spelling.OURS:
    options.pop(key, None)
  if share in TRAINED:
    return (
      f"{share} reads a trained network; use it with {AFTER}wanda and the like"
    )
  config = {"algorithm": name, "sparsity": sparsity, "total_steps": 1000}
  config |= options
  if share:
    config["dist_type"] = share
  if kind:
    config["sparsity_type"] = spelling.parse_type(kind)
  try:
    jaxpruner.create_updater_from_config(config)
  except (TypeError, ValueError) as error:
    return str(error)
  return ""


def _problem_after(options: dict[str, Any], kind: str, share: str) -> str:
  for key, value in options.items():
    if key not in AFTER_OPTIONS:
      return f"no option {key!r}; {_tools.nearest(key, AFTER_OPTIONS)}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key == "calibration" and not (whole and value > 0):
      return f"calibration={value}: need a whole number of at least one"
  if share == "lamp" and kind:
    return "LAMP ranks single weights"
  if kind and spelling.parse_type(kind).on_matrix((-2, -1)) is None:
    return (
      "pruning after training keeps single weights, N:M and blocks; compare "
      f"{kind} with an algorithm that trains, such as magnitude"
    )
  return ""


def _problem_retrain(algorithm: str) -> str:
  name, options = ticket_of(algorithm)
  for key, value in options.items():
    if value not in RETRAIN_OPTIONS[key]:
      return f"{key}={value}: need {' or '.join(RETRAIN_OPTIONS[key])}"
  if name.startswith((AFTER, RETRAIN)):
    return f"{name} is not a row that trains; name one that does"
  return ""


def keeps_all(cell: Cell, settings: ComparisonSettings) -> bool:
  """Return whether the networks of all seeds of a cell are stored.

  Args:
    cell: the cell.
    settings: the comparison.

  Returns:
    True if another row starts or learns from them, or a question reads them.

  Example:
    >>> asked = ComparisonSettings(algorithms=("after:wanda",))
    >>> keeps_all(Cell("dense", 0.0), asked)
    True
  """
  return bool(settings.question) or cell in sources(settings)


def sources(settings: ComparisonSettings) -> set[Cell]:
  """Return the cells whose trained networks other cells need.

  Args:
    settings: the comparison.

  Returns:
    The cells.

  Example:
    >>> [c.id for c in sources(ComparisonSettings(algorithms=("after:wanda",)))]
    ['dense']
  """
  if not any(_depends(name) for name in settings.algorithms):
    return set()
  found = {cell.source for cell in cells_of(settings)}
  return {cell for cell in found if cell is not None}


def _depends(algorithm: str) -> bool:
  return Cell(algorithm, 0.5).source is not None


def options_axis(settings: ComparisonSettings) -> list[str]:
  """Return the points of the task's options that have several values.

  Args:
    settings: the comparison.

  Returns:
    Texts such as "width=64"; [""] if every option has one value.

  Example:
    >>> options_axis(ComparisonSettings(options={"width": (64, 128)}))
    ['width=64', 'width=128']
  """
  axes = {
    name: value
    for name, value in settings.options.items()
    if isinstance(value, list | tuple)
  }
  if settings.optimizer:
    axes["optimizer"] = settings.optimizer
  points = itertools.product(*axes.values())
  return [
    spelling.spelled(dict(zip(axes, point, strict=True))) for point in points
  ]


def base_task(settings: ComparisonSettings, options: str = "") -> tasks.Task:
  """Return the task at a point of its options, at its full width.

  Args:
    settings: the comparison.
    options: a point of `options_axis`; by default the first one.

  Returns:
    The task.

  Example:
    >>> axes = ComparisonSettings(options={"width": (8, 9)})
    >>> base_task(axes, "width=9").width
    9
  """
  values = options_at(settings, options)
  name = values.pop("optimizer", "") if settings.optimizer else ""
  task = tasks.make_task(settings.task, values)
  return tasks.with_optimizer(task, name) if name else task


def options_at(settings: ComparisonSettings, options: str) -> dict[str, Any]:
  """Return the values of all options at a point of `options_axis`."""
  point = spelling.options_of(options or options_axis(settings)[0])
  return {**settings.options, **point}


def has_small_dense(settings: ComparisonSettings) -> bool:
  """Return whether the task's network can be narrower.

  Args:
    settings: the comparison.

  Returns:
    False if the task has no rule for it, ignores its `width`, or starts from
    a checkpoint.

  Example:
    >>> has_small_dense(ComparisonSettings())
    True
  """
  if settings.checkpoint:  # a checkpoint has one width
    return False
  task = base_task(settings)
  return task.narrowable and _obeys_width(task)


@functools.lru_cache(maxsize=32)
def _obeys_width(task: tasks.Task) -> bool:
  """Whether the smallest width gives a network with fewer weights."""
  if task.width <= task.width_multiple:
    return False
  narrow = dataclasses.replace(task, width=task.width_multiple)
  return _weights_of(narrow) < _weights_of(task)


def _weights_of(task: tasks.Task) -> int:
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  return sum(x.size for x in jax.tree.leaves(shapes))
