"""The cells of a comparison: an algorithm at a sparsity, over all seeds."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

import jaxpruner
from jaxpruner.compare import tasks
from jaxpruner.compare.settings import ComparisonSettings

BASELINES = ("dense", "small_dense")
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
  """One entry of the table: an algorithm at a sparsity, over all seeds.

  Attributes:
    algorithm: a registered name, "dense" or "small_dense".
    sparsity: the fraction removed.

  Example:
    >>> Cell("rigl", 0.9).id
    'rigl@0.9'
  """

  algorithm: str
  sparsity: float

  @property
  def id(self) -> str:
    """Return a unique name that can be used as a file name.

    Example:
      >>> Cell("rigl", 0.999999).id, Cell("rigl", 0.9999991).id
      ('rigl@0.999999', 'rigl@0.9999991')
    """
    if self.algorithm == "dense":
      return "dense"
    return f"{self.algorithm}@{float(self.sparsity)!r}"


DENSE = Cell("dense", 0.0)


def cells_of(settings: ComparisonSettings) -> list[Cell]:
  """Return the baselines and the algorithms at every sparsity.

  Args:
    settings: the comparison.

  Returns:
    Each cell once: dense first, then sparsity by sparsity.

  Example:
    >>> settings = ComparisonSettings(algorithms=("rigl",), sparsity=(0.9,))
    >>> [cell.id for cell in cells_of(settings)]
    ['dense', 'small_dense@0.9', 'rigl@0.9']
  """
  names = list(settings.algorithms) or default_algorithms()
  if "all" in names:
    names = fitting_algorithms()
  if has_small_dense(settings):
    names = ["small_dense", *names]
  found = [DENSE]
  for sparsity in settings.sparsity:
    found += [Cell(name, sparsity) for name in names]
  return list(dict.fromkeys(found))


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
  task = tasks.make_task(settings.task, settings.options)
  return task.narrowable and _obeys_width(task)


@functools.lru_cache(maxsize=32)
def _obeys_width(task: tasks.Task) -> bool:
  """Whether the smallest width gives a network with fewer weights."""
  if task.width <= task.width_multiple:
    return False
  narrow = dataclasses.replace(task, width=task.width_multiple)
  return weights_of(narrow) < weights_of(task)


@functools.lru_cache(maxsize=256)
def weights_of(task: tasks.Task) -> int:
  """Return the number of parameters of a task's network."""
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
    algorithm: a baseline or a registered name.

  Returns:
    The group.

  Example:
    >>> group("dense")
    Group(order=0, title='Baselines')
  """
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
  if cell.algorithm in BASELINES:
    return Costs(1, 1, 1.0)
  category = jaxpruner.algorithm_category(cell.algorithm)
  trainings = category.trainings
  return Costs(
    category.gradients_per_step,
    1 if trainings is None else trainings(cell.sparsity),
    category.temperature,
  )
