"""Training at kept size against dense: time of a step, bytes, peak memory.

  python benchmarks/training.py               (about 5 minutes, alone)
  python benchmarks/training.py --only mlp    (one part)
  python benchmarks/training.py --torch PYTHON  (a Python that has torch)

Steps (forward, backward, Adam; jitted, donated) of all variants run in turns in
one process; a ratio is the median of those of all turns. `narrow` is a dense
network with as many weights; blocks are multiplied by XLA, without Numba. The
rows of torch, in a process of its own, are against its own dense step (SGD: its
Adam takes no CSR parameter). Peak memory is that of a fresh process that takes
three steps, less what the process had before it made its weights.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import page

import jaxpruner
from jaxpruner import kept

SPARSITIES = (0.8, 0.9, 0.95, 0.98)
WIDTH, LAYERS, BATCH = 2048, 4, 64
MODEL, TOKENS, BLOCKS = 768, 512, 2
PARTS = ("mlp", "transformer", "update", "memory", "scale")
AT_ONCE = "transformer, heads at once"
# Three layers of a billion weights: 12.9 GB dense, 51.5 GB with the rest.
SCALE = 32768


def mlp(params, x):
  for name in sorted(params):
    x = jax.nn.relu(x @ params[name]["kernel"])
  return x


def mlp_shapes(width):
  return {
    f"layer{i}": {"kernel": jax.ShapeDtypeStruct((width, width), jnp.float32)}
    for i in range(LAYERS)
  }


def norm(x):
  x = x - x.mean(-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def at_once(q, k, v):
  """Attention of all heads (tokens, heads, size), as it is usually written."""
  weights = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
  return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(weights), v)


def by_head(q, k, v):
  """The same, one head after the other, computed anew for its gradient.

  XLA writes several arrays of heads × tokens² for `at_once`, on which both
  dense and sparse models would spend most of their time beside projections.
  """
  heads = [jnp.moveaxis(a, 1, 0) for a in (q * q.shape[-1] ** -0.5, k, v)]
  one = lambda q, k, v: jax.nn.softmax(q @ k.T) @ v
  mixed = jax.lax.map(lambda each: jax.checkpoint(one)(*each), tuple(heads))
  return jnp.moveaxis(mixed, 0, 1)


def transformer(params, x, attention=by_head):
  for name in sorted(params):
    p = params[name]
    h = norm(x)
    q, k, v = (
      (h @ p[part]["kernel"]).reshape(len(x), 12, -1) for part in "qkv"
    )
    x = x + attention(q, k, v).reshape(x.shape) @ p["out"]["kernel"]
    h = jax.nn.gelu(norm(x) @ p["up"]["kernel"])
    x = x + h @ p["down"]["kernel"]
  return x


def transformer_shapes(width):
  shape = lambda *s: {"kernel": jax.ShapeDtypeStruct(s, jnp.float32)}
  block = {part: shape(width, width) for part in ("q", "k", "v", "out")}
  block |= {"up": shape(width, 4 * width), "down": shape(4 * width, width)}
  return {f"block{i}": block for i in range(BLOCKS)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Thin:
  """A weight of rank 8: its product costs next to nothing but its result."""

  left: jax.Array
  right: jax.Array

  def __rmatmul__(self, x):
    return (x @ self.left) @ self.right


def thin_shapes(width):
  """Return `transformer_shapes` with thin weights, to time all the rest."""
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  return jax.tree.map(
    lambda s: Thin(shape(s.shape[0], 8), shape(8, s.shape[1])),
    transformer_shapes(width),
  )


def pruner_at(sparsity, algorithm="static_sparse", block=None):
  config = {
    "algorithm": algorithm, "sparsity": sparsity, "rng_seed": 0,
    "storage": "kept",
  }  # fmt: skip
  if block is not None:
    config["sparsity_type"] = f"block_{block},{block}"
  if algorithm != "static_sparse":
    config |= {
      "update_freq": 1, "update_start_step": 1, "update_end_step": 10**6
    }  # fmt: skip
  return jaxpruner.create_updater_from_config(config)


def data(batch, width):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)] * 2


def stepper(tx, loss, params, state, batch):
  """Return a function that takes one step."""

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, batch):
    grads, more = loss(params, state, batch)
    updates, state = tx.update(grads, state, params, **more)
    return optax.apply_updates(params, updates), state

  box = [params, state]

  def run():
    box[:] = step(*box, batch)
    return box[0]

  return run


def dense_step(model, shapes, batch):
  rng = np.random.default_rng(1)
  draw = lambda s: jnp.asarray(
    rng.standard_normal(s.shape, np.float32) * s.shape[0] ** -0.5
  )
  params, tx = jax.tree.map(draw, shapes), optax.adam(1e-4)
  tx = optax.with_extra_args_support(tx)

  def loss(params, _, batch):
    x, y = batch
    square = lambda p: jnp.mean((model(p, x) - y) ** 2)
    return jax.grad(square)(params), {}

  return stepper(tx, loss, params, tx.init(params), batch)


def kept_step(model, shapes, batch, pruner):
  init = lambda _: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  weights = pruner.create(jax.random.key(0), init)
  tx, apply = pruner.wrap_optax(optax.adam(1e-4)), kept.lift(model)

  def square(params, state, batch):
    x, y = batch
    return jnp.mean(
      (apply(pruner.pre_forward_update(params, state), x) - y) ** 2
    )

  def loss(params, state, batch):
    if not pruner.grows_by_gradient:
      return jax.grad(square)(params, state, batch), {}
    _, grads, growth = pruner.value_and_grad(square)(params, state, batch)
    return grads, {"growth": growth}

  params, state = kept.split(weights)[0], tx.init(weights)
  report = kept.training_bytes(params, state)
  return stepper(tx, loss, params, state, batch), report


def bcoo_step(model, shapes, batch, sparsity):
  """The same step with `jax.experimental.sparse`, where x @ w is its own."""
  from jax.experimental import sparse

  rng = np.random.default_rng(1)
  values, places = {}, {}
  for name, layer in shapes.items():
    shape = layer["kernel"].shape
    count = round(np.prod(shape) * (1 - sparsity))
    at = np.sort(rng.choice(np.prod(shape), count, replace=False))
    places[name] = jnp.asarray(np.stack(np.unravel_index(at, shape), 1))
    values[name] = jnp.asarray(rng.standard_normal(count, np.float32) * 0.02)
  tx = optax.with_extra_args_support(optax.adam(1e-4))

  def loss(values, _, batch):
    x, y = batch

    def square(values):
      shape = (WIDTH, WIDTH)
      params = {
        n: {"kernel": sparse.BCOO((v, places[n]), shape=shape)}
        for n, v in values.items()
      }
      return jnp.mean((model(params, x) - y) ** 2)

    return jax.grad(square)(values), {}

  return stepper(tx, loss, values, tx.init(values), batch)


def torch_rows(python):
  """Return rows of torch's CSR training, by a Python that has torch."""
  script = pathlib.Path(__file__).with_name("torch_csr.py")
  out = subprocess.run(
    [python, script, str(WIDTH), str(LAYERS), str(BATCH), "0.95"],
    capture_output=True, text=True, check=True,
  )  # fmt: skip
  found = json.loads(out.stdout.splitlines()[-1])
  return [
    {"model": "mlp", "variant": variant, "sparsity": s, "ms": 1e3 * seconds,
     "speedup": found["dense"] / seconds, "bytes": None}
    for variant, s, seconds in (
      ("torch dense", 0.0, found["dense"]), ("torch csr", 0.95, found["csr"])
    )
  ]  # fmt: skip


