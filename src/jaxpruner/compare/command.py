"""`jaxpruner compare`: run a comparison, print its table, write its report."""

import argparse
import dataclasses
import datetime
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

from jaxpruner.compare.folder import FolderError


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options; each default is the task's or `Settings`'s own."""
  add = parser.add_argument
  add("--task", help="what is trained (default: digits); see --list")
  add("--algorithms", help="comma-separated, or all (default: the paper's)")
  add("--sparsity", help="fractions removed, such as 0.8,0.9,0.95")
  add("--seeds", type=int, help="how many seeds (default: 3)")
  add("--type", help="sparsity type: 2:4, 4x4, channel_0 (default: none)")
  add("--distribution", help="erk or uniform (default: the task's own)")
  add("--steps", type=int, help="training steps (default: the task's own)")
  add(
    "--set",
    action="append",
    default=[],
    metavar="FIELD=VALUE",
    help="override another field of the task: width, batch_size, ...",
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
    help="import a module that registers algorithms of yours",
  )
  add("--config", help="TOML file with the same settings; options win")
  add("--list", action="store_true", help="list tasks and algorithms")
  add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
  """Run the command; return 0, or 1 if something failed."""
  # Before JAX starts: a CPU shows as many devices as it is told to.
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

  for module in args.imports or ():
    importlib.import_module(module)
  if args.list:
    print_list()
    return 0
  try:
    settings = settings_from(args)
    out = args.out or f"runs/{settings.task}-{settings.digest()}"
    return compare(settings, out, args)
  except (ValueError, FolderError, datasets.DataError) as error:
    print(f"jaxpruner compare: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("\ninterrupted; the same command continues", file=sys.stderr)
    return 130


def settings_from(args: argparse.Namespace) -> Any:
  """Return the settings: defaults, then the file, then the options."""
  from jaxpruner.compare import plan

  values = plan.read_config(args.config) if args.config else {}
  for name in ("task", "type", "distribution", "seeds", "devices", "data"):
    if getattr(args, name) is not None:
      values[name] = getattr(args, name)
  if args.algorithms:
    values["algorithms"] = tuple(_listed(args.algorithms))
  if args.imports:
    values["imports"] = tuple(args.imports)
  if args.sparsity:
    try:
      values["sparsity"] = tuple(map(float, _listed(args.sparsity)))
    except ValueError as error:
      raise ValueError(
        f"--sparsity {args.sparsity!r}: write fractions such as 0.8,0.95"
      ) from error
  options = dict(values.get("options", {}))
  if args.steps is not None:
    options["steps"] = args.steps
  for item in args.set:
    name, _, value = item.partition("=")
    try:
      number = float(value)
    except ValueError as error:
      raise ValueError(f"--set {item!r}: write FIELD=NUMBER") from error
    options[name] = int(number) if value.isdigit() else number
  values["options"] = options
  # N:M fixes the sparsity, so asking for it again would be noise.
  dictated = plan.type_sparsity(values.get("type", ""))
  if dictated is not None:
    values.setdefault("sparsity", (dictated,))
  return plan.Settings(**values)


def _listed(text: str) -> list[str]:
  return [part.strip() for part in text.split(",") if part.strip()]


def compare(settings: Any, out: str, args: argparse.Namespace) -> int:
  """Compute what the folder lacks, then report all of it."""
  import jax

  from jaxpruner.compare import (
    executors,
    folder,
    latency,
    page,
    plan,
    tasks,
    terminal,
  )

  task = tasks.task_class(settings.task)
  cells = plan.cells(settings)
  # Missing data should be an error now, not in every cell.
  tasks.make_task(settings.task, settings.options).load(settings.data or None)
  with folder.RunFolder(out) as run:
    run.open_run(facts(settings))
    results = folder.read_results(out)
    pending = [
      cell
      for cell in cells
      if cell.id not in results or results[cell.id].get("raised")
    ]
    bar = terminal.Progress(
      len(cells), len(cells) - len(pending), task.metric, args.quiet
    )
    with bar:

      def sink(event: dict[str, Any]) -> None:
        record = event["record"]
        if event["event"] == "stretch":
          folder.append_line(run.path / "steps.jsonl", record)
          bar.stretch(record)
        else:
          folder.append_line(run.path / "results.jsonl", record)
          bar.finish(record)

      jobs = args.jobs if args.jobs is not None else _default_jobs()
      if jobs < 1:
        raise ValueError(f"--jobs {jobs}: need at least one")
      if args.executor == "ray":
        executors.ray_cluster(
          pending, settings, run.path, sink, args.ray_address
        )
      elif jobs == 1 and jax.default_backend() != "cpu":
        # One process owns the accelerator, and it is this one.
        executors.serial(pending, settings, run.path, sink)
      else:
        executors.processes(pending, settings, run.path, sink, jobs)

    measured = {
      record["cell"] for record in folder.read_lines(run.path / "latency.jsonl")
    }
    latency.measure_all(
      run.path,
      settings,
      [cell for cell in cells if cell.id not in measured],
      lambda record: folder.append_line(run.path / "latency.jsonl", record),
    )
    rows = page.write_report([out], out)
  terminal.print_table(rows)
  print(f"report: {pathlib.Path(out) / 'report.html'}")
  return int(any(row.problem for row in rows))


def _default_jobs() -> int:
  import jax

  if jax.default_backend() != "cpu":
    return 1  # one process owns the accelerator
  if hasattr(os, "sched_getaffinity"):  # what we may use, where it is known
    return min(8, len(os.sched_getaffinity(0)))
  return min(8, os.cpu_count() or 1)


def facts(settings: Any) -> dict[str, Any]:
  """Return what run.json says about this run."""
  import jax

  from jaxpruner.compare import plan

  versions = {
    name: importlib.metadata.version(name)
    for name in ("jaxpruner", "jax", "jaxlib", "optax", "numpy")
  }
  versions["python"] = platform.python_version()
  versions["device"] = jax.devices()[0].device_kind
  return {
    "settings": plan.as_dict(settings),
    "versions": versions,
    "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, "
    f"{platform.machine()}",
    "commit": _commit(),
    "command": shlex.join(["jaxpruner", *sys.argv[1:]]),
    "started": datetime.datetime.now(datetime.UTC).isoformat(
      timespec="seconds"
    ),
  }


def _commit() -> str:
  """Return the git commit of the library's source, if it is a checkout."""
  try:
    found = subprocess.run(
      ["git", "describe", "--always", "--dirty", "--abbrev=12"],
      cwd=pathlib.Path(__file__).parent,
      capture_output=True,
      text=True,
      timeout=10,
      check=True,
    )
  except (OSError, subprocess.SubprocessError):
    return ""
  return found.stdout.strip()


def print_list() -> None:
  """Print the tasks and the algorithms with their categories."""
  import jaxpruner
  from jaxpruner.compare import plan, tasks

  print("tasks")
  for name in tasks.TASKS:
    cls = tasks.task_class(name)
    options = ", ".join(
      f"{field.name}={field.default}" for field in dataclasses.fields(cls)
    )
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    print(f"  {name:14} {summary}\n{'':17}{options}")
  print("\nalgorithms")
  fitting, default = plan.fitting_algorithms(), plan.default_algorithms()
  for name in jaxpruner.all_algorithm_names():
    if name == "no_prune":
      continue
    note = "" if name in default else " (with --algorithms)"
    if name not in fitting:
      note = " (needs more than a training loop)"
    print(f"  {name:18} {plan.group(name).title}{note}")
