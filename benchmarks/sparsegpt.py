"""The cost of SparseGPT on one layer, against the algebra it consists of.

    python benchmarks/sparsegpt.py --size 4096

Times, in one process and interleaved: SparseGPT with its statistics given; the
Cholesky factorisation and the triangular inverse; and the matrix product that
carries errors from panel to panel. Prints medians, their ratio (the goal is at
most 4) and the peak memory of the process.
"""

import argparse
import resource
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training import _pattern
from jaxpruner.post_training.solvers import sparsegpt
from jaxpruner.sparsity_types import NByM


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--size", type=int, default=4096)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--type", default="unstructured", help="or 2:4")
  args = parser.parse_args()
  size = args.size
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2 * size, size)).astype(np.float32)
  gram = jnp.asarray(x.T @ x / len(x))
  w = jnp.asarray(rng.normal(size=(size, size)), jnp.float32)
  del x
  groups = _pattern.Pattern(NByM(2, 4))
  pattern = groups if args.type == "2:4" else _pattern.FREE
  product = jax.jit(
    lambda a, b: jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)
  )
  runs = {
    "sparsegpt": lambda: sparsegpt.prune(w, gram, 0.5, pattern),
    "factor": lambda: sparsegpt.inverse_factor(gram, 0.01),
    "product": lambda: product(gram, w),
  }
  times: dict[str, list[float]] = {name: [] for name in runs}
  for run in runs.values():
    jax.block_until_ready(run())
  for _ in range(args.rounds):
    for name, run in runs.items():
      start = time.perf_counter()
      jax.block_until_ready(run())
      times[name].append(time.perf_counter() - start)
  median = {name: statistics.median(rows) for name, rows in times.items()}
  for name, seconds in median.items():
    print(f"{name:10} {seconds:8.2f} s")
  ratio = median["sparsegpt"] / (median["factor"] + median["product"])
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  print(f"ratio      {ratio:8.2f}")
  print(f"peak       {peak / (4 * size * size):8.1f} x the statistics")


if __name__ == "__main__":
  main()
