"""A mixture of experts in place of the MLP: its fields, tensors, product."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.post_training.models.config_fields import Fields
from jaxpruner.post_training.models.functions import linear
from jaxpruner.sparse._safetensors import FileFormatError


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


def shapes(experts: Experts, dim: int) -> dict[str, tuple[int, ...]]:
  """Return the tensors of one layer's mixture."""
  base = experts.prefix
  gate, up, down = experts.names
  found: dict[str, tuple[int, ...]] = {
    f"{base}.gate.weight": (experts.count, dim)
  }
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


def count_name(config: Mapping[str, Any]) -> str:
  """Return the entry of `config.json` that counts the experts.

  Hugging Face's transformers writes a model's own name for it, or since its
  fifth version the one of Mixtral.
  """
  names = ("num_experts", "num_local_experts")
  return names[config.get(names[0]) is None]


def parse(field: Fields, kind: str, layers: int) -> tuple[Experts | None, ...]:
  """Return the mixture of each layer; None for an MLP."""
  if kind == "mixtral":
    one = Experts(
      field.size(count_name(field.config)), field.size("num_experts_per_tok"),
      field.size("intermediate_size"), True, names=("w1", "w3", "w2"),
      prefix="block_sparse_moe",
    )  # fmt: skip
  elif kind.endswith("_moe"):
    one = Experts(
      field.size(count_name(field.config)),
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


def routed(experts: Experts, params: Any, base: str, x: jax.Array) -> jax.Array:
  """Return how much each expert counts for each token, 0 if not chosen."""
  chances = jax.nn.softmax(
    linear(params, f"{base}.gate", x).astype(jnp.float32), axis=-1
  )
  top, chosen = jax.lax.top_k(chances, experts.used)
  if experts.normalise:
    top = top / top.sum(-1, keepdims=True)
  one_hot = jax.nn.one_hot(chosen, experts.count, dtype=top.dtype)
  return jnp.einsum("...k,...kj->...j", top, one_hot)


def expert(
  experts: Experts, params: Any, base: str, act: Any, j: int, x: jax.Array
) -> jax.Array:
  """Return what one expert computes, before it is weighted."""
  names = (f"{base}.experts.{j}.{n}" for n in experts.names)
  return gated(params, act, x, *names)


def apply(
  experts: Experts, params: Any, layer: str, act: Any, x: jax.Array
) -> jax.Array:
  """Return the sum of the chosen experts, and of the one that sees all."""
  base = layer + experts.prefix
  weights = routed(experts, params, base, x).astype(x.dtype)
  total = jnp.zeros_like(x)
  # Every expert sees every token: few rows, and no shape depends on data.
  for j in range(experts.count):
    total += weights[..., j, None] * expert(experts, params, base, act, j, x)
  if experts.shared:
    names = (f"{base}.shared_expert.{n}_proj" for n in ("gate", "up", "down"))
    open_ = jax.nn.sigmoid(linear(params, f"{base}.shared_expert_gate", x))
    total += open_ * gated(params, act, x, *names)
  return total


def gated(params: Any, act: Any, x: Any, gate: str, up: str, down: str):
  """Return down(act(gate x) · up x)."""
  wide = act(linear(params, gate, x)) * linear(params, up, x)
  return linear(params, down, wide)
