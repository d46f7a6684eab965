"""Run a question's measurements on the trained networks of a run."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner.compare import (
  executors,
  files,
  networks,
  outcomes,
  questions,
  run_folder,
)
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.given import trained_state
from jaxpruner.compare.plan import cells_of
from jaxpruner.compare.records import Failure, Measures
from jaxpruner.compare.settings import ComparisonSettings
from jaxpruner.compare.tasks.base import Task

PyTree = Any


class Trained(NamedTuple):
  """The trained networks of a cell; seeds are the leading axis."""

  task: Task
  data: PyTree
  params: PyTree
  masks: PyTree  # None where dense
  state: PyTree

  @property
  def seeds(self) -> int:
    """The number of seeds."""
    return jax.tree.leaves(self.params)[0].shape[0]

  def seed(self, number: int) -> tuple[PyTree, PyTree, PyTree]:
    """Return the parameters, masks and state of one seed."""
    return jax.tree.map(
      lambda x: x[number], (self.params, self.masks, self.state)
    )


class Store:
  """The trained networks of a run, read on request.

  Args:
    path: the run folder.
    settings: the comparison.

  Attributes:
    path: as above.
    settings: as above.
  """

  def __init__(self, path: pathlib.Path, settings: ComparisonSettings):
    self.path, self.settings = path, settings

  def has(self, cell: Cell) -> bool:
    """Return whether the networks of a cell are stored."""
    return executors.every_file(self.path, cell).exists()

  def load(self, cell: Cell) -> Trained:
    """Return the networks of a cell, of all seeds."""
    task = networks.cell_task(cell, self.settings)
    options = networks.task_options(self.settings, cell.options)
    data = networks.load_data(self.settings.task, self.settings.data, options)
    arrays = files.unpack_arrays(executors.every_file(self.path, cell))
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    return Trained(
      task,
      data,
      outcomes.filled(shapes, arrays, "param"),
      outcomes.filled(shapes, arrays, "mask", optional=True),
      trained_state(task, arrays),
    )


def measure_all(
  path: pathlib.Path,
  settings: ComparisonSettings,
  emit: Callable[[Measures], None],
) -> None:
  """Measure the cells that have no measurements yet.

  Args:
    path: the run folder.
    settings: the comparison; without a question nothing happens.
    emit: receives the measurements of each cell.
  """
  if not settings.question:
    return
  measure = questions.QUESTIONS.find(settings.question).measure
  if measure is None:
    return
  store = Store(path, settings)
  done = run_folder.read_measures(path)
  results = run_folder.read_results(path)
  for cell in cells_of(settings):
    result = results.get(cell.id)
    failed = result is None or isinstance(result, Failure) or result.problem
    if cell.id in done or failed or not store.has(cell):
      continue
    found = measure(cell, store)
    as_list = lambda values: np.asarray(values, np.float64).tolist()
    emit(Measures(cell.id, {k: as_list(v) for k, v in found.items()}))
