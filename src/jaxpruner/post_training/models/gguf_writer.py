"""Write a model of a folder as a GGUF file, for llama.cpp."""

import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxpruner._tools import atomic, regular
from jaxpruner.post_training.models import gguf
from jaxpruner.post_training.models.decoder_config import Decoder
from jaxpruner.post_training.models.hub import HubModel

VALUES = ("q8_0", "float16", "float32")
# Type numbers, and bytes of so many weights.
_TYPES = {"float32": (0, 1, 4), "float16": (1, 1, 2), "q8_0": (8, 32, 34)}
# The architecture's name, and whether queries and keys are turned in pairs of
# neighbours, not in halves of a head.
_KINDS = {
  "llama": ("llama", True), "mistral": ("llama", True),
  "qwen2": ("qwen2", False), "qwen3": ("qwen3", False),
}  # fmt: skip
_LAYER = {
  "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}  # fmt: skip


def save_gguf(
  path: str | os.PathLike,
  model: HubModel,
  like: str | os.PathLike,
  values: str = "q8_0",
) -> None:
  """Write a pruned model as a GGUF file that llama.cpp loads.

  Zeros are stored as zeros: llama.cpp has no sparse products, so the file is as
  large and as fast as that of the dense model. Tokenizer and settings are those
  of a GGUF file of the dense model, of any quantisation; its weights are not
  used. The file is written whole or not at all.

  Args:
    path: the file to write.
    model: a Llama, Mistral, Qwen 2 or Qwen 3 that `load_folder` loaded.
    like: a GGUF file of the model before pruning.
    values: how matrices are stored: "q8_0" (a byte, and a scale for 32
      neighbours), "float16" or "float32".

  Raises:
    ValueError: the model is of another kind, or `like` of another model.
    DataError: `like` is no GGUF file.

  Example:
    >>> save_gguf("x.gguf", HubModel(len, {}, {}, None, "folder"), "y.gguf")
    Traceback (most recent call last):
    ValueError: folder: only llama, mistral, qwen2, qwen3 are written as GGUF
  """
  config = model.config
  if not isinstance(config, Decoder) or config.kind not in _KINDS:
    raise ValueError(
      f"{model.folder}: only {', '.join(_KINDS)} are written as GGUF"
    )
  if values not in VALUES:
    raise ValueError(f"values={values!r} must be one of {VALUES}")
  target = atomic.check_target(path)
  raw = regular.read_bytes(like)
  old = gguf.header(raw)
  found = old.metadata.get("general.architecture")
  kind, neighbours = _KINDS[config.kind]
  if found != kind:
    raise ValueError(
      f"{like}: architecture {found!r}, but {model.folder} is {kind!r}; give "
      "a GGUF file of the same model"
    )
  source = _sources(config, set(old.entries))
  data = memoryview(raw)[old.start :]
  own = {name: e for name, e in old.entries.items() if name not in source}
  for name, entry in own.items():  # factors of rotations
    if entry.kind != 0 or len(entry.shape) > 1:
      raise ValueError(f"{like}: tensor {name!r} is not in {model.folder}")
    gguf.check_inside(name, entry, len(data))
  kept = gguf.File(old.metadata, own, data)
  missing = sorted(set(model.params) - set(source.values()))
  if missing:
    raise ValueError(f"{like} has no tensor for {missing[0]!r}")
  arrays: dict[str, Any] = {}
  for name, entry in old.entries.items():
    if name in own:
      arrays[name] = kept.read(name, entry.shape)
      continue
    arrays[name] = model.params[source[name]]
    if tuple(arrays[name].shape) != entry.shape:
      raise ValueError(
        f"{like}: {name!r} is {entry.shape}, but {source[name]!r} of "
        f"{model.folder} is {tuple(arrays[name].shape)}"
      )
  heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
  turned = {
    name: heads[part]
    for name in source
    if neighbours and (part := name.split(".")[-2]) in heads
  }
  with atomic.replacing(target) as file:
    for piece in _pieces(old, arrays, values, turned):
      file.write(piece)


def _sources(config: Decoder, names: set[str]) -> dict[str, str]:
  """Return GGUF name -> our name, of the tensors that both know."""
  root = config.root
  head = f"{root}embed_tokens" if config.tied else "lm_head"
  pairs = {
    "token_embd": f"{root}embed_tokens", "output_norm": f"{root}norm",
    "output": head,
  }  # fmt: skip
  for i in range(config.layers):
    for ours, theirs in _LAYER.items():
      pairs[f"blk.{i}.{theirs}"] = f"{root}layers.{i}.{ours}"
  return {
    f"{theirs}.{part}": f"{ours}.{part}"
    for theirs, ours in pairs.items()
    for part in ("weight", "bias")
    if f"{theirs}.{part}" in names
  }


def _stored(shape: tuple[int, ...], values: str) -> str:
  """Return how a tensor is stored: vectors are few bytes, and sensitive."""
  if len(shape) < 2:
    return "float32"
  return "float16" if values == "q8_0" and shape[-1] % 32 else values


def _pieces(
  old: gguf.Header, arrays: dict[str, Any], values: str, turned: dict[str, int]
) -> Iterator[bytes]:
  """Yield the file piece by piece."""
  infos, offset = [], 0
  text = lambda name: struct.pack("<Q", len(name.encode())) + name.encode()
  for name, array in arrays.items():
    shape = tuple(array.shape)
    kind, count, size = _TYPES[_stored(shape, values)]
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    infos.append(text(name) + dims + struct.pack("<IQ", kind, offset))
    offset += -(-(array.size // count * size) // old.align) * old.align
  begin = struct.pack("<4sIQQ", b"GGUF", 3, len(arrays), len(old.metadata))
  head = begin + old.fields + b"".join(infos)
  yield head + bytes(-len(head) % old.align)
  for name, array in arrays.items():
    array = np.asarray(array, np.float32)
    if name in turned:
      array = _by_pairs(array, turned[name])
    data = _encode(name, array, _stored(array.shape, values))
    yield data + bytes(-len(data) % old.align)


def _by_pairs(array: np.ndarray, heads: int) -> np.ndarray:
  """Order the rows of each head so that what turns together is adjacent."""
  halves = array.reshape(heads, 2, -1, *array.shape[1:])
  return halves.swapaxes(1, 2).reshape(array.shape)


def _encode(name: str, array: np.ndarray, values: str) -> bytes:
  if values != "q8_0":
    with np.errstate(over="ignore"):
      stored = array.astype("<f4" if values == "float32" else "<f2")
    _check(name, stored, values)
    return stored.tobytes()
  blocks = array.reshape(-1, 32)
  with np.errstate(over="ignore"):
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
  _check(name, scales, values)
  wide = scales.astype(np.float32)
  codes = np.divide(blocks, wide, where=wide > 0, out=np.zeros_like(blocks))
  codes = np.clip(np.rint(codes), -127, 127).astype(np.int8)
  both = scales.view(np.uint8), codes.view(np.uint8)
  return np.concatenate(both, 1).tobytes()


def _check(name: str, stored: np.ndarray, values: str) -> None:
  if not np.isfinite(stored).all():
    raise ValueError(
      f"{name} holds weights that are not finite as {values}; float32 holds "
      "larger ones"
    )
