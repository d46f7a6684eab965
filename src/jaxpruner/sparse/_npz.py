"""NumPy archives (`.npz`): read without pickle, member by member."""

import os
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxpruner._tools import atomic
from jaxpruner.sparse import _foreign
from jaxpruner.sparse import _safetensors as st
from jaxpruner.sparse._layouts import Content, Tensor

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Npz(_foreign.Foreign):
  """An archive of `.npy` members; a zip of anything else is refused."""

  kind = "NumPy archive (.npz)"

  def __init__(self, path: str | os.PathLike):
    super().__init__(path)
    try:
      self._zip = zipfile.ZipFile(self.path)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as e:
      raise st.FileFormatError(f"{path}: a damaged zip archive ({e})") from e
    try:
      for about in self._zip.infolist():
        self._describe(about)
    except BaseException:
      self._zip.close()
      raise

  def _describe(self, about: zipfile.ZipInfo) -> None:
    name = about.filename.removesuffix(".npy")
    st.check_name(name, str(self.path))
    where = f"{self.path}: {name!r}"
    if name in self.tensors:
      raise st.FileFormatError(f"{where} occurs twice")
    if about.compress_type not in _METHODS or about.flag_bits & 1:
      raise st.FileFormatError(f"{where} is encrypted or oddly compressed")
    # DEFLATE cannot shrink further than this.
    if about.file_size > 1100 * about.compress_size + 1100:
      raise st.FileFormatError(f"{where} claims an impossible compression")
    with self._opened(name) as file:
      dtype, shape, offset = _header(file, where)
    size = dtype.itemsize
    if not st.is_shape(shape, max(size, 1)):
      raise st.FileFormatError(f"{where}: impossible shape {shape!r:.100}")
    tensor = Tensor(
      name, tuple(name.split("/")), dtype, shape,
      stored_bytes=about.compress_size,
    )  # fmt: skip
    if offset + tensor.size * size != about.file_size:
      raise st.FileFormatError(
        f"{where}: {dtype} of shape {shape} does not take its "
        f"{about.file_size} bytes"
      )
    self.tensors[name] = tensor

  def _opened(self, name: str) -> Any:
    try:
      return self._zip.open(name + ".npy")
    except (zipfile.BadZipFile, RuntimeError, KeyError, OSError) as e:
      raise st.FileFormatError(f"{self.path}: {name!r}: {e}") from e

  def __exit__(self, *exc: object) -> None:
    self._zip.close()

  def array(self, name: str) -> np.ndarray:
    tensor = self.tensors[name]
    raw = np.empty(tensor.size * tensor.dtype.itemsize, np.uint8)
    try:
      with self._opened(name) as file:
        fortran = _header(file, name, order=True)
        at = 0
        while part := file.read(1 << 20):
          raw[at : at + len(part)] = np.frombuffer(part, np.uint8)
          at += len(part)
    except (
      zipfile.BadZipFile, ValueError, EOFError, OSError, zlib.error,
    ) as e:  # fmt: skip
      raise st.FileFormatError(f"{self.path}: {name!r}: {e}") from e
    if at != len(raw):
      raise st.FileFormatError(f"{self.path}: {name!r} is cut short")
    array = raw.view(tensor.dtype)
    if fortran:
      return np.ascontiguousarray(array.reshape(tensor.shape[::-1]).T)
    return array.reshape(tensor.shape)

  def write(
    self,
    target: str | os.PathLike,
    read: Callable[[str], Content],
    tensors: Iterable[Tensor],
    overwrite: bool,
  ) -> None:
    del overwrite  # a file is replaced in one piece
    with atomic.replacing(target) as out, zipfile.ZipFile(out, "w") as new:
      for tensor in tensors:
        old = self._zip.getinfo(tensor.name + ".npy")
        about = zipfile.ZipInfo(old.filename)
        about.compress_type = old.compress_type
        with new.open(about, "w", force_zip64=True) as member:
          np.lib.format.write_array_header_1_0(
            member,
            {
              "descr": np.lib.format.dtype_to_descr(tensor.dtype),
              "fortran_order": False,
              "shape": tensor.shape,
            },
          )
          for piece in _foreign.patched(read(tensor.name)):
            member.write(np.ascontiguousarray(piece).view(np.uint8).data)


def _header(file: Any, where: str, order: bool = False) -> Any:
  """Return dtype, shape and length of a `.npy` header, or its order."""
  try:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
      found = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
      found = np.lib.format.read_array_header_2_0(file)
    else:
      raise ValueError(f"version {version} of .npy")
  except Exception as e:  # whatever a damaged header makes NumPy raise
    raise st.FileFormatError(f"{where}: not an array ({e!s:.200})") from e
  shape, fortran, dtype = found
  if dtype.hasobject or dtype.kind not in "biufcV" or dtype.names:
    raise st.FileFormatError(
      f"{where}: {dtype} is no array of numbers (objects need pickle, which "
      "is never loaded)"
    )
  return fortran if order else (dtype, shape, file.tell())
