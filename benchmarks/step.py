"""What a pruner adds to a training step, to compiling it, and to its memory.

  python benchmarks/step.py                       (about 20 minutes)
  python benchmarks/step.py --only vit conv       (some parts)
  python benchmarks/step.py --only compile --algorithms rigl --layers 5

Sparse and dense steps (jitted, donated, Adam) run in turns in one process; a
ratio is the median of those of all turns. Compile time is the processor's for
tracing, lowering and compiling, without a cache. Memory is the peak of a fresh
process while it trains. Rows that are measured replace those of
`docs/results/step.json`; the page is written anew from all of them.
"""

import argparse
import ctypes
import datetime
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import page

import jaxpruner

ALGORITHMS = [
  "no_prune",
  "magnitude",
  "random",
  "saliency",
  "magnitude_ste",
  "global_magnitude",
  "static_sparse",
  "set",
  "rigl",
  "magnitude packed",
]
UPDATE = 1000  # masks change at every multiple of this step


def dense_layer(rng, inputs, outputs):
  scale = inputs**-0.5
  kernel = rng.standard_normal((inputs, outputs), np.float32) * scale
  return {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(outputs)}


def apply(layer, x):
  return x @ layer["kernel"] + layer["bias"]


def vit(rng, width=384, layers=8, tokens=64):
  """A transformer encoder; twelve leaves per layer."""

  def norm():
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

  def block():
    shapes = {"qkv": 3, "out": 1, "up": 4}
    made = {k: dense_layer(rng, width, n * width) for k, n in shapes.items()}
    made["down"] = dense_layer(rng, 4 * width, width)
    return made | {"norm1": norm(), "norm2": norm()}

  params = {f"layer{i}": block() for i in range(layers)}

  def normalize(p, x):
    x = x - x.mean(-1, keepdims=True)
    x *= jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x * p["scale"] + p["bias"]

  def forward(params, x):
    for i in range(layers):
      p = params[f"layer{i}"]
      q, k, v = jnp.split(apply(p["qkv"], normalize(p["norm1"], x)), 3, -1)
      heads = lambda t: t.reshape(*t.shape[:2], -1, 64).swapaxes(1, 2)
      weights = heads(q) @ heads(k).swapaxes(2, 3) / 8
      mixed = jax.nn.softmax(weights) @ heads(v)
      mixed = mixed.swapaxes(1, 2).reshape(x.shape)
      x += apply(p["out"], mixed)
      hidden = jax.nn.gelu(apply(p["up"], normalize(p["norm2"], x)))
      x += apply(p["down"], hidden)
    return x

  return params, forward, lambda batch: (batch, tokens, width)


