"""The mask engine against sorting, and against one read of the scores.

  python benchmarks/engine.py             (about 10 minutes, most of it sorting)
  python benchmarks/engine.py --most 1e7  (up to ten million weights)

Every mask is compared with the sort's before anything is timed. Engine and
rival run in turns in one process; a ratio is that of the medians. Peak memory
is the growth of a fresh process per case, beyond the scores and the mask.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import page

from jaxpruner import mask_calculator as mc

SPARSITY = 0.9
LEAVES = 60


def draw(size: int, dtype, seed: int = 0) -> jax.Array:
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(size, np.float32), dtype)


def engine(w):
  return mc.topk_masks([lambda: jnp.abs(w)], [mc.num_ones(w.size, SPARSITY)])[0]


def by_argsort(w):
  scores = jnp.abs(w)
  order = jnp.argsort(scores, descending=True, stable=True)
  ones = mc.num_ones(w.size, SPARSITY)
  return jnp.zeros(w.size, jnp.uint8).at[order[:ones]].set(1)


def by_sort(w):
  scores = jnp.abs(w)
  level = jnp.sort(scores)[-mc.num_ones(w.size, SPARSITY)]
  return (scores >= level).astype(jnp.uint8)


def by_top_k(w):
  scores = jnp.abs(w)
  _, order = jax.lax.top_k(scores, mc.num_ones(w.size, SPARSITY))
  return jnp.zeros(w.size, jnp.uint8).at[order].set(1)


def by_partition(w: np.ndarray) -> np.ndarray:
  scores = np.abs(w)
  place = w.size - mc.num_ones(w.size, SPARSITY)
  return (scores >= np.partition(scores, place)[place]).astype(np.uint8)


def rivals(size: int):
  """Rivals with the number of their runs: sorts are slow."""
  few = 3 if size <= 10**6 else 1
  yield "stable argsort", jax.jit(by_argsort), few
  if size <= 10**7:
    yield "jnp.sort", jax.jit(by_sort), few
    yield "lax.top_k", jax.jit(by_top_k), few
  yield "read pass", jax.jit(jnp.sum), 15


def compare(run, rival, scores, theirs, repeats) -> tuple[float, float]:
  """How many times slower the rival is, and the engine's milliseconds."""
  fast, slow = page.interleave(
    lambda: run(scores), lambda: rival(theirs), repeats=repeats
  )
  # Sorts run but a few times; the engine's own median takes more.
  more = page.interleave(lambda: run(scores), repeats=9)[0]
  mine = float(np.median([*fast, *more]))
  return float(np.median(slow)) / mine, 1e3 * mine


def selection(sizes: list[int]) -> list[dict]:
  rows = []
  for dtype in (jnp.float32, jnp.bfloat16):
    for size in sizes:
      w = draw(size, dtype)
      run = jax.jit(engine)
      row = {"dtype": jnp.dtype(dtype).name, "weights": size}
      for name, rival, repeats in rivals(size):
        out = rival(w)
        if name in ("stable argsort", "lax.top_k"):
          np.testing.assert_array_equal(run(w), out, name)
        row[name], row["milliseconds"] = compare(run, rival, w, w, repeats)
      if dtype == jnp.float32:
        host = np.asarray(w)
        row["numpy.partition"], _ = compare(run, by_partition, w, host, 3)
      row["bytes per weight"] = peak(f"{size} {jnp.dtype(dtype).name}")
      rows.append(row)
      print(json.dumps(row), flush=True)
  return rows


def peak(case: str) -> float:
  """Bytes per weight a fresh process grows by while it selects."""
  command = [sys.executable, __file__, "--peak", case]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  return float(done.stdout.split()[-1])


def print_peak(case: str) -> None:
  size, dtype = case.split()
  w = jax.random.normal(jax.random.key(0), int(size), dtype)
  program = jax.jit(engine).lower(w).compile()
  first = program(w)  # the mask, and memory kept for reuse
  # Fill what earlier peaks have left, so that the high-water mark moves.
  usage = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  blocks = [first]
  start = usage()
  while usage() == start:
    blocks.append(np.ones(1 << 20, np.uint8))
  start = usage()
  jax.block_until_ready(program(w))
  print(max(0, usage() - start - w.size) / w.size)


