"""Rotary positions: the variants that `config.json` can name."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse._safetensors import FileFormatError

_TYPES = ("default", "linear", "llama3", "yarn")


class Rope(NamedTuple):
  """Angles per position, and a factor for queries and keys.

  Attributes:
    rates: radians per position, one for each pair of numbers of a head.
    scale: multiplies cosines and sines (YaRN).
  """

  rates: tuple[float, ...]
  scale: float = 1.0

  def apply(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turn number i and i + half of each head of (rows, time, heads, size)."""
    rates = np.asarray(self.rates, np.float32)
    angles = positions.astype(jnp.float32)[:, None] * rates
    cos = (jnp.cos(angles) * self.scale)[:, None].astype(x.dtype)
    sin = (jnp.sin(angles) * self.scale)[:, None].astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rope(field: Any, head_dim: int, local: bool) -> Rope:
  """Return the rotation that a configuration describes.

  Args:
    field: the entries of `config.json`, see `config_fields.Fields`.
    head_dim: numbers of a head.
    local: whether the layer sees a window only, which some models rotate
      differently.
  """
  if head_dim % 2:
    raise FileFormatError(f"{field.where}: head_dim={head_dim} is odd")
  # What a configuration that leaves it out means.
  usual = 1e6 if field.get("model_type") in ("mixtral", "gemma3_text") else 1e4
  base = field.number("rope_theta", usual)
  given = field.get("rope_parameters") or field.get("rope_scaling") or {}
  which = "sliding_attention" if local else "full_attention"
  if isinstance(given, dict) and isinstance(given.get(which), dict):
    given = given[which]
  elif local and field.get("model_type") == "gemma3_text":
    base, given = field.number("rope_local_base_freq", 1e4), {}
  about = type(field)(given, f"{field.where}: rope_parameters")
  kind = about.get("rope_type", about.get("type", "default"))
  if kind not in _TYPES or about.get("partial_rotary_factor", 1) != 1:
    raise FileFormatError(
      f"{field.where}: positions of type {kind!r:.100} are not known here, "
      f"only {', '.join(_TYPES)} of whole heads"
    )
  base = about.number("rope_theta", base)
  if base <= 1:
    raise FileFormatError(f"{about.where}: rope_theta={base} must exceed 1")
  half = head_dim // 2
  rates = base ** (-np.arange(half, dtype=np.float64) / half)
  scale = 1.0
  if kind == "linear":
    rates = rates / about.number("factor", None)
  elif kind == "llama3":
    rates = _llama3(about, rates)
  elif kind == "yarn":
    rates, scale = _yarn(field, about, rates, base, head_dim)
  return Rope(tuple(map(float, rates)), scale)


def _llama3(about: Any, rates: np.ndarray) -> np.ndarray:
  """Slow down long waves by a factor, leave short ones, blend between."""
  factor = about.number("factor", None)
  low, high = (about.number(f"{n}_freq_factor", None) for n in ("low", "high"))
  old = about.number("original_max_position_embeddings", None)
  if high <= low:
    raise FileFormatError(
      f"{about.where}: high_freq_factor={high} must exceed "
      f"low_freq_factor={low}"
    )
  turns = old * rates / (2 * math.pi)  # within the old context
  blend = np.clip((turns - low) / (high - low), 0, 1)
  return rates * (blend + (1 - blend) / factor)


def _yarn(
  field: Any, about: Any, rates: np.ndarray, base: float, head_dim: int
) -> tuple[np.ndarray, float]:
  """Slow down long waves (Peng et al., 2023), and sharpen attention."""
  factor = about.number("factor", None)
  old = about.number(
    "original_max_position_embeddings",
    field.number("max_position_embeddings", None),
  )

  def pair(turns: float) -> float:
    """Return the pair that turns so often within the old context."""
    return (
      head_dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base))
    )

  first = max(math.floor(pair(about.number("beta_fast", 32))), 0)
  last = min(math.ceil(pair(about.number("beta_slow", 1))), head_dim - 1)
  ramp = np.clip(
    (np.arange(rates.size) - first) / max(last - first, 0.001), 0, 1
  )
  scale = about.number(
    "attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
  )
  return rates * ((1 - ramp) + ramp / factor), scale
