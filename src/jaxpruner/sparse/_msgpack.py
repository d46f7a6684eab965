"""Flax's msgpack files: arrays are found by walking the bytes.

A pruned array has the bytes of the old one, in number. So the new file is the
old one with some ranges replaced, and nothing else in it needs to be
understood. The format is walked here rather than by the `msgpack` package so
that one array at a time is in memory, and every length is checked.
"""

import mmap
import os
import shutil
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jaxpruner._tools import atomic
from jaxpruner.sparse import _foreign
from jaxpruner.sparse import _safetensors as st
from jaxpruner.sparse._layouts import Content, Tensor

_CHUNKED = "__msgpack_chunked_array__"
_NUMBERS = {
  0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
  0xCA: 4, 0xCB: 8,
}  # fmt: skip
# first byte from, to: what, the bits of its length or value
_SHORT = (
  (0x00, 0x7F, "number", 0x7F), (0x80, 0x8F, "map", 15),
  (0x90, 0x9F, "list", 15), (0xA0, 0xBF, "text", 31),
  (0xE0, 0xFF, "number", 0),
)  # fmt: skip
# first byte -> (what, bytes of its length)
_LONG = {
  0xD9: ("text", 1), 0xDA: ("text", 2), 0xDB: ("text", 4),
  0xC4: ("bytes", 1), 0xC5: ("bytes", 2), 0xC6: ("bytes", 4),
  0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
  0xC7: ("ext", 1), 0xC8: ("ext", 2), 0xC9: ("ext", 4),
}  # fmt: skip
_NAMES = {str(dtype): dtype for dtype in st.DTYPE_NAMES}


class _Walk:
  """A position in the bytes, and the items read from there."""

  def __init__(self, raw: mmap.mmap, where: str):
    self._raw, self._where, self.at = raw, where, 0

  def fail(self, why: str) -> st.FileFormatError:
    return st.FileFormatError(
      f"{self._where}: byte {self.at}: {why}: damaged, or not a Flax msgpack "
      "file"
    )

  def skip(self, count: int) -> int:
    """Pass over bytes; return where they begin."""
    begin = self.at
    if count > len(self._raw) - begin:
      raise self.fail(f"{count} bytes are announced, the file ends before")
    self.at += count
    return begin

  def number(self, count: int) -> int:
    begin = self.skip(count)
    return int.from_bytes(self._raw[begin : begin + count], "big")

  def head(self) -> tuple[str, int]:
    """Return the kind of the next item, and its length or value."""
    first = self.number(1)
    if first in _LONG:
      what, width = _LONG[first]
      return what, self.number(width)
    for low, high, what, mask in _SHORT:
      if low <= first <= high:
        return what, first & mask
    if first in (0xC0, 0xC2, 0xC3):
      return "number", 0
    if first in _NUMBERS:
      return "number", self.number(_NUMBERS[first])
    if 0xD4 <= first <= 0xD8:
      return "ext", 1 << (first - 0xD4)
    raise self.fail(f"0x{first:02x} is no item")

  def text(self) -> str:
    what, length = self.head()
    if what != "text" or length > 65_536:
      raise self.fail("a name is expected")
    begin = self.skip(length)
    try:
      return self._raw[begin : begin + length].decode()
    except UnicodeDecodeError as e:
      raise self.fail("a name is not UTF-8") from e


class _Array(NamedTuple):
  dtype: np.dtype | None
  shape: tuple[int, ...]
  ranges: list[tuple[int, int]]  # first byte, number of bytes


