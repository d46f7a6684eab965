"""How good real models are when pruned after training.

    python benchmarks/oneshot.py --model SmolLM2-135M
    python benchmarks/oneshot.py --methods sparsegpt+blocks
    python benchmarks/oneshot.py --methods sparsegpt+blocks+distill
    python benchmarks/oneshot.py --model CIFAR-10-CNN
    python benchmarks/oneshot.py --model SmolLM2-135M --memory

Language models calibrate on the first part of three texts (Wikipedia, speeches,
film reviews) and are judged on a later part; stories15M, which knows nothing
but small children's stories, on stories it told itself. The benchmark writes
each figure to docs/results/oneshot.json as soon as it is known; figures already
there are not measured again.
"""

import argparse
import datetime
import functools
import gc
import importlib.metadata
import itertools
import json
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax

from jaxpruner import datasets, post_training
from jaxpruner.post_training import (
  calibration_text,
  contrib,
  evaluation,
  models,
)
from jaxpruner.post_training.models import resnet50
from jaxpruner.sparse import files

RESULTS = pathlib.Path(__file__).parent.parent / "docs/results/oneshot.json"
KINDS = ("enwik8", "sotu", "imdb")


def three_texts(part: int) -> list[str]:
  """The first or a later part of each source: they share no document."""
  million = 1_000_000
  wiki = datasets.load_enwik8()[40 * part * million :][: 4 * million]
  speeches = [
    raw.decode("utf-8", "ignore") for *_, raw in datasets.load_speeches()
  ]
  reviews = datasets.load_imdb()
  return [
    wiki.tobytes().decode("utf-8", "ignore"),
    "\n\n".join(speeches[part::2])[: 4 * million],
    "\n\n".join(reviews[part::2][:5000]),
  ]


def store(key: str, row: dict) -> None:
  rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  print(key, json.dumps(row), flush=True)
  rows[key] = row | {
    "date": datetime.date.today().isoformat(),
    "jax": importlib.metadata.version("jax"),
  }
  temporary = RESULTS.with_suffix(".tmp")
  temporary.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
  os.replace(temporary, RESULTS)


def known(key: str, amount: int, of: str = "tokens") -> bool:
  rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  return rows.get(key, {}).get(of, 0) >= amount


def to_learn(
  model, rows: int, seed: int = 0, window: int = 0, skip: int = 0
) -> np.ndarray:
  """Token windows to learn from, without the first `skip` of each text.

  A model that tells its own stories is given others by another seed.
  """
  if model.sample:
    return model.sample(rows, seed)
  encode, length = model.tokenizer.encode, window or model.window
  texts, skip = three_texts(0), skip * len(KINDS)
  return calibration_text.mixed(texts, encode, length, rows + skip)[skip:]


