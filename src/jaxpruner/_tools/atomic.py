"""Replace a file in one piece: readers see the old file or the new one.

A writer fills a temporary file beside its target, forces it to disk, renames
it and forces the folder to disk. While it lives it holds a lock (`flock`) on
the temporary file, which the system drops however the writer ends; temporary
files that nobody holds are removed by the next writer in that folder.
"""

import contextlib
import errno
import os
import pathlib
import re
import secrets
import socket
import stat
import time
import zlib
from collections.abc import Iterator
from typing import IO

try:
  import fcntl
except ImportError:  # Windows has no flock: nothing is swept there
  fcntl = None

_TEMPORARY = re.compile(r"\..*\.([0-9a-f]{8})-[0-9a-f]{8}\.jaxpruner\.tmp")
# File systems without folders that can be opened or forced to disk.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM}
_DAY = 86_400.0


class PathError(OSError):
  """A path at which no file can be written; the message has the cure."""


def check_target(path: str | os.PathLike) -> pathlib.Path:
  """Return the path, if a file may be written or replaced there.

  Raises:
    PathError: the path is empty, a folder, a pipe, a device or a socket, or
      its folder is missing. A link is replaced; what it points to stays.
  """
  target = pathlib.Path(path)
  if not os.fspath(path) or not target.name:
    raise PathError(f"output path {os.fspath(path)!r} names no file; give one")
  if "\0" in os.fspath(target):
    raise PathError(f"output path {os.fspath(path)!r} holds NUL; leave it out")
  try:
    mode = os.stat(target).st_mode
  except FileNotFoundError:
    if not target.parent.is_dir():
      raise PathError(
        f"{target}: the folder {target.parent} does not exist; make it first"
      ) from None
    return target
  if stat.S_ISDIR(mode):
    raise PathError(f"{target} is a folder; name a file in it")
  if not stat.S_ISREG(mode):
    raise PathError(
      f"{target} is a pipe, a device or a socket, and would be replaced by a "
      "file; name a file"
    )
  return target


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[IO[bytes]]:
  """Open a file that appears at `path` when the block ends without an error.

  Args:
    path: what is there stays until the new file is whole and on disk.

  Yields:
    A binary file; bytes become durable when the block ends.

  Example:
    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "x"
    >>> with replacing(path) as file:
    ...   _ = file.write(b"whole")
    >>> path.read_bytes(), len(list(path.parent.iterdir()))
    (b'whole', 1)
  """
  target = check_target(path)
  sweep(target.parent)
  file, temporary = _open_temporary(target)
  lock = -1
  try:
    # A second descriptor keeps the lock while the first is closed, so that a
    # failing close is noticed before the rename, and nobody sweeps between.
    if fcntl is not None:
      lock = os.dup(file.fileno())
    yield file
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(temporary, target)
    temporary = None
    sync_folder(target.parent)
  except OSError as error:
    if error.errno == errno.ENOSPC and error.filename is None:
      error.filename = str(target)  # which disk is full
    raise
  finally:
    if temporary is not None:
      with contextlib.suppress(OSError):
        file.close()
      with contextlib.suppress(OSError):
        os.unlink(temporary)
    if lock >= 0:
      os.close(lock)


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
  """Replace `path` by a file of this content, in one piece."""
  with replacing(path) as file:
    file.write(content)


def _open_temporary(target: pathlib.Path) -> tuple[IO[bytes], pathlib.Path]:
  while True:
    # Cut: the name with its ending must not exceed what file systems allow.
    mark = f"{_host()}-{secrets.token_hex(4)}.jaxpruner.tmp"
    temporary = target.with_name(f".{target.name[:40]}.{mark}")
    file = open(temporary, "xb")
    if _lock(file.fileno(), wait=True) is not False:
      return file, temporary
    file.close()  # swept between the opening and the lock


def _lock(descriptor: int, wait: bool) -> bool | None:
  """Lock an open file; False if it is held or gone, None if it cannot be."""
  if fcntl is None:
    return None
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
  except BlockingIOError:
    return False
  except OSError:  # a file system without locks
    return None
  return os.fstat(descriptor).st_nlink > 0


def is_temporary(path: pathlib.Path) -> bool:
  """Return whether a path is named as temporary files of this module are."""
  return _TEMPORARY.fullmatch(path.name) is not None


def sweep(folder: str | os.PathLike) -> list[pathlib.Path]:
  """Remove temporary files whose writer is dead; return their paths.

  A temporary file is removed if nobody holds its lock and it was made on this
  host, or is older than a day: locks may not reach across hosts.
  """
  removed: list[pathlib.Path] = []
  if fcntl is None:
    return removed
  with contextlib.suppress(OSError), os.scandir(folder) as entries:
    for entry in entries:
      found = _TEMPORARY.fullmatch(entry.name)
      if found is None or not entry.is_file(follow_symlinks=False):
        continue
      with contextlib.suppress(OSError):
        age = time.time() - entry.stat(follow_symlinks=False).st_mtime
        if found[1] == _host() or age > _DAY:
          if _remove_if_dead(entry.path):
            removed.append(pathlib.Path(entry.path))
  return removed


def _remove_if_dead(path: str) -> bool:
  descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  try:
    if _lock(descriptor, wait=False) is not True:
      return False
    os.unlink(path)
    return True
  finally:
    os.close(descriptor)


def _host() -> str:
  return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def sync_folder(folder: str | os.PathLike) -> None:
  """Force a folder to disk, so that a rename in it survives a power loss."""
  try:
    descriptor = os.open(folder, os.O_RDONLY)
  except OSError as error:
    if error.errno in _NO_FOLDER_SYNC:
      return
    raise
  try:
    os.fsync(descriptor)
  except OSError as error:
    if error.errno not in _NO_FOLDER_SYNC:
      raise
  finally:
    os.close(descriptor)
