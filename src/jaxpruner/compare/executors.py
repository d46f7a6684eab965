"""Compute cells in this process or on a Ray cluster; see also `workers`.

Each executor calls `emit(event)` in the process that owns the run folder, with
a `Chunk`, a `Record` or a `Failure`. A cell depends on its settings only, so
all executors give the same records.
"""

import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxpruner.compare import after_run, cell_run, files, modules, settings
from jaxpruner.compare.cells import AFTER, Cell
from jaxpruner.compare.files import RunFolderError
from jaxpruner.compare.outcomes import Outcome
from jaxpruner.compare.records import (
  Event,
  Failure,
  SchemaError,
  event_from_json,
  event_to_json,
)
from jaxpruner.compare.settings import ComparisonSettings

Emit = Callable[[Event], None]


def threads(settings: ComparisonSettings) -> dict[str, str]:
  """Return environment variables that give a worker one thread.

  What XLA does: the order in which it sums a product depends on the number of
  threads. What we do: one thread per cell. What it saves: a cell gives the same
  bits on any number of cores, and two cells on one core each are faster than
  two cells that share two cores.

  Args:
    settings: the comparison.

  Returns:
    Variable -> value; empty if a cell uses several devices.

  Example:
    >>> threads(ComparisonSettings())
    {'NPROC': '1'}
  """
  return {"NPROC": "1"} if settings.devices == 1 else {}


class CheckpointFile:
  """The checkpoint of an unfinished cell in the run folder.

  Args:
    path: the run folder.
    cell: the cell.

  Attributes:
    path: the checkpoint's file.
  """

  def __init__(self, path: pathlib.Path, cell: Cell):
    self.path = path / "checkpoints" / f"{cell.id}.npz"

  def load(self) -> dict[str, np.ndarray] | None:
    """Return the arrays, or None; rename a damaged file."""
    if not self.path.exists() and not self.path.is_symlink():
      return None
    try:
      return files.unpack_arrays(self.path)
    except RunFolderError as error:
      self.set_aside(str(error))
      return None

  def save(self, arrays: dict[str, np.ndarray]) -> None:
    """Replace the checkpoint."""
    files.write_atomic(self.path, files.pack_arrays(arrays))

  def set_aside(self, reason: str) -> None:
    """Rename a checkpoint that cannot be used, so that it is not read again."""
    if not self.path.exists() and not self.path.is_symlink():
      return
    aside = self.path.with_name(f"{self.path.name}.bad")
    with files.explained(self.path):
      os.replace(self.path, aside)
    files.say(
      f"{self.path}: of no use ({reason}); set aside as {aside.name}, the cell "
      "starts over and gives the same numbers"
    )

  def delete(self) -> None:
    """Delete the checkpoint of a finished cell."""
    self.path.unlink(missing_ok=True)


def compute(
  cell: Cell, settings: ComparisonSettings, path: pathlib.Path, emit: Emit
) -> None:
  """Compute one cell; store its weights and checkpoints in the run folder.

  Args:
    cell: the cell.
    settings: the comparison it belongs to.
    path: the run folder.
    emit: receives its chunks, then its record or failure.
  """
  checkpoint = CheckpointFile(path, cell)
  try:
    outcome = _computed(cell, settings, emit, _trained(cell, path), checkpoint)
  except (RunFolderError, KeyboardInterrupt):
    raise
  except Exception as error:
    failed = failure(cell, error)
    checkpoint.set_aside(failed.problem)
    emit(failed)
    return
  packed = files.pack_arrays(outcome.arrays)
  files.write_atomic(path / "weights" / f"{cell.id}.npz", packed)
  if outcome.every is not None:
    packed = files.pack_arrays(outcome.every)
    files.write_atomic(every_file(path, cell), packed)
  emit(outcome.record)
  checkpoint.delete()


def _trained(cell: Cell, path: pathlib.Path) -> dict[str, np.ndarray] | None:
  """Return the networks that a cell starts or learns from."""
  source = cell.source
  if source is None or not every_file(path, source).exists():
    return None
  return files.unpack_arrays(every_file(path, source))


def every_file(path: pathlib.Path, cell: Cell) -> pathlib.Path:
  """Return the file with the weights of all seeds of a cell."""
  return path / "weights" / f"{cell.id}.all.npz"


def in_order(pending: Sequence[Cell]) -> list[list[Cell]]:
  """Return the cells in groups; each needs the results of those before it.

  Args:
    pending: the cells to compute.

  Returns:
    Cells that need no other, then those that need only these, and so on.

  Example:
    >>> in_order([Cell("after:wanda", 0.5), Cell("dense", 0.0)])[0][0].id
    'dense'
  """
  groups: dict[int, list[Cell]] = {}
  for cell in pending:
    depth, source = 0, cell.source
    while source is not None:
      depth, source = depth + 1, source.source
    groups.setdefault(depth, []).append(cell)
  return [groups[depth] for depth in sorted(groups)]


