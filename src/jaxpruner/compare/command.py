"""`jaxpruner compare`: run a comparison, print its table, write its report."""

import argparse
import importlib.util
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # imported on use: JAX must not start before its devices
  from jaxpruner.compare.cells import Cell
  from jaxpruner.compare.executors import Emit
  from jaxpruner.compare.records import Event, Failure, Record
  from jaxpruner.compare.settings import ComparisonSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options; defaults are those of the task or the settings."""
  add = parser.add_argument
  add(
    "--task",
    help="the task (default: digits): a name of --list, or module:NAME of "
    "your own",
  )
  add(
    "--algorithms",
    help="comma-separated, or all (default: the paper's); options in braces: "
    "rigl{drop_fraction=0.1}",
  )
  add("--sparsity", help="fractions removed, such as 0.8,0.9,0.95")
  add("--seeds", type=int, help="number of seeds (default: 3)")
  add(
    "--type",
    help="sparsity types, such as unstructured,2:4,8x8,channels",
  )
  add("--distribution", help="erk, uniform, ... (default: the task's own)")
  add(
    "--optimizer", help="adam, adamw, sgd, momentum, ... (default: the task's)"
  )
  add(
    "--all-layers",
    action="store_true",
    default=None,
    help="structured types also prune the first and the output layer",
  )
  add("--steps", type=int, help="training steps (default: the task's own)")
  add(
    "--set",
    action="append",
    default=[],
    metavar="OPTION=VALUE",
    help="set another option of the task: width, batch_size, ...; several "
    "values, such as width=64,128, are compared",
  )
  add("--out", help="run folder (default: runs/TASK-HASH)")
  add("--jobs", type=int, help="parallel processes (default: one per core)")
  add("--executor", choices=("local", "ray"), default="local")
  add("--ray-address", help="address of a running Ray cluster")
  add("--devices", type=int, help="devices per cell, data-parallel")
  add("--data", help="folder with the task's data; see `jaxpruner data`")
  add(
    "--import",
    dest="imports",
    action="append",
    metavar="MODULE",
    help="import a module that registers your algorithms or tasks",
  )
  add("--config", help="TOML file with the same settings; options win")
  add(
    "--init",
    dest="checkpoint",
    metavar="CHECKPOINT",
    help="start every row from these weights: safetensors, Orbax, npz, ...",
  )
  add(
    "--question",
    metavar="NAME",
    help="answer a question: its axes, measurements, pictures and verdict "
    "(--list shows all)",
  )
  add("--list", action="store_true", help="list tasks and algorithms")
  add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
  """Run the command; return 0 on success."""
  # Before JAX starts: the number of CPU devices is set by this variable.
  if args.devices and args.devices > 1 and "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = (
      f"--xla_force_host_platform_device_count={args.devices}"
    )
  for extra in ("matplotlib", "rich"):
    if importlib.util.find_spec(extra) is None:
      print(
        f"jaxpruner compare needs {extra}: pip install 'jaxpruner[compare]'",
        file=sys.stderr,
      )
      return 2
  from jaxpruner import datasets
  from jaxpruner.compare import files, modules
  from jaxpruner.compare import settings as settings_lib
  from jaxpruner.compare.files import RunFolderError

  try:
    modules.import_modules(args.imports or ())
    modules.import_task(args.task or "")
    if args.list:
      print_list()
      return 0
    settings = settings_from(args)
    out = (
      settings_lib.default_folder(settings) if args.out is None else args.out
    )
    running = Running(args.jobs, args.executor, args.ray_address, args.quiet)
    return compare(settings, out, running)
  except (ValueError, RunFolderError, datasets.DataError) as error:
    files.say(str(error), "compare")
    return 1
  except KeyboardInterrupt:
    print("\ninterrupted; the same command continues", file=sys.stderr)
    return 130


# Options with one value, which are settings of the same name.
_SINGLE = (
  "task",
  "seeds",
  "devices",
  "data",
  "all_layers",
  "checkpoint",
  "question",
)


def settings_from(args: argparse.Namespace) -> "ComparisonSettings":
  """Return the settings: defaults, then the file, then the options.

  Args:
    args: the parsed options.

  Returns:
    The settings.

  Raises:
    ValueError: an option, or a value in the file, is invalid.
  """
  from jaxpruner.compare import plan, spelling
  from jaxpruner.compare import settings as settings_lib
  from jaxpruner.compare.questions import asking

  _check_running(args)
  values = settings_lib.read_config(args.config) if args.config else {}
  named = values.get("task", "")
  if ":" in named and named != args.task:
    raise ValueError(
      f"--config {args.config}: names the task {named!r}; a file imports "
      f"nothing by itself: if you trust that module, type --task {named}"
    )
  untyped = set(values.get("imports", ())) - set(args.imports or ())
  if untyped:
    named = " ".join(f"--import {name}" for name in sorted(untyped))
    raise ValueError(
      f"--config {args.config}: names modules to import; a file imports "
      f"nothing by itself: if you trust them, type {named}"
    )
  for name in _SINGLE:
    if getattr(args, name) is not None:
      values[name] = getattr(args, name)
  for name in ("algorithms", "distribution", "optimizer"):
    if getattr(args, name) is not None:
      values[name] = tuple(_listed(f"--{name}", getattr(args, name)))
  if args.type is not None:
    values["type"] = tuple(spelling.types_of(args.type))
  if "algorithms" in values:
    values["algorithms"] = tuple(map(spelling.canonical, values["algorithms"]))
  if args.imports:
    values["imports"] = tuple(args.imports)
  if args.sparsity is not None:
    values["sparsity"] = _fractions(args.sparsity)
  values["options"] = _options(args, values.get("options", {}))
  values = asking.with_axes(values)
  if "sparsity" not in values:
    values["sparsity"] = _default_sparsity(values.get("type", ()))
  settings = settings_lib.ComparisonSettings(**values)
  settings_lib.check_names(settings)
  plan.plan(settings)  # refuses options that an algorithm does not know
  return settings


def _default_sparsity(types: "tuple[str, ...]") -> tuple[float, ...]:
  """Return the default sparsities, with those that N:M types imply."""
  from jaxpruner.compare import settings as settings_lib

  implied = [settings_lib.type_sparsity(kind) for kind in types]
  found = {value for value in implied if value is not None}
  if not types or None in implied:
    found |= set(settings_lib.ComparisonSettings.sparsity)
  return tuple(sorted(found))


def _listed(option: str, text: str) -> list[str]:
  from jaxpruner.compare import spelling

  found = spelling.listed(text)
  if not found:
    raise ValueError(
      f"{option} {text!r}: is empty; give names, or leave it out"
    )
  return found


def _fractions(text: str) -> tuple[float, ...]:
  try:
    return tuple(map(float, _listed("--sparsity", text)))
  except ValueError as error:
    raise ValueError(
      f"--sparsity {text!r}: write fractions such as 0.8,0.95"
    ) from error


def _options(args: argparse.Namespace, given: Any) -> dict[str, Any]:
  """Return values for the task's fields: from the file, --steps, --set."""
  from jaxpruner.compare import spelling

  options = dict(given)
  if args.steps is not None:
    options["steps"] = args.steps
  for item in args.set:
    name, equals, value = item.partition("=")
    found = [spelling.parsed(part) for part in spelling.listed(value)]
    if not name or not equals or not found:
      raise ValueError(f"--set {item!r}: write OPTION=VALUE")
    options[name] = found[0] if len(found) == 1 else tuple(found)
  return options


