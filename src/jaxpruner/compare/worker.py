"""A worker process: settings and cells in on stdin, events out on stdout."""

import json
import os
import pathlib
import queue
import sys
import threading


def main() -> None:
  """Compute cells until stdin closes; exit at once if the parent dies."""
  path = pathlib.Path(sys.argv[1])
  # Whatever prints to stdout must not break the protocol.
  out, sys.stdout = sys.stdout, sys.stderr
  lines: queue.Queue[str | None] = queue.Queue()

  def listen() -> None:
    for line in sys.stdin:
      lines.put(line)
    if lines.unfinished_tasks:
      os._exit(1)  # the parent is gone in the middle of a cell
    lines.put(None)

  threading.Thread(target=listen, daemon=True).start()

  from jaxpruner.compare import executors, plan

  def send(event) -> None:
    # The parent may close stdin once it has read "done": be idle by then.
    if event["event"] == "done":
      lines.task_done()
    out.write(json.dumps(event) + "\n")
    out.flush()

  settings = plan.from_dict(json.loads(lines.get() or "{}"))
  lines.task_done()
  while (line := lines.get()) is not None:
    executors.compute(plan.Cell(*json.loads(line)), settings, path, send)


if __name__ == "__main__":
  main()
