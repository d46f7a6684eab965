"""`jaxpruner reproduce`: run one published cell again, compare bit for bit."""

import argparse
import dataclasses
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # imported on use: `--help` needs no JAX
  from jaxpruner.compare import record_files

# What a measurement decides, not the computation.
MEASURED = ("seconds", "step_seconds")
# Numbers that older versions did not record, as such a record reads.
UNKNOWN = {"training_bytes": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options."""
  parser.add_argument(
    "source", metavar="RECORDS", help="a file of records, or a run folder"
  )
  parser.add_argument(
    "cell", nargs="?", metavar="CELL", help="such as rigl@0.9 (default: list)"
  )
  parser.add_argument("--data", help="folder with the task's data")
  parser.add_argument(
    "--task", help="the run's own task, module:NAME, if you trust that module"
  )
  parser.add_argument(
    "--import",
    dest="imports",
    action="append",
    metavar="MODULE",
    help="import a module that the run used; none is imported by itself",
  )


class Reproduction(NamedTuple):
  """A cell that was computed again.

  Attributes:
    inputs: what differs between the recorded run and this one before anything
      is computed: versions, device, data, settings.
    differing: what differs in the result; empty if it is the same bit for bit.
    compared: what was compared, in words.
    unknown: the numbers that the record does not have.
  """

  inputs: list[str]
  differing: list[str]
  compared: str
  unknown: list[str]


def run(args: argparse.Namespace) -> int:
  """Compute the cell; return 0 if it is equal, 1 if not, 2 on an error."""
  from jaxpruner import datasets
  from jaxpruner.compare import files, modules, record_files, records_command

  try:
    if args.data == "":
      raise ValueError("--data '': is empty; give a folder, or leave it out")
    found = record_files.load(args.source)
    if args.cell is None:
      print("\n".join(records_command.described(found)))
      return 0
    modules.import_modules(args.imports or ())
    modules.import_task(args.task or "")
    check_typed(found.info.settings, args)
    done = reproduce(found, args.cell, args.data)
  except (files.RunFolderError, ValueError, datasets.DataError) as error:
    files.say(str(error), "reproduce")
    return 2
  print("\n".join(described(found.info, args.cell, done)))
  return int(bool(done.differing))


def check_typed(settings: dict[str, Any], args: argparse.Namespace) -> None:
  """Raise if the run needs a module that the user has not typed."""
  task = str(settings.get("task", ""))
  if ":" in task and task != args.task:
    raise ValueError(
      f"{args.source}: names the task {task!r}; a file imports nothing by "
      f"itself: if you trust that module, type --task {task}"
    )
  if args.task is not None and args.task != task:
    raise ValueError(
      f"--task {args.task!r}: the run's task is {task!r}; leave --task out"
    )
  untyped = set(settings.get("imports") or ()) - set(args.imports or ())
  if untyped:
    named = " ".join(f"--import {name}" for name in sorted(untyped))
    raise ValueError(
      f"{args.source}: names modules to import; a file imports nothing by "
      f"itself: if you trust them, type {named}"
    )


def reproduce(
  found: "record_files.Records", cell: str, data: str | None = None
) -> Reproduction:
  """Compute a recorded cell again, and compare.

  Args:
    found: the records.
    cell: the id of the cell.
    data: a folder with the task's data; by default the run's.

  Returns:
    What differs.

  Raises:
    ValueError: the cell is unknown or not finished.
  """
  from jaxpruner import _tools
  from jaxpruner.compare import fingerprint, run_folder, tasks
  from jaxpruner.compare import settings as settings_lib

  listed = {
    entry.cell.id: entry.cell
    for entry in run_folder.listed_cells(found.info, "records")
  }
  if cell not in found.records:
    raise ValueError(
      f"cell {cell!r} has no record; {_tools.nearest(cell, found.records)}"
    )
  if cell not in listed:
    raise ValueError(
      f"cell {cell!r} is not among the cells of its run: the file was changed"
    )
  recorded = run_folder.settings_of(found.info, "records")
  settings = recorded
  if data:
    settings = dataclasses.replace(recorded, data=data)
  settings_lib.check_names(settings)
  point = {
    key: value[0] if isinstance(value, list | tuple) else value
    for key, value in settings.options.items()
  }
  loaded = tasks.make_task(settings.task, point).load(settings.data or None)
  in_process = "cores" in found.info.versions
  mine = fingerprint.run_info(settings, loaded, in_process)
  mine = dataclasses.replace(mine, settings=recorded.to_json())
  now = _computed(listed[cell], settings, mine, in_process)
  record, training = now.records[cell], now.trainings.get(cell)
  recorded_then = found.records[cell].to_json()
  unknown = [k for k, v in UNKNOWN.items() if recorded_then.get(k) == v]
  left_out = (*MEASURED, *unknown)
  differing = _differing(recorded_then, record.to_json(), left_out)
  differing += _losses(found.trainings.get(cell), training)
  seeds = len(next(iter(record.metrics.values()), []))
  compared = f"{len(record.metrics)} metrics of {seeds} seeds, costs, sizes"
  before = found.trainings.get(cell)
  if training is not None and before is not None and before.sha256:
    compared += f", the loss of each of {training.steps} steps"
  inputs = run_folder.differences(found.info, mine)
  return Reproduction(inputs, differing, compared, unknown)


def _computed(
  cell: Any, settings: Any, info: Any, in_process: bool
) -> "record_files.Records":
  """Return the record and the learning curve of a cell, computed now."""
  from jaxpruner.compare import (
    executors,
    record_files,
    records,
    run_folder,
    workers,
  )

  with tempfile.TemporaryDirectory() as folder:
    # Through a run folder, as the recorded numbers went.
    with run_folder.RunFolder(folder) as run:
      run.open_run(info)
      # A row may start or learn from the networks of others.
      chain = [cell]
      while (source := chain[-1].source) is not None:
        chain.append(source)
      for group in executors.in_order(chain):
        if in_process:
          executors.serial(group, settings, run.path, run.append)
        else:
          workers.processes(group, settings, run.path, run.append, 1)
    failed = run_folder.read_results(folder)[cell.id]
    if isinstance(failed, records.Failure):
      raise ValueError(f"cell {cell.id} failed: {failed.problem}")
    return record_files.of_folder(folder)


def _differing(
  before: dict[str, Any], after: dict[str, Any], left_out: tuple[str, ...]
) -> list[str]:
  return [
    f"{key}: {before.get(key)!r:.200} recorded, {after.get(key)!r:.200} now"
    for key in after
    if key not in left_out and before.get(key) != after[key]
  ]


def _losses(before: Any, after: Any) -> list[str]:
  """Return where two learning curves begin to differ."""
  if before is None or after is None or not before.sha256:
    return []
  if before.sha256 == after.sha256:
    return []
  pairs = zip(before.starts, before.losses, after.losses, strict=False)
  first = next((start for start, a, b in pairs if a != b), None)
  where = "" if first is None else f", from step {first} on"
  return [f"the losses of single steps{where}"]


def described(info: Any, cell: str, done: Reproduction) -> list[str]:
  """Return the lines that the command prints."""
  from jaxpruner.compare import files

  commit = files.printable(info.commit or "unknown")
  lines = [f"{cell}, recorded at commit {commit}"]
  lines += [f"  other input: {text}" for text in done.inputs]
  if not done.inputs:
    lines.append("  same versions, data, settings and device")
  lines += [f"  not recorded then: {name}" for name in done.unknown]
  if not done.differing:
    return [*lines, f"equal bit for bit: {done.compared}"]
  lines += [f"  differs: {text}" for text in done.differing]
  return [*lines, "not equal bit for bit"]
