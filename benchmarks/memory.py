"""Memory of training and of inference: dense, masked, packed, BCOO, kept.

  python benchmarks/memory.py                  (about 5 minutes, alone)
  python benchmarks/memory.py --only mlp       (one model, printed only)

Every case is a fresh process. It makes its weights, runs the forward pass three
times, then three training steps (Adam; donated). A peak is the most memory of
the process meanwhile, less what it had before its weights were made.

- dense: no masks.
- masked: RigL's masks, a byte per weight.
- packed: RigL's masks, a bit per weight; at inference, weights packed by
  `sparse.pack`.
- bcoo: `jax.experimental.sparse`, values trained under fixed positions.
- kept: `storage: "kept"`.
"""

import argparse
import ctypes
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
from training import peak_memory

import jaxpruner
from jaxpruner import kept, sparse

SPARSITY = 0.95
VARIANTS = ("dense", "masked", "packed", "bcoo", "kept")
# Model, its size (width of the MLP, blocks of the ViT), batches.
CASES = [("mlp", 1024, (64,)), ("mlp", 4096, (1, 64, 512)), ("vit", 12, (1, 8))]
# BCOO multiplies each kept weight by each row at once: bytes one product may
# take. The lower limit of the ViT keeps the run short: its BCOO step takes
# seconds at batch 1, and larger batches were not measured.
MOST_BCOO = {"mlp": 4e9, "vit": 4e8}
SIDE, PATCH, WIDTH, HEADS = 224, 16, 768, 12


def mlp(params, x):
  for name in sorted(params):
    x = jax.nn.relu(x @ params[name]["kernel"])
  return x


def mlp_shapes(width):
  shape = jax.ShapeDtypeStruct((width, width), jnp.float32)
  return {f"layer{i}": {"kernel": shape} for i in range(4)}


def vit(params, x):
  """ViT-B/16 (12 blocks): patches, class token, positions, 1000 classes."""
  batch, cells = x.shape[0], SIDE // PATCH
  x = x.reshape(batch, cells, PATCH, cells, PATCH, 3).transpose(
    0, 1, 3, 2, 4, 5
  )
  x = x.reshape(batch, cells**2, -1) @ params["embed"]["kernel"]
  token = jnp.broadcast_to(params["token"], (batch, 1, WIDTH))
  x = jnp.concatenate([token, x], 1) + params["positions"]
  for name in sorted(n for n in params if n.startswith("block")):
    p = params[name]
    h = norm(x, p["norm1"])
    q, k, v = (
      (h @ p[part]["kernel"]).reshape(*x.shape[:2], HEADS, -1) for part in "qkv"
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(x.shape) @ p["out"]["kernel"]
    h = jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]["kernel"])
    x = x + h @ p["down"]["kernel"]
  return norm(x[:, 0], params["norm"]) @ params["head"]["kernel"]


