"""What `config.json` says of a decoder: its sizes, names and tensors.

Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, OPT, Mixtral and the Qwen mixtures
of experts differ in the fields of `Decoder` alone.
"""

import dataclasses
import math
from typing import Any

from jaxpruner.post_training.models import mixture
from jaxpruner.post_training.models.config_fields import Fields
from jaxpruner.post_training.models.functions import ACTIVATIONS
from jaxpruner.post_training.models.mixture import Experts
from jaxpruner.post_training.models.rope import Rope, rope
from jaxpruner.sparse._safetensors import FileFormatError

Shapes = dict[str, tuple[int, ...]]
MODEL_TYPES = (
  "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "opt",
  "mixtral", "qwen2_moe", "qwen3_moe",
)  # fmt: skip


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
      return found | mixture.shapes(experts, self.dim)
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
    experts=mixture.parse(field, kind, layers),
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