def narrow(width, sparsity):
  return max(16, round(width * (1 - sparsity) ** 0.5 / 16) * 16)


def compare(name, repeats):
  """Return rows of one model: time of a step by sparsity and variant."""
  attention = at_once if name == AT_ONCE else by_head
  whole = functools.partial(transformer, attention=attention)
  model, make, width, batch = (whole, transformer_shapes, MODEL, TOKENS)
  if name == "mlp":
    model, make, width, batch = (mlp, mlp_shapes, WIDTH, BATCH)
  steps = {("dense", 0.0): dense_step(model, make(width), data(batch, width))}
  reports = {}
  for s in SPARSITIES:
    steps["kept", s], reports["kept", s] = kept_step(
      model, make(width), data(batch, width), pruner_at(s)
    )
  if name == "mlp":
    for s in SPARSITIES:
      small = narrow(width, s)
      steps["narrow", s] = dense_step(model, make(small), data(batch, small))
    for block in (16, 32, 64):
      for s in (0.9, 0.95):
        label = f"kept, blocks {block}"
        steps[label, s], reports[label, s] = kept_step(
          model,
          make(width),
          data(batch, width),
          pruner_at(s, block=block),
        )
    steps["bcoo", 0.95] = bcoo_step(
      model, make(width), data(batch, width), 0.95
    )
  else:
    steps["no projections", 1.0] = dense_step(
      model, thin_shapes(width), data(batch, width)
    )
  runs = list(steps.values())
  for run in runs:
    jax.block_until_ready(run())
  times = page.interleave(*runs, repeats=repeats)
  return [
    {
      "model": name,
      "variant": variant,
      "sparsity": s,
      "ms": 1e3 * float(np.median(own)),
      "speedup": page.ratio(times[0], own),
      "bytes": reports[variant, s].ratio if "kept" in variant else None,
    }
    for (variant, s), own in zip(steps, times, strict=True)
  ]


