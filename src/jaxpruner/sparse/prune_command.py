"""`jaxpruner prune CHECKPOINT -o OUT`: prune a checkpoint, tensor by tensor.

Single weights and N:M groups along the last axis are chosen and written in
pieces: memory does not depend on the size of a tensor. Blocks and channels hold
one tensor and its scores.
"""

import argparse
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxpruner
from jaxpruner import _tools, mask_calculator
from jaxpruner._tools import fingerprint
from jaxpruner.sparse import _layouts, _threshold, checkpoints
from jaxpruner.sparse import _safetensors as st
from jaxpruner.sparse._progress import track
from jaxpruner.sparse._table import size, table

ALGORITHMS = ("magnitude", "random", "global_magnitude")
_HELD = 1 << 27  # bytes of a tensor that are read once and kept in memory
# Parts of a name that tell an embedding or a head.
_ENDS = re.compile(
  r"embed|embd|^(wte|wpe|word_embeddings|lm_head|head|classifier|score|"
  r"output_layer|logits)$"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add_paths(parser)
  parser.add_argument(
    "--sparsity", type=float, help="fraction removed; N:M types imply it"
  )
  parser.add_argument(
    "--type", default="unstructured", help="2:4, 4x4, channel_0, …"
  )
  parser.add_argument(
    "--axis",
    type=int,
    help="axis of N:M groups; by default the one contracted over: -1 for "
    "tensors named *.weight (PyTorch, out x in), else -2",
  )
  parser.add_argument("--algorithm", default="magnitude", choices=ALGORITHMS)
  parser.add_argument(
    "--distribution", default="uniform", choices=("uniform", "erk")
  )
  parser.add_argument(
    "--include",
    metavar="REGEX",
    type=_pattern,
    help="prune only tensors it is found in; embeddings and heads are pruned "
    "only where it is",
  )
  parser.add_argument(
    "--exclude",
    metavar="REGEX",
    type=_pattern,
    help="leave tensors it is found in alone",
  )
  parser.add_argument("--seed", type=int, default=0, help="of random scores")
  parser.add_argument(
    "--layout",
    choices=_layouts.ALL_LAYOUTS,
    help="of the new checkpoint; by default that of the old one",
  )


def add_paths(parser: argparse.ArgumentParser) -> None:
  """Declare the checkpoint, and where the new one goes."""
  parser.add_argument(
    "file",
    metavar="CHECKPOINT",
    help="a Hugging Face folder, a .safetensors file of any layout, an Orbax "
    "checkpoint, a Flax msgpack file or an .npz",
  )
  parser.add_argument(
    "-o", "--output", required=True, help="the new file or folder"
  )
  parser.add_argument(
    "--overwrite",
    action="store_true",
    help="replace a folder that exists, or the checkpoint itself",
  )


def check_paths(args: argparse.Namespace) -> None:
  """Refuse to replace the checkpoint unless that was asked for."""
  same = os.path.exists(args.output) and os.path.samefile(
    args.file, args.output
  )
  if same and not args.overwrite:
    raise ValueError(
      f"{args.output} is the checkpoint itself; name another output, or "
      "replace it with --overwrite"
    )


def _pattern(text: str) -> re.Pattern[str]:
  if not text:  # as of a variable of the shell that is not set
    raise argparse.ArgumentTypeError("'' is empty; give a pattern")
  try:
    return re.compile(text)
  except re.error as e:
    raise argparse.ArgumentTypeError(
      f"{text!r} is not a regular expression ({e}); escape special "
      "characters with a backslash"
    ) from e


def is_end(name: str) -> bool:
  """Tell by its name whether a tensor is an embedding or a head.

  >>> is_end("model.embed_tokens.weight"), is_end("layers.0.mlp.up.weight")
  (True, False)
  """
  return any(map(_ENDS.search, re.split("[./]", name.lower())))


def _chosen(args: argparse.Namespace, tensor: _layouts.Tensor) -> bool:
  """Tell whether a tensor may be pruned, embeddings and heads included."""
  if args.exclude and args.exclude.search(tensor.name):
    return False
  if args.include and not args.include.search(tensor.name):
    return False
  names = tuple(re.split("[./]", tensor.name))
  # Scales of quantised weights are matrices too, and E8M0 has no zero.
  if "scale" in names[-1] or "E8M0" in st.DTYPE_NAMES.get(tensor.dtype, ""):
    return False
  leaf = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
  return (
    tensor.size > 0
    and tensor.dtype.kind != "c"
    and tensor.dtype in st.DTYPE_NAMES
    and jaxpruner.sparsity_distributions.default_filter(names, leaf)
  )


@functools.partial(jax.jit, static_argnums=(0, 2))
def _structured(kind: Any, scores: jax.Array, sparsity: float) -> jax.Array:
  return kind.mask(scores, sparsity)


class Plan:
  """Which tensors are pruned, how far, and by which scores."""

  def __init__(
    self, args: argparse.Namespace, file: checkpoints.Checkpoint
  ) -> None:
    self._args, self._file = args, file
    if args.seed < 0:
      raise ValueError(f"--seed {args.seed} must not be negative")
    chosen = [t for t in file.tensors.values() if _chosen(args, t)]
    self.left: list[str] = []
    if not args.include:
      self.left = [t.name for t in chosen if is_end(t.name)]
    shapes = {
      t.name: jax.ShapeDtypeStruct(t.shape, t.dtype)
      for t in chosen
      if t.name not in self.left
    }
    if not shapes:
      raise ValueError(
        f"{args.file}: no tensor to prune among {list(file.tensors)[:5]}…; "
        "see --include and --exclude"
      )
    sparsity = args.sparsity
    self.kind = jaxpruner.parse_sparsity_type(args.type)
    if sparsity is None:
      sparsity = getattr(self.kind, "sparsity", None)
    if sparsity is None:
      raise ValueError(f"--type {args.type} needs --sparsity, such as 0.8")
    distribution = getattr(jaxpruner.sparsity_distributions, args.distribution)
    self.sparsities: dict[str, float] = distribution(
      shapes, sparsity=sparsity, filter_fn=lambda _names, _leaf: True
    )
    self.settings = {
      "algorithm": args.algorithm,
      "distribution": args.distribution,
      "sparsity": sparsity,
      "sparsity_type": args.type,
    }
    self._threshold = None
    if args.algorithm == "global_magnitude":
      if args.type != "unstructured" or args.distribution != "uniform":
        raise ValueError(
          "--algorithm global_magnitude ranks single weights of all tensors: "
          "it goes with neither --type nor --distribution"
        )
      total = sum(file.tensors[n].size for n in shapes)
      self._threshold = _threshold.find(
        shapes, file.chunks, int(mask_calculator.num_ones(total, sparsity))
      )

  @property
  def facts(self) -> dict[str, Any]:
    """What decides the result, besides the checkpoint."""
    patterns = {
      name: getattr(self._args, name) and getattr(self._args, name).pattern
      for name in ("include", "exclude")
    }
    more = {k: getattr(self._args, k) for k in ("axis", "seed")}
    more |= {"jax": fingerprint.settings(), "versions": fingerprint.versions()}
    return self.settings | patterns | more

  def _kind(self, tensor: _layouts.Tensor) -> Any:
    """Return the sparsity type of one tensor, checked."""
    kind = self.kind
    if hasattr(kind, "m"):
      axis = -1 if tensor.name.endswith(".weight") else -2
      axis = axis if self._args.axis is None else self._args.axis
      kind = dataclasses.replace(kind, axis=axis)
    kind.check(
      tensor.shape, self.sparsities[tensor.name], f"tensor {tensor.name!r}"
    )
    return kind

  def _scores(
    self, name: str, chunks: Iterator[np.ndarray]
  ) -> Iterator[np.ndarray]:
    """Yield the scores of a tensor as its chunks come."""
    if self._args.algorithm == "random":
      seed = (self._args.seed, _tools.path_hash(name))
      rng = np.random.default_rng(seed)
      return (rng.random(chunk.size, np.float32) for chunk in chunks)
    return (_threshold.keys(chunk, name).view(np.float32) for chunk in chunks)

  def content(self, name: str) -> _layouts.Content:
    """Return a tensor with its mask; one not chosen as it was."""
    old = self._file.content(name)
    if name not in self.sparsities:
      return old
    tensor = self._file.tensors[name]
    if tensor.size * tensor.dtype.itemsize <= _HELD:
      old = _layouts.content((self._file.read(name)[0], None))
    chunks = lambda: (values for values, _ in old.pieces())
    kind = self._kind(tensor)
    if kind == jaxpruner.Unstructured():
      # The same choice as the type's own, without holding the tensor.
      found = self._threshold
      if found is None:
        kept = int(kind.ones(tensor.shape, self.sparsities[name]))
        scores = lambda _: self._scores(name, chunks())
        found = _threshold.find([name], scores, kept)
      masks = lambda: found.masks(name, self._scores(name, chunks()))
      if self._threshold is not None:
        masks = lambda: found.masks(name, chunks())
    elif _in_rows(kind, tensor.shape):
      masks = lambda: _groups(kind, self._scores(name, chunks()))
    else:
      array = self._file.read(name)[0]
      scores = np.empty(tensor.size, np.float32)
      at = 0
      for part in self._scores(name, chunks()):
        scores[at : at + part.size] = part
        at += part.size
      scores = scores.reshape(tensor.shape)
      mask = np.asarray(_structured(kind, scores, self.sparsities[name]))
      return _layouts.content((array, mask))
    return _layouts.Content(True, lambda: zip(chunks(), masks(), strict=True))


def _in_rows(kind: Any, shape: tuple[int, ...]) -> bool:
  """Tell whether N:M groups lie one after another, within every piece."""
  m, n = getattr(kind, "m", 0), len(shape)
  return (
    type(kind) is jaxpruner.NByM
    and kind.axis in (-1, n - 1)
    and not shape[-1] % m
    and not _layouts.PIECE % m
  )


def _groups(kind: Any, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
  """Yield the masks of flat pieces of whole groups."""
  kind = dataclasses.replace(kind, axis=-1)
  for scores in chunks:
    # Padded, so that the shapes to compile are few.
    full = np.zeros(1 << max(10, (scores.size - 1).bit_length()), np.float32)
    full[: scores.size] = scores
    mask = _structured(kind, full.reshape(-1, kind.m), kind.sparsity)
    yield np.asarray(mask).reshape(-1)[: scores.size] != 0


class _Counted:
  """Count what is kept while it is written."""

  def __init__(self, plan: Plan):
    self._plan = plan
    self.rows: list[tuple[str, str, str]] = []
    self.kept = self.weights = self.packed = 0

  def content(self, tensor: _layouts.Tensor) -> _layouts.Content:
    found = self._plan.content(tensor.name)
    if tensor.name not in self._plan.sparsities:
      self.packed += tensor.size * tensor.dtype.itemsize
      return found
    ones = sum(
      int(np.sum(kept)) for _, kept in found.pieces() if kept is not None
    )
    self.kept += ones
    self.weights += tensor.size
    self.packed += _layouts.packed_bytes(tensor, ones)
    shape = "x".join(map(str, tensor.shape))
    sparsity = f"{100 * (1 - ones / tensor.size):.2f} %"
    self.rows.append((tensor.name, shape, sparsity))
    if not ones:
      print(f"warning: nothing is left of {tensor.name}", file=sys.stderr)
    return found


def run(args: argparse.Namespace) -> int:
  try:
    check_paths(args)
    before = checkpoints.stored_bytes(args.file)
    with checkpoints.open_checkpoint(args.file) as file:
      plan = Plan(args, file)
      counted = _Counted(plan)
      written = file.rewrite(
        args.output,
        lambda name: counted.content(file.tensors[name]),
        layout=args.layout,
        metadata=file.metadata | {"prune": plan.settings},
        progress=lambda tensors: track(tensors, "pruning"),
        overwrite=args.overwrite,
        facts=plan.facts,
      )
      kind, layout = file.kind, args.layout or file.layout
  except (ValueError, OSError) as e:
    print(e, file=sys.stderr)
    return 1
  print(table(("tensor", "shape", "sparsity"), counted.rows))
  print(
    f"\n{args.output} ({kind}): {counted.kept:,} of {counted.weights:,} "
    f"weights kept in {len(counted.rows)} tensors, sparsity "
    f"{100 * (1 - counted.kept / max(1, counted.weights)):.2f} %; "
    f"{size(before)} -> {size(checkpoints.stored_bytes(args.output))}"
  )
  for line in _remarks(plan, counted, layout, written):
    print(line)
  return 0


def _remarks(
  plan: Plan, counted: _Counted, layout: str, written: _layouts.Written | None
) -> Iterator[str]:
  """Yield what a user should know besides the table."""
  if plan.left:
    more = f" and {len(plan.left) - 3} more" if len(plan.left) > 3 else ""
    yield (
      f"left alone: {', '.join(plan.left[:3])}{more} (embeddings and heads; "
      "--include names what is pruned)"
    )
  if layout == "dense" and not (written and written.found):
    yield (
      "the layout is dense, so zeros are stored as zeros; --layout packed "
      f"would take {size(counted.packed)}"
    )
  if written is not None and written.found:
    yield (
      f"{len(written.found)} shards were there from an interrupted run; the "
      "table shows the others"
    )
  if written is not None and written.left:
    yield f"not copied: {', '.join(written.left)} (weights of other formats)"
