"""The layouts of sparse tensors in a file; reads and writes single tensors.

`packed`: one bit per weight and the kept values, described and hashed in the
metadata. `int8`: the same, with matrices rounded to one byte per kept weight.
`sparse-bitmask`: the layout of compressed-tensors, row by row. `dense`: plain
tensors, zeros spelled out.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.sparse import _int8
from jaxpruner.sparse import _safetensors as st

LAYOUTS = ("packed", "dense", "sparse-bitmask")  # exact ones
ALL_LAYOUTS = (*LAYOUTS, "int8")
_HASHED = ("packed", "int8")  # layouts with a manifest
VERSION = 1
_KEY = "jaxpruner"
_DIGEST = "jaxpruner_sha256"
_NAMES = "jaxpruner_names"
MODEL_KEY = "jaxpruner_model"  # of files with a program, see `artifacts`
_BITMASK_PARTS = (".shape", ".compressed", ".bitmask", ".row_offsets")
_CHUNK = 1 << 17  # elements decoded at once: mask and indices stay in cache


class Tensor(NamedTuple):
  """A tensor of a model file of any layout."""

  name: str
  path: tuple[str | int, ...]
  dtype: np.dtype
  shape: tuple[int, ...]
  encoding: str = "dense"  # or "packed", "int8", "sparse-bitmask"
  masked: bool = False  # a mask was saved, not only zeros
  stored_bytes: int = 0
  sha256: str = ""
  prefix: str = ""  # common prefix of the parts of a sparse-bitmask

  @property
  def size(self) -> int:
    return math.prod(self.shape)


Leaf = tuple[np.ndarray, np.ndarray | None]
PIECE = 1 << 20  # elements written at once; whole bytes of bits
# Flat values, and which of them are kept: None if no mask was given.
Piece = tuple[np.ndarray, np.ndarray | None]


class Content(NamedTuple):
  """A tensor to write: its pieces in order, as often as they are asked for.

  Every piece but the last has a multiple of 8 elements.
  """

  masked: bool
  pieces: Callable[[], Iterable[Piece]]


def content(leaf: Leaf) -> Content:
  """Return a tensor and its mask as pieces."""
  flat, mask = leaf[0].reshape(-1), leaf[1]
  kept = None if mask is None else mask.reshape(-1)

  def pieces() -> Iterator[Piece]:
    for begin in range(0, flat.size, PIECE):
      at = slice(begin, begin + PIECE)
      yield flat[at], None if kept is None else kept[at] != 0

  return Content(mask is not None, pieces)


class Written(NamedTuple):
  """What a user should know of a checkpoint that was written.

  Attributes:
    left: files not copied, the same weights in other formats.
    found: shards that an interrupted run had finished.
  """

  left: list[str]
  found: list[str]


def _words(array: np.ndarray) -> np.ndarray:
  """View as unsigned integers, so that zero means +0.0 and bits survive."""
  return array.reshape(-1).view(f"u{array.dtype.itemsize}")


def keep(array: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
  """Return which elements must be stored, flat."""
  if mask is None:
    return _words(array) != 0
  return mask.reshape(-1) != 0


def packed_bytes(tensor: Tensor, kept: int) -> int:
  """Return the bytes of bits and values in the `packed` layout."""
  return -(-tensor.size // 64) * 8 + kept * tensor.dtype.itemsize


def _spread(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
  """Put `values` where a flat mask is 1, +0.0 elsewhere."""
  out = np.zeros(mask.size, f"u{values.dtype.itemsize}")
  words, taken = _words(values), 0
  for begin in range(0, mask.size, _CHUNK):
    where = np.flatnonzero(mask[begin : begin + _CHUNK].view(np.bool_))
    part = words[taken : taken + where.size]
    if part.size == where.size:
      out[begin : begin + _CHUNK][where] = part
    taken += where.size
  if taken != words.size:
    raise st.FileFormatError(
      f"the bits mark {taken} weights, {words.size} are stored"
    )
  return out.view(values.dtype)


def _unpack_bits(bits: np.ndarray, size: int) -> np.ndarray:
  if np.unpackbits(bits[size // 8 :], bitorder="little")[size % 8 :].any():
    raise st.FileFormatError("bits are set beyond the last weight")
  return np.unpackbits(bits, count=size, bitorder="little")


def _sha(*arrays: np.ndarray) -> str:
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(array.reshape(-1).view(np.uint8).data)
  return digest.hexdigest()


def _check_depth(path: Sequence[Any], where: str) -> None:
  if len(path) > st.MAX_NESTING:
    raise st.FileFormatError(
      f"{where}: {len(path)} keys lead to it, at most {st.MAX_NESTING} may"
    )


class SparseFile:
  """A model file of any of the layouts; tensors are decoded on request."""

  def __init__(self, path: str | os.PathLike):
    self.reader = st.Reader(path)
    self.path = self.reader.path
    try:
      self.layout, self.tensors, self.metadata = self._describe()
    except BaseException:
      self.reader.__exit__()
      raise

  def __enter__(self) -> "SparseFile":
    return self

  def __exit__(self, *exc: object) -> None:
    self.reader.__exit__()

  def _stored(self, *names: str) -> int:
    entries = (self.reader.entries[n] for n in names)
    return sum(e.end - e.begin for e in entries)

  def _describe(self) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    if MODEL_KEY in self.reader.metadata:
      raise st.FileFormatError(
        f"{self.path}: a saved model, weights and program; call it with "
        "jaxpruner.sparse.load_model"
      )
    # Either key: a damaged one must not turn the file into a foreign one.
    if {_KEY, _DIGEST} & self.reader.metadata.keys():
      return self._describe_packed()
    entries, tensors, bitmask = self.reader.entries, {}, set()
    metadata = dict(self.reader.metadata)
    exact = st.parse_json(metadata.pop(_NAMES, "[]"), f"{self.path}: metadata")
    if not isinstance(exact, list):
      raise st.FileFormatError(f"{self.path}: {_NAMES} must be a list of names")
    for stored in entries:
      prefix = stored.removesuffix(".compressed")
      parts = [prefix + p for p in _BITMASK_PARTS]
      if prefix == stored or not all(p in entries for p in parts):
        continue
      bitmask.update(parts)
      # The layout names parts after the module of a weight; its first version
      # named them after the weight, and so do we where it is no `.weight`.
      whole = prefix.endswith(".weight") or prefix in exact
      name = prefix if whole else prefix + ".weight"
      tensors[name] = Tensor(
        name,
        tuple(name.split("/")),
        entries[stored].dtype,
        self._bitmask_shape(prefix),
        "sparse-bitmask",
        masked=True,
        stored_bytes=self._stored(*parts),
        prefix=prefix,
      )
    for name, e in entries.items():
      if name in bitmask:
        continue
      if name in tensors:
        raise st.FileFormatError(
          f"{self.path}: {name!r} is stored both dense and as a bitmask"
        )
      tensors[name] = Tensor(
        name, tuple(name.split("/")), e.dtype, e.shape,
        stored_bytes=self._stored(name),
      )  # fmt: skip
    layout = "sparse-bitmask" if bitmask else "dense"
    for name, tensor in tensors.items():
      _check_depth(tensor.path, f"{self.path}: {name[:40]!r}…")
    return layout, tensors, metadata

  def _bitmask_shape(self, name: str) -> tuple[int, ...]:
    entries = self.reader.entries
    where = f"{self.path}: {name!r}"
    shape_entry = entries[name + ".shape"]
    if shape_entry.dtype != np.int64 or len(shape_entry.shape) != 1:
      raise st.FileFormatError(f"{where}: .shape must be a list of I64")
    if shape_entry.shape[0] > st.MAX_RANK:
      raise st.FileFormatError(
        f"{where}: .shape has more than {st.MAX_RANK} dimensions"
      )
    shape = tuple(map(int, self.reader.read(name + ".shape")))
    bits = entries[name + ".bitmask"]
    rows = entries[name + ".row_offsets"]
    if (
      not shape
      or not st.is_shape(shape, entries[name + ".compressed"].dtype.itemsize)
      or bits.dtype != np.uint8
      or bits.shape != (*shape[:-1], -(-shape[-1] // 8))
      or rows.dtype != np.int64
      or rows.shape != shape[:-1]
      or len(entries[name + ".compressed"].shape) != 1
    ):
      raise st.FileFormatError(
        f"{where}: bitmask {bits.shape}, row_offsets {rows.shape} and shape "
        f"{shape} do not fit together"
      )
    return shape

  def _describe_packed(self) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    where = str(self.path)
    metadata = dict(self.reader.metadata)
    manifest = st.parse_json(metadata.get(_KEY, ""), f"{where}: metadata")
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != VERSION:
      raise st.FileFormatError(
        f"{where}: written in version {str(version)[:40]} of the layout, this "
        f"jaxpruner reads version {VERSION}; upgrade jaxpruner"
      )
    digest = metadata.pop(_DIGEST, None)
    if digest != st.header_digest(self.reader.entries, metadata):
      raise st.FileFormatError(
        f"{where}: the header does not match its SHA-256: damaged or altered"
      )
    try:
      tensors = {
        name: self._packed_tensor(name, spec)
        for name, spec in manifest["tensors"].items()
      }
      user = dict(manifest["metadata"])
      st.check_metadata(user, where)
    except (KeyError, TypeError, AttributeError, ValueError) as e:
      raise st.FileFormatError(f"{where}: malformed manifest ({e!r})") from e
    parts = [p for t in tensors.values() for p in _packed_parts(t)]
    if sorted(parts) != sorted(self.reader.entries):
      raise st.FileFormatError(
        f"{where}: the manifest and the stored tensors differ"
      )
    rounded = any(t.encoding == "int8" for t in tensors.values())
    return "int8" if rounded else "packed", tensors, user

  def _packed_tensor(self, name: str, spec: Mapping[str, Any]) -> Tensor:
    st.check_name(name, str(self.path))
    _check_depth(spec["path"], f"{self.path}: {name[:40]!r}")
    tensor = Tensor(
      name, tuple(spec["path"]), st.DTYPES[spec["dtype"]],
      tuple(spec["shape"]), spec["encoding"], spec["masked"],
      sha256=spec["sha256"],
    )  # fmt: skip
    if (
      tensor.encoding not in ("dense", *_HASHED)
      or not st.is_shape(tensor.shape, tensor.dtype.itemsize)
      or not all(type(k) in (str, int) for k in tensor.path)
      or type(tensor.masked) is not bool
      or len(tensor.sha256) != 64
    ):
      raise ValueError(f"{name}: {spec}")
    entries = [self.reader.entries[p] for p in _packed_parts(tensor)]
    found = [(e.dtype, e.shape) for e in entries]
    if found != _expected(tensor, entries):
      raise ValueError(f"{name}: stored as {found}, described as {spec}")
    return tensor._replace(stored_bytes=self._stored(*_packed_parts(tensor)))

  def read(self, name: str) -> Leaf:
    """Return a tensor and its mask; None where no mask was saved."""
    tensor = self.tensors[name]
    try:
      return self._decode(tensor)
    except st.FileFormatError as e:
      raise st.FileFormatError(f"{self.path}: tensor {name!r}: {e}") from e

  def _decode(self, tensor: Tensor) -> Leaf:
    parts = [self.reader.read(p) for p in _parts(tensor)]
    if tensor.sha256 and _sha(*parts) != tensor.sha256:
      raise st.FileFormatError("its bytes do not match their SHA-256")
    if tensor.encoding == "dense":
      return parts[0], None
    if tensor.encoding == "int8":
      return self._decode_int8(tensor, *parts)
    if tensor.encoding == "packed":
      bits, values = parts
      mask = _unpack_bits(bits, tensor.size)
    else:
      _, values, rows, offsets = parts
      mask = np.unpackbits(
        rows, axis=-1, count=tensor.shape[-1], bitorder="little"
      )
      counts = mask.sum(-1, dtype=np.int64).reshape(-1)
      if (offsets.reshape(-1) != np.cumsum(counts) - counts).any():
        raise st.FileFormatError("row_offsets contradict the bitmask")
    array = _spread(mask.reshape(-1), values).reshape(tensor.shape)
    return array, mask.reshape(tensor.shape) if tensor.masked else None

  def _decode_int8(self, tensor: Tensor, bits, codes, scales) -> Leaf:
    mask = np.ones(tensor.size, np.uint8)
    if bits.size:
      mask = _unpack_bits(bits, tensor.size)
    array = _int8.decode(_spread(mask, codes).reshape(tensor.shape), scales)
    kept = mask.reshape(tensor.shape) if tensor.masked else None
    return array.astype(tensor.dtype), kept

  def chunks(self, name: str) -> Iterator[np.ndarray]:
    """Yield a tensor flat in pieces; only a packed one is read whole."""
    for values, kept in self.content(name).pieces():
      del kept
      yield values

  def content(self, name: str) -> Content:
    """Return a tensor in pieces; only a packed one is read whole."""
    tensor = self.tensors[name]
    # A hash, and the bytes of BOOL, are checked on the whole.
    if tensor.encoding != "dense" or tensor.sha256 or tensor.dtype == np.bool_:
      return content(self.read(name))
    return Content(False, lambda: ((c, None) for c in self.reader.chunks(name)))

  def stored_values(self, tensor: Tensor) -> int:
    """Return how many weights of a tensor the file holds."""
    if tensor.encoding == "dense":
      return tensor.size
    parts = _parts(tensor)
    return math.prod(self.reader.entries[parts[1]].shape)

  @property
  def kind(self) -> str:
    """What the file is, in words."""
    return "safetensors file"

  def rewrite(
    self,
    target: str | os.PathLike,
    read: Callable[[str], Content],
    *,
    layout: str | None = None,
    metadata: Mapping[str, Any],
    progress: Callable[[list[Tensor]], Iterable[Tensor]] = iter,
    overwrite: bool = False,
    facts: Mapping[str, Any] | None = None,
  ) -> Written | None:
    """Write a file with the same tensors and other content."""
    del overwrite, facts  # a file is replaced in one piece
    write(
      target, self.tensors.values(), read, layout=layout or self.layout,
      metadata=metadata, progress=progress,
    )  # fmt: skip


def _packed_parts(tensor: Tensor) -> tuple[str, ...]:
  if tensor.encoding == "dense":
    return (tensor.name,)
  if tensor.encoding == "int8":
    return tuple(tensor.name + p for p in (".bits", ".codes", ".scales"))
  return (tensor.name + ".bits", tensor.name + ".values")


def _expected(tensor: Tensor, entries: Sequence[st.Entry]) -> list[Any]:
  """Return the dtypes and shapes of a tensor's parts in our own layouts."""
  if tensor.encoding == "dense":
    return [(tensor.dtype, tensor.shape)]
  words = (-(-tensor.size // 64) * 8,)
  count = entries[1].shape if len(entries[1].shape) == 1 else (-1,)
  if tensor.encoding == "packed":
    return [(np.uint8, words), (tensor.dtype, count)]
  # Without bits every weight is kept.
  words = words if entries[0].shape != (0,) else (0,)
  count = count if words != (0,) else (tensor.size,)
  scales = _int8.scale_shape(tensor.shape)
  return [(np.uint8, words), (np.int8, count), (_int8.SCALE, scales)]


def _parts(tensor: Tensor) -> tuple[str, ...]:
  if tensor.encoding == "sparse-bitmask":
    return tuple(tensor.prefix + p for p in _BITMASK_PARTS)
  return _packed_parts(tensor)


def _kept(piece: Piece) -> np.ndarray:
  """Return which elements of a piece must be stored."""
  values, kept = piece
  return _words(values) != 0 if kept is None else kept


def select(piece: Piece) -> np.ndarray:
  """Return a piece with +0.0 where it is not kept."""
  values, kept = piece
  return (
    values if kept is None else np.where(kept, values, values.dtype.type(0))
  )


def _values(content: Content) -> Iterator[np.ndarray]:
  return (piece[0][_kept(piece)] for piece in content.pieces())


def _bits(tensor: Tensor, content: Content) -> tuple[np.ndarray, int]:
  """Return one bit per weight, in whole words, and the number of ones."""
  # Whole words keep the values that follow aligned.
  bits = np.zeros(-(-tensor.size // 64) * 8, np.uint8)
  at = count = 0
  for piece in content.pieces():
    kept = _kept(piece)
    packed = np.packbits(kept, bitorder="little")
    bits[at : at + packed.size] = packed
    at += packed.size
    count += int(kept.sum())
  return bits, count


Part = tuple[np.dtype, tuple[int, ...], Iterable[np.ndarray]]


def _encode(
  tensor: Tensor, content: Content, layout: str
) -> tuple[Tensor, list[Part]]:
  """Return how a tensor is stored, and its parts, to be consumed once."""
  dense: Part = tensor.dtype, tensor.shape, map(select, content.pieces())
  if layout == "dense" or (layout == "sparse-bitmask" and not tensor.shape):
    return tensor._replace(encoding="dense"), [dense]
  if layout == "int8" and _int8.suits(tensor.shape, tensor.dtype):
    return _encode_int8(tensor, content)
  bits, count = _bits(tensor, content)
  # sparse-bitmask has no room for a mask; in both an unmasked tensor stays
  # dense unless packing it pays.
  if not content.masked and (
    packed_bytes(tensor, count) >= tensor.size * tensor.dtype.itemsize
  ):
    return tensor._replace(encoding="dense", masked=False), [dense]
  values: Part = tensor.dtype, (count,), _values(content)
  if layout in _HASHED:
    encoded = tensor._replace(encoding="packed", masked=content.masked)
    return encoded, [(bits.dtype, bits.shape, [bits]), values]
  rows = np.unpackbits(bits, count=tensor.size, bitorder="little")
  rows = rows.reshape(tensor.shape)
  counts = rows.sum(-1, dtype=np.int64)
  starts = np.cumsum(counts).reshape(counts.shape) - counts
  parts = [
    np.array(tensor.shape, np.int64),
    np.packbits(rows, axis=-1, bitorder="little"),
    starts,
  ]
  shape, row_bits, offsets = ((p.dtype, p.shape, [p]) for p in parts)
  prefix = tensor.name.removesuffix(".weight")
  encoded = tensor._replace(encoding="sparse-bitmask", prefix=prefix)
  return encoded, [shape, values, row_bits, offsets]


def _encode_int8(tensor: Tensor, content: Content) -> tuple[Tensor, list[Part]]:
  """Round a matrix; it is read whole, for groups run along its last axis."""
  bits, count = _bits(tensor, content)
  flat = np.concatenate([select(piece) for piece in content.pieces()])
  codes, scales = _int8.encode(flat.reshape(tensor.shape), tensor.name)
  codes = codes.reshape(-1)
  if tensor.size - count <= tensor.size // 8 and not content.masked:
    bits = bits[:0]  # bits would cost more than the zeros
  else:
    kept = np.unpackbits(bits, count=tensor.size, bitorder="little")
    codes = codes[kept.view(np.bool_)]
  encoded = tensor._replace(encoding="int8", masked=content.masked)
  return encoded, [(a.dtype, a.shape, [a]) for a in (bits, codes, scales)]


def _manifest(tensors: Iterable[Tensor], metadata: Mapping[str, Any]) -> str:
  rows = {
    t.name: {
      "path": list(t.path),
      "dtype": st.DTYPE_NAMES[t.dtype],
      "shape": list(t.shape),
      "encoding": t.encoding,
      "masked": t.masked,
      "sha256": t.sha256,
    }
    for t in tensors
  }
  return json.dumps(
    {"version": VERSION, "tensors": rows, "metadata": dict(metadata)}
  )


def write(
  path: str | os.PathLike,
  tensors: Iterable[Tensor],
  read: Callable[[str], Content],
  *,
  layout: str = "packed",
  metadata: Mapping[str, Any] | None = None,
  progress: Callable[[list[Tensor]], Iterable[Tensor]] = iter,
) -> None:
  """Write a model file, asking `read` for one tensor at a time.

  Args:
    path: where the file appears once it is complete.
    tensors: name, path, dtype and shape of each tensor.
    read: returns the content of a tensor by name.
    layout: one of `ALL_LAYOUTS`.
    metadata: further values to store: JSON values in "packed" and "int8",
      strings in the other layouts.
    progress: yields the tensors it is given, and may display progress.
  """
  if layout not in ALL_LAYOUTS:
    raise ValueError(f"layout={layout!r} is not one of {ALL_LAYOUTS}")
  metadata = dict(metadata or {})
  st.check_metadata(metadata, str(path))
  # Wide elements first: every tensor then starts aligned to its own width.
  ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
  metadata = _file_metadata(ordered, layout, metadata)
  largest = _largest_entries(ordered, layout, str(path))
  reserved = metadata
  if layout in _HASHED:
    hashed = (t._replace(encoding="packed", sha256="0" * 64) for t in ordered)
    reserved = {_KEY: _manifest(hashed, metadata), _DIGEST: "0" * 64}
  with st.Writer(path, largest, reserved) as writer:
    done = []
    for tensor in progress(ordered):
      encoded, parts = _encode(tensor, read(tensor.name), layout)
      digest = hashlib.sha256() if layout in _HASHED else None
      for name, part in zip(_parts(encoded), parts, strict=True):
        if name in writer.entries:
          raise ValueError(
            f"{path}: {name!r} is the name of a tensor and of a part of "
            "another; rename one, or use layout='dense'"
          )
        writer.add(name, *part, digest)
      if digest is not None:
        encoded = encoded._replace(sha256=digest.hexdigest())
      done.append(encoded)
    if layout in _HASHED:
      writer.metadata = {_KEY: _manifest(done, metadata)}
      writer.metadata[_DIGEST] = st.header_digest(
        writer.entries, writer.metadata
      )


def _file_metadata(
  tensors: Sequence[Tensor], layout: str, metadata: Mapping[str, Any]
) -> dict[str, Any]:
  """Return the metadata in the form that a layout keeps."""
  if layout in _HASHED:
    return dict(metadata)
  words = {
    k: v if isinstance(v, str) else json.dumps(v)
    for k, v in metadata.items()
    if k not in (_KEY, _DIGEST, _NAMES)
  }
  exact = [t.name for t in tensors if not t.name.endswith(".weight")]
  if layout == "sparse-bitmask" and exact:
    words[_NAMES] = json.dumps(exact)
  return words


def _largest_entries(
  tensors: Iterable[Tensor], layout: str, path: str
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  """Return every entry a file may get, at its largest, to size the header."""
  largest: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
  for t in tensors:
    st.check_name(t.name, path)
    _check_depth(t.path, f"{path}: {t.name[:40]!r}")
    # A tensor may come out in any of its encodings; room for all is cheap.
    largest[t.name] = (t.dtype, t.shape)
    if layout in _HASHED:
      largest[t.name + ".bits"] = (np.dtype("u1"), (t.size + 64,))
      largest[t.name + ".values"] = (t.dtype, (t.size,))
    if layout == "int8":
      largest[t.name + ".codes"] = (np.dtype("i1"), (t.size,))
      largest[t.name + ".scales"] = (_int8.SCALE, (*t.shape, 1))
    if layout == "sparse-bitmask":
      for part in _BITMASK_PARTS:
        largest[t.name + part] = (np.dtype("i8"), (*t.shape, 1))
  return largest
