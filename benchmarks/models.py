"""Whole models at 80 and 90 %, against dense XLA and what else is installed.

  python benchmarks/models.py                           (about 15 minutes)
  python benchmarks/models.py --only bert-1 --cores 1   (some rows)
  python benchmarks/models.py --rivals PYTHON           (with rivals, see below)
  python benchmarks/models.py --only                    (the page, of old rows)

Every layer of a model loses the same share of its weights, at random; only the
speed is looked at, which depends on how many are left and not on which. First
convolutions, depthwise ones and biases stay dense. Each row has a process of
its own, bound to its cores. In it the jitted dense model, the accelerated one
and the rivals take turns, after their outputs were compared. Rivals run in
processes of their own (`rival.py`) by the interpreter PYTHON, with `onnx` and
one or both of `onnxruntime` and `deepsparse`; they get the same model from
`model_zoo.py`, the dense ones with its zeros. Rows replace those of
`docs/results/models.json`; the page is made of all of them.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import model_zoo
import numpy as np
import page
import rival

from jaxpruner import sparse

SPARSITIES = (0.8, 0.9)
CORES = (1, 2)
RIVALS = ("onnxruntime", "deepsparse")
# Turns that each takes.
SPELLS = 5


class Jax:
  """The layers of `model_zoo` in JAX.

  Args:
    weights: arrays by name; those that are missing are drawn.
    sparsity: the share of zeros of those that are drawn.
  """

  def __init__(self, weights: dict[str, Any], sparsity: float = 0.0):
    self.weights, self._sparsity = weights, sparsity
    self._rng = np.random.default_rng(0)

  def weight(self, name, shape, gain=1.0):
    if name not in self.weights:
      fan = np.prod(shape[:-1]) if len(shape) > 1 else 1
      drawn = self._rng.standard_normal(shape, np.float32)
      drawn *= np.float32(gain / np.sqrt(fan))
      if not any(word in name for word in model_zoo.KEPT_DENSE):
        drawn *= self._rng.random(shape) >= self._sparsity
        # The scale of what is kept, so that no layer's output fades away.
        drawn /= np.float32(np.sqrt(1 - self._sparsity))
      self.weights[name] = drawn
    return self.weights[name]

  def conv(self, x, name, size, out, stride=1, groups=1):
    w = self.weight(name, (size, size, x.shape[-1] // groups, out))
    y = jax.lax.conv_general_dilated(
      x, w, (stride, stride), [(size // 2, size // 2)] * 2,
      dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip
    return y + self.weight(f"{name}/bias", (out,), 0.1)

  def dense(self, x, name, out):
    y = x @ self.weight(name, (x.shape[-1], out))
    return y + self.weight(f"{name}/bias", (out,), 0.1)

  def relu(self, x):
    return jax.nn.relu(x)

  def add(self, x, y):
    return x + y

  def max_pool(self, x, size=3):
    pad = (size - 1) // 2
    edges = [(0, 0), (pad, pad), (pad, pad), (0, 0)]
    window, strides = (1, size, size, 1), (1, 2, 2, 1)
    return jax.lax.reduce_window(
      x, -jnp.inf, jax.lax.max, window, strides, edges
    )

  def mean_pool(self, x):
    return x.mean((1, 2))

  def upsample(self, x):
    return x.repeat(2, axis=1).repeat(2, axis=2)

  def concat(self, x, y):
    return jnp.concatenate([x, y], -1)

  def attention(self, q, k, v, heads):
    tokens, width = q.shape
    q, k, v = (a.reshape(1, tokens, heads, width // heads) for a in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v).reshape(tokens, width)

  def norm(self, x, name):
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    x = x * self.weight(f"{name}/scale", (x.shape[-1],))
    return x + self.weight(f"{name}/bias", (x.shape[-1],), 0.1)

  def gelu(self, x):
    return jax.nn.gelu(x, approximate=False)


def lstm(o: Jax, x: Any) -> Any:
  """Two LSTM layers of width 1024, 32 steps, batch 1."""
  width = 1024
  for layer in range(2):
    shape = (x.shape[-1] + width, 4 * width)
    w, b = o.weight(f"layer{layer}", shape), o.weight("bias", shape[1:], 0.1)

    def step(carry, x, w=w, b=b):
      h, c = carry
      i, f, g, out = jnp.split(jnp.concatenate([x, h], -1) @ w + b, 4, -1)
      c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
      h = jax.nn.sigmoid(out) * jnp.tanh(c)
      return (h, c), h

    zero = jnp.zeros((x.shape[1], width))
    _, x = jax.lax.scan(step, (zero, zero), x)
  return x


def experts(o: Jax, x: Any) -> Any:
  """Two layers of 8 experts, 768 to 2048 and back, 64 tokens, best 2 each."""
  count, width, room = 8, 768, 16
  for layer in range(2):
    scores = jax.nn.softmax(x @ o.weight(f"scale{layer}", (width, count)))
    gates, chosen = jax.lax.top_k(scores, 2)
    taken = jax.nn.one_hot(chosen, count)  # token, choice, expert
    order = jnp.cumsum(taken.reshape(-1, count), 0).reshape(taken.shape) - 1
    places = jax.nn.one_hot(order, room) * taken[..., None]
    sent = jnp.einsum("tkec,td->ecd", places, x)
    up = o.weight(f"experts{layer}/up", (count, width, 2048), 4.0)
    down = o.weight(f"experts{layer}/down", (count, 2048, width), 4.0)
    y = jax.nn.relu(jnp.einsum("ecd,edh->ech", sent, up))
    y = jnp.einsum("ech,ehd->ecd", y, down)
    x = x + jnp.einsum("tkec,tk,ecd->td", places, gates, y)
  return x


# Those that only JAX runs here: scans and routing.
MODELS = model_zoo.MODELS | {
  "lstm": (lstm, (32, 1, 1024)),
  "experts": (experts, (64, 768)),
}


@contextlib.contextmanager
def started(
  python: str | None, name: str, weights: Any, x: np.ndarray, cores: int
) -> Iterator[tuple[dict[str, rival.Rival], dict[str, np.ndarray]]]:
  """Start the rivals that can run the model, and return their outputs."""
  running: dict[str, rival.Rival] = {}
  outputs: dict[str, np.ndarray] = {}
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    file = pathlib.Path(folder, "weights.npz")
    np.savez(file, **weights)
    for other in RIVALS if python else ():
      started = stack.enter_context(rival.Rival(str(python), other, cores))
      y = started.load(name, file, x)
      if y is not None:
        running[other], outputs[other] = started, y
    yield running, outputs


def spell(run: Callable[[], Any], least: float) -> list[tuple[float, float]]:
  """Return wall and processor seconds of each run during a while."""
  for _ in range(rival.WARM):
    jax.block_until_ready(run())
  taken = []
  end = time.perf_counter() + least
  while not taken or time.perf_counter() < end:
    start, worked = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    worked = time.process_time() - worked
    taken.append((time.perf_counter() - start, worked))
  return taken


def check(name: str, got: np.ndarray, want: np.ndarray) -> float:
  """Return the largest difference, relative to the largest output."""
  error = float(np.abs(got - want).max() / np.abs(want).max())
  if not error < 1e-3:
    raise AssertionError(f"{name} differs from XLA by {error:.1e}")
  return error


def measure(
  name: str, sparsity: float, cores: int, python: str | None, least: float
) -> dict[str, Any]:
  """Return the row of one model."""
  model, shape = MODELS[name]
  x = np.random.default_rng(1).standard_normal(shape, np.float32)
  drawn = Jax({}, sparsity)
  jax.eval_shape(lambda x: model(drawn, x), x)
  weights = jax.tree.map(jnp.asarray, drawn.weights)
  apply = lambda weights, x: model(Jax(weights), x)
  x = jnp.asarray(x)
  start = time.perf_counter()
  fast, report = sparse.accelerate(apply, weights, x)
  tuning = time.perf_counter() - start
  dense = jax.jit(apply)
  want = np.asarray(dense(weights, x))
  runs = {"dense": lambda: dense(weights, x), "ours": lambda: fast(x)}
  taken: dict[str, list[tuple[float, float]]] = {n: [] for n in runs}
  error = check("ours", np.asarray(fast(x)), want)
  extern = name in model_zoo.MODELS
  arguments = name, drawn.weights, np.asarray(x), cores
  with started(python if extern else None, *arguments) as (rivals, outputs):
    others: dict[str, list[float]] = {other: [] for other in rivals}
    for r, y in outputs.items():
      check(r, y.reshape(want.shape), want)
    for _ in range(SPELLS):
      for n, run in runs.items():
        taken[n] += spell(run, least / SPELLS)
      for r, seconds in others.items():
        seconds += rivals[r].spell(least / SPELLS)
  dense_kept = [l for l in report.layers if l.format == "dense"]
  return {
    "model": name, "sparsity": sparsity, "cores": cores,
    "date": str(datetime.date.today()), "error": error, "tuning": tuning,
    "wall": {n: _median([w for w, _ in t]) for n, t in taken.items()},
    "cpu": {n: _median([c for _, c in t]) for n, t in taken.items()},
    "rivals": {r: _median(t) for r, t in others.items()},
    "formats": Counter(l.format for l in report.layers if len(l.shape) > 1),
    "dense": {l.name: l.rule for l in dense_kept if len(l.shape) > 1},
    "rule": report.rule,
  }  # fmt: skip


def _median(values: list[float]) -> float:
  return float(np.median(values))


def _times(row: dict[str, Any], name: str) -> str:
  """Return a rival's time over ours."""
  found = row["rivals"].get(name)
  return "–" if found is None else f"{found / row['wall']['ours']:.2f}"


