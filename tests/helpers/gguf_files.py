"""GGUF files of a model, as llama.cpp would have made them."""

import struct

import numpy as np

from jaxpruner.post_training.models import gguf_writer


def text(word):
  return struct.pack("<Q", len(word)) + word.encode()


def dense_file(path, model, kind, more=(), left_out=()):
  """Write a GGUF file of zeros with the names and shapes of a model."""
  config = model.config
  names = gguf_writer._sources(
    config,
    {
      f"{part}.{end}"
      for end in ("weight", "bias")
      for part in (
        "token_embd", "output_norm", *([] if config.tied else ["output"]),
        *(f"blk.{i}.{n}" for i in range(config.layers)
          for n in gguf_writer._LAYER.values()),
      )
    },
  )  # fmt: skip
  shapes = {
    theirs: model.params[ours].shape
    for theirs, ours in names.items()
    if ours in model.params and theirs not in left_out
  } | dict(more)
  fields = {"general.architecture": kind, "tokenizer.ggml.model": "none"}
  raw = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(fields))
  for key, value in fields.items():
    raw += text(key) + struct.pack("<I", 8) + text(value)
  offset = 0
  for name, shape in shapes.items():
    raw += text(name) + struct.pack(
      f"<I{len(shape)}Q", len(shape), *shape[::-1]
    )
    raw += struct.pack("<IQ", 0, offset)
    offset += -(-4 * int(np.prod(shape)) // 32) * 32
  raw += bytes(-len(raw) % 32) + bytes(offset)
  path.write_bytes(raw)
  return path
