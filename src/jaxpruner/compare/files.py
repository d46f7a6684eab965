"""Read and write the files of a run folder safely.

A run folder may come from another person. Its files are opened without
following links, and paths that are pipes or devices are refused: writing there
could change a file elsewhere. Lines have checksums; files are replaced
atomically.
"""

import contextlib
import errno
import io
import json
import os
import pathlib
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from jaxpruner._tools import atomic

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


class RunFolderError(RuntimeError):
  """The run folder cannot be used; the message names the reason and a cure."""


@contextlib.contextmanager
def explained(path: pathlib.Path) -> Iterator[None]:
  """Turn an OSError into a RunFolderError that names a cure."""
  try:
    yield
  except OSError as error:
    cure = {
      errno.ENOSPC: "free some space",
      errno.EDQUOT: "free some of your quota",
      errno.EROFS: "the file system is read-only; choose another --out",
      errno.EACCES: "you may not write there; choose another --out",
      errno.EPERM: "you may not write there; choose another --out",
      errno.ENOTDIR: "a file is in the way; choose another --out",
      errno.EEXIST: "a file is in the way; choose another --out",
      errno.ENOENT: "the folder cannot be made there; choose another --out",
      errno.ELOOP: "it is a link, which is not followed; delete it",
    }.get(error.errno or 0, "see the message")
    raise RunFolderError(
      f"{path}: {error.strerror or error}; {cure}. What was finished is safe: "
      "the same command continues from there."
    ) from error


def check_regular(path: pathlib.Path) -> None:
  """Raise if a path exists and is not a regular file.

  Args:
    path: the path of a file to write; it need not exist.

  Raises:
    RunFolderError: it is a pipe, a device, a socket or a folder.
  """
  try:
    mode = path.lstat().st_mode
  except OSError:
    return
  if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
    raise RunFolderError(
      f"{path}: is a {_kind(mode)}, not a file; choose another path"
    )


def _kind(mode: int) -> str:
  if stat.S_ISDIR(mode):
    return "folder"
  if stat.S_ISFIFO(mode):
    return "pipe"
  return "socket" if stat.S_ISSOCK(mode) else "device"


def open_own(path: pathlib.Path, mode: str) -> IO[Any]:
  """Open a file of the run folder; links, pipes and devices are refused.

  Args:
    path: the file.
    mode: as in `open`: "rb", "ab", "r+b", "w", "a+".

  Returns:
    The open file.
  """
  check_regular(path)

  def opener(name: str, flags: int) -> int:
    # Opening a pipe without a reader would block: do not wait, then refuse.
    found = os.open(name, flags | _NOFOLLOW | _NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(found).st_mode):
      os.close(found)
      raise OSError(errno.EINVAL, "not a regular file")
    return found

  with explained(path):
    return open(path, mode, opener=opener)


def write_synced(file: IO[bytes], content: bytes) -> None:
  """Write bytes and wait until they are on disk."""
  file.write(content)
  file.flush()
  os.fsync(file.fileno())


def write_atomic(path: pathlib.Path, content: bytes) -> None:
  """Replace `path` by `content`: readers see the old file or the new one."""
  check_regular(path)
  with explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(path, content)


def append_line(path: pathlib.Path, record: Mapping[str, Any]) -> None:
  """Append one record and wait until it is on disk."""
  # NaN is not JSON: a diverged loss is stored as null.
  payload = json.dumps(_finite(record), sort_keys=True, allow_nan=False)
  line = f"{zlib.crc32(payload.encode()):08x} {payload}\n".encode()
  with explained(path), open_own(path, "ab") as file:
    write_synced(file, line)


def printable(text: str) -> str:
  """Return text without control characters, which could move a cursor.

  Args:
    text: any text.

  Returns:
    The text with a space for every character that cannot be printed.

  Example:
    >>> printable("a\\x1b[2J")
    'a [2J'
  """
  return "".join(c if c.isprintable() else " " for c in text)