def sections(rows: list[dict[str, Any]]) -> list[str]:
  """Return the page's text."""
  head = [
    "model", "sparsity", "cores", "dense XLA, ms", "accelerated, ms",
    "dense, CPU ms", "accelerated, CPU ms",
    "dense XLA ÷ ours", "the same, CPU time", "ONNX Runtime ÷ ours",
    "DeepSparse ÷ ours", "formats", "date",
  ]  # fmt: skip
  lines = []
  for r in rows:
    wall, cpu = r["wall"], r["cpu"]
    formats = ", ".join(f"{n} {f}" for f, n in sorted(r["formats"].items()))
    lines.append([
      r["model"], f"{r['sparsity']:.0%}", str(r["cores"]),
      f"{1e3 * wall['dense']:.2f}", f"{1e3 * wall['ours']:.2f}",
      f"{1e3 * cpu['dense']:.2f}", f"{1e3 * cpu['ours']:.2f}",
      f"**{wall['dense'] / wall['ours']:.2f}**",
      f"{cpu['dense'] / cpu['ours']:.2f}",
      _times(r, "onnxruntime"), _times(r, "deepsparse"), formats, r["date"],
    ])  # fmt: skip
  reasons: dict[tuple[str, float], dict[str, list[str]]] = {}
  for r in rows:
    found = reasons.setdefault((r["model"], r["sparsity"]), {})
    for path, rule in r["dense"].items():
      found.setdefault(rule, [])
      if path not in found[rule]:
        found[rule].append(path)
  why = [
    [m, f"{s:.0%}", rule, str(len(paths)), _some(paths)]
    for (m, s), rules in reasons.items()
    for rule, paths in rules.items()
  ]
  seen = {r["model"] for r in rows}
  docs = {n: (m.__doc__ or "").split("\n")[0] for n, (m, _) in MODELS.items()}
  listed = "\n".join(f"- `{n}`: {t}" for n, t in docs.items() if n in seen)
  missing = ", ".join(f"`{n}`" for n in MODELS if n not in seen)
  if missing:
    listed += f"\n\nNot measured yet: {missing}."
  return [
    "Medians of the runs of five turns, each row in a process bound to its "
    "cores; ONNX Runtime runs the dense model, DeepSparse the sparse one, and "
    "both are stopped while it is not their turn. Above 1 is faster than "
    "the other. Weights are random and pruned at random, layer by layer. On "
    "one core a wall time far above the CPU time tells of other work on the "
    "machine: then the ratio of CPU times is the better one, and the rivals', "
    "which are of wall time, say little. Rows carry their date; the minutes "
    "are those of the last call.",
    page.table(head, lines),
    listed,
    "## What stays dense, and why",
    page.table(["model", "sparsity", "reason", "layers", "such as"], why),
  ]


