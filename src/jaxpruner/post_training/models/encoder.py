"""Encoders of the hub: BERT (and MiniLM) for text, ViT for images.

Parameters are a flat dict with the names of the folder, as for decoders.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.post_training.models.config_fields import Fields
from jaxpruner.post_training.models.decoder_config import Shapes
from jaxpruner.post_training.models.functions import (
  ACTIVATIONS,
  layer_norm,
  linear,
)
from jaxpruner.sparse._safetensors import FileFormatError

MODEL_TYPES = ("bert", "vit")


@dataclasses.dataclass(frozen=True)
class Encoder:
  """The sizes of an encoder.

  Attributes:
    positions, types: rows of the embeddings of text; 0 for images.
    image, patch, channels: sides and colours of images; 0 for text.
    prefix: what the names begin with: "", "bert." or "vit.".
  """

  kind: str
  dim: int
  hidden: int
  layers: int
  heads: int
  eps: float
  activation: str
  vocab: int = 0
  positions: int = 0
  types: int = 0
  image: int = 0
  patch: int = 0
  channels: int = 0
  qkv_bias: bool = True
  prefix: str = ""

  def shapes(self) -> Shapes:
    """Return the tensors of the encoder itself, without a head."""
    dim, found = self.dim, {}
    root = self.prefix + "embeddings."
    if self.kind == "bert":
      for name, rows in (
        ("word", self.vocab), ("position", self.positions),
        ("token_type", self.types),
      ):  # fmt: skip
        found[f"{root}{name}_embeddings.weight"] = (rows, dim)
      found |= _pair(root + "LayerNorm", dim)
    else:
      side, patch = self.image // self.patch, self.patch
      found[root + "cls_token"] = (1, 1, dim)
      found[root + "position_embeddings"] = (1, side * side + 1, dim)
      name = root + "patch_embeddings.projection"
      found |= _pair(name, dim, self.channels, patch, patch)
      found |= _pair(self.prefix + "layernorm", dim)
    for i in range(self.layers):
      layer = f"{self.prefix}encoder.layer.{i}."
      for key, name in self.names.items():
        sizes = {
          "up": (self.hidden, dim), "down": (dim, self.hidden),
          "first": (dim,), "second": (dim,),
        }.get(key, (dim, dim))  # fmt: skip
        found |= _pair(layer + name, *sizes)
        if key in "qkv" and not self.qkv_bias:
          del found[f"{layer}{name}.bias"]
    return found

  @property
  def names(self) -> dict[str, str]:
    """The names of a layer's parts."""
    inner = "self" if self.kind == "bert" else "attention"
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    if self.kind == "vit":
      norms = ("layernorm_before", "layernorm_after")
    return {
      "q": f"attention.{inner}.query", "k": f"attention.{inner}.key",
      "v": f"attention.{inner}.value", "o": "attention.output.dense",
      "up": "intermediate.dense", "down": "output.dense",
      "first": norms[0], "second": norms[1],
    }  # fmt: skip


def _pair(name: str, *shape: int) -> Shapes:
  return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def parse(config: Any, where: str = "config.json", prefix: str = "") -> Encoder:
  """Read what `config.json` says of an encoder.

  Args:
    config: the parsed JSON; not trusted.
    where: its path, for errors.
    prefix: what the names of the tensors begin with.

  Raises:
    FileFormatError: it is not an encoder that is known here, or holds values
      that no model has.
  """
  field = Fields(config, where)
  kind = field.choice("model_type", MODEL_TYPES)
  dim, heads = field.size("hidden_size"), field.size("num_attention_heads")
  if dim % heads:
    raise FileFormatError(f"{where}: hidden_size={dim} in {heads} heads")
  more: dict[str, Any] = {
    "image": field.size("image_size", 224),
    "patch": field.size("patch_size", 16),
    "channels": field.size("num_channels", 3),
    "qkv_bias": field.flag("qkv_bias", True),
  }
  if kind == "bert":
    if field.get("position_embedding_type", "absolute") != "absolute":
      raise FileFormatError(f"{where}: only absolute positions are known here")
    more = {
      "vocab": field.size("vocab_size"),
      "positions": field.size("max_position_embeddings"),
      "types": field.size("type_vocab_size", 2),
    }
  return Encoder(
    kind=kind,
    dim=dim,
    hidden=field.size("intermediate_size"),
    layers=field.size("num_hidden_layers"),
    heads=heads,
    eps=field.number("layer_norm_eps", 1e-12),
    activation=field.choice("hidden_act", ACTIVATIONS, "gelu"),
    prefix=prefix,
    **more,
  )