def masked_step(model, shapes, batch, algorithm, sparsity):
  """A step under masks that rewires every layer."""
  pruner = pruner_at(sparsity, algorithm).updater
  rng = np.random.default_rng(1)
  draw = lambda s: jnp.asarray(
    rng.standard_normal(s.shape, np.float32) * s.shape[0] ** -0.5
  )
  params, tx = jax.tree.map(draw, shapes), pruner.wrap_optax(optax.adam(1e-4))
  state = tx.init(params)

  def loss(params, _, batch):
    x, y = batch
    square = lambda p: jnp.mean((model(p, x) - y) ** 2)
    return jax.grad(square)(params), {}

  params = pruner.post_gradient_update(params, state)
  return stepper(tx, loss, params, state, batch)


def rebuild(sparsity):
  """Return a function that drops, and writes all lists anew; nothing grows."""
  from jaxpruner.kept import growth, rewiring

  weights = [
    kept.create(jax.random.key(i), (WIDTH, WIDTH), sparsity)
    for i in range(LAYERS)
  ]
  words = jnp.array([1, 2], jnp.uint32)
  words = growth.random(words, 0, "w", (WIDTH, WIDTH), 1)

  @jax.jit
  def run(weights):
    leaves = [
      rewiring.Leaf(w.values, w.layout, words, jnp.int32(n), n)
      for w in weights
      for n in [w.layout.count]
    ]
    return [found[:2] for found in rewiring.rewire(leaves)]

  return lambda: run(weights)


def gradients():
  """Return a function that computes the dense gradients of all layers."""
  x, g = data(BATCH, WIDTH)
  run = jax.jit(lambda pairs: [a.T @ b for a, b in pairs])
  pairs = [(x + i, g - i) for i in range(LAYERS)]
  return lambda: run(pairs)


def updates(repeats):
  """Return rows: a step that rewires every layer over one that does not."""
  rows = []
  for s in (0.9, 0.98):
    batch, shapes = data(BATCH, WIDTH), mlp_shapes(WIDTH)
    runs = {"plain": kept_step(mlp, shapes, batch, pruner_at(s))[0]}
    runs["lists alone"] = rebuild(s)
    runs["dense gradients alone"] = gradients()
    for algorithm in ("set", "rigl"):
      pruner = pruner_at(s, algorithm)
      runs[algorithm] = kept_step(mlp, shapes, batch, pruner)[0]
    for algorithm in ("set", "rigl"):
      runs[f"{algorithm}, masked"] = masked_step(
        mlp, shapes, batch, algorithm, s
      )
    for fn in (*runs.values(), *runs.values()):  # step 0 rewires nothing
      jax.block_until_ready(fn())
    times = page.interleave(*runs.values(), repeats=repeats)
    rows += [
      {"algorithm": name, "sparsity": s, "ms": 1e3 * float(np.median(own)),
       "steps": page.ratio(own, times[0])}
      for name, own in zip(runs, times, strict=True)
    ]  # fmt: skip
  return rows


def peak_memory():
  """Return the most memory that this process has had, in bytes."""
  # Not ru_maxrss: a process inherits that of the one that started it.
  text = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(text.split("VmHWM:")[1].split()[0])


def peak_of(variant, sparsity, width):
  """Return peak and expected bytes of three steps, in a fresh process."""
  code = [sys.executable, __file__, "--child", variant, str(sparsity)]
  out = subprocess.run(
    [*code, "--width", str(width)], capture_output=True, text=True, check=True
  )
  return json.loads(out.stdout.splitlines()[-1])


def child(variant, sparsity, width):
  """Print the peak memory of three steps, as JSON."""
  batch = data(BATCH, width)
  warm = lambda: jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
  warm()
  base = peak_memory()
  layers = mlp_shapes(width)
  if variant == "scale":
    layers = {name: layers[name] for name in sorted(layers)[:3]}
  size = 16 * sum(s.size for s in jax.tree.leaves(layers))
  if variant == "dense":
    run, total = dense_step(mlp, layers, batch), size
  else:
    run, report = kept_step(mlp, layers, batch, pruner_at(sparsity))
    total = report.total
  jax.block_until_ready(run())
  start = time.perf_counter()
  for _ in range(2):
    jax.block_until_ready(run())
  seconds = (time.perf_counter() - start) / 2
  peak = peak_memory()
  row = {
    "variant": variant, "sparsity": sparsity, "width": width,
    "dense_bytes": size, "bytes": total, "peak_bytes": peak - base,
    "step_s": seconds,
  }  # fmt: skip
  print(json.dumps(row))