def _some(paths: list[str]) -> str:
  return ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", nargs="*", default=list(MODELS), metavar="NAME")
  parser.add_argument("--cores", nargs="+", type=int, default=list(CORES))
  parser.add_argument("--sparsities", nargs="+", type=float, default=SPARSITIES)
  parser.add_argument("--rivals", metavar="PYTHON")
  parser.add_argument("--quick", action="store_true", help="writes nothing")
  parser.add_argument(
    "--seconds", type=float, default=1.5, help="for each, in a row"
  )
  parser.add_argument("--row", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.row:
    name, sparsity, cores = json.loads(options.row)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    found = measure(name, sparsity, cores, options.rivals, options.seconds)
    print(json.dumps(found))
    return
  start = time.time()
  record = page.RESULTS / "models.json"
  command = [sys.executable, __file__, "--seconds", str(options.seconds)]
  if options.rivals:
    command += ["--rivals", options.rivals]
  failed: list[str] = []
  for name in options.only:
    for sparsity in options.sparsities:
      for cores in options.cores:
        asked = json.dumps([name, sparsity, cores])
        out = subprocess.run(
          [*command, "--row", asked], stdout=subprocess.PIPE, check=False
        )
        if out.returncode:
          failed.append(asked)
          continue
        row = json.loads(out.stdout.splitlines()[-1])
        rows = {_key(r): r for r in _stored(record)} | {_key(row): row}
        brief = {k: row[k] for k in ("wall", "cpu", "rivals", "formats")}
        print(asked, brief, f"tuned in {row['tuning']:.0f} s", flush=True)
        if not options.quick:  # a row at a time: a run may be cut short
          record.write_text(json.dumps(_sorted(rows), indent=1) + "\n")
  if not options.quick:
    text = sections(_stored(record))
    page.write("models", "Whole models", text, time.time() - start)
  if failed:
    sys.exit(f"failed: {', '.join(failed)}; their old rows are kept")


def _stored(record: pathlib.Path) -> list[dict[str, Any]]:
  return json.loads(record.read_text()) if record.exists() else []


def _key(row: dict[str, Any]) -> tuple[str, float, int]:
  return row["model"], row["sparsity"], row["cores"]


def _sorted(rows: dict[Any, dict[str, Any]]) -> list[dict[str, Any]]:
  names = list(MODELS)
  order = lambda r: (names.index(r["model"]), r["sparsity"], r["cores"])
  return sorted(rows.values(), key=order)


if __name__ == "__main__":
  main()