def say(message: str, command: str = "") -> None:
  """Print a message on standard error; it may quote a file of others."""
  name = f"jaxpruner {command}".rstrip()
  print(printable(f"{name}: {message}"), file=sys.stderr)


def parse(content: bytes) -> Any:
  """Return the value of JSON that anyone may have written.

  Args:
    content: the JSON.

  Returns:
    The value; its texts can be encoded, its numbers are finite.

  Raises:
    ValueError: it is no JSON, nested too deeply, or holds a lone surrogate, a
      number that is not finite, or one too long for a float.
  """
  try:
    value = json.loads(content, parse_int=_whole)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
  except RecursionError as error:
    raise ValueError("nested too deeply") from error
  return value


def _whole(text: str) -> int:
  if len(text) > 300:
    raise ValueError(f"{text:.20}… has {len(text)} digits")
  return int(text)


class Line(NamedTuple):
  """One line of a file: its position, and its JSON value."""

  where: str
  value: Any


def read_lines(
  path: pathlib.Path, note: Callable[[str], None] = say
) -> list[Line]:
  """Return the lines of a file; drop an incomplete last line.

  Args:
    path: the file; a file that does not exist has no lines.
    note: receives a message about a dropped line.

  Returns:
    The lines.

  Raises:
    RunFolderError: a line's checksum does not match.
  """
  if not path.exists() and not path.is_symlink():
    return []
  with explained(path), open_own(path, "rb") as file:
    lines = file.read().split(b"\n")
  torn = lines.pop()  # empty when the file ends in a newline
  if torn:
    note(_torn(path, len(lines) + 1, torn))
  found = []
  for number, line in enumerate(lines, 1):
    checksum, _, payload = line.partition(b" ")
    if checksum.decode(errors="replace") != f"{zlib.crc32(payload):08x}":
      raise RunFolderError(
        f"{path}, line {number}: damaged (its checksum does not match); "
        "delete that line and run the same command: only that record is "
        "computed again"
      )
    try:
      found.append(Line(f"{path}, line {number}", parse(payload)))
    except ValueError as error:
      raise RunFolderError(
        f"{path}, line {number}: not JSON ({error}); delete that line"
      ) from error
  return found


def _torn(path: pathlib.Path, number: int, torn: bytes) -> str:
  return (
    f"{path}, line {number}: dropped, {len(torn)} bytes without a newline at "
    "the end, left by a write that was cut short; that record is computed "
    "again when the run continues"
  )


def cut_torn_line(
  path: pathlib.Path, note: Callable[[str], None] = say
) -> None:
  """Drop the bytes after the last newline, left by an interrupted write."""
  if not path.exists() and not path.is_symlink():
    return
  with explained(path), open_own(path, "r+b") as file:
    raw = file.read()
    end = raw.rfind(b"\n") + 1
    if end != len(raw):
      note(_torn(path, raw.count(b"\n") + 1, raw[end:]))
      file.truncate(end)
      os.fsync(file.fileno())


def _finite(value: Any) -> Any:
  if isinstance(value, float):
    return value if np.isfinite(value) else None
  if isinstance(value, Mapping):
    return {key: _finite(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(item) for item in value]
  return value


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
  """Return the arrays as the bytes of an .npz file."""
  buffer = io.BytesIO()
  # np.savez takes names as keywords; "file" would clash with its argument.
  named: dict[str, Any] = {f"a:{name}": x for name, x in arrays.items()}
  np.savez(buffer, **named)
  return buffer.getvalue()


def unpack_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Return the arrays in an .npz file; raise RunFolderError if damaged."""
  try:
    # Open the file here: np.load leaves it open if the archive is damaged.
    with open_own(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
      return {name.removeprefix("a:"): file[name] for name in file.files}
  except Exception as error:  # of zipfile, zlib or numpy: the file is damaged
    raise RunFolderError(f"{path}: damaged ({error}); delete it") from error
