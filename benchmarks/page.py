"""A page of results: command, versions, date, machine, and the tables."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxpruner.compare import run_folder

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Return a Markdown table."""
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cpu() -> str:
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text()
    names = [
      x.split(":")[1].strip() for x in text.splitlines() if "model n" in x
    ]
    return names[0] if names else platform.processor()
  except OSError:
    return platform.processor()


def _here() -> str:
  """Return the versions and the machine of this process."""
  versions = ", ".join(
    f"{package} {importlib.metadata.version(package)}"
    for package in ("jaxpruner", "jax", "numpy")
  )
  return (
    f"Python {platform.python_version()}, {versions}; "
    f"{_cpu()}, {os.cpu_count()} cores, {jax.default_backend()}"
  )


def _there(runs: Sequence[run_folder.RunInfo]) -> str:
  """Return the versions, the machines and the days of recorded runs."""
  versions = {
    f"Python {run.versions['python']}, "
    + ", ".join(f"{k} {run.versions[k]}" for k in ("jaxpruner", "jax", "numpy"))
    for run in runs
  }
  days = sorted(run.started[:10] for run in runs)
  days = sorted({days[0], days[-1]})
  machines = sorted({run.device for run in runs})
  return (
    f"trained {' to '.join(days)} with {' or '.join(sorted(versions))}; "
    f"{' or '.join(machines)}"
  )


def write(
  name: str,
  title: str,
  sections: Sequence[str],
  seconds: float,
  runs: Sequence[run_folder.RunInfo] = (),
) -> None:
  """Print the page and store it in docs/results.

  Args:
    name: of the script and of the page.
    title: of the page.
    sections: its text.
    seconds: the time of the measurements.
    runs: the recorded runs that the page is made of, which state when, where
      and with what they were made; by default here and now.
  """
  text = "\n\n".join(
    [
      f"# {title}",
      f"`python benchmarks/{name}.py` on {datetime.date.today()}, "
      f"{seconds / 60:.1f} minutes; {_there(runs) if runs else _here()}.",
      *sections,
    ]
  )
  RESULTS.mkdir(parents=True, exist_ok=True)
  target = RESULTS / f"{name}.md"
  temporary = target.with_suffix(".tmp")
  temporary.write_text(text + "\n")
  os.replace(temporary, target)
  print(text)


def interleave(
  *fns: Callable[[], object], repeats: int = 15
) -> list[list[float]]:
  """Time functions in turns, so that a busy moment hits all of them."""
  times: list[list[float]] = [[] for _ in fns]
  for _ in range(repeats):
    for fn, seen in zip(fns, times, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(fn())
      seen.append(time.perf_counter() - start)
  return times


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
  """Return the median of the paired ratios."""
  return float(np.median(np.array(slow) / np.array(fast)))
