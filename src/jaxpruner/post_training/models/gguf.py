"""A strict reader of GGUF files: metadata and float, Q4_1 and Q8_0 tensors."""

import math
import struct
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.datasets.archives import DataError

# Type number -> format of struct; 8 is a string, 9 an array.
_SCALARS = {
  0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q",
  11: "q", 12: "d",
}  # fmt: skip
# Tensor type -> (weights per block, bytes per block).
_BLOCKS = {0: (1, 4), 1: (1, 2), 3: (32, 20), 8: (32, 34)}
_MOST = 1 << 20  # entries of a header or an array


class Entry(NamedTuple):
  """Where a tensor lies; its shape as NumPy has it."""

  shape: tuple[int, ...]
  kind: int
  offset: int


class _Cursor:
  def __init__(self, raw: bytes):
    self.raw, self.at = raw, 0

  def take(self, count: int) -> bytes:
    if not 0 <= count <= len(self.raw) - self.at:
      raise DataError(f"GGUF: {count} bytes wanted at {self.at}, cut short")
    self.at += count
    return self.raw[self.at - count : self.at]

  def number(self, format: str) -> Any:
    size = struct.calcsize("<" + format)
    return struct.unpack("<" + format, self.take(size))[0]

  def count(self) -> int:
    value = self.number("Q")
    if value > _MOST:
      raise DataError(f"GGUF: {value} entries announced, at most {_MOST}")
    return value

  def text(self) -> str:
    try:
      return self.take(self.count()).decode()
    except UnicodeDecodeError as error:
      raise DataError(f"GGUF: a string is not UTF-8 ({error})") from error

  def value(self, kind: int, nested: bool = False) -> Any:
    if kind == 8:
      return self.text()
    if kind == 9 and not nested:
      inner = self.number("I")
      return [self.value(inner, True) for _ in range(self.count())]
    if kind not in _SCALARS:
      raise DataError(f"GGUF: value type {kind} is unknown")
    return self.number(_SCALARS[kind])


class Header(NamedTuple):
  """What stands before the weights.

  Attributes:
    metadata: name -> value.
    fields: the bytes of the metadata, as they are in the file.
    entries: name -> where a tensor lies.
    align: what offsets are multiples of.
    start: the byte at which the weights begin.
  """

  metadata: dict[str, Any]
  fields: bytes
  entries: dict[str, Entry]
  align: int
  start: int


class File(NamedTuple):
  """A parsed file."""

  metadata: dict[str, Any]
  entries: dict[str, Entry]
  data: memoryview

  def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor as float32; it must have this shape."""
    entry = self.entries.get(name)
    if entry is None or entry.shape != shape:
      found = None if entry is None else entry.shape
      raise DataError(f"GGUF: tensor {name!r} has shape {found}, need {shape}")
    weights, size = _BLOCKS[entry.kind]
    count = math.prod(shape) // weights
    raw = np.frombuffer(self.data, np.uint8, count * size, entry.offset)
    with np.errstate(all="ignore"):  # what is not finite is refused below
      values = _decode(raw.reshape(count, size), entry.kind).reshape(shape)
    if not np.isfinite(values).all():
      raise DataError(
        f"GGUF: tensor {name!r} holds weights that are not finite"
      )
    return values


def header(raw: bytes) -> Header:
  """Parse what stands before the weights."""
  cursor = _Cursor(raw)
  if cursor.take(4) != b"GGUF" or cursor.number("I") not in (2, 3):
    raise DataError("not a GGUF file of version 2 or 3")
  tensors, fields = cursor.count(), cursor.count()
  metadata: dict[str, Any] = {}
  begin = cursor.at
  for _ in range(fields):
    key = cursor.text()
    if key in metadata:
      raise DataError(f"GGUF: key {key!r} is there twice")
    metadata[key] = cursor.value(cursor.number("I"))
  end = cursor.at
  entries: dict[str, Entry] = {}
  for _ in range(tensors):
    name, dims = cursor.text(), cursor.number("I")
    if name in entries or not 1 <= dims <= 4:
      raise DataError(f"GGUF: tensor {name!r} is there twice or {dims}-D")
    shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
    entries[name] = Entry(shape, cursor.number("I"), cursor.number("Q"))
  align = metadata.get("general.alignment", 32)
  # 32.0 and True are equal to whole numbers.
  if type(align) is not int or align not in (8, 16, 32, 64, 128, 256):
    raise DataError(f"GGUF: alignment {align!r} is not sensible")
  start = -(-cursor.at // align) * align
  return Header(metadata, raw[begin:end], entries, align, start)


def parse(raw: bytes) -> File:
  """Parse a file; refuse anything that does not fit together."""
  metadata, _, entries, _, start = header(raw)
  data = memoryview(raw)[start:]
  for name, entry in entries.items():
    check_inside(name, entry, len(data))
  return File(metadata, entries, data)


def check_inside(name: str, entry: Entry, length: int) -> None:
  """Raise if a tensor does not lie within so many bytes of weights."""
  if entry.kind not in _BLOCKS:
    raise DataError(f"GGUF: tensor {name!r} has unknown type {entry.kind}")
  weights, size = _BLOCKS[entry.kind]
  total = math.prod(entry.shape)
  end = entry.offset + total // weights * size
  if entry.shape[-1] % weights or end > length or total > 1 << 40:
    raise DataError(f"GGUF: tensor {name!r} does not lie within the file")


def _decode(blocks: np.ndarray, kind: int) -> np.ndarray:
  if kind in (0, 1):
    return blocks.reshape(-1).view("<f4" if kind == 0 else "<f2").astype("f4")
  scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
  if kind == 8:
    return scale * blocks[:, 2:].view(np.int8)
  low = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
  halves = blocks[:, 4:]
  return scale * np.concatenate([halves & 15, halves >> 4], axis=1) + low