def conv(rng, width=64, layers=6):
  params = {
    f"conv{i}": {
      "kernel": jnp.asarray(
        rng.standard_normal((3, 3, width, width), np.float32) * 0.04
      )
    }
    for i in range(layers)
  }

  def forward(params, x):
    for layer in params.values():
      x = jax.lax.conv_general_dilated(
        x,
        layer["kernel"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
      )
      x = jax.nn.relu(x)
    return x

  return params, forward, lambda batch: (batch, 16, 16, width)


def mlp(rng, width=2048, layers=3):
  params = {f"dense{i}": dense_layer(rng, width, width) for i in range(layers)}

  def forward(params, x):
    for layer in params.values():
      x = jax.nn.relu(apply(layer, x))
    return x

  return params, forward, lambda batch: (batch, width)


MODELS = {
  "vit": (vit, 16),
  "vit, batch 2": (vit, 2),
  "conv": (conv, 16),
  "mlp": (mlp, 8),
}
PARTS = [*MODELS, "compile", "memory"]
RECORD = page.RESULTS / "step.json"


def updater(name: str, **options):
  if name.endswith(" packed"):
    return updater(name.removesuffix(" packed"), use_packed_masks=True)
  config = dict(
    algorithm=name,
    dist_type="uniform",
    sparsity=0.9,
    update_freq=UPDATE,
    update_start_step=0,
    update_end_step=100 * UPDATE,
  )
  return jaxpruner.create_updater_from_config(config | options)


def make_step(forward, pruner):
  """A donated training step; without a pruner, the dense one."""
  tx = optax.adam(1e-3)
  tx = tx if pruner is None else pruner.wrap_optax(tx)

  def loss(params, x):
    return jnp.mean(forward(params, x) ** 2)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  return tx, step


class Runner:
  """One training run whose clock can be set."""

  def __init__(self, params, forward, pruner, x):
    self.tx, step = make_step(forward, pruner)
    self.params = jax.tree.map(jnp.array, params)
    self.state = jax.jit(self.tx.init)(self.params)
    self.x = x
    start = time.process_time()
    self.step = step.lower(self.params, self.state, x).compile()
    self.compile_seconds = time.process_time() - start
    self.sparse = pruner is not None

  def at(self, count: int):
    if self.sparse:
      self.state = self.state._replace(
        count=jnp.asarray(count, self.state.count.dtype)
      )

  def __call__(self):
    self.params, self.state, value = self.step(self.params, self.state, self.x)
    return value


def overhead(model: str, algorithms, repeats: int) -> list[dict]:
  build, batch = MODELS[model]
  params, forward, shape = build(np.random.default_rng(0))
  x = jnp.asarray(
    np.random.default_rng(1).standard_normal(shape(batch)), jnp.float32
  )
  dense = Runner(params, forward, None, x)
  rows = []
  for name in algorithms:
    sparse = Runner(params, forward, updater(name), x)
    # Where masks are chosen at every step, sparsity goes on and does not jump.
    rest = UPDATE * 50 + 1 if name.endswith("_ste") else UPDATE + 1
    times: dict[str, list[float]] = {"dense": [], "rest": [], "update": []}
    for turn in range(repeats + 1):
      for key, run, count in (
        ("dense", dense, 0),
        ("rest", sparse, rest),
        ("update", sparse, UPDATE * 50),
      ):
        run.at(count)
        jax.block_until_ready((run.params, run.state))
        start = time.perf_counter()
        run().block_until_ready()
        jax.block_until_ready((run.params, run.state))
        if turn:
          times[key].append(time.perf_counter() - start)
    spent = {key: np.array(value) for key, value in times.items()}
    over = {k: float(np.median(v / spent["dense"])) for k, v in spent.items()}
    row = {
      "model": model.split(",")[0],
      "batch": batch,
      "algorithm": name,
      "dense ms": 1e3 * float(np.median(spent["dense"])),
      "step": over["rest"],
      "update step": over["update"],
    }
    rows.append(row)
    print(json.dumps(row), flush=True)
  return rows


def kernels(text: str) -> int:
  """How many different fusions a program has: equal ones are compiled once."""
  bodies = re.findall(r"^%fused.*?^\}", text, re.MULTILINE | re.DOTALL)
  names = r", metadata=\{[^}]*\}|%[\w.-]+|param_[\d.]+"
  return len({re.sub(names, "", body) for body in bodies})


def compile_times(layers: int, algorithms) -> list[dict]:
  """A small transformer of 12 leaves per layer."""
  build = functools.partial(vit, width=128, layers=layers, tokens=8)
  params, forward, shape = build(np.random.default_rng(0))
  x = jnp.zeros(shape(2))
  Runner(params, forward, None, x)  # what only the first program pays for
  rows = []
  for name in algorithms:
    jax.clear_caches()
    dense = Runner(params, forward, None, x)
    jax.clear_caches()
    sparse = Runner(params, forward, updater(name), x)
    row = {
      "leaves": len(jax.tree.leaves(params)),
      "algorithm": name,
      "dense s": dense.compile_seconds,
      "ratio": sparse.compile_seconds / dense.compile_seconds,
      "dense kernels": kernels(dense.step.as_text()),
      "kernels": kernels(sparse.step.as_text()),
    }
    rows.append(row)
    print(json.dumps(row), flush=True)
  return rows


def kernel_cost(few: int = 10, many: int = 50, turns: int = 5) -> dict:
  """Milliseconds to compile one more kernel, a new one and an equal one."""

  def seconds(factors) -> float:
    program = lambda *xs: [
      x * x + x * y for x, y in zip(xs, factors, strict=True)
    ]
    numbers = [jax.ShapeDtypeStruct((), jnp.float32)] * len(factors)
    lowered = jax.jit(program).lower(*numbers)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start

  def slope(factor) -> float:
    seconds([factor(i) for i in range(few)])
    times = [
      [seconds([factor(i) for i in range(n)]) for n in (few, many)]
      for _ in range(turns)
    ]
    least = np.min(times, 0)
    return 1e3 * float(least[1] - least[0]) / (many - few)

  return {"scalar": slope(lambda i: i + 2.5), "equal": slope(lambda _i: 2.5)}


def memory(algorithms) -> list[dict]:
  """Peaks of fresh processes that train the MLP, beyond the dense one's."""

  def peak(name: str) -> int:
    command = [sys.executable, __file__, "--peak", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])

  weights = sum(
    w.size for w in jax.tree.leaves(mlp(np.random.default_rng(0))[0])
  )
  dense = peak("dense")
  rows = []
  for name in algorithms:
    row = {
      "algorithm": name,
      "dense bytes/weight": dense / weights,
      "more bytes/weight": (peak(name) - dense) / weights,
    }
    rows.append(row)
    print(json.dumps(row), flush=True)
  return rows


