"""A comparison small enough for tests, and ways to run it."""

import json
import os
import pathlib
import signal
import subprocess
import sys

from jaxpruner.compare import groups, plan, table
from jaxpruner.compare.records import Chunk, Record
from jaxpruner.compare.run_folder import FORMAT, RunInfo
from jaxpruner.compare.settings import ComparisonSettings

TINY = {"steps": 24, "width": 8, "batch_size": 8}
ALGORITHMS = ("magnitude", "static_sparse")

# A module of a user's with tasks of its own.
OWN_TASK = '''
import dataclasses
import numpy as np, jax, jax.numpy as jnp, optax
from jaxpruner import compare

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def my_task(width=16, steps=24, batch_size=16, rate=0.1):
  """A line between two halves."""
  def init(key):
    a, b = jax.random.split(key)
    return {"in": jax.random.normal(a, (8, width)),
            "out": jax.random.normal(b, (width, 2))}
  apply = lambda p, x: jax.nn.relu(x @ p["in"]) @ p["out"]
  def loss(p, batch, key):
    return optax.softmax_cross_entropy_with_integer_labels(
      apply(p, batch[0]), batch[1]).mean()
  def batches(seed, step):
    rows = np.random.default_rng((seed, step)).integers(0, 64, batch_size)
    return X[rows], Y[rows]
  evaluate = lambda p: 100 * (apply(p, X).argmax(-1) == Y).mean()
  return compare.task(init=init, apply=apply, loss=loss, batches=batches,
                      evaluate=evaluate, steps=steps,
                      optimizer=optax.sgd(rate))


READY = my_task()


@dataclasses.dataclass(frozen=True)
class Held(compare.Classification):
  """The same data on the device."""
  width: int = 16
  steps: int = 24
  batch_size: int = 16

  def load(self, folder=None):
    return {"train_x": X, "train_y": Y, "test_x": X, "test_y": Y}

  def init(self, key):
    a, b = jax.random.split(key)
    return {"in": {"kernel": jax.random.normal(a, (8, self.width))},
            "out": {"kernel": jax.random.normal(b, (self.width, 2))}}

  def apply(self, params, x):
    return jax.nn.relu(x @ params["in"]["kernel"]) @ params["out"]["kernel"]
'''


def settings(**changes) -> ComparisonSettings:
  values = {
    "algorithms": ALGORITHMS,
    "sparsity": (0.8,),
    "seeds": 2,
    "options": TINY,
  }
  return ComparisonSettings(**(values | changes))


def record(cell: str, values: list, **changes) -> Record:
  """Return a record made by hand."""
  name, _, rest = cell.partition("@")
  sparsity = rest.partition("+")[0]
  made = {
    "cell": cell,
    "algorithm": name,
    "sparsity": float(sparsity or 0),
    "width": 8,
    "metrics": {
      "accuracy": values,
      "noise_accuracy": values,
      "ece": [v / 50 for v in values],
    },
    "prunable": 10_000,
    "realised": [float(sparsity or 0)] * len(values),
    "nonzero_pruned": 0,
    "leaves": 2,
    "weights": 99,
    "bytes": 1234,
    "bytes_dense": 4000,
    "inference_flops": 10.0,
    "inference_flops_dense": 20.0,
    "training_flops": 30.0,
    "training_flops_dense": 60.0,
    "density": {},
    "seconds": 3.2,
  }
  return Record(**(made | changes))


def chunk(cell: str, start: int = 0, **changes) -> Chunk:
  """Return a chunk of training made by hand."""
  made = {
    "cell": cell,
    "start": start,
    "count": 12,
    "steps": 24,
    "loss": [[1.0, 0.5], [1.1, 0.6]],
    "density": {},
    "stored": {},
    "churn": [0.1, 0.2],
    "explored": [0.3, 0.4],
  }
  return Chunk(**(made | changes))


def run_info(**changes) -> RunInfo:
  """Return what run.json says of the tiny comparison."""
  chosen = settings()
  made = {
    "settings": chosen.to_json(),
    "versions": {"jax": "1"},
    "cells": [
      [*c, "erk", *groups.group(c.algorithm)] for c in plan.cells_of(chosen)
    ],
    "metric": "accuracy",
    "format": FORMAT,
  }
  return RunInfo(**(made | changes))


def command(out: pathlib.Path, *extra: str) -> list[str]:
  options = [f"--set={k}={v}" for k, v in TINY.items()]
  return [
    sys.executable,
    "-m",
    "jaxpruner.cli",
    "compare",
    "--quiet",
    f"--algorithms={','.join(ALGORITHMS)}",
    "--sparsity=0.8",
    "--seeds=2",
    f"--out={out}",
    *options,
    *extra,
  ]


def environment() -> dict[str, str]:
  # One device: what a user's shell has.
  return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}


def run(
  out: pathlib.Path, *extra: str, folder: pathlib.Path | None = None
) -> subprocess.CompletedProcess:
  """Run the command, in a folder that may hold a module of the user's."""
  return subprocess.run(
    command(out, *extra),
    cwd=folder,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=600,
  )


def kill_at(path, seconds: float, *extra: str, folder=None) -> None:
  """Start the command and kill it, workers included, after some seconds."""
  process = subprocess.Popen(
    command(path, *extra),
    cwd=folder,
    env=environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
  )
  try:
    process.wait(timeout=seconds)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def untimed(out: pathlib.Path) -> str:
  """Return the table without its measured times, as exact JSON."""
  rows = [table.flat(row) for row in table.rows(str(out), times=False)]
  return json.dumps(rows, sort_keys=True)
