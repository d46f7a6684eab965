"""The fingerprint: everything that determines the numbers of a run.

A run folder with another fingerprint is not continued, because its table would
mix two runs. Not included: the imports of the modules named by --import.
"""

import dataclasses
import datetime
import hashlib
import importlib.util
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax

from jaxpruner import _fingerprint
from jaxpruner.compare import cells, tasks
from jaxpruner.compare.run_folder import FORMAT, RunInfo
from jaxpruner.compare.settings import ComparisonSettings

PACKAGES = ("jaxpruner", "jax", "jaxlib", "optax", "numpy")


def run_info(settings: ComparisonSettings, data: Any) -> RunInfo:
  """Return the content of run.json for this run.

  Args:
    settings: the comparison.
    data: the result of the task's `load`.

  Returns:
    The fingerprint and further information.
  """
  device = jax.devices()[0].device_kind
  task = tasks.make_task(settings.task, settings.options)
  now = datetime.datetime.now(datetime.UTC)
  found = _fingerprint.versions(*PACKAGES)
  versions = {name: str(version) for name, version in found.items()}
  groups = [(c, cells.group(c.algorithm)) for c in cells.cells_of(settings)]
  return RunInfo(
    settings=settings.to_json(),
    versions=versions | {"python": platform.python_version(), "device": device},
    task=dataclasses.asdict(task),
    data={"sha256": _fingerprint.arrays(data)},
    imports={name: hash_module(name) for name in settings.imports},
    jax={name: str(x) for name, x in _fingerprint.settings().items()},
    cells=[[c.algorithm, float(c.sparsity), *group] for c, group in groups],
    metric=task.metric,
    device=f"{device}, {os.cpu_count()} cores, {platform.machine()}",
    commit=_commit(),
    command=shlex.join(["jaxpruner", *sys.argv[1:]]),
    started=now.isoformat(timespec="seconds"),
    format=FORMAT,
  )


def hash_module(name: str) -> str:
  """Return the SHA-256 of a module's source, or of a package's files."""
  spec = importlib.util.find_spec(name)
  if spec is None or spec.origin is None:
    return ""
  origin = pathlib.Path(spec.origin)
  if not origin.is_file():  # built in
    return spec.origin
  package = spec.submodule_search_locations
  sources = sorted(origin.parent.rglob("*.py")) if package else [origin]
  total = hashlib.sha256()
  for source in sources:
    total.update(f"{source.relative_to(origin.parent)}\n".encode())
    total.update(hashlib.sha256(source.read_bytes()).digest())
  return total.hexdigest()


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
