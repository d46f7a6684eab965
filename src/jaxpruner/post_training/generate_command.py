"""`jaxpruner generate FOLDER --prompt …`: write text with a model."""

import argparse
import sys

import jax.numpy as jnp

from jaxpruner.post_training import (
  calibration_text,
  contrib,
  evaluation,
  generation,
  models,
)
from jaxpruner.post_training.models import hub, hub_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options."""
  parser.add_argument(
    "folder", metavar="FOLDER", help="a Hugging Face folder, dense or packed"
  )
  parser.add_argument("--prompt", required=True, help="the text to go on from")
  parser.add_argument(
    "--tokens", type=int, default=100, help="how many to write at most"
  )
  parser.add_argument(
    "--temperature", type=float, default=0.0, help="0: the most likely token"
  )
  parser.add_argument(
    "--top-k", type=int, default=0, help="draw among the so many most likely"
  )
  parser.add_argument("--seed", type=int, default=0, help="of the drawing")
  parser.add_argument(
    "--dtype", default="float32", choices=("float32", "bfloat16")
  )
  parser.add_argument(
    "--accelerate",
    action="store_true",
    help="pack sparse weights where that is measured to be faster (float32)",
  )
  parser.add_argument(
    "--values",
    choices=generation.VALUES,
    help="round all matrices, zeros packed; int8 is the fastest",
  )
  parser.add_argument(
    "--skip-inputs",
    type=float,
    metavar="FRACTION",
    help="skip so many inputs of each product, the smallest (not with int8)",
  )
  parser.add_argument(
    "--calibration",
    metavar="FILE",
    help="a text file to find their thresholds on",
  )


def run(args: argparse.Namespace) -> int:
  """Write the text as it comes, then the speed."""
  try:
    if (args.accelerate or args.values) and args.dtype != "float32":
      raise ValueError(
        "--accelerate and --values pack float32; leave out --dtype"
      )
    if (args.skip_inputs is None) != (args.calibration is None):
      raise ValueError("--skip-inputs and --calibration FILE need each other")
    if args.prompt != args.prompt.encode(errors="replace").decode():
      raise ValueError("--prompt is no UTF-8; check the terminal's encoding")
    # Before a large model is loaded.
    generation.check_drawing(
      args.tokens, args.temperature, args.top_k, args.seed
    )
    tokenizer = hub_tokenizer.HubTokenizer(args.folder)
    model = models.load_folder(args.folder, jnp.dtype(args.dtype))
    prompt = tokenizer.encode(args.prompt)
    length = len(prompt) + max(1, args.tokens)
    writer = generation.Writer(
      model,
      length,
      accelerate=args.accelerate,
      values=args.values,
      thresholds=_thresholds(args, model, tokenizer.encode),
    )
    drawn = writer.write(
      prompt,
      args.tokens,
      temperature=args.temperature,
      top_k=args.top_k,
      seed=args.seed,
      stop=_ends(args.folder),
    )
    seconds = _stream(tokenizer, prompt, drawn)
  except (ValueError, OSError) as error:
    print(error, file=sys.stderr)
    return 1
  if writer.report is not None:
    # The table of all weights is long; its last line is the sum.
    print("\n" + str(writer.report).splitlines()[-1], file=sys.stderr)
  # The first step compiles.
  later = seconds[2:]
  pace = f"{len(later) / sum(later):.1f} tokens/s" if later else "no pace yet"
  print(
    f"\nprefill {len(prompt)} tokens {seconds[0]:.2f} s (with compilation), "
    f"then {pace}",
    file=sys.stderr,
  )
  return 0


def _thresholds(args, model, encode) -> dict[str, float] | None:
  """Find thresholds on 8 windows of a text, or fewer if it is short."""
  if args.skip_inputs is None:
    return None
  text = calibration_text.read(args.calibration)
  ids = encode(text[:20_000])
  context = getattr(model.config, "context", 256)
  rows = evaluation.windows(ids, max(1, min(256, context, len(ids))))[:8]
  return contrib.input_thresholds(model, [rows], sparsity=args.skip_inputs)


def _ends(folder: str) -> list[int]:
  """Return the tokens that end a text."""
  found = hub.read_config(folder).get("eos_token_id")
  ids = found if isinstance(found, list) else [found]
  return [i for i in ids if type(i) is int]


# Control characters but for lines and tabs: the tokenizer of a folder may hold
# any, and a terminal obeys them.
_CONTROLS = {
  i: "\N{SYMBOL FOR SUBSTITUTE}"
  for i in (*range(32), *range(127, 160))
  if chr(i) not in "\n\t"
}


def _shown(text: str) -> str:
  return text.translate(_CONTROLS)


def _stream(tokenizer, prompt, drawn) -> list[float]:
  """Print text as soon as its characters are whole; return the times."""
  ids, seconds = list(prompt), []
  shown = _shown(tokenizer.decode(ids))
  print(shown, end="", flush=True)
  for token in drawn:
    ids.append(token.id)
    seconds.append(token.seconds)
    text = _shown(tokenizer.decode(ids))
    if not text.endswith("\ufffd"):  # half of a character
      print(text[len(shown) :], end="", flush=True)
      shown = text
  print()
  return seconds