def _check_running(args: argparse.Namespace) -> None:
  """Check the options that do not change the numbers, and empty ones."""
  if args.jobs is not None and args.jobs < 1:
    raise ValueError(f"--jobs {args.jobs}: need at least one")
  # An empty text is a variable of the shell that is not set: going on without
  # it would not be what was asked for.
  for option, value in {
    "--out": args.out,
    "--data": args.data,
    "--init": args.checkpoint,
    "--config": args.config,
    "--question": args.question,
    "--type": args.type,
  }.items():
    if value == "":
      raise ValueError(f"{option} '': is empty; give a value, or leave it out")
    if value is not None and "\0" in value:
      raise ValueError(f"{option} {value!r}: holds a null character")


class Running(NamedTuple):
  """The options that do not change the numbers.

  Attributes:
    jobs: the number of worker processes; None is one per core.
    executor: "local" or "ray".
    ray_address: the address of a running cluster.
    quiet: whether to show no progress bar.
    in_process: whether cells run one after another in this process.
    table: whether to print the table at the end.
  """

  jobs: int | None = None
  executor: str = "local"
  ray_address: str | None = None
  quiet: bool = False
  in_process: bool = False
  table: bool = True


def compare(settings: "ComparisonSettings", out: str, running: Running) -> int:
  """Compute the unfinished cells of a run, then write its report.

  Args:
    settings: the comparison.
    out: the run folder.
    running: the options that do not change the numbers.

  Returns:
    0, or 1 if a cell failed.
  """
  from jaxpruner.compare import (
    executors,
    fingerprint,
    latency,
    page,
    plan,
    pretrained,
    records,
    run_folder,
    terminal,
  )
  from jaxpruner.compare.questions import measuring

  wanted = plan.cells_of(settings)
  task = plan.base_task(settings)
  # Raise for missing data now, not in every cell.
  data = task.load(settings.data or None)
  if settings.checkpoint:
    pretrained.read(settings.checkpoint, task)  # raises if it does not fit
  with run_folder.RunFolder(out) as run:
    info = fingerprint.run_info(settings, data, running.in_process)
    run.open_run(info)
    del data
    for note in () if running.quiet else info.notes:
      print(note, file=sys.stderr)
    pending = _pending(run_folder.read_results(out), wanted, run.path)
    done = len(wanted) - len(pending)
    bar = terminal.Progress(len(wanted), done, task.metric, running.quiet)
    with bar:

      def emit(event: "Event") -> None:
        run.append(event)
        if isinstance(event, records.Chunk):
          bar.advance(event)
        else:
          bar.finish(event)

      for group in executors.in_order(pending):
        _execute(group, settings, run.path, emit, running)
    measured = run_folder.read_latency(out)
    missing = [cell for cell in wanted if cell.id not in measured]
    latency.measure_all(run.path, settings, missing, run.append)
    measuring.measure_all(run.path, settings, run.append)
    rows = page.write_report([out], out)
  if running.table:
    terminal.print_table(rows)
    terminal.print_answer(out)
    print(f"report: {pathlib.Path(out) / 'report.html'}")
  return int(any(row.problem for row in rows))