def to_judge(model, args) -> dict[str, np.ndarray]:
  """Token windows to be judged by, per source."""
  encode, length = model.tokenizer.encode, model.window
  if model.sample:
    return {"own": model.sample(-(-args.tokens // length), 1)}
  rows = -(-args.tokens // len(KINDS) // length)
  parts = zip(KINDS, three_texts(1), strict=True)
  return {
    k: calibration_text.mixed([text], encode, length, rows) for k, text in parts
  }


def language(args: argparse.Namespace) -> None:
  """Measure a language model, dense and pruned."""
  model = models.load(args.model)
  learn = to_learn(model, args.calibration, window=args.window)
  judge = to_judge(model, args)
  # Blocks learn from one batch per step: small ones give more steps.
  size = lambda method: args.batch if "+blocks" in method else 4
  split = lambda method: np.split(learn, len(learn) // size(method))

  def measure(key: str, params, extra: dict) -> None:
    start = time.perf_counter()
    found = {
      kind: evaluation.perplexity(model.apply_fn, params, rows)
      for kind, rows in judge.items()
    }
    mean = float(np.exp(np.mean(np.log(list(found.values())))))
    row = {"perplexity": mean, **found, **extra}
    row["tokens"] = int(sum(rows.size for rows in judge.values()))
    row["judged_seconds"] = time.perf_counter() - start
    store(key, row)

  if not known(f"{args.model} dense", args.tokens):
    measure(f"{args.model} dense", model.params, {})
  for kind, method, allocation in itertools.product(
    args.types, args.methods, args.allocations
  ):
    key = f"{args.model} {kind} {method}"
    if allocation != "uniform":
      key += f" {allocation}"
    if args.again or not known(key, args.tokens):
      base = method.removesuffix("+distill")
      params, extra, masks = pruned(
        model, split(method), base, 0.5, kind, args, allocation=allocation
      )
      extra |= {"calibration_tokens": learn.size, "window": learn.shape[1]}
      if base != method:
        params, more = recovered(model, params, masks, kind, args)
        extra |= more
      measure(key, params, extra)


def recovered(model, params, masks, kind, args) -> tuple[Any, dict]:
  """Train for a while on the dense model's predictions."""
  rows = to_learn(
    model, args.distill_windows, 2, args.window, skip=args.calibration
  )
  rng = np.random.default_rng(0)
  batches = (
    rows[chosen]
    for _ in itertools.count()
    for chosen in rng.permutation(len(rows))[
      : len(rows) // args.distill_batch * args.distill_batch
    ].reshape(-1, args.distill_batch)
  )
  losses = []

  def progress(step: int, loss: float) -> None:
    losses.append(loss)
    if step % 10 == 1:
      mean = np.mean(losses[-30:])
      print(f"step {step}, {clock():.0f} s, loss {mean:.4f}", flush=True)

  start, cpu = time.perf_counter(), time.process_time()
  steps, tx = args.distill_steps, None
  if steps:  # as many on every machine
    batches = itertools.islice(batches, steps)
    tx = optax.adam(
      optax.warmup_cosine_decay_schedule(
        0, args.distill_rate, max(1, steps // 10), steps
      ),
      b2=0.98,
    )

  def clock() -> float:
    """Seconds of two processors, or the part of the wall time given."""
    wall = (time.perf_counter() - start) * args.minutes / args.wall_minutes
    return max((time.process_time() - cpu) / 2, wall)

  def labels(logits, rows):
    return args.labels * next_loss(lambda *_: logits, None, rows)

  params = contrib.distill(
    model.apply_fn, params, masks, model.params, batches,
    loss_fn=labels if args.labels else None, tx=tx,
    seconds=60 * args.minutes, learning_rate=args.distill_rate,
    clock=clock, progress=progress,
  )  # fmt: skip
  if args.keep:
    name = f"{kind.replace(':', '-')}-distilled.safetensors"
    files.save(pathlib.Path(args.keep) / name, params, masks)
  return params, {
    "distill_seconds": time.perf_counter() - start,
    "distill_cpu_seconds": time.process_time() - cpu,
    "distill_steps": len(losses),
    "distill_tokens": len(losses) * args.distill_batch * rows.shape[1],
    "distill_rate": args.distill_rate,
    "distill_batch": args.distill_batch,
    "distill_labels": args.labels,
  }


def views(photos: np.ndarray, width: int) -> np.ndarray:
  """The photos whole, and their corners and middle at full size."""
  size = photos.shape[1]
  rest = size - width
  places = [(0, 0), (0, rest), (rest, 0), (rest, rest), (rest // 2, rest // 2)]
  crops = [photos[:, i : i + width, j : j + width] for i, j in places]
  larger = [jax.image.resize(c, photos.shape, "linear") for c in crops]
  return np.concatenate([photos, *map(np.asarray, larger)])


def pictures(args: argparse.Namespace) -> None:
  """Measure a classifier, dense and pruned."""
  model = models.load(args.model)
  if args.model == "ResNet-50":
    photos, y = resnet50.photos()
    # Twenty photos are few: views of them to be judged by, and to learn from
    # others, mirrored.
    x, y, size = views(photos, 192), np.tile(y, 6), 20
    mirrored = photos[:, :, ::-1]
    learn = np.concatenate([views(mirrored, 160), views(mirrored, 208)[20:]])
  else:
    sets = datasets.load_cifar10()
    x = sets["test_x"][: args.images].astype(np.float32)
    y = sets["test_y"][: args.images]
    learn, size = sets["train_x"][:512].astype(np.float32), 64
  batches = np.split(learn, len(learn) // size)
  dense = evaluation.classes(model.apply_fn, model.params, x, size)

  def measure(key: str, params, extra: dict) -> None:
    found = evaluation.classes(model.apply_fn, params, x, size)
    row = {
      "accuracy": float((found == y).mean()),
      "agreement": float((found == dense).mean()),
      "images": len(x),
    }
    store(key, row | extra)

  if not known(f"{args.model} dense", len(x), "images"):
    measure(f"{args.model} dense", model.params, {})
  for sparsity in args.sparsities:
    for method in args.methods:
      key = f"{args.model} {sparsity} {method}"
      if not known(key, len(x), "images"):
        # Running statistics are measured anew, for all methods alike.
        options = method, sparsity, "unstructured", args, True
        measure(key, *pruned(model, batches, *options)[:2])


def resident(word: str) -> int:
  """Bytes of memory held now (VmRSS), or at most (VmHWM)."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(l.split()[1]) for l in lines if l.startswith(word)) * 1024


def forget_peak() -> int:
  """Return the bytes of memory held now; the peak is counted from here."""
  gc.collect()
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  return resident("VmRSS")


def memory(args: argparse.Namespace) -> None:
  """Measure what pruning takes beside the model, in this fresh process."""
  model = models.load(args.model)
  learn = to_learn(model, args.calibration)
  batches = np.split(learn, len(learn))
  first = jax.tree.map(np.array, model.params)
  whole = sum(x.nbytes for x in jax.tree.leaves(first))
  for turn in ("cold", "warm"):  # the walk is compiled anew in each turn
    params = jax.tree.map(np.array, first)
    before = forget_peak()
    _, masks, report = post_training.prune(
      model.apply_fn,
      params,
      batches,
      sparsity=0.5,
      filter_fn=model.filter_fn,
      donate=True,
    )
    widest = max(layer.shape[-2] for layer in report.layers)
    row = {
      "model_bytes": whole,
      "extra_bytes": resident("VmHWM") - before,
      "mask_bytes": sum(x.nbytes for x in jax.tree.leaves(masks)),
      "statistics_bytes": 4 * widest**2,
      "calibration_tokens": int(learn.size),
    }
    store(f"{args.model} memory {turn}", row)
    del masks, params


def pruned(
  model, batches, method, sparsity, kind, args, refit=False,
  allocation="uniform",
):  # fmt: skip
  """Prune by a method, or by one with a word behind it.

  "+blocks" prunes block by block and trains each, "+levels" searches the level
  of each layer, and "+learned" goes on from the N:M masks of the method and
  learns better ones for the dense weights.
  """
  solver, _, word = method.partition("+")
  run: Any = functools.partial(post_training.prune, refit=refit)
  row: dict[str, Any] = {}
  if word == "blocks":
    run = functools.partial(
      contrib.prune_blocks,
      epochs=args.epochs,
      learning_rate=args.learning_rate,
      folder=args.keep and pathlib.Path(args.keep) / kind.replace(":", "-"),
    )
    row = {n: getattr(args, n) for n in ("epochs", "learning_rate", "batch")}
  before = forget_peak()
  start, cpu = time.perf_counter(), time.process_time()
  options: dict[str, Any] = {
    "method": solver, "sparsity": sparsity, "filter_fn": model.filter_fn,
  }  # fmt: skip
  levels = None
  if word == "levels":
    levels = contrib.search_levels(
      model.apply_fn, model.params, batches, **options,
      progress=lambda *at: print(*at, flush=True),
    )  # fmt: skip
  params, masks, report = run(
    model.apply_fn,
    model.params,
    batches,
    **options,
    sparsity_type=kind,
    custom_sparsity_map=levels,
    allocation=allocation,
    progress=lambda *at: print(*at, flush=True),
  )
  if word == "learned":
    params, masks, row = learned(model, masks, batches, kind, args)
  row |= {
    "sparsity": report.sparsity,
    "seconds": time.perf_counter() - start,
    "cpu_seconds": time.process_time() - cpu,
    "extra_bytes": resident("VmHWM") - before,
  }
  return params, row, masks


def learned(model, masks, batches, kind, args) -> tuple[Any, Any, dict]:
  """Learn N:M masks on the loss of the next token, weights frozen."""
  rng = np.random.default_rng(0)
  turns = [
    batches[i]
    for _ in range(args.epochs)
    for i in rng.permutation(len(batches))
  ]
  masks = contrib.learn_masks(
    functools.partial(next_loss, model.apply_fn), model.params, turns,
    steps=len(turns), masks=masks, sparsity_type=kind,
    filter_fn=model.filter_fn, learning_rate=args.learning_rate,
    progress=lambda *at: print(*at, flush=True),
  )  # fmt: skip
  keep = lambda x, m: x if m is None else x * m
  params = jax.tree.map(keep, model.params, masks, is_leaf=lambda x: x is None)
  about = {n: getattr(args, n) for n in ("epochs", "learning_rate")}
  return params, masks, about


def next_loss(apply_fn, params, rows) -> Any:
  """The mean loss of each next token."""
  return optax.softmax_cross_entropy_with_integer_labels(
    apply_fn(params, rows)[:, :-1], rows[:, 1:]
  ).mean()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", default="stories15M")
  parser.add_argument("--tokens", type=int, default=51200)
  parser.add_argument("--images", type=int, default=10_000)
  parser.add_argument("--calibration", type=int, default=128, help="windows")
  parser.add_argument(
    "--window", type=int, default=0, help="tokens per window to calibrate on"
  )
  parser.add_argument(
    "--methods", nargs="*", default=["magnitude", "wanda", "sparsegpt"]
  )
  parser.add_argument("--types", nargs="*", default=["unstructured", "2:4"])
  parser.add_argument(
    "--sparsities", nargs="*", type=float, default=[0.5, 0.7, 0.8, 0.9]
  )
  parser.add_argument(
    "--epochs", type=int, default=5, help="of +blocks, +learned"
  )
  parser.add_argument("--learning-rate", type=float, default=2e-3)
  parser.add_argument("--batch", type=int, default=1, help="of +blocks")
  parser.add_argument("--keep", help="folder of finished blocks, to go on from")
  parser.add_argument(
    "--again", action="store_true", help="measure what is there once more"
  )
  parser.add_argument("--allocations", nargs="*", default=["uniform"])
  parser.add_argument(
    "--minutes", type=float, default=20, help="of +distill, on two processors"
  )
  parser.add_argument(
    "--wall-minutes", type=float, default=240, help="of +distill, at most"
  )
  parser.add_argument(
    "--distill-steps", type=int, default=0,
    help="of +distill: so many, the rate rising over a tenth of them",
  )  # fmt: skip
  parser.add_argument("--distill-windows", type=int, default=512)
  parser.add_argument("--distill-batch", type=int, default=1)
  parser.add_argument("--distill-rate", type=float, default=1e-4)
  parser.add_argument(
    "--labels", type=float, default=0, help="of +distill, weight of the loss"
  )
  parser.add_argument("--memory", action="store_true")
  args = parser.parse_args()
  if args.memory:
    return memory(args)
  image = args.model in ("ResNet-50", "CIFAR-10-CNN")
  (pictures if image else language)(args)


if __name__ == "__main__":
  main()
