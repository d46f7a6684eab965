"""What a pruner adds to a training step, and to compiling it.

  python benchmarks/step.py               (about 10 minutes)
  python benchmarks/step.py --only vit    (one model)

Sparse and dense steps (jitted, donated, Adam) run in turns in one process; a
ratio is that of the medians. Compile time is tracing, lowering and compiling,
without a cache.
"""

import argparse
import functools
import json
import os
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


MODELS = {"vit": (vit, 16), "conv": (conv, 16), "mlp": (mlp, 8)}


def updater(name: str, **options):
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

  def loss(params, state, x):
    if pruner is not None:
      params = pruner.pre_forward_update(params, state)
    return jnp.mean(forward(params, x) ** 2)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, state, x)
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
    start = time.perf_counter()
    lowered = step.lower(self.params, self.state, x)
    self.lower_seconds = time.perf_counter() - start
    self.step = lowered.compile()
    self.compile_seconds = time.perf_counter() - start
    self.sparse = pruner is not None

  def at(self, count: int):
    if self.sparse:
      self.state = self.state._replace(
        count=jnp.asarray(count, self.state.count.dtype)
      )

  def __call__(self):
    self.params, self.state, value = self.step(self.params, self.state, self.x)
    return value


def overhead(model: str, algorithms, repeats: int = 9, **options) -> list[dict]:
  build, batch = MODELS[model]
  params, forward, shape = build(np.random.default_rng(0))
  x = jnp.asarray(
    np.random.default_rng(1).standard_normal(shape(batch)), jnp.float32
  )
  dense = Runner(params, forward, None, x)
  rows = []
  for name in algorithms:
    sparse = Runner(params, forward, updater(name, **options), x)
    times: dict[str, list[float]] = {"dense": [], "rest": [], "update": []}
    for turn in range(repeats + 1):
      for key, run, count in (
        ("dense", dense, 0),
        ("rest", sparse, UPDATE + 1),
        ("update", sparse, UPDATE * 50),
      ):
        run.at(count)
        jax.block_until_ready((run.params, run.state))
        start = time.perf_counter()
        run().block_until_ready()
        jax.block_until_ready((run.params, run.state))
        if turn:
          times[key].append(time.perf_counter() - start)
    median = {key: float(np.median(value)) for key, value in times.items()}
    row = {
      "model": model,
      "batch": batch,
      "algorithm": name + " (packed)" * bool(options),
      "dense ms": 1e3 * median["dense"],
      "step": median["rest"] / median["dense"],
      "update step": median["update"] / median["dense"],
    }
    rows.append(row)
    print(json.dumps(row), flush=True)
  return rows


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
      "lower s": sparse.lower_seconds,
      "dense lower s": dense.lower_seconds,
    }
    rows.append(row)
    print(json.dumps(row), flush=True)
  return rows


def sections(results: dict) -> list[str]:
  head = ["model", "batch", "algorithm", "dense ms", "step", "update step"]
  rows = [
    [r["model"], str(r["batch"]), r["algorithm"], f"{r['dense ms']:.1f}"]
    + [f"{r[key]:.2f}" for key in ("step", "update step")]
    for r in results["step"]
  ]
  out = ["## Sparse ÷ dense training step", page.table(head, rows)]
  head = ["leaves", "algorithm", "dense s", "sparse ÷ dense"]
  rows = [
    [
      str(r["leaves"]),
      r["algorithm"],
      f"{r['dense s']:.1f}",
      f"{r['ratio']:.2f}",
    ]
    for r in results["compile"]
  ]
  return [*out, "## Compile time", page.table(head, rows)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", choices=[*MODELS, "compile"])
  parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
  parser.add_argument("--layers", nargs="+", type=int, default=[5, 25])
  options = parser.parse_args()
  start = time.perf_counter()
  results: dict[str, list] = {"step": [], "compile": []}
  for model in MODELS:
    if options.only in (None, model):
      results["step"] += overhead(model, options.algorithms)
      results["step"] += overhead(model, ["magnitude"], use_packed_masks=True)
  if options.only in (None, "compile"):
    for layers in options.layers:
      picked = [a for a in options.algorithms if a != "no_prune"]
      results["compile"] += compile_times(layers, picked)
  if options.only is None:
    seconds = time.perf_counter() - start
    page.write("step", "The training step", sections(results), seconds)
    target = page.RESULTS / "step.json"
    target.with_suffix(".tmp").write_text(json.dumps(results, indent=2) + "\n")
    os.replace(target.with_suffix(".tmp"), target)


if __name__ == "__main__":
  main()
