"""Sparse against dense products and models, in one process, in turns.

  python benchmarks/sparse_ops.py --output docs/results      (about 6 minutes)
  python benchmarks/sparse_ops.py --output docs/results --only blocks

Every ratio is the median time of dense XLA over the median time of the sparse
product of the same operands, the two run alternately; above 1 is faster than
dense. A small product runs several times inside one compiled program, as it
does in a model: the fixed cost of calling a program from Python is no part of
it, and is measured apart. The outputs are compared before anything is timed.
On a machine that others use, `taskset -c 1 python … --clock cpu` compares the
processor time of one core instead.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import bounds
import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse

SHAPES = [(768, 3072), (3072, 768), (4096, 4096)]
BATCHES = [1, 8, 64, 512]
SPARSITIES = [0.5, 0.8, 0.9, 0.95]
TOKENS = [1, 8, 128, 512]
# Products per program, by batch, one after the other as layers are; a large one
# needs no company.
REPEATS = {1: 32, 8: 16, 64: 4, 512: 1}
# What the library promises: ratio at batch 1, 8, 64, 512.
GOALS = {
  0.5: (2, 2.5, 1.7, 1.5),
  0.8: (3, 2.5, 3, 2),
  0.9: (5, 4, 5, 3.5),
  0.95: (8, 6.5, 7, 5),
}
BLOCK_GOAL, MODEL_GOAL = (6, 7, 4, 3), (4, 5, 3.3, 2.8)


COMMANDS = {
  "wall": "python benchmarks/sparse_ops.py --output docs/results",
  "cpu": "taskset -c 1 python benchmarks/sparse_ops.py "
  "--output docs/results --clock cpu",
}
# Where `accelerate` is asked to make nothing slower.
SPREAD_SHAPES = [(128, 128), (512, 512), (768, 3072)]
SPREAD_SPARSITIES = [0.0, 0.3, 0.5, 0.7, 0.8, 0.9]
SPREAD_BATCHES = [1, 16, 256]
BUSY = (
  "The machine was shared while this was measured, so these are ratios of "
  "processor time on one core. They include the fixed cost of a call, about "
  "0.015 ms, which weighs on the smallest products."
)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def ratio(
  dense: Callable[[], Any],
  fast: Callable[[], Any],
  budget: float,
  clock: Callable[[], float],
  repeats: int = 1,
) -> dict[str, float]:
  """Check that both agree, then time them in turns."""
  want, got = np.asarray(dense()), np.asarray(fast())
  error = np.abs(got - want).max() / max(1e-30, np.abs(want).max())
  if not error < 1e-5:
    raise AssertionError(f"sparse and dense differ by {error:.1e}, relative")
  times: tuple[list[float], list[float]] = ([], [])
  start = time.perf_counter()
  while len(times[0]) < 9 or time.perf_counter() - start < budget:
    for spent, run in zip(times, (dense, fast), strict=True):
      begin = clock()
      jax.block_until_ready(run())
      spent.append(clock() - begin)
  d, s = (float(np.median(t)) for t in times)
  return {
    "dense_ms": d * 1e3 / repeats, "sparse_ms": s * 1e3 / repeats,
    "ratio": d / s,
  }  # fmt: skip


def products(
  budget: float, clock: Callable[[], float], blocks: int | None = None
) -> list[dict]:
  """Time x @ w for all shapes, sparsities and batches."""
  rng = np.random.default_rng(0)

  @functools.partial(jax.jit, static_argnums=2)
  def run(x, w, repeats):
    # Each needs the last one's result, or there would be but one.
    again = lambda _, y: (x + 0 * y[:1, :1]) @ w
    start = jnp.zeros((len(x), w.shape[1]), x.dtype)
    return jax.lax.fori_loop(0, repeats, again, start)

  rows = []
  for shape in SHAPES:
    for sparsity in [0.9] if blocks else SPARSITIES:
      mask = rng.random([d // (blocks or 1) for d in shape]) >= sparsity
      if blocks:
        mask = np.kron(mask, np.ones((blocks, blocks), bool))
      dense = np.where(mask, rng.standard_normal(shape), 0).astype(np.float32)
      w, packs = jnp.asarray(dense), {}
      for batch in BATCHES:
        repeats = REPEATS[batch]
        x = rng.standard_normal((batch, shape[0]), np.float32)
        name = "block" if blocks else "sell"
        if sparsity <= 0.6 and batch <= 16:
          name = "bitmask"
        options = {"block_shape": (blocks, blocks)} if blocks else {}
        if name not in packs:
          packs[name] = sparse.pack(dense, mask, format=name, **options)
        packed = packs[name]
        x = jnp.asarray(x)
        pair = (functools.partial(run, x, a, repeats) for a in (w, packed))
        cell = ratio(*pair, budget, clock, repeats)
        flops = 2 * int(mask.sum()) * batch
        rows.append({
          "shape": list(shape), "sparsity": sparsity, "batch": batch,
          "format": name,
          "bytes": packed.nbytes / dense.nbytes, **cell,
          "gigaflops": flops / cell["sparse_ms"] / 1e6,
        })  # fmt: skip
        print(rows[-1], flush=True)
  return rows


def transformer(
  params: Any, x: jax.Array, project: Callable[..., Any] = jnp.einsum
) -> jax.Array:
  """Two pre-norm blocks, 12 heads, d = 768."""

  def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)

  for p in params:
    q, k, v = (project("sd,dhk->hsk", norm(x), p[n]) for n in "qkv")
    weights = jax.nn.softmax(jnp.einsum("hsk,htk->hst", q, k) / 8)
    heads = jnp.einsum("hst,htk->hsk", weights, v)
    x = x + project("hsk,hkd->sd", heads, p["o"])
    hidden = jax.nn.gelu(project("sd,df->sf", norm(x), p["up"]))
    x = x + project("sf,fd->sd", hidden, p["down"])
  return x


def without_products(x: jax.Array) -> jax.Array:
  """Do all that `transformer` does but its products with weights."""

  def project(spec, x, w):
    del w
    if spec == "sd,dhk->hsk":
      y = x.reshape(len(x), 12, 64).transpose(1, 0, 2)
    elif spec == "hsk,hkd->sd":
      y = x.transpose(1, 0, 2).reshape(-1, 768)
    else:
      y = jnp.tile(x, 4) if spec == "sd,df->sf" else x[:, :768]
    # A product would not fuse with its neighbours.
    return jax.lax.optimization_barrier(y)

  params = [dict.fromkeys(("q", "k", "v", "o", "up", "down")) for _ in range(2)]
  return transformer(params, x, project)


def models(budget: float, clock: Callable[[], float]) -> list[dict]:
  """Time two transformer blocks, 90 % unstructured, whole function."""
  rng = np.random.default_rng(0)
  shapes = dict.fromkeys("qkv", (768, 12, 64))
  shapes |= {"o": (12, 64, 768), "up": (768, 3072), "down": (3072, 768)}

  def leaf(shape):
    kept = rng.random(shape) >= 0.9
    return jnp.asarray(kept * rng.standard_normal(shape) * 0.05, jnp.float32)

  params = [{n: leaf(s) for n, s in shapes.items()} for _ in range(2)]
  dense = jax.jit(transformer)
  rows = []
  for tokens in TOKENS:
    x = jnp.asarray(rng.standard_normal((tokens, 768)), jnp.float32)
    fast, report = sparse.accelerate(transformer, params, x, cache=None)
    pair = functools.partial(dense, params, x), functools.partial(fast, x)
    cell = ratio(*pair, budget, clock)
    rest = functools.partial(jax.jit(without_products), x)
    cell["rest_ms"] = ratio(rest, rest, budget, clock)["dense_ms"]
    rows.append({
      "tokens": tokens, "bytes": report.bytes / report.dense_bytes, **cell
    })  # fmt: skip
    print(rows[-1], flush=True)
    print(report, flush=True)
  return rows


def call_cost(budget: float, clock: Callable[[], float]) -> dict[str, float]:
  """Time a call of a program whose product is next to nothing."""
  w = np.eye(16, dtype=np.float32)
  run = jax.jit(lambda x, w: x @ w)
  x = jnp.ones((1, 16))
  pair = (
    functools.partial(run, x, a) for a in (jnp.asarray(w), sparse.pack(w))
  )
  return ratio(*pair, budget, clock)


def spread(budget: float, clock: Callable[[], float]) -> list[dict]:
  """Time what `accelerate` returns against dense, wanted or not."""
  rng = np.random.default_rng(0)
  rows = []
  for shape in SPREAD_SHAPES:
    for sparsity in SPREAD_SPARSITIES:
      dense = rng.standard_normal(shape) * (rng.random(shape) >= sparsity)
      w = jnp.asarray(dense, jnp.float32)
      for batch in SPREAD_BATCHES:
        x = jnp.asarray(rng.standard_normal((batch, shape[0])), jnp.float32)
        model = lambda w, x: jax.nn.relu(x @ w)
        fast, report = sparse.accelerate(model, w, x, cache=None)
        plain = functools.partial(jax.jit(model), w, x)
        cell = ratio(plain, functools.partial(fast, x), budget, clock)
        rows.append({
          "shape": list(shape), "sparsity": sparsity, "batch": batch,
          "format": report.layers[0].format, **cell,
        })  # fmt: skip
        print(rows[-1], flush=True)
  return rows


def spread_table(rows: list[dict]) -> list[str]:
  """Lay rows out: one line per shape and sparsity, one column per batch."""
  titles = " | ".join(f"batch {b}" for b in SPREAD_BATCHES)
  lines = [f"| shape | sparsity | {titles} |", "|---" * 5 + "|"]
  for i in range(0, len(rows), len(SPREAD_BATCHES)):
    group = rows[i : i + len(SPREAD_BATCHES)]
    shape = "×".join(map(str, group[0]["shape"]))
    cells = " | ".join(f"{r['format']} {r['ratio']:.2f}" for r in group)
    lines.append(f"| {shape} | {group[0]['sparsity']:.0%} | {cells} |")
  return lines


def environment() -> dict[str, Any]:
  lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  cpu = next(l for l in lines if l.startswith("model name")).split(": ")[1]
  return {
    "date": datetime.date.today().isoformat(),
    "cpu": f"{cpu}, {os.cpu_count()} cores",
    "load": round(os.getloadavg()[0], 1),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "numba": __import__("numba").__version__,
  }


def table(rows: list[dict], goals: dict) -> list[str]:
  """Lay rows out: one line per shape and sparsity, one column per batch."""
  lines = [
    "| shape | sparsity | format | bytes | batch 1 | 8 | 64 | 512 | goal |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for i in range(0, len(rows), len(BATCHES)):
    group = rows[i : i + len(BATCHES)]
    first = group[0]
    cells = " | ".join(f"{r['ratio']:.2f}" for r in group)
    formats = ", ".join(dict.fromkeys(r["format"] for r in group))
    goal = " / ".join(map(str, goals.get(first["sparsity"], ("–",))))
    shape = "×".join(map(str, first["shape"]))
    lines.append(
      f"| {shape} | {first['sparsity']:.0%} | {formats} "
      f"| {first['bytes']:.3f} | {cells} | {goal} |"
    )
  return lines


def ceiling(results: dict[str, Any]) -> list[str]:
  """Say how near the kernel comes to what the machine can do."""
  limits, cores = results["bounds"], results["environment"]["cores used"]
  peak, loaded = (cores * limits[k] for k in ("fma", "fma_with_load"))
  rows = [r for r in results["products"] if r["batch"] == 512]
  best = max(rows, key=lambda r: r["gigaflops"])
  shape = "×".join(map(str, best["shape"]))
  half = [r for r in rows if r["sparsity"] == 0.5]
  reach = [2 * loaded / (2 * np.prod(r["shape"]) * 512 / r["dense_ms"] / 1e6)
           for r in half]  # fmt: skip
  return [
    "Every kept weight scales another row of x, so each multiply-add comes "
    "with a vector load of its own. From the first cache level "
    f"{cores} cores do {loaded:.0f} GFLOP/s that way, "
    f"{loaded / peak:.0%} of the {peak:.0f} they do without loads "
    "(`benchmarks/bounds.py`): no kernel for unstructured weights can pass "
    f"that. At batch 512 the fastest product, {shape} at "
    f"{best['sparsity']:.0%}, does {best['gigaflops']:.0f} GFLOP/s of useful "
    f"work, {best['gigaflops'] / loaded:.0%} of that ceiling. At 50 % the "
    f"ceiling itself is {min(reach):.1f} to {max(reach):.1f} × dense.",
  ]


def store(path: pathlib.Path, text: str) -> None:
  temporary = path.with_name(f".{path.name}.tmp")
  temporary.write_text(text)
  os.replace(temporary, path)


def write(output: pathlib.Path, results: dict[str, Any]) -> None:
  """Write the numbers and, once no part is missing, page and picture."""
  output.mkdir(parents=True, exist_ok=True)
  store(output / "sparse_ops.json", json.dumps(results, indent=1))
  if not results.keys() >= SECTIONS.keys():
    return
  env, call = results["environment"], results["call"]
  chosen = [r["ratio"] for r in results["spread"] if r["format"] != "dense"]
  page = [
    "# Sparse products against dense ones",
    "",
    f"`{COMMANDS[env['clock']]}`",
    "",
    "Median time of dense XLA over median time of the sparse product, run "
    "alternately in one process, float32; above 1 is faster than dense. "
    "`bytes` is relative to the dense weight. Before timing, outputs were "
    "compared: they agree to 1e-5 of the largest.",
    "",
    ", ".join(f"{k} {v}" for k, v in env.items()),
    "",
    *([BUSY, ""] if env["clock"] == "cpu" else []),
    f"A call of a program whose product is next to nothing takes "
    f"{call['dense_ms'] * 1e3:.0f} µs dense and {call['sparse_ms'] * 1e3:.0f} "
    f"µs sparse; products of batch {', '.join(map(str, REPEATS))} ran "
    f"{', '.join(map(str, REPEATS.values()))} times per call.",
    "",
    "## Unstructured",
    *table(results["products"], GOALS),
    "",
    *ceiling(results),
    "",
    "## Blocks of 64 × 64, in plain XLA",
    *table(results["blocks"], {0.9: BLOCK_GOAL}),
    "",
    "## Two transformer blocks, 90 % unstructured, through `accelerate`",
    "`rest` is all but the products with weights: attention itself, softmax, "
    "GELU, norms. It is the same in both, and bounds the ratio by the last "
    "column however fast the products are.",
    "",
    "| tokens | dense ms | now ms | ratio | goal | weights | rest ms | bound |",
    "|---|---|---|---|---|---|---|---|",
    *(
      f"| {r['tokens']} | {r['dense_ms']:.2f} | {r['sparse_ms']:.2f} "
      f"| {r['ratio']:.2f} | {goal} | {r['bytes']:.3f} "
      f"| {r['rest_ms']:.2f} | {r['dense_ms'] / r['rest_ms']:.1f} |"
      for r, goal in zip(results["models"], MODEL_GOAL, strict=True)
    ),
    "",
    "## What `accelerate` returns, wherever it is asked",
    "The format it chose, and the time of dense over that of what it "
    "returned. Where it says dense it returned the dense program, and the "
    "distance from 1 is the noise of the measurement; where it chose another "
    f"format the least is {min(chosen):.2f}.",
    "",
    *spread_table(results["spread"]),
    "",
    "![ratios](sparse_ops.png)",
    "",
  ]
  store(output / "sparse_ops.md", "\n".join(page))
  picture(output / "sparse_ops.png", results["products"])


def picture(path: pathlib.Path, rows: list[dict]) -> None:
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True)
  for axis, shape in zip(axes, SHAPES, strict=True):
    for sparsity in SPARSITIES:
      chosen = [
        r for r in rows
        if r["shape"] == list(shape) and r["sparsity"] == sparsity
      ]  # fmt: skip
      ratios = [r["ratio"] for r in chosen]
      axis.plot(BATCHES, ratios, "o-", label=f"{sparsity:.0%}")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="batch")
    axis.set_title("×".join(map(str, shape)))
    axis.grid(alpha=0.3, which="both")
  axes[0].set_ylabel("times faster than dense")
  axes[0].legend(title="sparsity")
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--output", type=pathlib.Path, required=True)
  parser.add_argument("--budget", type=float, default=1.0, help="s per cell")
  parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
  parser.add_argument(
    "--only", nargs="+", choices=sorted(SECTIONS), help="redo these parts"
  )
  args = parser.parse_args()
  how = args.budget, CLOCKS[args.clock]
  cores = len(os.sched_getaffinity(0))
  stored = args.output / "sparse_ops.json"
  results = {}
  if args.only and stored.exists():
    results = json.loads(stored.read_text())
  results["environment"] = {
    **environment(), "clock": args.clock, "cores used": cores,
    "seconds per cell": args.budget,
  }  # fmt: skip
  for name, section in SECTIONS.items():
    if name in (args.only or SECTIONS):
      results[name] = section(*how)
      write(args.output, results)


SECTIONS: dict[str, Callable[[float, Callable[[], float]], Any]] = {
  "bounds": lambda _budget, _clock: bounds.bounds(),
  "call": call_cost,
  "models": models,
  "products": products,
  "blocks": functools.partial(products, blocks=64),
  "spread": spread,
}


if __name__ == "__main__":
  main()