def failure(cell: Cell, error: Exception) -> Failure:
  """Return the record of a cell that raised; a resumed run retries it."""
  first = str(error).strip().splitlines()[0] if str(error).strip() else ""
  problem = f"{type(error).__name__}: {first}"
  return Failure(cell.id, cell.algorithm, cell.sparsity, problem)


def check_sender(event: Event, cell: Cell, sender: str) -> Event:
  """Return an event, or raise if it belongs to another cell.

  Args:
    event: the event that the sender returned.
    cell: the cell that the sender was given.
    sender: a worker or node, for the error message.

  Returns:
    The event.

  Raises:
    RunFolderError: the event names another cell.
  """
  if event.cell != cell.id:
    raise RunFolderError(
      f"{sender} returned cell {event.cell!r:.80}, but was given {cell.id!r}; "
      "nothing of it was stored"
    )
  return event


def serial(
  pending: Sequence[Cell],
  settings: ComparisonSettings,
  path: pathlib.Path,
  emit: Emit,
) -> None:
  """Compute the cells one after another in this process."""
  for cell in pending:
    compute(cell, settings, path, emit)


def ray_cluster(
  pending: Sequence[Cell],
  settings: ComparisonSettings,
  path: pathlib.Path,
  emit: Emit,
  address: str | None,
) -> None:
  """Compute the cells as Ray tasks, on a cluster or on this machine.

  Nodes need jaxpruner and the task's data, but no shared file system: weights
  are part of the result.

  Args:
    pending: the cells.
    settings: the comparison.
    path: the run folder.
    emit: receives the events of each cell when it is finished.
    address: the address of a running cluster; None starts one on this
      machine.
  """
  try:
    import ray  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise ValueError(
      "--executor ray needs Ray: pip install 'jaxpruner[ray]'"
    ) from error
  if not ray.is_initialized():
    ray.init(address=address, log_to_driver=False)

  environment = {"env_vars": threads(settings)}
  task = ray.remote(max_retries=3, runtime_env=environment)(_remote)
  payload = settings.to_json()
  # Two tasks per CPU keep nodes busy without filling the cluster's queue.
  limit = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
  waiting, running = list(pending)[::-1], {}
  while waiting or running:
    while waiting and len(running) < limit:
      cell = waiting.pop()
      trained = None
      if cell.source and every_file(path, cell.source).exists():
        trained = every_file(path, cell.source).read_bytes()
      running[task.remote(tuple(cell), payload, trained)] = cell
    ready, _ = ray.wait(list(running), num_returns=1)
    store_remote(running.pop(ready[0]), ray.get(ready[0]), path, emit)


def store_remote(
  cell: Cell, result: Any, path: pathlib.Path, emit: Emit
) -> None:
  """Check the result of a node, and store it.

  Args:
    cell: the cell that the node was given; it names the file.
    result: (events as JSON, bytes of the weights or None, and bytes of the
      weights of all seeds if there are any).
    path: the run folder.
    emit: receives the events.
  """
  sent, packed, *every = result
  try:
    events = [event_from_json(event, f"Ray, {cell.id}") for event in sent]
  except SchemaError as error:
    raise RunFolderError(f"{error}; do all nodes run this version?") from error
  for event in events:
    check_sender(event, cell, "a Ray node")
  if packed is not None:
    files.write_atomic(path / "weights" / f"{cell.id}.npz", packed)
  if every and every[0] is not None:
    files.write_atomic(every_file(path, cell), every[0])
  for event in events:
    emit(event)


def _remote(
  cell: tuple, payload: dict, trained: bytes | None
) -> tuple[list[dict], bytes | None, bytes | None]:
  """Compute one cell on a node; a module-level function, as Ray requires."""
  # The modules that the user typed; the head node sent their names.
  modules.import_modules(payload.get("imports", ()))
  modules.import_task(payload.get("task", ""))
  chosen = settings.from_json(payload)
  events: list[dict] = []
  emit = lambda event: events.append(event_to_json(event))
  try:
    outcome = _computed(Cell(*cell), chosen, emit, _unpacked(trained))
  except Exception as error:
    emit(failure(Cell(*cell), error))
    return events, None, None
  emit(outcome.record)
  every = outcome.every
  packed = files.pack_arrays(every) if every is not None else None
  return events, files.pack_arrays(outcome.arrays), packed


def _computed(
  cell: Cell,
  chosen: ComparisonSettings,
  emit: Emit,
  trained: dict[str, np.ndarray] | None,
  checkpoint: CheckpointFile | None = None,
) -> Outcome:
  if cell.source is not None and trained is None:
    called = "the dense row" if cell.source == cell.dense else cell.source.id
    raise ValueError(f"{called} has no trained weights: it failed")
  if cell.name.startswith(AFTER) and trained is not None:
    return after_run.run_after(cell, chosen, trained)
  return cell_run.run_cell(cell, chosen, emit, checkpoint, trained)


def _unpacked(packed: bytes | None) -> dict[str, np.ndarray] | None:
  if packed is None:
    return None
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "trained.npz"
    file.write_bytes(packed)
    return files.unpack_arrays(file)
