"""The safetensors container: strict reading, streamed atomic writing.

The format is eight bytes of header length, a JSON header, and the tensors'
bytes. It is read here rather than by the `safetensors` package because a file
is input from outside: every field is checked before a byte is used, and
tensors are read and written one at a time, so a file may exceed memory.
"""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import reprlib
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner._tools import atomic

# What a reader accepts, and a writer writes, at most.
MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
MAX_TENSORS = 1 << 18
MAX_RANK = 64  # NumPy's own
MAX_BYTES = 1 << 62  # of one tensor, empty axes counted as one
MAX_NESTING = 256  # keys of a path, levels of metadata
_CHUNK = 1 << 20

DTYPES = {
  "BOOL": np.dtype(np.bool_),
  "U8": np.dtype(np.uint8),
  "I8": np.dtype(np.int8),
  "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
  "F8_E5M2": np.dtype(jnp.float8_e5m2),
  "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
  "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
  "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
  "U16": np.dtype(np.uint16),
  "I16": np.dtype(np.int16),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
  "U32": np.dtype(np.uint32),
  "I32": np.dtype(np.int32),
  "F32": np.dtype(np.float32),
  "U64": np.dtype(np.uint64),
  "I64": np.dtype(np.int64),
  "F64": np.dtype(np.float64),
  "C64": np.dtype(np.complex64),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FileFormatError(ValueError):
  """A file that is damaged, hostile or not of the format it claims.

  Example:
    >>> import tempfile, pathlib
    >>> from jaxpruner import sparse
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> _ = path.write_bytes(b"no tensors")
    >>> try:
    ...   sparse.load(path)
    ... except sparse.FileFormatError:
    ...   print("refused")
    refused
  """


class Entry(NamedTuple):
  """The position of a stored tensor, relative to the end of the header."""

  dtype: np.dtype
  shape: tuple[int, ...]
  begin: int
  end: int


def check_name(name: str, where: str) -> None:
  """Refuse names that could leave a directory or garble a terminal."""
  parts = re.split(r"[/\\]", name)
  if not name.isprintable() or any(p in ("", ".", "..") for p in parts):
    raise FileFormatError(
      f"{where}: tensor name {name!r} is not allowed; names are printable and "
      "have no empty, '.' or '..' part between slashes"
    )


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
  out: dict[str, Any] = {}
  for key, value in pairs:
    if key in out:
      raise FileFormatError(f"key {key!r} occurs twice")
    out[key] = value
  return out


def parse_json(text: str | bytes, where: str) -> Any:
  """Parse untrusted JSON; any failure is a `FileFormatError`."""
  try:
    return json.loads(text, object_pairs_hook=_unique)
  except (ValueError, RecursionError) as e:
    raise FileFormatError(f"{where}: not valid JSON ({e})") from e


def is_count(value: Any) -> bool:
  return type(value) is int and 0 <= value < 1 << 62


def is_shape(value: Any, itemsize: int = 1) -> bool:
  """Tell whether an array may have this shape; wide products stop early."""
  if not isinstance(value, list | tuple) or len(value) > MAX_RANK:
    return False
  size = itemsize
  for side in value:
    if not is_count(side):
      return False
    size *= side or 1  # NumPy refuses huge sides beside an empty one as well
    if size >= MAX_BYTES:
      return False
  return True


def check_metadata(value: Any, where: str) -> None:
  """Refuse values that nest too deep, or text that UTF-8 cannot hold."""
  waiting = [(value, 0)]
  while waiting:
    value, depth = waiting.pop()
    if depth > MAX_NESTING:
      raise FileFormatError(
        f"{where}: metadata nests more than {MAX_NESTING} levels deep"
      )
    if isinstance(value, str):
      try:
        value.encode()
      except UnicodeEncodeError as e:
        raise FileFormatError(
          f"{where}: metadata {value[:40]!r} is not Unicode text ({e.reason})"
        ) from None
    elif isinstance(value, Mapping):
      waiting += [(v, depth + 1) for pair in value.items() for v in pair]
    elif isinstance(value, list | tuple):
      waiting += [(v, depth + 1) for v in value]


def _parse_entry(name: str, spec: Any, where: str) -> Entry:
  check_name(name, where)
  where = f"{where}: tensor {name!r}"
  if not isinstance(spec, dict) or set(spec) != {
    "dtype", "shape", "data_offsets",
  }:  # fmt: skip
    raise FileFormatError(
      f"{where}: its entry must hold dtype, shape and data_offsets, got "
      f"{reprlib.repr(spec)}"
    )
  dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
  if not isinstance(dtype, str) or dtype not in DTYPES:
    raise FileFormatError(
      f"{where}: unknown dtype {reprlib.repr(dtype)}; known are {list(DTYPES)}"
    )
  itemsize = DTYPES[dtype].itemsize
  if not isinstance(shape, list) or not is_shape(shape, itemsize):
    raise FileFormatError(
      f"{where}: shape must be a list of at most {MAX_RANK} sizes that take "
      f"less than 2^62 bytes, got {reprlib.repr(shape)}"
    )
  if (
    not isinstance(offsets, list)
    or len(offsets) != 2
    or not all(map(is_count, offsets))
  ):
    raise FileFormatError(
      f"{where}: data_offsets must be two sizes, got {reprlib.repr(offsets)}"
    )
  size = math.prod(shape) * itemsize
  if offsets[1] - offsets[0] != size:
    raise FileFormatError(
      f"{where}: {dtype} of shape {shape} takes {size} bytes, its offsets "
      f"{offsets} say otherwise"
    )
  return Entry(DTYPES[dtype], tuple(shape), *offsets)


class Reader:
  """The checked header of a file, and its tensors on request.

  Args:
    path: a `.safetensors` file.

  Raises:
    FileFormatError: for anything but a well-formed file whose tensors cover
      it exactly, without holes or overlap.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    self._lock = threading.Lock()
    # Opening a pipe would wait for its writer.
    if not stat.S_ISREG(os.stat(self.path).st_mode):
      raise FileFormatError(f"{self.path}: not a regular file; name one")
    self._file = open(self.path, "rb")
    try:
      self._read_header()
    except BaseException:
      self._file.close()
      raise

  def _read_header(self) -> None:
    where = str(self.path)
    size = os.fstat(self._file.fileno()).st_size
    length = int.from_bytes(self._file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
      raise FileFormatError(
        f"{where}: the header claims {length} bytes in a file of {size} "
        f"(limit {MAX_HEADER}): truncated, or not a safetensors file"
      )
    header = parse_json(self._file.read(length), where)
    if not isinstance(header, dict):
      raise FileFormatError(f"{where}: the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
      isinstance(v, str) for v in metadata.values()
    ):
      raise FileFormatError(f"{where}: __metadata__ must map names to strings")
    check_metadata(metadata, where)
    if len(header) > MAX_TENSORS:
      raise FileFormatError(
        f"{where}: {len(header)} tensors, at most {MAX_TENSORS} are read; "
        "split the tree over several files"
      )
    self.metadata: dict[str, str] = metadata
    self.entries = {k: _parse_entry(k, v, where) for k, v in header.items()}
    self.start = 8 + length
    position = 0
    for name, entry in sorted(
      self.entries.items(), key=lambda item: (item[1].begin, item[1].end)
    ):
      if entry.begin != position:
        raise FileFormatError(
          f"{where}: tensor {name!r} begins at byte {entry.begin}, expected "
          f"{position}: tensors overlap or leave a hole"
        )
      position = entry.end
    if self.start + position != size:
      raise FileFormatError(
        f"{where}: the tensors end at byte {self.start + position} of "
        f"{size}: truncated, or followed by foreign bytes"
      )

  def _read_into(self, buffer: np.ndarray, offset: int) -> None:
    with self._lock:
      self._file.seek(self.start + offset)
      count = self._file.readinto(buffer)  # pyright: ignore
    if count != buffer.nbytes:
      raise FileFormatError(f"{self.path}: shortened while being read")

  def read(self, name: str) -> np.ndarray:
    """Return one stored tensor as a writable array."""
    entry = self.entries[name]
    raw = np.empty(entry.end - entry.begin, np.uint8)
    if raw.size:
      self._read_into(raw, entry.begin)
    if entry.dtype == np.bool_ and raw.size and raw.max() > 1:
      raise FileFormatError(
        f"{self.path}: tensor {name!r} is BOOL but holds bytes above 1"
      )
    return raw.view(entry.dtype).reshape(entry.shape)

  def chunks(self, name: str, items: int = _CHUNK) -> Iterator[np.ndarray]:
    """Yield one stored tensor flat, at most `items` elements at a time."""
    entry = self.entries[name]
    step = items * entry.dtype.itemsize
    for begin in range(entry.begin, entry.end, step):
      raw = np.empty(min(step, entry.end - begin), np.uint8)
      self._read_into(raw, begin)
      yield raw.view(entry.dtype)

  def __enter__(self) -> "Reader":
    return self

  def __exit__(self, *exc: object) -> None:
    self._file.close()


def header_digest(
  entries: Mapping[str, Entry], metadata: Mapping[str, str]
) -> str:
  """Return the SHA-256 of a header's content, independent of JSON style."""
  rows = [
    [name, DTYPE_NAMES[e.dtype], *e.shape, e.begin, e.end]
    for name, e in entries.items()
  ]
  text = json.dumps(
    [sorted(rows, key=lambda r: r[0]), sorted(metadata.items())]
  )
  return hashlib.sha256(text.encode()).hexdigest()


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
  header: dict[str, Any] = {}
  if metadata:
    header["__metadata__"] = dict(metadata)
  for name, e in entries.items():
    header[name] = {
      "dtype": DTYPE_NAMES[e.dtype],
      "shape": list(e.shape),
      "data_offsets": [e.begin, e.end],
    }
  return json.dumps(header, ensure_ascii=False).encode()


class Writer:
  """Stream tensors into a file that appears at `path` only when complete.

  The header comes first in the file but is known last. Space for the largest
  possible header is reserved and padded with spaces, as the format allows.

  Args:
    path: the file; an existing file is replaced only at the end.
    largest: dtype and largest shape of every tensor that will be added.
    metadata: metadata of at least the final length.
  """

  def __init__(
    self,
    path: str | os.PathLike,
    largest: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str],
  ):
    self.path = pathlib.Path(path)
    total = sum(d.itemsize * math.prod(s) for d, s in largest.values())
    worst = {k: Entry(d, s, total, total) for k, (d, s) in largest.items()}
    # The tensors start at a multiple of 64 so that a memory map is aligned.
    self._length = -(-(8 + len(_header(worst, metadata))) // 64) * 64 - 8
    if self._length > MAX_HEADER:
      raise ValueError(
        f"{path}: the header would take {self._length} bytes, the format "
        f"allows {MAX_HEADER}; split the tree over several files"
      )
    self.entries: dict[str, Entry] = {}
    self.metadata: dict[str, str] = dict(metadata)
    self._position = 0

  def __enter__(self) -> "Writer":
    with contextlib.ExitStack() as stack:
      self._file = stack.enter_context(atomic.replacing(self.path))
      self._file.seek(8 + self._length)
      self._open = stack.pop_all()
    return self

  def add(
    self,
    name: str,
    dtype: np.dtype,
    shape: tuple[int, ...],
    pieces: Iterable[np.ndarray],
    digest: Any = None,
  ) -> None:
    """Append one tensor, given in flat pieces; `digest` hashes them."""
    begin = self._position
    if len(self.entries) >= MAX_TENSORS:
      raise ValueError(
        f"{self.path}: more than {MAX_TENSORS} tensors; split the tree over "
        "several files"
      )
    for piece in pieces:
      # A byte view: memoryview knows nothing of bfloat16.
      raw = np.asarray(piece, order="C").reshape(-1).view(np.uint8).data
      self._file.write(raw)
      if digest is not None:
        digest.update(raw)
      self._position += len(raw)
    if self._position - begin != math.prod(shape) * dtype.itemsize:
      raise RuntimeError(f"{name}: its pieces do not fill the shape {shape}")
    self.entries[name] = Entry(dtype, shape, begin, self._position)

  def __exit__(self, kind: Any, *exc: Any) -> None:
    try:
      if kind is None:
        header = _header(self.entries, self.metadata)
        if len(header) > self._length:
          raise RuntimeError("the header outgrew the room reserved for it")
        self._file.seek(0)
        self._file.write(self._length.to_bytes(8, "little"))
        self._file.write(header.ljust(self._length))
    except BaseException:
      self._open.__exit__(*sys.exc_info())
      raise
    self._open.__exit__(kind, *exc)
