"""`jaxpruner compare`: fair comparisons of pruning algorithms.

settings      the settings of a comparison, checked before anything starts
modules       import what the user typed, never what a file names
cells         a cell: an algorithm at a point of all axes, and its source
groups, plan  categories and costs; settings -> cells
tasks/        data, network, loss and metric, one file each; layers: networks
streams       batches drawn on the host during training, and their checks
training, over_seeds   the training of one seed; all seeds in one program
distillation, given, pretrained   teachers, masks of other rows, checkpoints
networks      the network of a cell: task, width, data, updater
cell_run      train one cell, chunk by chunk; stored_carry: its checkpoints
outcomes      metrics, sizes and costs of a cell, and its record's checks
after_run     prune the dense row's trained weights: rows "after training"
spelling      texts of the command line; structure: leaves that stay dense
records       the stored results of a cell: Chunk, Record, Failure, Measures
executors     compute cells in this process or on a Ray cluster
workers       compute cells in several processes: both ends of the protocol
files         read and write files of a run folder safely
run_folder    the results on disk; a run can be killed at any time
record_files  a finished run as one small file, to publish and restore
fingerprint   everything that determines a run's numbers
statistics, table, columns, exports   from records to numbers, rows and text
metric_picture, pictures, page, terminal, latency   pictures, report, times
questions/    questions with their axes, measurements, pictures and verdict
command, report_command, fit_command, records_command, reproduce_command   the
              subcommands
from_python   `jaxpruner.compare.run`
"""

from typing import Any


def __getattr__(name: str) -> Any:
  # Imported on use: the command line sets up devices before JAX starts.
  if name in ("Classification", "Task", "register_task", "task"):
    from jaxpruner.compare import tasks

    return getattr(tasks, name)
  if name in ("Comparison", "RunFolderError", "run"):
    from jaxpruner.compare import from_python

    return getattr(from_python, name)
  if name in ("Question", "register_question"):
    from jaxpruner.compare import questions

    return getattr(questions, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
