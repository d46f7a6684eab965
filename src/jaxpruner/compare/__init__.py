"""`jaxpruner compare`: fair comparisons of pruning algorithms.

plan        settings -> cells (an algorithm at a sparsity)
tasks/      what is trained, one file each
program     one cell's training, all seeds in one compiled program
cell        train, evaluate, price and check one cell
executors   cells in this process, in several, or on a Ray cluster
folder      what is finished, safe at any instant
statistics, table, pictures, page, terminal   what is shown
"""

from typing import Any


def __getattr__(name: str) -> Any:
  # On use: the command line sets up devices before it imports much.
  if name in ("Classification", "Task", "register_task"):
    from jaxpruner.compare import tasks

    return getattr(tasks, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