def print_peak(name: str) -> None:
  """Print the peak while steps run, by how much it tops an empty process."""

  def status(key: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(text.split(key + ":")[1].split()[0])

  empty = status("VmRSS")
  params, forward, shape = mlp(np.random.default_rng(0))
  pruner = None if name == "dense" else updater(name)
  run = Runner(params, forward, pruner, jnp.ones(shape(8)))
  del params
  # What compiling took is none of the step's: give it back, and forget it.
  ctypes.CDLL("libc.so.6").malloc_trim(0)
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  for count in (UPDATE + 1, UPDATE * 50):
    run.at(count)
    jax.block_until_ready((run(), run.params, run.state))
  print(status("VmHWM") - empty)


KEYS = {
  "step": ("model", "batch", "algorithm"),
  "compile": ("leaves", "algorithm"),
  "memory": ("algorithm",),
}


def merge(old: list[dict], new: list[dict], keys) -> list[dict]:
  """Rows of both in the order of the algorithms; new ones win."""
  now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
  new = [row | {"measured": now} for row in new]
  table = {tuple(row[k] for k in keys): row for row in [*old, *new]}
  models = [model.split(",")[0] for model in MODELS]

  def place(row):
    model = models.index(row["model"]) if "model" in row else 0
    size = -row["batch"] if "batch" in row else row.get("leaves", 0)
    return model, size, ALGORITHMS.index(row["algorithm"])

  return sorted(table.values(), key=place)


READING = """`step` leaves the masks alone, `update step` changes them.
`no_prune` is the dense program: its distance from 1 is the noise of a machine
with two cores. Goals: a step 1.02 (packed masks 1.03, straight-through 1.05 at
batch 16 and 1.25 at batch 2), an update step 1.3 for methods that score, and
for SET and RigL 1.3 on the transformer and 4 on the MLP.

A step that leaves the masks alone reads them once more and writes nothing more:
masks pass through a loop of no turn, which, unlike a conditional, copies
nothing; the optimizer goes on from its moments as they are stored, so that XLA
overwrites them in place; and packed bits are unpacked in the pass that applies
them. The MLP at batch 8 is the hardest case: its step is little more than one
reading and writing of weights, gradients and moments, 44 bytes per weight. A
selection reads the scores about five times: four times or five to count, and to
write. So an update step there costs as many passes more: 4 bytes each for |w|,
8 for |w·g|, and for random numbers, which are drawn anew in every pass rather
than stored, some ten integer operations. Straight-through pruning selects at
every step, and starts from where the last thresholds lead: mostly that takes
two or three passes to count."""

COMPILING = """Seconds of processor time for tracing, lowering and compiling,
without a cache, one after the other in a warm process; one leaf in three is
pruned. Kernels are the different fusions of the compiled program: XLA compiles
equal ones once. Goals: 1.5 at 60 leaves, 2 at 300.

One loop searches leaf after leaf, so a search is compiled once, not once per
leaf; and what tells equal leaves apart (their thresholds, which random words
are their own, how many weights they keep) is data, not code, so leaves of one
shape share their kernels. A search has some twenty kernels, most of them
arithmetic on a number or two; each shape adds those that copy or count it,
write its mask and compare it with the old one. Methods that drop and grow take
both turns through one compiled search; they also reset moments.

{profile} A dense step of 60 leaves has a hundred kernels: half as many again
are all that its goal has room for, with nothing left for tracing. That is out
of reach unless XLA compiles a computation on small arrays as one kernel, which
it does only for loops it finds small. At 300 leaves the passes over a larger
program prevail, on both sides."""

PROFILE = """What a kernel costs, however small: {scalar:.0f} ms to compile a
product and a sum of two numbers, {equal:.1f} ms if the program has that kernel
already."""

MEMORY = """The peak of a fresh process over a step and an update step of the
MLP, beyond that of the dense step, in bytes per weight. A mask takes 1 (packed,
an eighth), and an update step holds old and new ones. Where scores use
gradients, those of all leaves are alive at once."""


def sections(results: dict) -> list[str]:
  number = lambda value: f"{value:.2f}"
  out = ["## Sparse ÷ dense training step", READING]
  if "note" in results:
    out.append(results["note"])
  head = ["model", "batch", "algorithm", "dense, ms", "step", "update step"]
  head += ["measured"]
  rows = [
    [r["model"], str(r["batch"]), r["algorithm"], f"{r['dense ms']:.0f}"]
    + [number(r["step"]), number(r["update step"]), r["measured"]]
    for r in results["step"]
  ]
  out += [page.table(head, rows), "![Ratios](step.png)"]
  head = ["leaves", "algorithm", "dense, s", "sparse ÷ dense", "kernels"]
  head += ["kernels, dense", "measured"]
  rows = [
    [str(r["leaves"]), r["algorithm"], f"{r['dense s']:.1f}"]
    + [number(r["ratio"])]
    + [str(r.get(key, "–")) for key in ("kernels", "dense kernels", "measured")]
    for r in results["compile"]
  ]
  profile = PROFILE.format(**results["kernel"]) if "kernel" in results else ""
  text = COMPILING.format(profile=profile)
  out += ["## Compile time", text, page.table(head, rows)]
  head = ["algorithm", "dense", "more"]
  rows = [
    [r["algorithm"]]
    + [f"{r[key]:.1f}" for key in ("dense bytes/weight", "more bytes/weight")]
    for r in results["memory"]
  ]
  if rows:
    out += ["## Peak memory", MEMORY, page.table(head, rows)]
  return out


def plot(results: dict) -> None:
  import matplotlib

  matplotlib.use("agg")
  import matplotlib.pyplot as plt

  cases = {(r["model"], r["batch"]): [] for r in results["step"]}
  for row in results["step"]:
    cases[row["model"], row["batch"]].append(row)
  figure, every = plt.subplots(
    1, len(cases), figsize=(3 * len(cases), 4), sharey=True, squeeze=False
  )
  for axes, ((model, batch), rows) in zip(every[0], cases.items(), strict=True):
    places = [ALGORITHMS.index(r["algorithm"]) for r in rows]
    for key, mark in (("step", "o"), ("update step", "s")):
      axes.plot([r[key] for r in rows], places, mark, label=key)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set(title=f"{model}, batch {batch}", xlabel="÷ dense", xscale="log")
    axes.set_xticks([1, 1.5, 2, 3, 5], ["1", "1.5", "2", "3", "5"])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.7, 6)
    axes.set_yticks(range(len(ALGORITHMS)), ALGORITHMS)
    axes.set_ylim(len(ALGORITHMS) - 0.5, -0.5)
    axes.grid(axis="y", linewidth=0.3)
  every[0, 0].legend(fontsize="small")
  figure.tight_layout()
  target = page.RESULTS / "step.png"
  figure.savefig(target.with_suffix(".tmp.png"), dpi=120)
  os.replace(target.with_suffix(".tmp.png"), target)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
  parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
  parser.add_argument("--layers", nargs="+", type=int, default=[5, 25])
  parser.add_argument("--repeats", type=int, default=9)
  parser.add_argument("--peak", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.peak:
    print_peak(options.peak)
    return
  start = time.perf_counter()
  results = {key: [] for key in KEYS}
  seconds = 0.0
  if (
    RECORD.exists() and options.only + options.algorithms != PARTS + ALGORITHMS
  ):
    stored = json.loads(RECORD.read_text())
    seconds = stored.pop("seconds")
    results |= stored
  pruners = [a for a in options.algorithms if a != "no_prune"]
  for part in options.only:
    if part == "compile":
      results["kernel"] = kernel_cost()
      for layers in options.layers:
        new = compile_times(layers, pruners)
        results[part] = merge(results[part], new, KEYS[part])
    elif part == "memory":
      results[part] = merge(results[part], memory(pruners), KEYS[part])
    else:
      new = overhead(part, options.algorithms, options.repeats)
      results["step"] = merge(results["step"], new, KEYS["step"])
  seconds += time.perf_counter() - start
  page.write("step", "The training step", sections(results), seconds)
  temporary = RECORD.with_suffix(".tmp")
  temporary.write_text(json.dumps(results | {"seconds": seconds}, indent=2))
  os.replace(temporary, RECORD)
  plot(results)


if __name__ == "__main__":
  main()
