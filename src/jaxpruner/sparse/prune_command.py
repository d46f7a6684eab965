"""`jaxpruner prune FILE -o OUT`: prune a checkpoint, tensor by tensor.

Peak memory is a few times the largest tensor, whatever the size of the file.
"""

import argparse
import dataclasses
import functools
import os
import re
import sys
from typing import Any

import jax
import numpy as np

import jaxpruner
from jaxpruner import _tools, mask_calculator
from jaxpruner.sparse import _layouts, _threshold
from jaxpruner.sparse._progress import track
from jaxpruner.sparse._table import size, table

_PIECE = 1 << 20  # elements counted at once
ALGORITHMS = ("magnitude", "random", "global_magnitude")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("file", help="a .safetensors file of any layout")
  parser.add_argument("-o", "--output", required=True, help="the new file")
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
    help="prune only tensors it is found in",
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
    choices=_layouts.LAYOUTS,
    help="of the new file; by default that of the old one",
  )


def _pattern(text: str) -> re.Pattern[str]:
  try:
    return re.compile(text)
  except re.error as e:
    raise argparse.ArgumentTypeError(
      f"{text!r} is not a regular expression ({e}); escape special "
      "characters with a backslash"
    ) from e


def _chosen(args: argparse.Namespace, tensor: _layouts.Tensor) -> bool:
  """Tell whether a tensor is one to prune."""
  if args.exclude and args.exclude.search(tensor.name):
    return False
  if args.include and not args.include.search(tensor.name):
    return False
  names = tuple(re.split("[./]", tensor.name))
  leaf = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
  return tensor.size > 0 and jaxpruner.sparsity_distributions.default_filter(
    names, leaf
  )


@functools.partial(jax.jit, static_argnums=(0, 2))
def _structured(kind: Any, scores: jax.Array, sparsity: float) -> jax.Array:
  return kind.mask(scores, sparsity)


class Plan:
  """Which tensors are pruned, how far, and by which scores."""

  def __init__(self, args: argparse.Namespace, file: _layouts.SparseFile):
    self._args, self._file = args, file
    shapes = {
      t.name: jax.ShapeDtypeStruct(t.shape, t.dtype)
      for t in file.tensors.values()
      if _chosen(args, t)
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

  def _mask(self, name: str, array: np.ndarray) -> np.ndarray:
    if self._threshold is not None:
      return self._threshold.mask(name, array)
    if self._args.algorithm == "random":
      seed = (self._args.seed, _tools.path_hash(name))
      scores = np.random.default_rng(seed).random(array.shape, np.float32)
    else:
      scores = _threshold.keys(array, name).view(np.float32)
    kind, sparsity = self.kind, self.sparsities[name]
    if hasattr(kind, "m"):
      axis = -1 if name.endswith(".weight") else -2
      axis = axis if self._args.axis is None else self._args.axis
      kind = dataclasses.replace(kind, axis=axis)
    kind.check(array.shape, sparsity, f"tensor {name!r}")
    if kind == jaxpruner.Unstructured():
      # The same choice as the type's own, without compiling per tensor.
      kept = int(kind.ones(array.shape, sparsity))
      flat = scores.reshape(-1)
      pieces = np.array_split(flat, -(-flat.size // _PIECE))
      found = _threshold.find([name], lambda _: pieces, kept)
      return found.mask(name, scores)
    return np.asarray(_structured(kind, scores, sparsity))

  def read(self, name: str) -> _layouts.Leaf:
    """Return a tensor with its mask; one not chosen as it was."""
    array, mask = self._file.read(name)
    if name not in self.sparsities:
      return array, mask
    return array, self._mask(name, array)


def run(args: argparse.Namespace) -> int:
  rows: list[tuple[str, str, str]] = []
  try:
    with _layouts.SparseFile(args.file) as file:
      plan = Plan(args, file)
      weights = sum(file.tensors[n].size for n in plan.sparsities)
      kept = 0

      def read(name: str) -> _layouts.Leaf:
        nonlocal kept
        array, mask = plan.read(name)
        if mask is not None and name in plan.sparsities:
          ones = int(mask.sum(dtype=np.int64))
          kept += ones
          shape = "x".join(map(str, array.shape))
          rows.append((name, shape, f"{100 * (1 - ones / mask.size):.2f} %"))
          if not ones:
            print(f"warning: nothing is left of {name}", file=sys.stderr)
        return array, mask

      _layouts.write(
        args.output,
        file.tensors.values(),
        read,
        layout=args.layout or file.layout,
        metadata=file.metadata | {"prune": plan.settings},
        progress=lambda tensors: track(tensors, "pruning"),
      )
  except (ValueError, OSError) as e:
    print(e, file=sys.stderr)
    return 1
  print(table(("tensor", "shape", "sparsity"), rows))
  print(
    f"\n{args.output}: {kept:,} of {weights:,} weights kept in {len(rows)} "
    f"tensors, sparsity {100 * (1 - kept / weights):.2f} %; "
    f"{size(os.path.getsize(args.file))} -> "
    f"{size(os.path.getsize(args.output))}"
  )
  return 0
