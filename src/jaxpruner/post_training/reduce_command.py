"""`jaxpruner reduce FOLDER --experts N | --heads N | --drop N`: smaller."""

import argparse
import sys

from jaxpruner import datasets
from jaxpruner.datasets.archives import DataError
from jaxpruner.post_training import calibration_text, contrib, models
from jaxpruner.post_training.models.hub_tokenizer import HubTokenizer
from jaxpruner.sparse import _staging, checkpoints
from jaxpruner.sparse._table import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options."""
  parser.add_argument(
    "folder", metavar="FOLDER", help="a Hugging Face folder of a decoder"
  )
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument(
    "--experts", type=int, help="experts to keep per layer of a mixture"
  )
  what.add_argument(
    "--heads",
    type=int,
    help="key-value heads to keep per layer, each with its query heads",
  )
  what.add_argument("--drop", type=int, help="whole layers to remove")
  parser.add_argument(
    "--calibration",
    metavar="FILE",
    help="a text file to calibrate on; by default enwik8",
  )
  parser.add_argument(
    "--samples", type=int, default=32, help="windows to calibrate on"
  )
  parser.add_argument("--window", type=int, default=512, help="tokens of one")
  parser.add_argument("-o", "--output", required=True, help="the new folder")
  parser.add_argument(
    "--overwrite", action="store_true", help="replace a folder that exists"
  )


def _batches(args: argparse.Namespace, context: int):
  if args.calibration is not None:
    text = calibration_text.read(args.calibration)
  else:
    raw = datasets.load_enwik8(None)[:4_000_000]
    text = raw.tobytes().decode("utf-8", "ignore")
  encode = HubTokenizer(args.folder).encode
  window = min(args.window, context)
  rows = calibration_text.mixed([text], encode, window, args.samples)
  return [rows[i : i + 4] for i in range(0, len(rows) // 4 * 4, 4)] or [rows]


def run(args: argparse.Namespace) -> int:
  """Write the smaller folder; print what was kept."""
  try:
    for name in ("samples", "window"):
      if getattr(args, name) < 1:
        raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    # Before anything is computed.
    _staging.check_target(args.output, args.overwrite)
    model = models.load_folder(args.folder)
    batches = _batches(args, getattr(model.config, "context", args.window))
    if args.drop is not None:
      small = contrib.drop_blocks(model, batches, drop=args.drop)
      lines = [f"layers {small.kept} of {len(small.scores)} kept"]
    else:
      word = "heads" if args.experts is None else "experts"
      small = (
        contrib.prune_heads(model, batches, keep=args.heads)
        if args.experts is None
        else contrib.prune_experts(model, batches, keep=args.experts)
      )
      lines = [
        f"layer {i}: {word} {kept} of {len(small.scores[i])} kept"
        for i, kept in enumerate(small.kept)
        if kept is not None
      ]
    models.save_folder(small, args.output, overwrite=args.overwrite)
  except (DataError, ValueError, OSError) as error:
    print(error, file=sys.stderr)
    return 1
  before, after = map(checkpoints.stored_bytes, (args.folder, args.output))
  print("\n".join(lines))
  print(f"{args.output}: {size(before)} -> {size(after)}")
  return 0
