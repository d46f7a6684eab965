"""The cells of a comparison: an algorithm at a point of all axes.

The axes are algorithms, sparsities, sparsity types, distributions, and options
of the task (with the optimizer). A combination that cannot be gets no cell, and
a note says why.
"""

import dataclasses
import functools
import itertools
import urllib.parse
from typing import Any, NamedTuple

import jax

import jaxpruner
from jaxpruner import _tools
from jaxpruner.compare import settings as settings_lib
from jaxpruner.compare import spelling, tasks
from jaxpruner.compare.settings import ComparisonSettings

BASELINES = ("dense", "small_dense")
# The prefix of rows that prune the dense row's trained weights.
AFTER = "after:"
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
# The default of --algorithms: the paper's algorithms, which take a few minutes
# on two cores.
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


class Cell(NamedTuple):
  """One entry of the table: a point of all axes, over all seeds.

  Attributes:
    algorithm: a registered name with its options, "dense" or "small_dense".
    sparsity: the fraction removed.
    type: the sparsity type; "" is unstructured.
    distribution: the distribution; "" is the task's.
    options: options of the task that have several values, such as "width=64".

  Example:
    >>> Cell("rigl", 0.9).id
    'rigl@0.9'
    >>> Cell("rigl{drop_fraction=0.1}", 0.5, "2:4", "", "width=64").id
    'rigl{drop_fraction=0.1}@0.5+type=2%3A4+width=64'
  """

  algorithm: str
  sparsity: float
  type: str = ""
  distribution: str = ""
  options: str = ""

  @property
  def id(self) -> str:
    """Return a unique name that can be used as a file name.

    Example:
      >>> Cell("rigl", 0.999999).id, Cell("rigl", 0.9999991).id
      ('rigl@0.999999', 'rigl@0.9999991')
    """
    parts = [self.algorithm]
    if self.algorithm != "dense":
      parts[0] += f"@{float(self.sparsity)!r}"
    for name in ("type", "distribution"):
      if value := getattr(self, name):
        parts.append(f"{name}={value}")
    if self.options:
      parts.append(self.options)
    quoted = [urllib.parse.quote(part, safe="@{}=,") for part in parts]
    return "+".join(quoted)

  @property
  def dense(self) -> "Cell":
    """The dense baseline that this cell is compared with."""
    return Cell("dense", 0.0, options=self.options)

  @property
  def name(self) -> str:
    """The registered name of the algorithm, without options."""
    return self.algorithm.partition("{")[0]


DENSE = Cell("dense", 0.0)


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
  name = spelling.algorithm_of(algorithm)[0]
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
  return ""


def needs_dense(settings: ComparisonSettings) -> bool:
  """Return whether rows start from the trained dense network.

  Args:
    settings: the comparison.

  Returns:
    True if an algorithm prunes after training.

  Example:
    >>> needs_dense(ComparisonSettings(algorithms=("after:wanda",)))
    True
  """
  return any(name.startswith(AFTER) for name in settings.algorithms)


def ranks_globally(cls: Any) -> bool:
  """Return whether an algorithm ranks all leaves together.

  Args:
    cls: the class of the algorithm.

  Returns:
    True if it needs no distribution.

  Example:
    >>> ranks_globally(jaxpruner.GlobalMagnitudePruning)
    True
  """
  return "sparsity" in {field.name for field in dataclasses.fields(cls)}


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
    False if the task has no rule for it, or ignores its `width`.

  Example:
    >>> has_small_dense(ComparisonSettings())
    True
  """
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


def fitting_algorithms() -> list[str]:
  """Return the registered algorithms that can run inside a training loop.

  Excluded are algorithms that do not prune, prune after training, or need
  calibration data.

  Returns:
    Their names.

  Example:
    >>> "rigl" in fitting_algorithms(), "no_prune" in fitting_algorithms()
    (True, False)
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
  """Return the paper's algorithms, and those registered by the user.

  Returns:
    Their names.

  Example:
    >>> default_algorithms()[:3]
    ['magnitude', 'random', 'saliency']
  """
  return [
    name
    for name in fitting_algorithms()
    if name in DEFAULT or not _is_ours(jaxpruner.algorithm_class(name))
  ]


def _is_ours(algorithm: type) -> bool:
  return algorithm.__module__.partition(".")[0] == "jaxpruner"


class Group(NamedTuple):
  """Algorithms with the same kind of training cost.

  Attributes:
    order: the position in the table.
    title: the heading in the table.
  """

  order: int
  title: str


def group(algorithm: str) -> Group:
  """Return the group that an algorithm is listed in.

  Args:
    algorithm: a baseline or a registered name, with or without options.

  Returns:
    The group.

  Example:
    >>> group("dense")
    Group(order=0, title='Baselines')
  """
  if algorithm in BASELINES:
    return Group(0, "Baselines")
  after = Group(5, "After training: the dense training, then calibration")
  if algorithm.startswith(AFTER):
    return after
  category = jaxpruner.algorithm_category(Cell(algorithm, 0.0).name)
  if category.when == "after":
    return after
  if category.start == "sparse-to-sparse":
    if category.dynamic:
      return Group(4, "Sparse to sparse, dynamic: sparse cost from the start")
    return Group(3, "Sparse to sparse, static: sparse cost from the start")
  if category.when == "before":
    return Group(2, "Pruned before training")
  return Group(1, "Dense to sparse: training starts at the dense cost")


class Listed(NamedTuple):
  """A cell as the table shows it.

  Attributes:
    cell: the cell.
    distribution: what decides the sparsity of each leaf, or "".
    group: the group that it is listed in.
  """

  cell: Cell
  distribution: str
  group: Group


def listed(cell: Cell, task: tasks.Task) -> Listed:
  """Return a cell with its distribution and group.

  Args:
    cell: the cell.
    task: its task.

  Returns:
    The entry of run.json.

  Example:
    >>> task = tasks.make_task("digits")
    >>> listed(Cell("rigl", 0.9), task).distribution
    'erk'
  """
  return Listed(cell, distribution_of(cell, task), group(cell.algorithm))


def distribution_of(cell: Cell, task: tasks.Task) -> str:
  """Return the distribution of a cell: "" for baselines, or "global"."""
  if cell.algorithm in BASELINES:
    return ""
  if not cell.name.startswith(AFTER) and ranks_globally(
    jaxpruner.algorithm_class(cell.name)
  ):
    return "global"
  # N:M gives every leaf the same sparsity; ERK would contradict it.
  if settings_lib.type_sparsity(cell.type) is not None:
    return cell.distribution or "uniform"
  return cell.distribution or task.distribution


class Costs(NamedTuple):
  """The cost of an algorithm relative to a plain training.

  Attributes:
    gradients_per_step: gradients computed in one step.
    trainings: complete trainings, more than 1 for iterative pruning.
    temperature: the divisor of the network's outputs during training.
  """

  gradients_per_step: int
  trainings: int
  temperature: float


def costs_of(cell: Cell) -> Costs:
  """Return the costs of a cell's algorithm.

  Args:
    cell: the cell.

  Returns:
    The costs; a plain training for the baselines.

  Example:
    >>> costs_of(DENSE)
    Costs(gradients_per_step=1, trainings=1, temperature=1.0)
  """
  if cell.algorithm in BASELINES or cell.name.startswith(AFTER):
    return Costs(1, 1, 1.0)
  category = jaxpruner.algorithm_category(cell.name)
  trainings = category.trainings
  return Costs(
    category.gradients_per_step,
    1 if trainings is None else trainings(cell.sparsity),
    category.temperature,
  )