def _pending(
  results: "dict[str, Record | Failure]",
  wanted: "list[Cell]",
  path: pathlib.Path,
) -> "list[Cell]":
  """Return the cells to compute: those without a record, and their sources.

  A source is computed again if its weights are not there, as in a folder that
  was restored from a file of records.
  """
  from jaxpruner.compare import executors
  from jaxpruner.compare.records import Record

  finished = {key for key, r in results.items() if isinstance(r, Record)}
  pending = {cell for cell in wanted if cell.id not in finished}
  for cell in list(pending):
    source = cell.source
    while source and not executors.every_file(path, source).exists():
      pending.add(source)
      source = source.source
  return [cell for cell in wanted if cell in pending]


def _execute(
  pending: "list[Cell]",
  settings: "ComparisonSettings",
  path: pathlib.Path,
  emit: "Emit",
  running: Running,
) -> None:
  """Compute the cells with the executor that the options choose."""
  import jax

  from jaxpruner.compare import executors, workers

  jobs = running.jobs if running.jobs is not None else _default_jobs()
  if running.in_process:
    executors.serial(pending, settings, path, emit)
  elif running.executor == "ray":
    executors.ray_cluster(pending, settings, path, emit, running.ray_address)
  elif jobs == 1 and jax.default_backend() != "cpu":
    # Only one process can use the accelerator: this one.
    executors.serial(pending, settings, path, emit)
  else:
    workers.processes(pending, settings, path, emit, jobs)


def _default_jobs() -> int:
  import jax

  if jax.default_backend() != "cpu":
    return 1  # only one process can use the accelerator
  if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
    return min(8, len(os.sched_getaffinity(0)))
  return min(8, os.cpu_count() or 1)


def print_list() -> None:
  """Print the tasks and the algorithms with their categories."""
  import jaxpruner
  from jaxpruner.compare import cells, groups, questions, tasks
  from jaxpruner.post_training.solvers.table import SOLVERS

  print("tasks")
  for name in tasks.TASKS:
    known = tasks.task_options(name).items()
    options = ", ".join(f"{key}={default}" for key, default in known)
    lines = (tasks.task_class(name).__doc__ or "").strip().splitlines()
    summary = lines[0] if lines else ""
    print(f"  {name:14} {summary}\n{'':17}{options}")
  print("\nquestions")
  for name in questions.QUESTIONS:
    print(f"  {name:14} {questions.QUESTIONS.find(name).asks}")
  print("\nalgorithms")
  fitting, default = groups.fitting_algorithms(), groups.default_algorithms()
  for name in jaxpruner.all_algorithm_names():
    if name == "no_prune":
      continue
    note = "" if name in default else " (with --algorithms)"
    if name not in fitting:
      note = " (needs more than a training loop)"
    print(f"  {name:18} {groups.group(name).title}{note}")
  for name in SOLVERS:
    name = f"{cells.AFTER}{name}"
    print(f"  {name:18} {groups.group(name).title} (with --algorithms)")
