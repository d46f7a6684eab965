"""`jaxpruner gguf FOLDER --like DENSE.gguf -o OUT.gguf`: for llama.cpp."""

import argparse
import os
import sys

from jaxpruner.datasets.archives import DataError
from jaxpruner.post_training import models
from jaxpruner.post_training.models import gguf_writer


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options."""
  parser.add_argument(
    "folder", metavar="FOLDER", help="a Hugging Face folder, dense or packed"
  )
  parser.add_argument(
    "--like",
    required=True,
    metavar="GGUF",
    help="a GGUF file of the dense model: its tokenizer and settings are taken",
  )
  parser.add_argument("-o", "--output", required=True, metavar="OUT")
  parser.add_argument(
    "--values", default="q8_0", choices=gguf_writer.VALUES,
    help="how matrices are stored",
  )  # fmt: skip


def run(args: argparse.Namespace) -> int:
  """Write the file, and its size."""
  try:
    if os.path.exists(args.output):
      raise ValueError(f"{args.output} exists; choose another name")
    model = models.load_folder(args.folder)
    models.save_gguf(args.output, model, args.like, args.values)
  except (ValueError, OSError, DataError) as error:
    print(error, file=sys.stderr)
    return 1
  print(
    f"{args.output}: {os.path.getsize(args.output) / 1e6:.1f} MB; zeros are "
    "stored as zeros, llama.cpp multiplies them"
  )
  return 0
