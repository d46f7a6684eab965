"""One decoder for the language models of the hub, driven by `config.json`.

Parameters are a flat dict with the names and shapes of the folder: a weight is
(outputs, inputs).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training.models import mixture
from jaxpruner.post_training.models.decoder_config import Decoder
from jaxpruner.post_training.models.functions import (
  ACTIVATIONS,
  layer_norm,
  linear,
)

Cache = list[tuple[jax.Array, jax.Array]]


def empty_cache(
  model: Decoder, rows: int, length: int, dtype: Any = jnp.float32
) -> Cache:
  """Return room for the keys and values of `length` tokens."""
  shape = rows, length, model.kv_heads, model.head_dim
  return [
    (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    for _ in range(model.layers)
  ]


def apply(model: Decoder, params: Any, tokens: jax.Array) -> jax.Array:
  """Return the logits (rows, time, vocab) of token ids (rows, time)."""
  return forward(model, params, tokens)[0]


def forward(
  model: Decoder,
  params: Any,
  tokens: jax.Array,
  cache: Cache | None = None,
  start: Any = 0,
  last: Any = None,
) -> tuple[jax.Array, Cache]:
  """Return logits, and the keys and values seen so far.

  Args:
    model: the kind and sizes.
    params: name -> array, as in the folder.
    tokens: ids (rows, time).
    cache: keys and values of earlier tokens, with room for these.
    start: the position of the first of `tokens`.
    last: the index of the only token whose logits are wanted; None for all.
  """
  positions = start + jnp.arange(tokens.shape[1])
  x = embed(model, params, tokens, positions)
  new: Cache = []
  for i in range(model.layers):
    x, h, seen = attend(model, params, i, x, cache and cache[i], positions)
    x = feed_forward(model, params, i, x, h)
    new.append(seen)
  if last is not None:
    x = jax.lax.dynamic_slice_in_dim(x, last, 1, 1)
  return finish(model, params, x), new


def finish(model: Decoder, params: Any, x: jax.Array) -> jax.Array:
  """Return the logits of what leaves the last layer."""
  x = _norm(model, params, model.root + model.names["last"], x)
  head = f"{model.root}embed_tokens" if model.tied else "lm_head"
  logits = linear(params, head, x)
  if model.logit_cap:
    logits = jnp.tanh(logits / model.logit_cap) * model.logit_cap
  return logits


def embed(
  model: Decoder, params: Any, tokens: jax.Array, positions: Any
) -> jax.Array:
  """Return what enters the first layer, (rows, time, dim)."""
  x = params[f"{model.root}embed_tokens.weight"][tokens]
  # As the peers compute it: the factor is rounded to the weights' precision.
  x = x * np.asarray(model.embed_scale).astype(x.dtype)
  if model.positions:
    x = x + params[f"{model.root}embed_positions.weight"][positions + 2]
  return x


def attend(
  model: Decoder, params: Any, i: int, x: Any, cache: Any, positions: Any
) -> tuple[jax.Array, jax.Array, Any]:
  """Run the first half of a layer.

  Returns:
    `(x, h, seen)`: the stream behind attention, what the second half's MLP or
    mixture gets of it, and keys and values.
  """
  layer, at = f"{model.root}layers.{i}.", model.names
  h = _norm(model, params, layer + at["before"], x)
  h, seen = _attention(model, params, i, h, cache, positions)
  if model.sandwich:
    x = x + _norm(model, params, layer + at["between"], h)
    return x, _norm(model, params, layer + "pre_feedforward_layernorm", x), seen
  x = x + h
  return x, _norm(model, params, layer + at["between"], x), seen


def feed_forward(model: Decoder, params: Any, i: int, x: Any, h: Any):
  """Run the second half of a layer on what `attend` returned."""
  h = _feed_forward(model, params, i, h)
  if model.sandwich:
    layer = f"{model.root}layers.{i}."
    h = _norm(model, params, layer + "post_feedforward_layernorm", h)
  return x + h


def _norm(model: Decoder, params: Any, name: str, x: jax.Array) -> jax.Array:
  scale = params[f"{name}.weight"]
  wide = x.astype(jnp.float32)
  if model.norm == "layer":
    return layer_norm(wide, scale, params[f"{name}.bias"], model.eps)
  mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  wide = wide * jax.lax.rsqrt(mean + model.eps)
  scale = scale.astype(jnp.float32)
  return (wide * (1 + scale if model.norm == "rms1" else scale)).astype(x.dtype)


def heads(
  model: Decoder, params: Any, i: int, x: Any, positions: Any
) -> jax.Array:
  """Return what the heads of a layer find, (rows, time, heads × size)."""
  name = f"{model.root}layers.{i}.{model.names['before']}"
  x = _norm(model, params, name, x)
  return _heads(model, params, i, x, None, positions)[0]


def _attention(model: Decoder, params: Any, i: int, x, cache, positions):
  mixed, seen = _heads(model, params, i, x, cache, positions)
  name = f"{model.root}layers.{i}.{model.names['o']}"
  return linear(params, name, mixed), seen


def _heads(model: Decoder, params: Any, i: int, x, cache, positions):
  layer, at = f"{model.root}layers.{i}.", model.names

  def split(name: str) -> jax.Array:
    y = linear(params, layer + at[name], x)
    return y.reshape(*y.shape[:2], -1, model.head_dim)

  q, k, v = split("q"), split("k"), split("v")
  if model.qk_norm:
    q = _norm(model, params, layer + "self_attn.q_norm", q)
    k = _norm(model, params, layer + "self_attn.k_norm", k)
  turn = model.ropes[i]
  if turn is not None:
    q, k = turn.apply(q, positions), turn.apply(k, positions)
  if cache is not None:
    put = lambda old, y: jax.lax.dynamic_update_slice_in_dim(
      old, y.astype(old.dtype), positions[0], 1
    )
    k, v = put(cache[0], k), put(cache[1], v)
    keys = jnp.arange(k.shape[1])
  else:
    keys = positions
  visible = keys <= positions[:, None]
  if model.windows[i]:
    visible &= keys > positions[:, None] - model.windows[i]
  return _mix(model, q, k, v, visible), (k, v)


def _mix(model: Decoder, q: Any, k: Any, v: Any, visible: Any) -> jax.Array:
  """Return what heads of (rows, time, heads, size) find in the values."""
  rows, length = q.shape[:2]
  q = q.reshape(rows, length, model.kv_heads, -1, model.head_dim)
  scale = model.query_scale or model.head_dim**-0.5
  scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k).astype(jnp.float32) * scale
  if model.attention_cap:
    scores = jnp.tanh(scores / model.attention_cap) * model.attention_cap
  weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
  mixed = jnp.einsum("bgrqk,bkgd->bqgrd", weights.astype(v.dtype), v)
  return mixed.reshape(rows, length, -1)


def _feed_forward(model: Decoder, params: Any, i: int, x: jax.Array):
  layer, act = f"{model.root}layers.{i}.", ACTIVATIONS[model.activation]
  experts = model.experts[i]
  if model.kind == "opt":
    return linear(params, layer + "fc2", act(linear(params, layer + "fc1", x)))
  if experts is None:
    names = (f"{layer}mlp.{n}_proj" for n in ("gate", "up", "down"))
    return mixture.gated(params, act, x, *names)
  return mixture.apply(experts, params, layer, act, x)
