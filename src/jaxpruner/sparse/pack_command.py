"""`jaxpruner pack FILE -o OUT`: store zeros as bits."""

import argparse
import os
import sys

from jaxpruner.sparse import _layouts
from jaxpruner.sparse._progress import track
from jaxpruner.sparse._table import size


def add_arguments(
  parser: argparse.ArgumentParser, layout: str = "packed"
) -> None:
  parser.add_argument("file", help="a .safetensors file of any layout")
  parser.add_argument("-o", "--output", required=True, help="the new file")
  parser.add_argument(
    "--layout",
    default=layout,
    choices=_layouts.LAYOUTS,
    help="packed (bits and kept values, hashed), sparse-bitmask (of "
    f"compressed-tensors) or dense; by default {layout}",
  )


def run(args: argparse.Namespace) -> int:
  try:
    before = os.path.getsize(args.file)
    with _layouts.SparseFile(args.file) as file:
      _layouts.write(
        args.output,
        file.tensors.values(),
        file.read,
        layout=args.layout,
        metadata=file.metadata,
        progress=lambda tensors: track(tensors, f"writing {args.layout}"),
      )
    after = os.path.getsize(args.output)
  except (ValueError, OSError) as e:
    print(e, file=sys.stderr)
    return 1
  print(
    f"{args.output}: {size(before)} -> {size(after)} "
    f"({after / max(before, 1):.3f}x)"
  )
  return 0
