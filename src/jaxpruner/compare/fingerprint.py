"""The fingerprint: everything that determines the numbers of a run.

A run folder with another fingerprint is not continued, because its table would
mix two runs. A task of the user's is known by the source of its module, by the
traced program of its first step, and, if its batches are streamed, by the first
of them: other modules that it imports count as far as they change these.
"""

import dataclasses
import datetime
import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner._tools import fingerprint
from jaxpruner.compare import groups, plan, pretrained, streams, tasks
from jaxpruner.compare.run_folder import FORMAT, RunInfo
from jaxpruner.compare.settings import ComparisonSettings

PACKAGES = ("jaxpruner", "jax", "jaxlib", "optax", "numpy")


def run_info(
  settings: ComparisonSettings, data: Any, in_process: bool = False
) -> RunInfo:
  """Return the content of run.json for this run.

  Args:
    settings: the comparison.
    data: the result of the task's `load`.
    in_process: whether cells use all threads of this process: the order in
      which XLA sums then depends on their number.

  Returns:
    The fingerprint and further information.
  """
  device = jax.devices()[0].device_kind
  task = plan.base_task(settings)
  now = datetime.datetime.now(datetime.UTC)
  found = fingerprint.versions(*PACKAGES)
  versions = {name: str(version) for name, version in found.items()}
  if in_process:
    versions["cores"] = str(os.cpu_count())
  planned = plan.plan(settings)
  entries = [groups.listed(cell, task) for cell in planned.cells]
  hashes = {"sha256": fingerprint.arrays(data)}
  if settings.checkpoint:
    hashes["init"] = pretrained.digest(settings.checkpoint)
  batch = None
  if task.streamed:
    first = streams.check(task)
    batch = first[0]
    hashes["first batches"] = fingerprint.arrays(first)
  imports = {name: hash_module(name) for name in settings.imports}
  if not _is_ours(task):
    imports |= _own_task(settings.task, task, data, batch)
  return RunInfo(
    settings=settings.to_json(),
    versions=versions | {"python": platform.python_version(), "device": device},
    task=fields_of(task),
    data=hashes,
    imports=imports,
    jax={name: str(x) for name, x in fingerprint.settings().items()},
    cells=[
      [
        *entry.cell._replace(sparsity=float(entry.cell.sparsity)),
        entry.distribution,
        *entry.group,
      ]
      for entry in entries
    ],
    metric=task.metric,
    unit=task.unit,
    higher_is_better=task.higher_is_better,
    notes=notes_of(settings),
    device=f"{device}, {os.cpu_count()} cores, {platform.machine()}",
    commit=_commit(),
    command=shlex.join(["jaxpruner", *sys.argv[1:]]),
    started=now.isoformat(timespec="seconds"),
    format=FORMAT,
  )


def fields_of(task: tasks.Task) -> dict[str, Any]:
  """Return the numbers and texts among a task's fields."""
  plain = (int, float, str, bool, type(None))
  found = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
  return {
    name: value if isinstance(value, plain) else fingerprint.describe(value)
    for name, value in found.items()
    if name != "functions"
  }


def notes_of(settings: ComparisonSettings) -> list[str]:
  """Return what a reader of the table must know.

  Args:
    settings: the comparison.

  Returns:
    Sentences; none for a plain comparison.

  Example:
    >>> notes_of(ComparisonSettings())
    []
  """
  found = list(plan.plan(settings).notes)
  if settings.checkpoint:
    found.append(
      f"Every row starts from --init {settings.checkpoint} and trains for the "
      "same number of steps, the dense one too. The small dense baseline is "
      "left out: a checkpoint has one width."
    )
  elif not plan.has_small_dense(settings):
    found.append(
      "The small dense baseline is left out: the task has no rule for a "
      "narrower network (`narrower`, or an `init` that uses `width`)."
    )
  return found


def _is_ours(task: tasks.Task) -> bool:
  return hasattr(task, "functions") is False and type(
    task
  ).__module__.startswith("jaxpruner.")


def _own_task(
  name: str, task: tasks.Task, data: Any, batch: Any
) -> dict[str, str]:
  """Return hashes of the source and of the first step of a user's task."""
  module, colon, _ = name.partition(":")
  hashes = {name: hash_module(module)} if colon else {}
  if functions := getattr(task, "functions", None):
    parts = (functions.batches, functions.evaluate, functions.test)
    hashes["functions"] = fingerprint.text(
      " ".join(fingerprint.source(part) for part in parts if part is not None)
    )
  elif not colon:
    hashes[name] = hash_module(type(task).__module__)
  task.example(data)  # raises if it does not know the network's inputs
  try:
    hashes["program"] = _program(task, data, batch)
  except ValueError:
    raise
  except Exception as error:
    line = (str(error).strip().splitlines() or [""])[0]
    raise ValueError(
      f"task {name!r}: its first step cannot be traced: "
      f"{type(error).__name__}: {line}{_cure(line)}"
    ) from error
  return hashes


def _cure(line: str) -> str:
  """Return what to do about a known error of a user's step."""
  axis = re.search(r"unbound axis name: (\w+)", line)
  if axis is None:
    return ""
  return f"; pass axis_name={axis[1]!r} to compare.task"


def _program(task: tasks.Task, data: Any, batch: Any) -> str:
  """Return the hash of a task's first step, traced."""

  def step(key, data, batch):
    params, state = task.init(key), task.init_state(key)
    if not task.streamed:
      env_state = task.start(params, data, key)
      _, batch = task.interact(env_state, params, data, key, jnp.array(0))
    loss_fn = lambda p: task.loss_and_state(p, state, batch, key)
    if task.has_state:
      loss, grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    else:
      plain = lambda p, batch, key: task.loss(p, batch, key)
      loss, grads = task.gradient(plain, params, batch, key)
    tx = task.optimizer()
    return loss, tx.update(grads, tx.init(params), params)[0]

  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), data
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  return fingerprint.function(step, key, shapes, batch)


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
