"""Products with sparse weights against the best that is installed.

  python benchmarks/rivals.py                  (about 5 minutes)
  python benchmarks/rivals.py --rivals PYTHON  (rivals of another environment)
  python benchmarks/rivals.py --quick          (prints, writes nothing)

48 cells: three shapes, four sparsities, four batches. Ours is the format that
`accelerate` chooses. Rivals are dense XLA, in this process, and those of
`rival.py` that PYTHON has, in processes of their own that are stopped while it
is not their turn: ONNX Runtime, NumPy's BLAS and MKL on the dense product,
DeepSparse on the sparse one. They take turns of 30 ms; each cell divides the
median of the best rival by ours, so that above 1 is ahead. The outputs are
compared before anything is timed.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import page
import rival

from jaxpruner import sparse

SHAPES = [(768, 3072), (3072, 768), (4096, 4096)]
SPARSITIES = [0.5, 0.8, 0.9, 0.95]
BATCHES = [1, 8, 64, 512]
TURNS, TURN = 6, 0.03


def cell(
  file: pathlib.Path, x: np.ndarray, others: list[rival.Rival], turns: int
) -> dict[str, Any]:
  """Return the format we choose, and the median seconds of all."""
  given, dense = jnp.asarray(x), jnp.asarray(np.load(file)["w"])
  product = jax.jit(jnp.matmul)
  fast, report = sparse.accelerate(lambda w, x: x @ w, dense, given, cache=None)
  spells: dict[str, Callable[[], list[float]]] = {
    "ours": lambda: rival.spell(lambda: fast(given).block_until_ready(), TURN),
    "XLA": lambda: rival.spell(
      lambda: product(given, dense).block_until_ready(), TURN
    ),
  }
  want = np.asarray(product(given, dense))
  outputs = {"ours": np.asarray(fast(given))}
  for other in others:
    y = other.load("product", file, x)
    if y is not None:
      outputs[other.name] = y
      spells[other.name] = lambda other=other: other.spell(TURN)
  for name, y in outputs.items():
    error = np.abs(y - want).max() / np.abs(want).max()
    if not error < 1e-4:
      raise AssertionError(f"{name} differs from XLA by {error:.1e}")
  taken: dict[str, list[float]] = {name: [] for name in spells}
  for _ in range(turns):
    for name, run in spells.items():
      taken[name] += run()
  found: dict[str, Any] = {n: float(np.median(t)) for n, t in taken.items()}
  layer = report.layers[0]
  return found | {"format": layer.format, "times": layer.times}


def table(
  others: list[rival.Rival], file: pathlib.Path, turns: int
) -> list[str]:
  """Measure all cells; return the text and the table of the page."""
  rng = np.random.default_rng(0)
  rows, ahead, seen = [], 0, set()
  for shape in SHAPES:
    for sparsity in SPARSITIES:
      kept = rng.random(shape) >= sparsity
      weight = np.where(kept, rng.standard_normal(shape), 0).astype("f4")
      np.savez(file, w=weight)
      row = ["×".join(map(str, shape)), f"{sparsity:.0%}"]
      for batch in BATCHES:
        x = rng.standard_normal((batch, shape[0]), np.float32)
        found = cell(file, x, others, turns)
        times = {n: t for n, t in found.items() if isinstance(t, float)}
        best = min(times.keys() - {"ours"}, key=lambda name: times[name])
        seen |= times.keys() - {"ours"}
        ratio = times[best] / times["ours"]
        ahead += ratio >= 1
        row.append(f"{ratio:.2f} ({found['format']}; {best})")
        micro = {n: round(1e6 * t) for n, t in times.items()}
        tried = {n: round(1e6 * t) for n, t in found["times"].items()}
        print(row[0], row[1], batch, row[-1], micro, tried, flush=True)
      rows.append(row)
  head = ["shape", "sparsity", *(f"batch {b}" for b in BATCHES)]
  return [
    f"The best of {', '.join(sorted(seen))}, divided by ours, by median time; "
    "in brackets our format and the best rival. "
    f"Ahead in **{ahead} of {len(rows) * len(BATCHES)}** cells.",
    page.table(head, rows),
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rivals", metavar="PYTHON", default=sys.executable)
  parser.add_argument("--quick", action="store_true", help="two turns")
  options = parser.parse_args()
  start = time.time()
  cores = len(os.sched_getaffinity(0))
  with contextlib.ExitStack() as stack:
    file = stack.enter_context(tempfile.TemporaryDirectory())
    others = [
      stack.enter_context(rival.Rival(options.rivals, name, cores))
      for name in rival.NAMES
    ]
    turns = 2 if options.quick else TURNS
    sections = table(others, pathlib.Path(file, "w.npz"), turns)
  if options.quick:
    print("\n\n".join(sections))
  else:
    title = "Products against the best installed"
    page.write("rivals", title, sections, time.time() - start)


if __name__ == "__main__":
  main()
