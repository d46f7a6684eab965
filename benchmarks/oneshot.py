"""Perplexity of language models pruned after training.

    python benchmarks/oneshot.py --model stories15M --tokens 51200

Calibrates on the first part of three texts (Wikipedia, speeches, film reviews),
judges on a later part, and appends each figure to docs/results/oneshot.json as
soon as it is known; figures already there are not measured again.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import time

import numpy as np

from jaxpruner import post_training
from jaxpruner.compare import data
from jaxpruner.post_training import evaluation, models, texts

RESULTS = pathlib.Path(__file__).parent.parent / "docs/results/oneshot.json"
KINDS = ("enwik8", "sotu", "imdb")


def three_texts(part: int) -> list[str]:
  """The first or a later part of each source: they share no document."""
  million = 1_000_000
  wiki = data.load_enwik8()[40 * part * million :][: 4 * million]
  speeches = [raw.decode("utf-8", "ignore") for *_, raw in data.load_speeches()]
  reviews = data.load_imdb()
  return [
    wiki.tobytes().decode("utf-8", "ignore"),
    "\n\n".join(speeches[part::2])[: 4 * million],
    "\n\n".join(reviews[part::2][:5000]),
  ]


def store(key: str, row: dict) -> None:
  rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  rows[key] = row | {
    "date": datetime.date.today().isoformat(),
    "jax": importlib.metadata.version("jax"),
  }
  temporary = RESULTS.with_suffix(".tmp")
  temporary.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
  os.replace(temporary, RESULTS)


def known(key: str, tokens: int) -> bool:
  rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  return rows.get(key, {}).get("tokens", 0) >= tokens


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", default="stories15M")
  parser.add_argument("--tokens", type=int, default=51200)
  parser.add_argument("--calibration", type=int, default=128, help="windows")
  parser.add_argument(
    "--methods", nargs="*", default=["magnitude", "wanda", "sparsegpt"]
  )
  parser.add_argument("--types", nargs="*", default=["unstructured", "2:4"])
  args = parser.parse_args()
  model = models.load(args.model)
  encode, length = model.tokenizer.encode, model.window
  learn = texts.mixed(three_texts(0), encode, length, args.calibration)
  batches = np.array_split(learn, max(1, len(learn) // 4))
  per_kind = -(-args.tokens // len(KINDS) // length)
  judge = [
    texts.mixed([text], encode, length, per_kind) for text in three_texts(1)
  ]

  def measure(key: str, params, extra: dict) -> None:
    start = time.perf_counter()
    found = {
      kind: evaluation.perplexity(model.apply_fn, params, rows)
      for kind, rows in zip(KINDS, judge, strict=True)
    }
    mean = float(np.exp(np.mean(np.log(list(found.values())))))
    row = {"perplexity": mean, **found, **extra}
    row["tokens"] = int(sum(rows.size for rows in judge))
    row["judged_seconds"] = time.perf_counter() - start
    print(key, json.dumps(row), flush=True)
    store(key, row)

  if not known(f"{args.model} dense", args.tokens):
    measure(f"{args.model} dense", model.params, {})
  for kind in args.types:
    for method in args.methods:
      key = f"{args.model} {kind} {method}"
      if known(key, args.tokens):
        continue
      start = time.perf_counter()
      params, _, report = post_training.prune(
        model.apply_fn,
        model.params,
        batches,
        method=method,
        sparsity=0.5,
        sparsity_type=kind,
        filter_fn=model.filter_fn,
      )
      extra = {
        "sparsity": report.sparsity,
        "seconds": time.perf_counter() - start,
        "calibration_tokens": int(learn.size),
      }
      measure(key, params, extra)


if __name__ == "__main__":
  main()