def speed_section(rows):
  head = ["model", "weights", "sparsity", "step, ms", "dense ÷ this", "bytes"]
  lines = [
    [
      r["model"],
      r["variant"],
      f"{r['sparsity']:.0%}",
      f"{r['ms']:.1f}",
      f"{r['speedup']:.2f}",
      "" if r["bytes"] is None else f"{r['bytes']:.3f}",
    ]
    for r in rows
  ]
  return (
    "## A training step\n\n`bytes` is weights, gradients, Adam moments and "
    "indices over those of dense training. `no projections` is the\n"
    "transformer with weights of rank 8: what remains is attention's own "
    "products, softmax,\nnorms and GELU, which stay dense. It bounds what "
    "sparse weights can reach. The transformer's\nattention is computed head "
    "by head (`by_head`), dense and sparse alike; `heads at once` is the\n"
    "usual way to write it, in which XLA spends more on arrays of heads × "
    "tokens².\n\n" + page.table(head, lines)
  )


def update_section(rows):
  head = ["algorithm", "sparsity", "update step, ms", "plain steps"]
  lines = [
    [r["algorithm"], f"{r['sparsity']:.0%}", f"{r['ms']:.1f}",
     f"{r['steps']:.2f}"]
    for r in rows
  ]  # fmt: skip
  return (
    "## A mask update\n\nA step of the MLP that rewires all layers, and "
    "how many plain steps it takes;\n`lists alone` writes the positions of "
    "all layers anew; `dense gradients alone` are XLA's products\nfor them, "
    "which RigL needs beside the plain step: one plain step more than this row "
    "is\nabout the least that its update can take, before anything is searched "
    "or dropped.\n\n" + page.table(head, lines)
  )


def memory_section(rows):
  head = ["weights", "width", "sparsity", "dense state, MB", "state, MB",
          "peak, MB", "step, s"]  # fmt: skip
  lines = [
    [
      r["variant"],
      str(r["width"]),
      f"{r['sparsity']:.0%}",
      f"{r['dense_bytes'] / 1e6:.0f}",
      f"{r['bytes'] / 1e6:.0f}",
      f"{r['peak_bytes'] / 1e6:.0f}",
      f"{r['step_s']:.2f}",
    ]
    for r in rows
  ]
  return (
    "## Memory of a fresh process\n\n`scale` has three layers of 2³⁰ "
    "weights. A kept peak has about 230 MB of JAX, Numba and its compiler in "
    "it,\nwhatever the model.\n\n" + page.table(head, lines)
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
  parser.add_argument("--repeats", type=int, default=9)
  parser.add_argument(
    "--torch", metavar="PYTHON", help="a Python with torch: adds its CSR rows"
  )
  parser.add_argument("--child", nargs=2)
  parser.add_argument("--width", type=int, default=WIDTH)
  options = parser.parse_args()
  if options.child:
    child(options.child[0], float(options.child[1]), options.width)
    return
  start = time.perf_counter()
  record: dict[str, list] = {"speed": [], "update": [], "memory": []}
  for name in ("mlp", "transformer", AT_ONCE):
    if name.split(",")[0] in options.only:
      record["speed"] += compare(name, options.repeats)
  if options.torch and "mlp" in options.only:
    record["speed"] += torch_rows(options.torch)
  if "update" in options.only:
    record["update"] = updates(options.repeats)
  if "memory" in options.only:
    cases = [("dense", 0.0), *(("kept", s) for s in SPARSITIES)]
    record["memory"] += [peak_of(v, s, 2 * WIDTH) for v, s in cases]
  if "scale" in options.only:
    record["memory"].append(peak_of("scale", 0.99, SCALE))
  sections = [
    make(record[key])
    for key, make in (
      ("speed", speed_section),
      ("update", update_section),
      ("memory", memory_section),
    )
    if record[key]
  ]
  if set(options.only) != set(PARTS):
    print("\n\n".join(sections))  # the page has all parts of one run
    return
  place = page.RESULTS / "training.json"
  place.write_text(json.dumps(record, indent=1) + "\n")
  seconds = time.perf_counter() - start
  page.write("training", "Training at kept size", sections, seconds)


if __name__ == "__main__":
  main()
