"""One decoder for the language models of the hub, driven by `config.json`.

Parameters are a flat dict with the names and shapes of the folder: a weight is
(outputs, inputs). Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, OPT, Mixtral and
the Qwen mixtures of experts differ in the fields of `Decoder` alone.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training.models.rope import Rope, rope
from jaxpruner.sparse._safetensors import FileFormatError

Shapes = dict[str, tuple[int, ...]]
# name of a size in config.json -> the largest one accepted
_LIMITS = {
  "vocab_size": 1 << 22, "hidden_size": 1 << 17, "intermediate_size": 1 << 20,
  "ffn_dim": 1 << 20, "num_hidden_layers": 1024, "num_attention_heads": 4096,
  "num_key_value_heads": 4096, "head_dim": 1 << 14, "sliding_window": 1 << 30,
  "max_position_embeddings": 1 << 30, "num_experts": 4096,
  "num_local_experts": 4096, "num_experts_per_tok": 4096,
  "moe_intermediate_size": 1 << 20, "shared_expert_intermediate_size": 1 << 20,
  "decoder_sparse_step": 1024, "type_vocab_size": 1 << 16,
  "image_size": 1 << 14, "patch_size": 1 << 12, "num_channels": 1024,
}  # fmt: skip
MODEL_TYPES = (
  "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "opt",
  "mixtral", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
  "relu": jax.nn.relu,
}


class Fields:
  """The entries of an untrusted `config.json`, checked as they are read."""

  def __init__(self, config: Any, where: str = "config.json"):
    if not isinstance(config, Mapping):
      raise FileFormatError(f"{where}: not a JSON object")
    self._config, self.where = config, where

  def size(self, name: str, default: int | None = None) -> int:
    """Return a count that a model may have."""
    value = self._config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= _LIMITS[name]:
      raise FileFormatError(
        f"{self.where}: {name}={value!r:.100} must be a number from 1 to "
        f"{_LIMITS[name]}"
      )
    return value

  def number(self, name: str, default: float | None) -> float:
    value = self._config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0 < value < 1e12:
      raise FileFormatError(
        f"{self.where}: {name}={value!r:.100} must be a positive number"
      )
    return float(value)

  def flag(self, name: str, default: bool = False) -> bool:
    value = self._config.get(name)
    value = default if value is None else value
    if type(value) is not bool:
      raise FileFormatError(
        f"{self.where}: {name}={value!r:.100} must be true or false"
      )
    return value

  def get(self, name: str, default: Any = None) -> Any:
    return self._config.get(name, default)

  def choice(self, name: str, known: Any, default: str | None = None) -> str:
    value = self._config.get(name, default)
    if not isinstance(value, str) or value not in known:
      raise FileFormatError(
        f"{self.where}: {name}={value!r:.100} is not one of {', '.join(known)}"
      )
    return value


@dataclasses.dataclass(frozen=True)
class Experts:
  """A mixture of experts in place of the MLP."""

  count: int
  used: int
  hidden: int
  normalise: bool
  shared: int = 0  # hidden units of the expert that sees every token
  names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
  prefix: str = "mlp"


@dataclasses.dataclass(frozen=True)
class Decoder:
  """What distinguishes one decoder from another.

  Attributes:
    windows: per layer, how many tokens attention sees; 0 for all.
    ropes: per layer, the rotation of positions; None for learned positions.
    experts: per layer, the mixture of experts; None for an MLP.
    context: tokens that the model was made for.
    positions: rows of learned positions; 0 with rotations.
    norm: "rms", "rms1" (a scale of 1 + w) or "layer".
    sandwich: norms also after attention and MLP (Gemma).
  """

  kind: str
  vocab: int
  dim: int
  hidden: int
  heads: int
  kv_heads: int
  head_dim: int
  eps: float
  activation: str
  norm: str
  windows: tuple[int, ...]
  ropes: tuple[Rope | None, ...]
  experts: tuple[Experts | None, ...]
  tied: bool
  context: int
  positions: int = 0
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  sandwich: bool = False
  query_scale: float = 0.0
  embed_scale: float = 1.0
  attention_cap: float = 0.0
  logit_cap: float = 0.0

  @property
  def layers(self) -> int:
    return len(self.windows)

  @property
  def root(self) -> str:
    """What the names of all tensors but the head begin with."""
    return "model.decoder." if self.kind == "opt" else "model."

  @property
  def names(self) -> dict[str, str]:
    """The names of a layer's parts, which OPT spells in its own way."""
    return _OPT_NAMES if self.kind == "opt" else _NAMES

  def shapes(self) -> Shapes:
    """Return the tensors that a folder of this model holds."""
    root, found = self.root, {}
    found[f"{root}embed_tokens.weight"] = (self.vocab, self.dim)
    if self.positions:
      rows = self.positions + 2  # OPT keeps two rows for padding
      found[f"{root}embed_positions.weight"] = (rows, self.dim)
    for i in range(self.layers):
      for name, shape in self._layer_shapes(i).items():
        found[f"{root}layers.{i}.{name}"] = shape
    found |= self._norm_shapes(root + self.names["last"], self.dim)
    if not self.tied:
      found["lm_head.weight"] = (self.vocab, self.dim)
    return found

  def _norm_shapes(self, name: str, size: int) -> Shapes:
    parts = ("weight", "bias") if self.norm == "layer" else ("weight",)
    return {f"{name}.{part}": (size,) for part in parts}

  def _layer_shapes(self, i: int) -> Shapes:
    q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
    at, experts = self.names, self.experts[i]
    found = _linear(at["q"], q, self.dim, self.qkv_bias)
    for name in ("k", "v"):
      found |= _linear(at[name], kv, self.dim, self.qkv_bias)
    found |= _linear(at["o"], self.dim, q, self.out_bias)
    norms = dict.fromkeys((at["before"], at["between"]), self.dim)
    if self.qk_norm:
      heads = ("self_attn.q_norm", "self_attn.k_norm")
      norms |= dict.fromkeys(heads, self.head_dim)
    if self.sandwich:
      norms["pre_feedforward_layernorm"] = self.dim
      norms["post_feedforward_layernorm"] = self.dim
    for name, size in norms.items():
      found |= self._norm_shapes(name, size)
    if experts is not None:
      return found | _expert_shapes(experts, self.dim)
    names = ["fc1", "fc2"]
    if self.kind != "opt":
      names = [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    for name in names[:-1]:
      found |= _linear(name, self.hidden, self.dim, self.mlp_bias)
    return found | _linear(names[-1], self.dim, self.hidden, self.mlp_bias)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Shapes:
  found: Shapes = {f"{name}.weight": (outputs, inputs)}
  if bias:
    found[f"{name}.bias"] = (outputs,)
  return found


_NAMES = {
  "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
  "o": "self_attn.o_proj", "before": "input_layernorm",
  "between": "post_attention_layernorm", "last": "norm",
}  # fmt: skip
_OPT_NAMES = _NAMES | {
  "o": "self_attn.out_proj", "before": "self_attn_layer_norm",
  "between": "final_layer_norm", "last": "final_layer_norm",
}  # fmt: skip


def _expert_shapes(experts: Experts, dim: int) -> Shapes:
  base = experts.prefix
  gate, up, down = experts.names
  found: Shapes = {f"{base}.gate.weight": (experts.count, dim)}
  for j in range(experts.count):
    one = f"{base}.experts.{j}."
    found[f"{one}{gate}.weight"] = found[f"{one}{up}.weight"] = (
      experts.hidden, dim,
    )  # fmt: skip
    found[f"{one}{down}.weight"] = (dim, experts.hidden)
  if experts.shared:
    one = f"{base}.shared_expert."
    found[one + "gate_proj.weight"] = (experts.shared, dim)
    found[one + "up_proj.weight"] = (experts.shared, dim)
    found[one + "down_proj.weight"] = (dim, experts.shared)
    found[f"{base}.shared_expert_gate.weight"] = (1, dim)
  return found


def parse(config: Any, where: str = "config.json") -> Decoder:
  """Read what `config.json` says of a decoder.

  Args:
    config: the parsed JSON; not trusted.
    where: its path, for errors.

  Raises:
    FileFormatError: it is not a decoder that is known here, or holds values
      that no model has.
  """
  field = Fields(config, where)
  kind = field.choice("model_type", MODEL_TYPES)
  heads = field.size("num_attention_heads")
  dim, layers = field.size("hidden_size"), field.size("num_hidden_layers")
  head_dim = field.size("head_dim", max(1, dim // heads))
  kv_heads = field.size("num_key_value_heads", heads)
  if heads % kv_heads:
    raise FileFormatError(
      f"{where}: num_attention_heads={heads} is no multiple of "
      f"num_key_value_heads={kv_heads}"
    )
  gemma = kind.startswith("gemma")
  sliding = _sliding(field, kind, layers)
  given: dict[str, Any] = {}
  if kind == "opt":
    given = _opt(field, dim)
  else:
    attention_bias = field.flag("attention_bias")
    given = {
      "qkv_bias": attention_bias or kind.startswith("qwen2"),
      "out_bias": attention_bias and not kind.startswith("qwen2"),
      "mlp_bias": field.flag("mlp_bias"),
      "norm": "rms1" if gemma else "rms",
      "eps": field.number("rms_norm_eps", 1e-6),
      "activation": field.choice(
        "hidden_activation" if gemma else "hidden_act", ACTIVATIONS,
        "gelu_pytorch_tanh" if gemma else "silu",
      ),
      "ropes": tuple(rope(field, head_dim, local) for local in sliding),
      "hidden": field.size("intermediate_size"),
      "qk_norm": kind in ("qwen3", "qwen3_moe", "gemma3_text"),
    }  # fmt: skip
  if gemma:
    given |= {
      "sandwich": True,
      "query_scale": field.number("query_pre_attn_scalar", 256) ** -0.5,
      "embed_scale": math.sqrt(dim),
      "attention_cap": _cap(field, "attn_logit_softcapping"),
      "logit_cap": _cap(field, "final_logit_softcapping"),
    }
  window = field.size("sliding_window") if any(sliding) else 0
  return Decoder(
    kind=kind,
    vocab=field.size("vocab_size"),
    context=field.size("max_position_embeddings", 2048),
    dim=dim,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    windows=tuple(window if local else 0 for local in sliding),
    experts=_experts(field, kind, layers),
    tied=field.flag("tie_word_embeddings", gemma or kind == "opt"),
    **given,
  )


def _cap(field: Fields, name: str) -> float:
  return field.number(name, None) if field.get(name) is not None else 0.0


def _opt(field: Fields, dim: int) -> dict[str, Any]:
  if not field.flag("do_layer_norm_before", True) or (
    field.get("word_embed_proj_dim", dim) != dim
  ):
    raise FileFormatError(
      f"{field.where}: OPT with norms after its layers or projected embeddings "
      "(opt-350m) is not known here"
    )
  bias = field.flag("enable_bias", True)
  return {
    "norm": "layer",
    "eps": 1e-5,
    "activation": field.choice("activation_function", ACTIVATIONS, "relu"),
    "ropes": (None,) * field.size("num_hidden_layers"),
    "hidden": field.size("ffn_dim"),
    "positions": field.size("max_position_embeddings"),
    "qkv_bias": bias,
    "out_bias": bias,
    "mlp_bias": bias,
  }


def _sliding(field: Fields, kind: str, layers: int) -> list[bool]:
  """Return which layers see a window of tokens only."""
  types = field.get("layer_types")
  if types is not None:
    known = {"full_attention": False, "sliding_attention": True}
    if (
      not isinstance(types, list)
      or len(types) != layers
      or not all(isinstance(t, str) and t in known for t in types)
    ):
      raise FileFormatError(
        f"{field.where}: layer_types must name {layers} layers, each "
        f"{' or '.join(known)}"
      )
    return [known[t] for t in types]
  if kind == "gemma2":
    return [i % 2 == 0 for i in range(layers)]
  if kind == "gemma3_text":
    period = field.get("sliding_window_pattern", 6)
    if type(period) is not int or not 1 <= period <= 1024:
      raise FileFormatError(
        f"{field.where}: sliding_window_pattern={period!r:.100} must be a "
        "number from 1 to 1024"
      )
    return [(i + 1) % period > 0 for i in range(layers)]
  if kind.startswith("qwen"):
    if not field.flag("use_sliding_window"):
      return [False] * layers
    first = field.get("max_window_layers", layers)
    return [type(first) is int and i >= first for i in range(layers)]
  has = field.get("sliding_window") is not None
  return [has and kind in ("mistral", "mixtral")] * layers


def _experts(
  field: Fields, kind: str, layers: int
) -> tuple[Experts | None, ...]:
  if kind == "mixtral":
    one = Experts(
      field.size("num_local_experts"), field.size("num_experts_per_tok"),
      field.size("intermediate_size"), True, names=("w1", "w3", "w2"),
      prefix="block_sparse_moe",
    )  # fmt: skip
  elif kind.endswith("_moe"):
    one = Experts(
      field.size("num_experts"),
      field.size("num_experts_per_tok"),
      field.size("moe_intermediate_size"),
      field.flag("norm_topk_prob"),
      field.size("shared_expert_intermediate_size")
      if kind == "qwen2_moe"
      else 0,
    )
  else:
    return (None,) * layers
  if one.used > one.count:
    raise FileFormatError(
      f"{field.where}: num_experts_per_tok={one.used} of {one.count} experts"
    )
  if kind == "mixtral":
    return (one,) * layers
  step = field.size("decoder_sparse_step", 1)
  plain = field.get("mlp_only_layers") or []
  if not isinstance(plain, list) or not all(type(i) is int for i in plain):
    raise FileFormatError(f"{field.where}: mlp_only_layers must list layers")
  return tuple(
    None if i in plain or (i + 1) % step else one for i in range(layers)
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
  at = model.names
  positions = start + jnp.arange(tokens.shape[1])
  x = params[f"{model.root}embed_tokens.weight"][tokens]
  # As the peers compute it: the factor is rounded to the weights' precision.
  x = x * np.asarray(model.embed_scale).astype(x.dtype)
  if model.positions:
    x = x + params[f"{model.root}embed_positions.weight"][positions + 2]
  new: Cache = []
  for i in range(model.layers):
    layer = f"{model.root}layers.{i}."
    h = _norm(model, params, layer + at["before"], x)
    h, seen = _attention(model, params, i, h, cache and cache[i], positions)
    new.append(seen)
    if model.sandwich:
      x = x + _norm(model, params, layer + at["between"], h)
      h = _norm(model, params, layer + "pre_feedforward_layernorm", x)
      h = _feed_forward(model, params, i, h)
      x = x + _norm(model, params, layer + "post_feedforward_layernorm", h)
    else:
      x = x + h
      h = _norm(model, params, layer + at["between"], x)
      x = x + _feed_forward(model, params, i, h)
  if last is not None:
    x = jax.lax.dynamic_slice_in_dim(x, last, 1, 1)
  x = _norm(model, params, model.root + at["last"], x)
  head = f"{model.root}embed_tokens" if model.tied else "lm_head"
  logits = linear(params, head, x)
  if model.logit_cap:
    logits = jnp.tanh(logits / model.logit_cap) * model.logit_cap
  return logits, new


def linear(params: Any, name: str, x: jax.Array) -> jax.Array:
  """Multiply by a weight of (outputs, inputs); add its bias if it has one."""
  y = x @ params[f"{name}.weight"].T
  bias = params.get(f"{name}.bias")
  return y if bias is None else y + bias


def _norm(model: Decoder, params: Any, name: str, x: jax.Array) -> jax.Array:
  scale = params[f"{name}.weight"]
  wide = x.astype(jnp.float32)
  if model.norm == "layer":
    return layer_norm(wide, scale, params[f"{name}.bias"], model.eps)
  mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  wide = wide * jax.lax.rsqrt(mean + model.eps)
  scale = scale.astype(jnp.float32)
  return (wide * (1 + scale if model.norm == "rms1" else scale)).astype(x.dtype)


def layer_norm(
  x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float
) -> jax.Array:
  """Normalise the last axis, then scale and shift it."""
  mean = jnp.mean(x, axis=-1, keepdims=True)
  var = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
  return ((x - mean) * jax.lax.rsqrt(var + eps) * scale + bias).astype(
    scale.dtype
  )


def _attention(model: Decoder, params: Any, i: int, x, cache, positions):
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
  mixed = _mix(model, q, k, v, visible)
  return linear(params, layer + at["o"], mixed), (k, v)


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
    return _gated(params, act, x, *names)
  base = layer + experts.prefix
  chances = jax.nn.softmax(
    linear(params, f"{base}.gate", x).astype(jnp.float32), axis=-1
  )
  top, chosen = jax.lax.top_k(chances, experts.used)
  if experts.normalise:
    top = top / top.sum(-1, keepdims=True)
  total = jnp.zeros_like(x)
  # Every expert sees every token: few rows, and no shape depends on data.
  for j in range(experts.count):
    weight = jnp.where(chosen == j, top, 0).sum(-1, keepdims=True)
    names = (f"{base}.experts.{j}.{n}" for n in experts.names)
    total += weight.astype(x.dtype) * _gated(params, act, x, *names)
  if experts.shared:
    names = (f"{base}.shared_expert.{n}_proj" for n in ("gate", "up", "down"))
    open_ = jax.nn.sigmoid(linear(params, f"{base}.shared_expert_gate", x))
    total += open_ * _gated(params, act, x, *names)
  return total


def _gated(params: Any, act: Any, x: Any, gate: str, up: str, down: str):
  wide = act(linear(params, gate, x)) * linear(params, up, x)
  return linear(params, down, wide)