def apply(
  model: Encoder, params: Any, inputs: jax.Array, seen: Any = None
) -> jax.Array:
  """Return the last hidden states (rows, time, dim).

  Args:
    model: the kind and sizes.
    params: name -> array, as in the folder.
    inputs: token ids (rows, time), or images (rows, channels, height, width).
    seen: True where a token is no padding; by default everywhere.
  """
  root = model.prefix + "embeddings."
  if model.kind == "bert":
    table = lambda name: params[f"{root}{name}_embeddings.weight"]
    x = table("word")[inputs] + table("position")[: inputs.shape[1]]
    x = _norm(model, params, root + "LayerNorm", x + table("token_type")[0])
  else:
    x = _patches(model, params, root, inputs)
  if seen is None:
    seen = jnp.ones(x.shape[:2], jnp.bool_)
  act = ACTIVATIONS[model.activation]
  for i in range(model.layers):
    layer = f"{model.prefix}encoder.layer.{i}."
    at = {key: layer + name for key, name in model.names.items()}
    wide = lambda h, at=at: linear(
      params, at["down"], act(linear(params, at["up"], h))
    )
    if model.kind == "bert":  # norms after each half
      h = x + _attention(model, params, at, x, seen)
      x = _norm(model, params, at["first"], h)
      x = _norm(model, params, at["second"], x + wide(x))
    else:
      h = _norm(model, params, at["first"], x)
      x = x + _attention(model, params, at, h, seen)
      x = x + wide(_norm(model, params, at["second"], x))
  if model.kind == "vit":
    x = _norm(model, params, model.prefix + "layernorm", x)
  return x


def _patches(model: Encoder, params: Any, root: str, images: jax.Array):
  """Embed the patches of (rows, channels, height, width), a class in front."""
  rows, side, patch = images.shape[0], model.image // model.patch, model.patch
  x = images.reshape(rows, model.channels, side, patch, side, patch)
  x = x.transpose(0, 2, 4, 1, 3, 5).reshape(rows, side * side, -1)
  kernel = params[root + "patch_embeddings.projection.weight"]
  x = x @ kernel.reshape(model.dim, -1).T
  x = x + params[root + "patch_embeddings.projection.bias"]
  first = jnp.broadcast_to(params[root + "cls_token"], (rows, 1, model.dim))
  x = jnp.concatenate([first, x], axis=1)
  return x + params[root + "position_embeddings"]


def _norm(model: Encoder, params: Any, name: str, x: jax.Array) -> jax.Array:
  scale, bias = params[f"{name}.weight"], params[f"{name}.bias"]
  return layer_norm(x, scale, bias, model.eps)


def _attention(model: Encoder, params: Any, at: Any, x: Any, seen: Any):
  size = model.dim // model.heads
  split = lambda key: linear(params, at[key], x).reshape(*x.shape[:2], -1, size)
  scores = jnp.einsum("bqhd,bkhd->bhqk", split("q"), split("k"))
  scores = jnp.where(seen[:, None, None], scores / math.sqrt(size), -1e30)
  weights = jax.nn.softmax(scores, axis=-1)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, split("v"))
  return linear(params, at["o"], mixed.reshape(x.shape))
