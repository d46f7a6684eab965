"""The categories of algorithms: their group in the table, their costs."""

import dataclasses
from typing import Any, NamedTuple

import jaxpruner
from jaxpruner.compare import settings as settings_lib
from jaxpruner.compare import tasks
from jaxpruner.compare.cells import (
  AFTER,
  BASELINES,
  RETRAIN,
  Cell,
  ticket_of,
)

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


class Group(NamedTuple):
  """Algorithms with the same kind of training cost.

  Attributes:
    order: the position in the table.
    title: the heading in the table.
  """

  order: int
  title: str


# Orders of groups.
DENSE_TO_SPARSE = 1
SPARSE_FROM_THE_START = (2, 3, 4)


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
  if Cell(algorithm, 0.0).name in BASELINES:
    return Group(0, "Baselines")
  if algorithm.startswith(RETRAIN):
    return Group(6, "Masks of another row, trained again: both trainings")
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
  return Group(
    DENSE_TO_SPARSE, "Dense to sparse: training starts at the dense cost"
  )


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


def distribution_of(cell: Cell, task: tasks.Task) -> str:
  """Return the distribution of a cell: "" for baselines, or "global"."""
  if cell.name in BASELINES:
    return ""
  if cell.name.startswith(RETRAIN):
    ticket = cell._replace(algorithm=ticket_of(cell.algorithm)[0])
    return distribution_of(ticket, task)
  if not cell.name.startswith(AFTER) and ranks_globally(
    jaxpruner.algorithm_class(cell.name)
  ):
    return "global"
  # N:M gives every leaf the same sparsity; ERK would contradict it.
  if settings_lib.type_sparsity(cell.type) is not None:
    return cell.distribution or "uniform"
  return cell.distribution or task.distribution


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
    >>> costs_of(Cell("dense", 0.0))
    Costs(gradients_per_step=1, trainings=1, temperature=1.0)
  """
  if cell.name in BASELINES or cell.name.startswith((AFTER, RETRAIN)):
    return Costs(1, 1, 1.0)
  category = jaxpruner.algorithm_category(cell.name)
  trainings = category.trainings
  return Costs(
    category.gradients_per_step,
    1 if trainings is None else trainings(cell.sparsity),
    category.temperature,
  )
