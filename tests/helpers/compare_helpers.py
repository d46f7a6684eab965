"""A comparison small enough for tests, and ways to run it."""

import json
import os
import pathlib
import subprocess
import sys

from jaxpruner.compare import plan, table

TINY = {"steps": 24, "width": 8, "batch_size": 8}
ALGORITHMS = ("magnitude", "static_sparse")


def settings(**changes) -> plan.Settings:
  values = {
    "algorithms": ALGORITHMS,
    "sparsity": (0.8,),
    "seeds": 2,
    "options": TINY,
  }
  return plan.Settings(**(values | changes))


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


def run(out: pathlib.Path, *extra: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    command(out, *extra),
    env=environment(),
    capture_output=True,
    text=True,
    timeout=600,
  )


def untimed(out: pathlib.Path) -> str:
  """Return the table without its measured times, as exact JSON."""
  rows = [table.flat(row) for row in table.rows(str(out), times=False)]
  return json.dumps(rows, sort_keys=True)