def split(total: int) -> list[int]:
  """Sizes of leaves like a model's: a few large, many small."""
  weight = np.repeat([8, 4, 2, 1], LEAVES // 4)
  sizes = total * weight // weight.sum()
  return [int(s) // 4096 * 4096 or int(s) for s in sizes]


def joint(total: int) -> dict:
  """Global selection over many leaves."""
  leaves = [draw(s, jnp.float32, i) for i, s in enumerate(split(total))]
  size = sum(w.size for w in leaves)
  ones = mc.num_ones(size, SPARSITY)

  @jax.jit
  def together(leaves):
    lazy = [lambda w=w: jnp.abs(w) for w in leaves]
    return mc.topk_masks(lazy, ones, together=True)

  @jax.jit
  def concatenated(leaves):
    mask = by_argsort(jnp.concatenate(leaves))
    return jnp.split(mask, np.cumsum([w.size for w in leaves])[:-1])

  read = jax.jit(lambda leaves: sum(jnp.sum(w) for w in leaves))
  program = together.lower(leaves).compile()
  for mine, theirs in zip(program(leaves), concatenated(leaves), strict=True):
    np.testing.assert_array_equal(mine, theirs)
  mine, once = page.interleave(
    lambda: program(leaves), lambda: read(leaves), repeats=9
  )
  (slow,) = page.interleave(lambda: concatenated(leaves), repeats=1)
  stored = program.memory_analysis().temp_size_in_bytes
  return {
    "weights": size,
    "leaves": len(leaves),
    "milliseconds": 1e3 * float(np.median(mine)),
    "concatenate and argsort": float(np.median(slow) / np.median(mine)),
    "read pass": float(np.median(once) / np.median(mine)),
    "bytes per weight": stored / size,
  }


def two_by_four(side: int) -> dict:
  w = draw(side * side, jnp.float32).reshape(side, side)
  mine = jax.jit(lambda w: mc.n_by_m_mask(jnp.abs(w), 2, 4))

  @jax.jit
  def double_argsort(w):
    groups = jnp.abs(w).reshape(-1, 4, side)
    order = jnp.argsort(groups, 1, descending=True, stable=True)
    return (jnp.argsort(order, 1) < 2).astype(jnp.uint8).reshape(w.shape)

  np.testing.assert_array_equal(mine(w), double_argsort(w))
  read = jax.jit(jnp.sum)
  fast, once = page.interleave(lambda: mine(w), lambda: read(w), repeats=15)
  (slow,) = page.interleave(lambda: double_argsort(w), repeats=1)
  stored = mine.lower(w).compile().memory_analysis().temp_size_in_bytes
  return {
    "weights": w.size,
    "milliseconds": 1e3 * float(np.median(fast)),
    "double argsort": float(np.median(slow) / np.median(fast)),
    "read pass": float(np.median(once) / np.median(fast)),
    "bytes per weight": stored / w.size,
  }


def times(row: dict, name: str) -> str:
  if name not in row:
    return "–"
  if name == "read pass":  # how many reads the engine takes
    return f"{1 / row[name]:.1f}"
  return f"{row[name]:.0f}" if row[name] >= 10 else f"{row[name]:.1f}"


def sections(results: dict) -> list[str]:
  names = ["stable argsort", "jnp.sort", "lax.top_k", "numpy.partition"]
  head = ["scores", "weights", "ms", *(f"÷ {n}" for n in names)]
  head += ["read passes", "bytes/weight"]
  rows = [
    [r["dtype"], f"{r['weights']:.0e}", f"{r['milliseconds']:.2f}"]
    + [times(r, n) for n in [*names, "read pass"]]
    + [f"{r['bytes per weight']:.3f}"]
    for r in results["selection"]
  ]
  out = [
    "## Selection, 90 % removed",
    "How many times faster than each rival, in how many read passes "
    "(`jnp.sum`) of the same array, and the memory by which a fresh process "
    "grows beyond scores and mask.",
    page.table(head, rows),
  ]
  for key, title, rival in (
    ("global", "Global selection", "concatenate and argsort"),
    ("2:4", "2:4 on 4096 × 4096", "double argsort"),
  ):
    r = results[key]
    row = [f"{r['weights']:.1e}", f"{r['milliseconds']:.1f}"]
    row += [times(r, rival), times(r, "read pass")]
    row += [f"{r['bytes per weight']:.3f}"]
    head = ["weights", "ms", f"÷ {rival}", "read passes", "bytes/weight"]
    out += [f"## {title}", page.table(head, [row])]
  return [*out, "![Selection](engine.png)"]


def plot(results: dict) -> None:
  import matplotlib

  matplotlib.use("agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
  for dtype, style in (("float32", "-"), ("bfloat16", "--")):
    rows = [r for r in results["selection"] if r["dtype"] == dtype]
    for i, name in enumerate(
      ["stable argsort", "lax.top_k", "numpy.partition"]
    ):
      seen = [(r["weights"], r[name]) for r in rows if name in r]
      if seen:
        axes.loglog(
          *zip(*seen, strict=True),
          style,
          color=f"C{i}",
          marker="o",
          label=f"{name}, {dtype}",
        )
  axes.axhline(1, color="black", linewidth=0.5)
  axes.set(xlabel="weights", ylabel="times slower than the engine")
  axes.legend(fontsize="small")
  target = page.RESULTS / "engine.png"
  figure.savefig(target.with_suffix(".tmp.png"), dpi=120)
  os.replace(target.with_suffix(".tmp.png"), target)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--most", type=float, default=1e8, help="weights")
  parser.add_argument("--peak", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.peak:
    print_peak(options.peak)
    return
  start = time.perf_counter()
  most = int(options.most)
  sizes = [n for n in (10**5, 10**6, 10**7, 10**8) if n <= most] or [most]
  results = {
    "selection": selection(sizes),
    "global": joint(most),
    "2:4": two_by_four(4096 if most >= 10**7 else 64),
  }
  seconds = time.perf_counter() - start
  page.write("engine", "The mask engine", sections(results), seconds)
  target = page.RESULTS / "engine.json"
  target.with_suffix(".tmp").write_text(json.dumps(results, indent=2) + "\n")
  os.replace(target.with_suffix(".tmp"), target)
  plot(results)


if __name__ == "__main__":
  main()
