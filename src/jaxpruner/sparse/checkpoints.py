"""Checkpoints as they come: what a path is, and its tensors one at a time."""

import os
import pathlib
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from jaxpruner.sparse import _layouts, _safetensors
from jaxpruner.sparse._layouts import Content, Leaf, Tensor, Written

FileFormatError = _safetensors.FileFormatError


class Checkpoint(Protocol):
  """A model on disk: named tensors, read one at a time.

  Attributes:
    path: where it is.
    kind: what it is, in words.
    layout: "dense", "packed" or "sparse-bitmask".
    tensors: name -> shape, dtype and stored bytes.
    metadata: what the file says about itself.

  Example:
    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.npz"
    >>> np.savez(path, w=np.eye(2))
    >>> with open_checkpoint(path) as checkpoint:
    ...   print(checkpoint.read("w")[0].tolist())
    [[1.0, 0.0], [0.0, 1.0]]
  """

  path: pathlib.Path
  layout: str
  tensors: dict[str, Tensor]
  metadata: dict[str, Any]

  @property
  def kind(self) -> str: ...

  def __enter__(self) -> "Checkpoint": ...

  def __exit__(self, *exc: object) -> None: ...

  def read(self, name: str) -> Leaf: ...

  def chunks(self, name: str) -> Iterator[np.ndarray]: ...

  def content(self, name: str) -> Content: ...

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
  ) -> Written | None: ...


# What cannot be read here: kind -> (what it is, the way).
_OTHERS = {
  "gguf": (
    "a GGUF file (llama.cpp)",
    "its weights are quantised in blocks; convert the model it was made from, "
    "a Hugging Face folder",
  ),
  "torch": (
    "a PyTorch checkpoint (a zip with a pickle)",
    "pickles run code and are never loaded; in PyTorch: "
    "safetensors.torch.save_file(torch.load(path, weights_only=True), "
    "'model.safetensors')",
  ),
  "pickle": (
    "a pickle",
    "pickles run code and are never loaded; save arrays with numpy.savez or "
    "safetensors",
  ),
  "hdf5": (
    "an HDF5 file (Keras, h5py)",
    "read it with h5py and save the arrays with numpy.savez",
  ),
  "npy": ("a single NumPy array", "save it with numpy.savez(path, w=array)"),
  "zip": (
    "a zip archive that holds more than .npy files",
    "unpack it and name the checkpoint inside",
  ),
  "folder": (
    "a folder without a checkpoint",
    "name a folder with *.safetensors files, or an Orbax checkpoint (the "
    "folder that holds _METADATA)",
  ),
}


def what_is(path: str | os.PathLike) -> str:
  """Tell what a path holds, by its content.

  Args:
    path: a file or a folder.

  Returns:
    "safetensors", "shards" (a Hugging Face folder), "index" (its index file),
    "orbax", "msgpack" or "npz", which can be opened; "gguf", "torch",
    "pickle", "hdf5", "npy", "zip" or "folder", which cannot; or "unknown".

  Example:
    >>> import tempfile, numpy as np
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model"
    >>> with open(path, "wb") as file:
    ...   np.savez(file, w=np.ones(3))
    >>> what_is(path)
    'npz'
  """
  if not os.fspath(path):  # else "" would be the current folder
    raise FileFormatError("the path of the checkpoint is empty; give one")
  path = pathlib.Path(path)
  mode = os.stat(path).st_mode
  if stat.S_ISDIR(mode):
    return _what_folder(path)
  if not stat.S_ISREG(mode):
    raise FileFormatError(
      f"{path}: neither a regular file nor a folder; name one"
    )
  if path.name.endswith(".safetensors.index.json"):
    return "index"
  with open(path, "rb") as file:
    head = file.read(9)
  if head.startswith(b"PK\x03\x04"):
    return _what_zip(path)
  for magic, kind in (
    (b"GGUF", "gguf"), (b"\x89HDF\r\n", "hdf5"), (b"\x93NUMPY", "npy"),
  ):  # fmt: skip
    if head.startswith(magic):
      return kind
  if head[8:9] == b"{" and path.suffix != ".msgpack":
    return "safetensors"
  if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
    return "pickle"
  # A map of at least one key: what Flax writes.
  if head[:1] and (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
    return "msgpack"
  return "unknown"


def _what_zip(path: pathlib.Path) -> str:
  try:
    with zipfile.ZipFile(path) as archive:
      names = archive.namelist()
  except (zipfile.BadZipFile, ValueError, NotImplementedError) as e:
    raise FileFormatError(f"{path}: a damaged zip archive ({e})") from e
  if any(name.endswith("data.pkl") for name in names):
    return "torch"
  return "npz" if all(n.endswith(".npy") for n in names) else "zip"


def _what_folder(path: pathlib.Path) -> str:
  names = os.listdir(path)
  if any(name.endswith(".safetensors") for name in names) or any(
    name.endswith(".safetensors.index.json") for name in names
  ):
    return "shards"
  orbax = {"_METADATA", "manifest.ocdbt"}
  if orbax & set(names):
    return "orbax"
  inside = [n for n in sorted(names) if _is_orbax(path / n)]
  if inside:
    raise FileFormatError(
      f"{path}: an Orbax step with the items {', '.join(inside)}; name one of "
      f"them, such as {path / inside[0]}"
    )
  return "folder"


def _is_orbax(path: pathlib.Path) -> bool:
  return (path / "_METADATA").is_file() or (path / "manifest.ocdbt").is_file()


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
  """Open a checkpoint, whatever it is; its tensors are read on request.

  Hugging Face folders (one or several `.safetensors`, with or without an
  index), single safetensors files, Orbax checkpoints, Flax msgpack files and
  `.npz` archives. Nothing is unpickled.

  Args:
    path: a file or a folder.

  Returns:
    The checkpoint, to be used in a `with` block.

  Raises:
    FileFormatError: it is damaged, hostile, or of a kind that is not read; the
      message says which and what to do.

  Example:
    >>> import tempfile, numpy as np
    >>> from jaxpruner import sparse
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.npz"
    >>> np.savez(path, w=np.eye(2))
    >>> with sparse.open_checkpoint(path) as checkpoint:
    ...   print(checkpoint.kind, checkpoint.tensors["w"].shape)
    NumPy archive (.npz) (2, 2)
  """
  kind = what_is(path)
  if kind in _OTHERS:
    what, way = _OTHERS[kind]
    raise FileFormatError(f"{path}: {what}; {way}")
  if kind in ("shards", "index"):
    from jaxpruner.sparse import _shards

    return _shards.Shards(path)
  if kind == "npz":
    from jaxpruner.sparse import _npz

    return _npz.Npz(path)
  if kind == "msgpack":
    from jaxpruner.sparse import _msgpack

    return _msgpack.Msgpack(path)
  if kind == "orbax":
    from jaxpruner.sparse import _orbax

    return _orbax.Orbax(path)
  return _layouts.SparseFile(path)


def stored_bytes(path: str | os.PathLike) -> int:
  """Return the bytes of a file, or of all files of a folder."""
  path = pathlib.Path(path)
  if path.is_dir():
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
  return path.stat().st_size
