"""The cells of a comparison: an algorithm at a sparsity, over all seeds."""

from typing import Any, NamedTuple

import jaxpruner
from jaxpruner.compare.settings import ComparisonSettings

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


class Cell(NamedTuple):
  """One entry of the table: an algorithm at a sparsity, over all seeds."""

  algorithm: str
  sparsity: float

  @property
  def id(self) -> str:
    """Return a name fit for a file; two sparsities never share one.

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
    each cell once: dense first, then sparsity by sparsity.
  """
  names = list(settings.algorithms) or default_algorithms()
  if "all" in names:
    names = fitting_algorithms()
  found = [DENSE]
  for sparsity in settings.sparsity:
    found += [Cell(name, sparsity) for name in ("small_dense", *names)]
  return list(dict.fromkeys(found))


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


class Group(NamedTuple):
  """A category of algorithms that may fairly be compared with each other."""

  order: int
  title: str


def group(algorithm: str) -> Group:
  """Return the group an algorithm is listed under.

  Args:
    algorithm: a baseline or a registered name.
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
  """What an algorithm costs beyond one gradient a step and one training."""

  gradients_per_step: int
  trainings: int
  temperature: float


def costs_of(cell: Cell) -> Costs:
  """Return what the cell's algorithm costs: the one place that asks it."""
  if cell.algorithm in BASELINES:
    return Costs(1, 1, 1.0)
  category = jaxpruner.algorithm_class(cell.algorithm).category
  return Costs(
    category.gradients_per_step,
    1 if category.trainings is None else category.trainings(cell.sparsity),
    category.temperature,
  )
