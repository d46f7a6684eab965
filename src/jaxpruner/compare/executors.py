"""Where cells are computed: this process, several, or a Ray cluster.

Each executor calls `sink(event)` in the process that owns the run folder:
`{"event": "stretch" | "done", "record": ...}`. A cell depends on nothing but
its settings, so all executors give the same records.
"""

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxpruner.compare import cell as cells
from jaxpruner.compare import folder, plan

Event = dict[str, Any]
Sink = Callable[[Event], None]


def _threads(settings: plan.Settings) -> dict[str, str]:
  """Return the environment of a worker: one thread for its one device.

  XLA sums a product in another order on another number of threads: with one,
  a cell gives the same bits on any number of cores and beside any number of
  other cells. It also wastes no time waiting: two cells on a core each are
  much faster than two that share two cores.
  """
  return {"NPROC": "1"} if settings.devices == 1 else {}


def compute(
  cell: plan.Cell, settings: plan.Settings, path: pathlib.Path, sink: Sink
) -> None:
  """Compute one cell, keeping its weights and checkpoints in the folder."""
  checkpoint = path / "checkpoints" / f"{cell.id}.npz"

  def load():
    if not checkpoint.exists():
      return None
    try:
      return folder.unpack_arrays(checkpoint)
    except folder.FolderError:
      # Only time is lost: the cell starts over and gives the same numbers.
      return None

  def save(arrays):
    folder.write_atomic(checkpoint, folder.pack_arrays(arrays))

  sink_stretch = lambda record: sink({"event": "stretch", "record": record})
  try:
    outcome = cells.run_cell(cell, settings, sink_stretch, load, save)
  except (folder.FolderError, KeyboardInterrupt):
    raise
  except Exception as error:
    sink({"event": "done", "record": failure(cell, error)})
    return
  packed = folder.pack_arrays(outcome.arrays)
  folder.write_atomic(path / "weights" / f"{cell.id}.npz", packed)
  sink({"event": "done", "record": outcome.record})
  checkpoint.unlink(missing_ok=True)


def failure(cell: plan.Cell, error: Exception) -> dict[str, Any]:
  """Return the record of a cell that raised; it is retried on resumption."""
  first = str(error).strip().splitlines()[0] if str(error).strip() else ""
  return {
    "cell": cell.id,
    "algorithm": cell.algorithm,
    "sparsity": cell.sparsity,
    "problem": f"{type(error).__name__}: {first}",
    "raised": True,
  }


def serial(
  pending: Sequence[plan.Cell],
  settings: plan.Settings,
  path: pathlib.Path,
  sink: Sink,
) -> None:
  """Compute the cells one after another in this process."""
  for cell in pending:
    compute(cell, settings, path, sink)


def processes(
  pending: Sequence[plan.Cell],
  settings: plan.Settings,
  path: pathlib.Path,
  sink: Sink,
  jobs: int,
) -> None:
  """Compute the cells in `jobs` worker processes.

  Workers speak JSON lines over pipes; one that loses its parent exits.
  """
  events: queue.Queue[tuple[int, Event | None]] = queue.Queue()
  waiting = list(pending)[::-1]
  workers: list[Any] = []

  def listen(index: int, stream) -> None:
    for line in stream:
      events.put((index, json.loads(line)))
    events.put((index, None))

  def give(index: int) -> None:
    pipe = workers[index].stdin
    if waiting:
      pipe.write(json.dumps(waiting.pop()) + "\n")
      pipe.flush()
    else:
      pipe.close()

  first = json.dumps(plan.as_dict(settings))
  try:
    for index in range(min(jobs, len(waiting))):
      with (path / f"worker-{index}.log").open("w") as log:
        worker = subprocess.Popen(
          [sys.executable, "-m", "jaxpruner.compare.worker", str(path)],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=log,
          text=True,
          env=os.environ | _threads(settings),
        )
      workers.append(worker)
      workers[index].stdin.write(first + "\n")
      threading.Thread(
        target=listen, args=(index, worker.stdout), daemon=True
      ).start()
      give(index)
    alive = len(workers)
    while alive:
      index, event = events.get()
      if event is None:
        alive -= 1
        if code := workers[index].wait():
          raise folder.FolderError(
            f"worker {index} ended with code {code}; see "
            f"{path / f'worker-{index}.log'}. The same command continues."
          )
        continue
      sink(event)
      if event["event"] == "done":
        give(index)
  finally:
    for worker in workers:
      worker.kill()
      worker.wait()
      for pipe in (worker.stdin, worker.stdout):
        pipe.close()


def ray_cluster(
  pending: Sequence[plan.Cell],
  settings: plan.Settings,
  path: pathlib.Path,
  sink: Sink,
  address: str | None,
) -> None:
  """Compute the cells as Ray tasks, on a cluster or on this machine.

  Nodes need jaxpruner and the task's data, but no shared file system: weights
  travel with the result.
  """
  try:
    import ray  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise ValueError(
      "--executor ray needs Ray: pip install 'jaxpruner[ray]'"
    ) from error
  if not ray.is_initialized():
    ray.init(address=address, log_to_driver=False)

  environment = {"env_vars": _threads(settings)}
  task = ray.remote(max_retries=3, runtime_env=environment)(_remote)
  payload = plan.as_dict(settings)
  # One spare task per CPU keeps nodes busy without flooding the cluster.
  limit = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
  waiting, running = list(pending)[::-1], []
  while waiting or running:
    while waiting and len(running) < limit:
      running.append(task.remote(tuple(waiting.pop()), payload))
    ready, running = ray.wait(running, num_returns=1)
    events, cell_id, packed = ray.get(ready[0])
    if packed is not None:
      folder.write_atomic(path / "weights" / f"{cell_id}.npz", packed)
    for event in events:
      sink(event)


def _remote(
  cell: tuple, payload: dict
) -> tuple[list[Event], str, bytes | None]:
  """Compute one cell on a node; module-level, so that Ray can ship it."""
  settings = plan.from_dict(payload)
  found = plan.Cell(*cell)
  events: list[Event] = []
  stretch = lambda record: events.append({"event": "stretch", "record": record})
  try:
    outcome = cells.run_cell(found, settings, stretch)
  except Exception as error:
    record = failure(found, error)
    return [*events, {"event": "done", "record": record}], found.id, None
  events.append({"event": "done", "record": outcome.record})
  return events, found.id, folder.pack_arrays(outcome.arrays)
