"""`jaxpruner pack CHECKPOINT -o OUT`: store zeros as bits."""

import argparse
import sys

from jaxpruner.sparse import _layouts, checkpoints, prune_command
from jaxpruner.sparse._progress import track
from jaxpruner.sparse._table import size


def add_arguments(
  parser: argparse.ArgumentParser, layout: str = "packed"
) -> None:
  prune_command.add_paths(parser)
  parser.add_argument(
    "--layout",
    default=layout,
    choices=_layouts.ALL_LAYOUTS,
    help="packed (bits and kept values, hashed), int8 (the same, matrices "
    "rounded to one byte), sparse-bitmask (of compressed-tensors) or dense; "
    f"by default {layout}",
  )


def run(args: argparse.Namespace) -> int:
  try:
    prune_command.check_paths(args)
    before = checkpoints.stored_bytes(args.file)
    with checkpoints.open_checkpoint(args.file) as file:
      kind = file.kind
      file.rewrite(
        args.output,
        file.content,
        layout=args.layout,
        metadata=file.metadata,
        progress=lambda tensors: track(tensors, f"writing {args.layout}"),
        overwrite=args.overwrite,
      )
    after = checkpoints.stored_bytes(args.output)
  except (ValueError, OSError) as e:
    print(e, file=sys.stderr)
    return 1
  print(
    f"{args.output} ({kind}): {size(before)} -> {size(after)} "
    f"({after / max(before, 1):.3f}x)"
  )
  return 0
