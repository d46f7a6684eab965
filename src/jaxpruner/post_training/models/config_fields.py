"""The entries of an untrusted `config.json`, checked as they are read."""

from collections.abc import Mapping
from typing import Any

from jaxpruner.sparse._safetensors import FileFormatError

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


class Fields:
  """The entries of an untrusted `config.json`, checked as they are read."""

  def __init__(self, config: Any, where: str = "config.json"):
    if not isinstance(config, Mapping):
      raise FileFormatError(f"{where}: not a JSON object")
    self.config, self.where = config, where

  def size(self, name: str, default: int | None = None) -> int:
    """Return a count that a model may have."""
    value = self.config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= _LIMITS[name]:
      raise FileFormatError(
        f"{self.where}: {name}={value!r:.100} must be a number from 1 to "
        f"{_LIMITS[name]}"
      )
    return value

  def number(self, name: str, default: float | None) -> float:
    value = self.config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0 < value < 1e12:
      raise FileFormatError(
        f"{self.where}: {name}={value!r:.100} must be a positive number"
      )
    return float(value)

  def flag(self, name: str, default: bool = False) -> bool:
    value = self.config.get(name)
    value = default if value is None else value
    if type(value) is not bool:
      raise FileFormatError(
        f"{self.where}: {name}={value!r:.100} must be true or false"
      )
    return value

  def get(self, name: str, default: Any = None) -> Any:
    return self.config.get(name, default)

  def choice(self, name: str, known: Any, default: str | None = None) -> str:
    value = self.config.get(name, default)
    if not isinstance(value, str) or value not in known:
      raise FileFormatError(
        f"{self.where}: {name}={value!r:.100} is not one of {', '.join(known)}"
      )
    return value
