"""Compute cells in several processes: both ends of the protocol.

Messages are lines of JSON:

    parent -> worker (its stdin)   the settings; then a cell, [algorithm,
                                   sparsity], each time the worker is idle
    worker -> parent (a pipe of    chunks while it trains, then the record or
    its own)                       failure of the cell (`records.event_to_json`)

The parent closes stdin when no cell is left. A worker whose stdin closes in
the middle of a cell has lost its parent and exits at once. All output of a
worker, also that of C code, goes to `worker-N.log` in the run folder.
"""

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from jaxpruner.compare import executors, files, modules, settings
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.executors import Emit
from jaxpruner.compare.files import RunFolderError
from jaxpruner.compare.records import (
  Event,
  SchemaError,
  event_from_json,
  event_to_json,
)
from jaxpruner.compare.settings import ComparisonSettings


def processes(
  pending: Sequence[Cell],
  settings: ComparisonSettings,
  path: pathlib.Path,
  emit: Emit,
  jobs: int,
) -> None:
  """Compute the cells in worker processes.

  Args:
    pending: the cells.
    settings: the comparison.
    path: the run folder.
    emit: receives the events, in this process.
    jobs: the number of workers.

  Raises:
    RunFolderError: a worker ended early, or sent something other than an
      event; the message names its log.
  """
  waiting = list(pending)[::-1]
  events: queue.Queue[tuple[_Worker, str | None]] = queue.Queue()
  workers: list[_Worker] = []
  try:
    for index in range(min(jobs, len(waiting))):
      workers.append(_Worker(index, settings, path, events))
      workers[-1].give(waiting)
    alive = len(workers)
    while alive:
      worker, line = events.get()
      if line is None:
        alive -= 1
        worker.check_ended()
        continue
      event = worker.event(line)
      emit(event)
      if event.event == "done":
        worker.give(waiting)
  finally:
    for worker in workers:
      worker.stop()


class _Worker:
  """The parent's end of a worker process."""

  def __init__(
    self,
    index: int,
    settings: ComparisonSettings,
    path: pathlib.Path,
    events: queue.Queue,
  ):
    self.name = f"worker {index}"
    self.log = path / f"worker-{index}.log"
    self.cell: Cell | None = None
    with files.open_own(self.log, "w") as log:
      self._process = subprocess.Popen(
        [sys.executable, "-m", "jaxpruner.compare.workers", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        errors="replace",
        env=os.environ | executors.threads(settings),
      )
    self._send(settings.to_json())
    threading.Thread(
      target=self._listen, args=(events, self._process.stdout), daemon=True
    ).start()

  def _listen(self, events: queue.Queue, stream: IO[str]) -> None:
    for line in stream:
      events.put((self, line))
    events.put((self, None))

  def _send(self, message: Any) -> None:
    pipe = self._process.stdin
    assert pipe is not None
    try:
      pipe.write(json.dumps(message) + "\n")
      pipe.flush()
    except BrokenPipeError:
      pass  # it ended: `check_ended` reports it when its pipe closes

  def give(self, waiting: list[Cell]) -> None:
    """Send the next cell, or close stdin if there is none."""
    if waiting:
      self.cell = waiting.pop()
      self._send(self.cell)
    else:
      self.cell = None
      assert self._process.stdin is not None
      self._process.stdin.close()

  def event(self, line: str) -> Event:
    """Return the event in a line; raise if it belongs to another cell."""
    try:
      found = event_from_json(json.loads(line), self.name)
    except (SchemaError, ValueError, RecursionError) as error:
      raise RunFolderError(
        f"{self.name} sent {line!r:.80}, which is no event ({error}); see "
        f"{self.log}. The same command continues."
      ) from error
    if self.cell is None:
      raise RunFolderError(f"{self.name} sent {found.cell!r:.80} unasked")
    return executors.check_sender(found, self.cell, self.name)

  def check_ended(self) -> None:
    """Raise if the worker failed, or ended before its cell was finished."""
    code = self._process.wait()
    if code or self.cell is not None:
      raise RunFolderError(
        f"{self.name} ended with code {code}; see {self.log}. The same "
        "command continues."
      )

  def stop(self) -> None:
    """Kill the process and close its pipes."""
    self._process.kill()
    self._process.wait()
    for pipe in (self._process.stdin, self._process.stdout):
      assert pipe is not None
      try:
        pipe.close()
      except BrokenPipeError:
        pass


def main() -> None:
  """Run a worker: compute cells until stdin closes."""
  path = pathlib.Path(sys.argv[1])
  # Duplicate the pipe to the parent, and make file descriptor 1 the log, so
  # that neither print nor C code can write into the pipe.
  out = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  sys.stdout = sys.stderr
  lines: queue.Queue[str | None] = queue.Queue()

  def listen() -> None:
    for line in sys.stdin:
      lines.put(line)
    if lines.unfinished_tasks:
      os._exit(1)  # the parent is gone in the middle of a cell
    lines.put(None)

  threading.Thread(target=listen, daemon=True).start()

  def emit(event: Event) -> None:
    # The parent may close stdin once it has read "done": mark the cell as
    # finished before sending.
    if event.event == "done":
      lines.task_done()
    out.write(json.dumps(event_to_json(event)) + "\n")
    out.flush()

  sent = json.loads(lines.get() or "{}")
  # The modules that the user typed; the parent sent their names.
  modules.import_modules(sent.get("imports", ()))
  modules.import_task(sent.get("task", ""))
  chosen = settings.from_json(sent)
  lines.task_done()
  while (line := lines.get()) is not None:
    executors.compute(Cell(*json.loads(line)), chosen, path, emit)


if __name__ == "__main__":
  main()
