"""`jaxpruner oneshot`: prune a pretrained model on a few batches of data."""

import argparse
import itertools
import os
import pathlib
import shutil
import sys
import time
from typing import Any

import jax
import numpy as np

from jaxpruner import datasets, sparse
from jaxpruner._tools import atomic, fingerprint
from jaxpruner.datasets import archives
from jaxpruner.post_training import (
  calibration_text,
  contrib,
  evaluation,
  models,
  pruning,
)
from jaxpruner.post_training.models import (
  decoder_config,
  hub,
  hub_tokenizer,
  resnet50,
)
from jaxpruner.post_training.solvers.table import SOLVERS
from jaxpruner.sparse import _layouts, _staging, checkpoints
from jaxpruner.sparse._table import size, table

_TRAIN = 16  # times as many windows to train on as to calibrate on


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options."""
  parser.add_argument(
    "--model",
    required=True,
    help="a Hugging Face folder of a decoder, or one of "
    f"{', '.join(sorted(models.MODELS))}",
  )
  parser.add_argument("--method", default="sparsegpt", choices=sorted(SOLVERS))
  parser.add_argument(
    "--sparsity", type=float, help="fraction removed; N:M types imply it"
  )
  parser.add_argument("--type", default="unstructured", help="2:4, 4x4, …")
  parser.add_argument(
    "--calibration",
    metavar="FILE",
    help="a text file: its first half calibrates, its second judges; by "
    "default enwik8, or the model's own pictures",
  )
  parser.add_argument(
    "--samples", type=int, default=32, help="windows or images to calibrate on"
  )
  parser.add_argument(
    "--judge", type=int, default=16, help="windows or images to judge by"
  )
  parser.add_argument(
    "--allocation",
    default="uniform",
    choices=("uniform", "erk", "owl", "alpha"),
  )
  parser.add_argument(
    "--refine", type=int, default=0, help="steps that re-fit kept weights"
  )
  parser.add_argument(
    "--refit", action="store_true", help="re-fit biases and norm statistics"
  )
  parser.add_argument(
    "--blocks",
    type=int,
    default=0,
    metavar="EPOCHS",
    help="prune block by block, and train each for so many passes towards what "
    "the dense model computes at its end",
  )
  parser.add_argument(
    "--distill",
    type=float,
    default=0,
    metavar="MINUTES",
    help="then train all of it on the dense model's predictions, masks fixed",
  )
  parser.add_argument(
    "--one-pass", action="store_true", help="calibrate on the dense model"
  )
  parser.add_argument(
    "--accelerate", action="store_true", help="also time sparse products"
  )
  parser.add_argument("--data", metavar="DIR", help="where packages lie")
  parser.add_argument(
    "--out",
    required=True,
    help="the .safetensors file; for a folder, the new folder",
  )
  parser.add_argument(
    "--layout",
    choices=("packed", "dense", "int8"),
    help="of a new folder; by default that of the old one",
  )


def _check(args: argparse.Namespace) -> None:
  """Raise if a number or the output cannot be; before anything is loaded."""
  least = {"samples": 1, "judge": 1, "refine": 0, "blocks": 0}
  for name, bound in least.items():
    if getattr(args, name) < bound:
      raise ValueError(
        f"--{name} {getattr(args, name)} must be at least {bound}"
      )
  if not 0 <= args.distill < float("inf"):
    raise ValueError(
      f"--distill {args.distill} must be finite and not negative"
    )
  if os.path.isfile(args.model):
    raise ValueError(
      f"--model {args.model}: a file of weights says nothing of its model; "
      "name the folder that holds config.json, or prune it without data: "
      f"jaxpruner prune {args.model}"
    )
  if not os.path.isdir(args.model):
    atomic.check_target(args.out)
  elif os.path.exists(args.out):
    raise ValueError(f"--out {args.out} exists; name a new folder")
  else:
    _staging.check_target(args.out, overwrite=False)
  _staging.check_parts(_layers(args))


def _layers(args: argparse.Namespace) -> pathlib.Path:
  """Return the folder of finished layers."""
  return pathlib.Path(f"{args.out}.layers")


def _load(args: argparse.Namespace) -> models.Model:
  """Return a built-in model, or the decoder of a folder."""
  if not os.path.isdir(args.model):
    return models.load(args.model, args.data)
  found = models.load_folder(args.model)
  if not isinstance(found.config, decoder_config.Decoder):
    raise ValueError(
      f"--model {args.model}: {found.config.kind} is no decoder; load it with "
      "post_training.models.load_folder, and prune it with post_training.prune"
    )
  tokenizer = hub_tokenizer.HubTokenizer(args.model)
  window = min(found.config.context, 512)
  return models.Model(
    found.apply_fn, found.params, hub.filter_fn, "text", tokenizer, window
  )


def _write_folder(
  args: argparse.Namespace, params: Any, masks: Any, about: dict[str, Any]
) -> None:
  """Write the folder back, with the new weights in their old dtypes."""
  with sparse.open_checkpoint(args.model) as file:

    def content(name: str) -> _layouts.Content:
      # A tied head may be stored beside the embedding.
      new = params.get(name, params["model.embed_tokens.weight"])
      if masks.get(name) is None and not (args.blocks or args.distill):
        return file.content(name)
      array = np.asarray(new).astype(file.tensors[name].dtype)
      return _layouts.content((array, masks.get(name)))

    file.rewrite(
      args.out, content, layout=args.layout, metadata=about,
      facts={"weights": fingerprint.arrays(params)},
    )  # fmt: skip


def _text(args: argparse.Namespace, part: int) -> str:
  """Return text to calibrate on (part 0) or to judge by (part 1)."""
  if args.calibration is not None:
    text = calibration_text.read(args.calibration)
    half = len(text) // 2
    return text[half:] if part else text[:half]
  raw = datasets.load_enwik8(args.data)[40_000_000 * (part + 1) :][:4_000_000]
  return raw.tobytes().decode("utf-8", "ignore")


def _inputs(args: argparse.Namespace, model: models.Model) -> tuple[Any, ...]:
  """Return calibration inputs, inputs to judge by, and labels or None."""
  if model.sample and args.calibration is None:
    return model.sample(args.samples, 0), model.sample(args.judge, 1), None
  if model.kind == "text":
    parts = [
      calibration_text.mixed(
        [_text(args, i)], model.tokenizer.encode, model.window, rows
      )
      for i, rows in enumerate((args.samples, args.judge))
    ]
    return *parts, None
  if model.kind == "sentence":
    lines = [
      [line for line in _text(args, i).splitlines() if len(line) > 80]
      for i in (0, 1)
    ]
    counts = args.samples, args.judge
    rows = [
      model.tokenizer.rows(found[:count], model.window)
      for found, count in zip(lines, counts, strict=True)
    ]
    return *rows, None
  if args.model == "CIFAR-10-CNN":
    sets = datasets.load_cifar10(args.data)
    learn = sets["train_x"][: args.samples].astype(np.float32)
    judge = sets["test_x"][: args.judge].astype(np.float32)
    return learn, judge, sets["test_y"][: args.judge]
  images, labels = resnet50.photos(args.data)
  judge = images[: args.judge]
  # Few photos there are: flipped ones teach, the others judge.
  return images[:, :, ::-1][: args.samples], judge, labels[: args.judge]


def _judge(
  model: models.Model, params: Any, inputs: np.ndarray, labels: Any
) -> tuple[str, Any]:
  """Return the name of the measure and its value."""
  if model.kind == "text":
    return "perplexity", evaluation.perplexity(model.apply_fn, params, inputs)
  if model.kind == "sentence":
    dense = np.asarray(model.apply_fn(model.params, inputs))
    now = np.asarray(model.apply_fn(params, inputs))
    return "cosine with dense", float((dense * now).sum(-1).mean())
  batch = min(len(inputs), 100)
  found = evaluation.classes(model.apply_fn, params, inputs, batch)
  return "accuracy", float((found == labels).mean())


def _speed(run: Any, inputs: Any) -> float:
  """Return rows (or tokens) per second, the best of three."""
  jax.block_until_ready(run(inputs))
  times = []
  for _ in range(3):
    start = time.perf_counter()
    jax.block_until_ready(run(inputs))
    times.append(time.perf_counter() - start)
  rows = inputs.size if inputs.ndim == 2 else len(inputs)
  return rows / min(times)


class _Progress:
  """One line per layer with the time left."""

  def __init__(self):
    self._start = time.perf_counter()
    self._first: int | None = None

  def __call__(self, done: int, total: int, name: str) -> None:
    now = time.perf_counter()
    if self._first is None:
      # What an interrupted run had done costs nothing now.
      self._first, self._start = done, now
    pace = (now - self._start) / max(1, done - self._first)
    left = f", {pace * (total - done):.0f} s left" if pace else ""
    print(f"[{done:4d}/{total}] {name}{left}", file=sys.stderr, flush=True)


def _prune(
  args: argparse.Namespace, model: models.Model, batches: Any, folder: Any
) -> tuple[Any, Any, Any]:
  """Prune layer by layer, or block by block."""
  options: dict[str, Any] = {
    "method": args.method,
    "sparsity": args.sparsity,
    "sparsity_type": args.type,
    "filter_fn": model.filter_fn,
    "allocation": args.allocation,
    "refine": args.refine,
    "progress": _Progress(),
  }
  given = model.apply_fn, model.params, batches
  if not args.blocks:
    return pruning.prune(
      *given, **options, refit=args.refit, sequential=not args.one_pass,
      folder=folder,
    )  # fmt: skip
  if args.refit or args.one_pass:
    raise ValueError(
      "--blocks trains biases, in order: drop --refit, --one-pass"
    )
  return contrib.prune_blocks(
    *given, **options, epochs=args.blocks, folder=folder
  )


def _more(args: argparse.Namespace, model: models.Model) -> np.ndarray:
  """Return windows to train on, of text after that to calibrate on."""
  rows = _TRAIN * args.samples
  if model.sample and args.calibration is None:
    return model.sample(rows, 2)
  # Some eight characters per token are enough for any of the tokenizers.
  text = _text(args, 0)[: 8 * (args.samples + rows) * model.window]
  found = evaluation.windows(model.tokenizer.encode(text), model.window)
  after = found[args.samples :][:rows]
  return after if len(after) else found  # a short text: the same again


def _distill(
  args: argparse.Namespace, model: models.Model, params, masks
) -> Any:
  """Train for so many minutes on windows of text, in turns."""
  windows = _more(args, model)
  rng = np.random.default_rng(0)
  turns = (
    windows[i : i + 1]
    for _ in itertools.count()
    for i in rng.permutation(len(windows))
  )
  last = [0.0]

  def progress(step: int, loss: float) -> None:
    if time.monotonic() - last[0] > 10:
      last[0] = time.monotonic()
      print(f"step {step}, loss {loss:.4f}", file=sys.stderr, flush=True)

  return contrib.distill(
    model.apply_fn, params, masks, model.params, turns,
    seconds=60 * args.distill, progress=progress,
  )  # fmt: skip


def run(args: argparse.Namespace) -> int:
  """Prune, save, and print the table; return 1 if that cannot be."""
  folder = _layers(args)
  try:
    _check(args)
    model = _load(args)
    learn, judge, labels = _inputs(args, model)
    if args.distill and model.kind != "text":
      raise ValueError(
        f"--distill needs a model of text, {args.model} is one of {model.kind}s"
      )
    # A block takes one step per batch: small ones fit it better.
    step = min(len(learn), 20) if model.kind == "image" else 4
    step = 1 if args.blocks and model.kind == "text" else step
    batches = [
      learn[i : i + step] for i in range(0, len(learn) // step * step, step)
    ]
    params, masks, report = _prune(args, model, batches, folder)
    if args.distill:
      params = _distill(args, model, params, masks)
    words = ("model", "method", "sparsity", "type", "blocks", "distill")
    settings = {k: getattr(args, k) for k in words}
    if os.path.isdir(args.model):
      _write_folder(args, params, masks, {"oneshot": settings})
    else:
      sparse.save(args.out, params, masks, metadata={"oneshot": settings})
  except (archives.DataError, ValueError, OSError) as error:
    print(error, file=sys.stderr)
    return 1
  shutil.rmtree(folder, ignore_errors=True)
  print(_table(args, model, params, masks, report, judge, labels))
  return 0


def _table(args, model, params, masks, report, judge, labels) -> str:
  name, before = _judge(model, model.params, judge, labels)
  _, after = _judge(model, params, judge, labels)
  sample = judge[:1]
  dense = jax.jit(model.apply_fn)
  unit = "images/s" if model.kind == "image" else "tokens/s"
  whole = sum(x.nbytes for x in jax.tree.leaves(model.params))
  rows = [
    (name, f"{before:.4g}", f"{after:.4g}"),
    ("sparsity of pruned weights", "0 %", f"{100 * report.sparsity:.2f} %"),
    ("bytes", size(whole), size(checkpoints.stored_bytes(args.out))),
    (
      unit + ", dense products",
      f"{_speed(lambda x: dense(model.params, x), sample):.3g}",
      f"{_speed(lambda x: dense(params, x), sample):.3g}",
    ),
  ]
  if args.accelerate:
    fast, _ = sparse.accelerate(model.apply_fn, params, sample, masks=masks)
    rows.append((unit + ", accelerated", "", f"{_speed(fast, sample):.3g}"))
  return table(("", "before", "after"), rows)
