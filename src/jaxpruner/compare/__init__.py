"""`jaxpruner compare`: fair comparisons of pruning algorithms.

settings      what is compared, checked before anything starts
cells         settings -> cells (an algorithm at a sparsity), their categories
tasks/        what is trained, one file each; layers: what networks consist of
training      one cell's training, all seeds in one compiled program
cell_run      train, evaluate, price and check one cell
records       what is stored of a cell: Chunk, Record, Failure
executors     cells in this process or on a Ray cluster
workers       cells in several processes: both ends of the protocol
files         links refused, lines checked, files replaced whole
run_folder    what is finished, safe at any instant
fingerprint   what decides a run's numbers; a folder holds one run
statistics, table, columns, exports   from records to numbers, rows and text
metric_picture, pictures, page, terminal, latency   what is shown
command, report_command   what the command line calls
"""

from typing import Any


def __getattr__(name: str) -> Any:
  # On use: the command line sets up devices before it imports much.
  if name in ("Classification", "Task", "register_task"):
    from jaxpruner.compare import tasks

    return getattr(tasks, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