def norm(x, scale):
  x = x - x.mean(-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def vit_shapes(blocks):
  array = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  layer = lambda *s: {"kernel": array(*s)}
  block = {part: layer(WIDTH, WIDTH) for part in ("q", "k", "v", "out")}
  block |= {"up": layer(WIDTH, 4 * WIDTH), "down": layer(4 * WIDTH, WIDTH)}
  block |= {"norm1": array(WIDTH), "norm2": array(WIDTH)}
  return {f"block{i:02d}": block for i in range(blocks)} | {
    "embed": layer(3 * PATCH**2, WIDTH),
    "head": layer(WIDTH, 1000),
    "norm": array(WIDTH),
    "positions": array(1, (SIDE // PATCH) ** 2 + 1, WIDTH),
    "token": array(1, 1, WIDTH),
  }


def model_of(name, size, batch):
  """Return the model, the shapes of its parameters, its inputs and targets."""
  rng = np.random.default_rng(0)
  draw = lambda *s: jnp.asarray(rng.standard_normal(s, np.float32))
  if name == "mlp":
    return mlp, mlp_shapes(size), draw(batch, size), draw(batch, size)
  return vit, vit_shapes(size), draw(batch, SIDE, SIDE, 3), draw(batch, 1000)


def filter_fn(names, leaf):
  return names[-1] == "kernel" and leaf.ndim == 2


def pruner_of(storage, packed=False):
  return jaxpruner.create_updater_from_config({
    "algorithm": "rigl", "sparsity": SPARSITY, "rng_seed": 0,
    "update_freq": 100, "update_start_step": 10, "update_end_step": 1000,
    "storage": storage, "filter_fn": filter_fn,
    **({"use_packed_masks": True} if packed else {}),
  })  # fmt: skip


def draw_dense(shapes):
  rng = np.random.default_rng(1)
  draw = lambda s: jnp.asarray(
    rng.standard_normal(s.shape, np.float32) * 0.02 * (len(s.shape) > 1)
    + (len(s.shape) == 1)
  )
  return jax.tree.map(draw, shapes)


def training_of(tx, forward, params, state, x, y):
  """Return a function that takes one step."""

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, x, y):
    loss = lambda p: jnp.mean((forward(p, state, x) - y) ** 2)
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  box = [params, state]

  def run():
    box[:] = step(*box, x, y)
    return box[0]

  return run


def dense_case(variant, model, shapes):
  """Return params, the forward function of them, and how to train them."""
  params, forward = draw_dense(shapes), lambda p, _, x: model(p, x)
  tx: optax.GradientTransformation = optax.adam(1e-4)
  if variant != "dense":
    pruner = pruner_of("masked", variant == "packed")
    tx = pruner.wrap_optax(tx)
  return params, forward, lambda p: (tx, p, tx.init(p))


def bcoo_case(model, shapes):
  from jax.experimental import sparse as experimental

  rng, places = np.random.default_rng(1), {}
  leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
  values = []
  for i, (path, s) in enumerate(leaves):
    if path[-1] != jax.tree_util.DictKey("kernel"):
      values.append(jnp.ones(s.shape))
      continue
    size = int(np.prod(s.shape))
    count = round(size * (1 - SPARSITY))
    at = np.sort(rng.choice(size, count, replace=False))
    at = np.stack(np.unravel_index(at, s.shape), 1).astype(np.int32)
    places[i] = jnp.asarray(at), s.shape
    values.append(jnp.asarray(rng.standard_normal(count, np.float32) * 0.02))

  def forward(values, _, x):
    full = [
      experimental.BCOO((v, places[i][0]), shape=places[i][1])
      if i in places
      else v
      for i, v in enumerate(values)
    ]
    return model(treedef.unflatten(full), x)

  tx = optax.adam(1e-4)
  return values, forward, lambda p: (tx, p, tx.init(p))


def kept_case(model, shapes):
  pruner = pruner_of("kept")
  # RigL, between its mask updates: what a step of it holds.
  pruner = kept.KeptUpdater(
    jaxpruner.StaticRandomSparse(
      sparsity_distribution_fn=pruner.updater.sparsity_distribution_fn,
      rng_seed=0,
    )
  )
  init = lambda _: jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)
  weights = pruner.create(jax.random.key(0), init)
  tx, apply = pruner.wrap_optax(optax.adam(1e-4)), kept.lift(model)

  def forward(p, state, x):  # inference has the positions in p
    return apply(p if state is None else kept.join(p, state.layouts), x)

  return weights, forward, lambda w: (tx, kept.split(w)[0], tx.init(w))


def packed_inference(model, shapes, x):
  """Return the forward pass of weights packed one by one."""
  rng = np.random.default_rng(1)

  def make(path, s):
    if path[-1] != jax.tree_util.DictKey("kernel"):
      return jnp.ones(s.shape)
    weight = rng.standard_normal(s.shape, np.float32) * np.float32(0.02)
    return sparse.pack(weight, rng.random(s.shape) >= SPARSITY, format="sell")

  packed = jax.tree_util.tree_map_with_path(make, shapes)
  apply = jax.jit(model)
  return lambda: apply(packed, x)


def reset_peak():
  """Give back free memory; let the kernel forget the peak of this process."""
  ctypes.CDLL(None).malloc_trim(0)
  pathlib.Path("/proc/self/clear_refs").write_text("5")


def child(name, size, batch, variant):
  """Print the peaks of inference and of training, as JSON."""
  jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
  if variant in ("kept", "packed inference"):  # Numba and its compiler
    small = kept.create(jax.random.key(0), (64, 64), 0.9)
    jax.block_until_ready(jnp.ones((64, 64)) @ small)
  model, shapes, x, y = model_of(name, size, batch)
  reset_peak()
  base = peak_memory()
  row = {"model": name, "size": size, "batch": batch, "variant": variant}
  row["before"] = base
  if variant == "packed inference":
    infer = packed_inference(model, shapes, x)
  else:
    make = {"bcoo": bcoo_case, "kept": kept_case}.get(
      variant, functools.partial(dense_case, variant)
    )
    params, forward, start = make(model, shapes)
    apply = jax.jit(lambda p, x: forward(p, None, x))
    infer = lambda: apply(params, x)
  jax.block_until_ready(infer())
  reset_peak()  # making and compiling are over
  times = timed(infer)
  row |= {"infer": peak_memory() - base, "infer_s": times}
  if variant != "packed inference":
    tx, params, state = start(params)
    step = training_of(tx, forward, params, state, x, y)
    del params, state
    infer = None
    jax.block_until_ready(step())
    reset_peak()
    times = timed(step)
    row |= {"train": peak_memory() - base, "train_s": times}
  print(json.dumps(row))


def timed(run):
  start = time.perf_counter()
  for _ in range(2):
    jax.block_until_ready(run())
  return (time.perf_counter() - start) / 2


def run_child(name, size, batch, variant):
  command = [sys.executable, __file__, "--child", name, str(size), str(batch)]
  out = subprocess.run(
    [*command, variant], capture_output=True, text=True, check=False
  )
  if out.returncode:
    raise RuntimeError(f"{name} {size} {batch} {variant}: {out.stderr[-3000:]}")
  return json.loads(out.stdout.splitlines()[-1])


def bcoo_bytes(name, size, batch):
  """Return the bytes of a product with BCOO: kept weights times rows."""
  largest = size**2 if name == "mlp" else 4 * WIDTH**2
  rows = batch if name == "mlp" else batch * ((SIDE // PATCH) ** 2 + 1)
  return 4 * (1 - SPARSITY) * largest * rows


def measure(models):
  rows = []
  for name, size, batches in CASES:
    if name not in models:
      continue
    for batch in batches:
      for variant in VARIANTS:
        if (
          variant == "bcoo" and bcoo_bytes(name, size, batch) > MOST_BCOO[name]
        ):
          continue
        row = run_child(name, size, batch, variant)
        if variant == "packed":
          own = run_child(name, size, batch, "packed inference")
          row |= {"infer": own["infer"], "infer_s": own["infer_s"]}
        rows.append(row)
        print(row, file=sys.stderr)
  return rows


def section(rows):
  head = ["model", "batch", "weights", "before, MB", "inference, MB",
          "training, MB", "of dense", "forward, s", "step, s"]  # fmt: skip
  lines, dense = [], {}
  for r in rows:
    key = r["model"], r["size"], r["batch"]
    if r["variant"] == "dense":
      dense[key] = r["train"]
    title = "ViT-B/16" if r["model"] == "vit" else f"MLP 4 × {r['size']}²"
    lines.append([
      title, str(r["batch"]), r["variant"], f"{r['before'] / 1e6:.0f}",
      f"{r['infer'] / 1e6:.0f}",
      f"{r['train'] / 1e6:.0f}", f"{r['train'] / dense[key]:.2f}",
      f"{r['infer_s']:.3f}", f"{r['train_s']:.3f}",
    ])  # fmt: skip
  return (
    f"Peak memory at {SPARSITY:.0%} sparsity, every case in a fresh process, "
    "without what the\nprocess had before its weights were made (JAX, the "
    "batch; for kept weights also Numba\nand its compiler), which is in the "
    "column `before`. `of dense` compares training.\n\n`masked` and `packed` "
    "train RigL's masks over dense arrays; at inference `packed` is\n"
    "`sparse.pack`. BCOO multiplies every kept weight by every row before it "
    "adds: it is\nleft out where one product would take more than 4 GB, and on "
    "the ViT above batch 1,\nto keep the run short: that case was not "
    "measured. Activations are in all figures:\nthey bring large batches "
    "together.\n\n" + page.table(head, lines)
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  models = sorted({name for name, _, _ in CASES})
  parser.add_argument("--only", nargs="+", choices=models, default=models)
  parser.add_argument("--child", nargs=4)
  options = parser.parse_args()
  if options.child:
    name, size, batch, variant = options.child
    child(name, int(size), int(batch), variant)
    return
  start = time.perf_counter()
  rows = measure(options.only)
  if set(options.only) != set(models):
    print(section(rows))  # the page has all models of one run
    return
  (page.RESULTS / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
  seconds = time.perf_counter() - start
  page.write("memory", "Memory, by storage", [section(rows)], seconds)


if __name__ == "__main__":
  main()