class Msgpack(_foreign.Foreign):
  """A file written by `flax.serialization.to_bytes`."""

  kind = "Flax msgpack file"

  def __init__(self, path: str | os.PathLike):
    super().__init__(path)
    self._file = open(self.path, "rb")
    try:
      self._raw = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as e:
      self._file.close()
      raise st.FileFormatError(f"{path}: an empty file") from e
    self._ranges: dict[str, list[tuple[int, int]]] = {}
    try:
      walk = _Walk(self._raw, str(self.path))
      self._walk(walk, ())
      if walk.at != len(self._raw):
        raise walk.fail("bytes follow the end")
    except BaseException:
      self.__exit__()
      raise

  def __exit__(self, *exc: object) -> None:
    self._raw.close()
    self._file.close()

  def _walk(self, walk: _Walk, names: tuple[str, ...]) -> None:
    if len(names) > st.MAX_NESTING:
      raise walk.fail(f"maps nest more than {st.MAX_NESTING} levels deep")
    what, length = walk.head()
    if what in ("text", "bytes"):
      walk.skip(length)
    elif what == "list":
      for i in range(length):
        self._walk(walk, (*names, str(i)))
    elif what == "ext":
      self._add(walk, names, _extension(walk, length))
    elif what == "map":
      self._map(walk, names, length)

  def _map(self, walk: _Walk, names: tuple[str, ...], length: int) -> None:
    for i in range(length):
      name = walk.text()
      if not i and name == _CHUNKED:
        return self._add(walk, names, _chunked(walk, length))
      self._walk(walk, (*names, name))

  def _add(self, walk: _Walk, names: tuple[str, ...], array: _Array) -> None:
    if array.dtype is None:  # a scalar, a complex number, an odd dtype
      return
    if len(self.tensors) >= st.MAX_TENSORS:
      raise walk.fail(f"more than {st.MAX_TENSORS} arrays")
    name = "/".join(names)
    st.check_name(name, str(self.path))
    if name in self.tensors:
      raise walk.fail(f"{name!r} occurs twice")
    tensor = Tensor(
      name, names, array.dtype, array.shape,
      stored_bytes=sum(count for _, count in array.ranges),
    )  # fmt: skip
    if tensor.size * array.dtype.itemsize != tensor.stored_bytes:
      raise walk.fail(
        f"{name!r}: {array.dtype} of shape {array.shape} does not take its "
        f"{tensor.stored_bytes} bytes"
      )
    self.tensors[name], self._ranges[name] = tensor, array.ranges

  def array(self, name: str) -> np.ndarray:
    tensor = self.tensors[name]
    raw = np.empty(tensor.stored_bytes, np.uint8)
    at = 0
    for begin, count in self._ranges[name]:
      raw[at : at + count] = np.frombuffer(self._raw, np.uint8, count, begin)
      at += count
    return raw.view(tensor.dtype).reshape(tensor.shape)

  def write(
    self,
    target: str | os.PathLike,
    read: Callable[[str], Content],
    tensors: Iterable[Tensor],
    overwrite: bool,
  ) -> None:
    del overwrite  # a file is replaced in one piece
    with atomic.replacing(target) as out, open(self.path, "rb") as old:
      shutil.copyfileobj(old, out, 1 << 20)
      for tensor in tensors:
        ranges = iter(self._ranges[tensor.name])
        begin, left = 0, 0
        for piece in _foreign.patched(read(tensor.name)):
          raw = np.ascontiguousarray(piece).view(np.uint8)
          while raw.size:
            if not left:
              begin, left = next(ranges)
            count = min(left, raw.size)
            out.seek(begin)
            out.write(raw[:count].data)
            raw, begin, left = raw[count:], begin + count, left - count
      out.seek(0, os.SEEK_END)


def _extension(walk: _Walk, length: int) -> _Array:
  """Read an array: Flax packs (shape, name of the dtype, bytes)."""
  code = walk.number(1)
  end = walk.skip(length) + length
  if code != 1:
    return _Array(None, (), [])
  walk.at = end - length
  what, count = walk.head()
  if (what, count) != ("list", 3):
    raise walk.fail("an array is (shape, dtype, bytes)")
  what, rank = walk.head()
  if what != "list" or rank > st.MAX_RANK:
    raise walk.fail("a shape is a short list")
  shape = []
  for _ in range(rank):
    what, size = walk.head()
    shape.append(size if what == "number" else -1)
  dtype = _NAMES.get(walk.text())
  what, count = walk.head()
  if what != "bytes":
    raise walk.fail("the bytes of an array are missing")
  begin = walk.skip(count)
  if walk.at != end or not st.is_shape(shape, dtype.itemsize if dtype else 1):
    raise walk.fail(f"an array of impossible shape {shape!r:.100}")
  return _Array(dtype, tuple(shape), [(begin, count)])


def _chunked(walk: _Walk, length: int) -> _Array:
  """Read a large array: Flax splits it into chunks of at most 1 GiB."""
  _skip_item(walk)
  shape: dict[int, int] = {}
  dtype, ranges = None, []
  for _ in range(length - 1):
    key = walk.text()
    what, count = walk.head()
    if what != "map" or key not in ("shape", "chunks"):
      raise walk.fail("an array in chunks has shape and chunks")
    for i in range(count):
      if walk.text() != str(i):
        raise walk.fail("chunks are numbered from 0")
      what, value = walk.head()
      if key == "shape" and what == "number" and i < st.MAX_RANK:
        shape[i] = value
      elif key == "chunks" and what == "ext":
        part = _extension(walk, value)
        dtype, ranges = part.dtype, [*ranges, *part.ranges]
      else:
        raise walk.fail("an array in chunks holds something else")
  sizes = tuple(shape.values())
  if not st.is_shape(sizes, dtype.itemsize if dtype else 1):
    raise walk.fail(f"an array of impossible shape {sizes!r:.100}")
  return _Array(dtype, sizes, ranges)


def _skip_item(walk: _Walk) -> None:
  what, length = walk.head()
  if what != "number":
    raise walk.fail(f"{_CHUNKED} is a flag")
  del length
