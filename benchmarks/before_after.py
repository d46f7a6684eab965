"""Two versions of the library against each other: compiling, selecting, steps.

  git worktree add ../old COMMIT
  python benchmarks/before_after.py ../old/src      (about 6 minutes)

Each version is measured in processes of its own, by turns; ratios of a step are
taken within a process, against the dense step.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import optax
import page

import jaxpruner
from jaxpruner import mask_calculator

MODELS = {"784-300-100-10": [784, 300, 100, 10], "60 × 128²": [128] * 61}
REST = [512] * 13
SIZES = (10**6, 10**7)
TURNS = 2
ALGORITHMS = ("magnitude", "rigl", "set")
NOTE = """\
Two runs of each version, by turns. Compile ratios are of CPU time; their noise
is about a tenth. A selection may take up to 1.5 × the time it took: it reads
the scores more often, and in return ties and meshes need no code of their own.
A straight-through step selects its masks anew each time; it is compared with
the dense step of the same model."""


def step_of(name: str, widths: list[int]):
  """Return a jitted training step at batch 8, and its arguments."""
  keys = jax.random.split(jax.random.key(0), len(widths))
  shapes = zip(keys, widths[:-1], widths[1:], strict=False)
  params = [
    {"kernel": jax.random.normal(k, (a, b)) * 0.05, "bias": jnp.zeros(b)}
    for k, a, b in shapes
  ]
  batch = jax.random.normal(jax.random.key(1), (8, widths[0]))
  tx = optax.adam(1e-3)
  if name != "dense":
    config = {
      "algorithm": name,
      "sparsity": 0.9,
      "update_freq": 100,
      "update_start_step": 50,
      "update_end_step": 100_000,
    }
    tx = jaxpruner.create_updater_from_config(config).wrap_optax(tx)

  def loss(params, x):
    for layer in params:
      x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(x**2)

  def step(params, state, batch):
    grads = jax.grad(loss)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step, donate_argnums=(0, 1)), params, tx.init(params), batch


def compile_time(name: str, widths: list[int]) -> float:
  """Return the CPU seconds of tracing, lowering and compiling a step."""
  step, *arguments = step_of(name, widths)
  began = time.process_time()
  step.lower(*arguments).compile()
  return time.process_time() - began


def milliseconds(run, *arguments, repeats: int = 15) -> float:
  """Return the median wall time of a call."""
  jax.block_until_ready(run(*arguments))
  taken = []
  for _ in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    taken.append(1e3 * (time.perf_counter() - began))
  return statistics.median(taken)


def rest_ratios(names: tuple[str, ...], repeats: int = 60) -> dict[str, float]:
  """Return the time of steps that leave masks alone ÷ the dense step's."""
  runs = {name: list(step_of(name, REST)) for name in ("dense", *names)}
  taken: dict[str, list[float]] = {name: [] for name in runs}
  # Masks do not change before step 50; the first steps compile.
  for _ in range(min(repeats, 45)):
    for name, run in runs.items():
      began = time.perf_counter()
      run[1:3] = jax.block_until_ready(run[0](*run[1:]))
      taken[name].append(time.perf_counter() - began)
  pairs = {n: zip(taken[n][5:], taken["dense"][5:], strict=True) for n in names}
  return {n: statistics.median(a / b for a, b in pairs[n]) for n in names}


def measure() -> dict[str, float]:
  """Measure the version that is imported."""
  found = {}
  for label, widths in MODELS.items():
    dense = statistics.median(compile_time("dense", widths) for _ in range(3))
    for name in ALGORITHMS:
      ours = statistics.median(compile_time(name, widths) for _ in range(2))
      found[f"compile ÷ dense, {label}, {name}"] = ours / dense
  choose = lambda x: mask_calculator.topk_mask_calculator(x, 0.9)
  for dtype in ("float32", "bfloat16"):
    for size in SIZES:
      normal = jax.random.normal(jax.random.key(2), (1000, size // 1000))
      scores = jnp.abs(normal).astype(dtype)
      taken = milliseconds(jax.jit(choose), scores)
      found[f"select {size:.0e} {dtype}, ms"] = taken
  scores = jnp.abs(jax.random.normal(jax.random.key(2), (1000, 100)))
  eager = milliseconds(choose, scores, repeats=60)
  found["select 1e5, eager ÷ jit"] = eager / milliseconds(
    jax.jit(choose), scores, repeats=60
  )
  for name, ratio in rest_ratios((*ALGORITHMS, "magnitude_ste")).items():
    found[f"step at rest ÷ dense, 12 × 512², {name}"] = ratio
  return found


def _in_process(source: pathlib.Path) -> dict[str, float]:
  environment = os.environ | {"PYTHONPATH": str(source)}
  command = [sys.executable, str(pathlib.Path(__file__)), "--measure"]
  done = subprocess.run(
    command, env=environment, capture_output=True, text=True, check=True
  )
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument(
    "old", nargs="?", type=pathlib.Path, help="its src folder"
  )
  parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.measure:
    jax.config.update("jax_enable_compilation_cache", False)
    print(json.dumps(measure()))
    return
  if arguments.old is None:
    parser.error("give the src folder of the old version")
  began = time.perf_counter()
  new = pathlib.Path(jaxpruner.__file__).parents[1]
  runs: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
  for _ in range(TURNS):
    for name, source in (("old", arguments.old.resolve()), ("new", new)):
      runs[name].append(_in_process(source))
  rows = [
    [key, *(" ".join(f"{r[key]:.2f}" for r in runs[n]) for n in runs)]
    for key in runs["new"][0]
  ]
  text = page.table(["", "before", "after"], rows)
  seconds = time.perf_counter() - began
  page.write("before_after", "Engine, before and after", [NOTE, text], seconds)


if __name__ == "__main__":
  main()
