"""Open a file that somebody named: pipes and devices are not waited for."""

import errno
import os
import pathlib
import stat
from typing import IO, cast

from jaxpruner._tools.atomic import PathError

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def open_bytes(path: str | os.PathLike) -> IO[bytes]:
  """Open a regular file for reading.

  Raises:
    PathError: the path is empty, or that of a folder, a pipe, a device or a
      socket.
    OSError: the file cannot be opened.

  Example:
    >>> open_bytes("/dev/zero")
    Traceback (most recent call last):
    jaxpruner._tools.atomic.PathError: /dev/zero is no regular file; name one
  """
  if not os.fspath(path):
    raise PathError("the path of a file is empty; give one")
  refusal = f"{os.fspath(path)} is no regular file; name one"

  def opener(name: str, flags: int) -> int:
    # Opening a pipe without a writer would block: do not wait, then refuse.
    try:
      found = os.open(name, flags | _NONBLOCK)
    except OSError as error:
      if error.errno == errno.ENXIO:  # a socket
        raise PathError(refusal) from error
      raise
    if not stat.S_ISREG(os.fstat(found).st_mode):
      os.close(found)
      raise PathError(refusal)
    return found

  return cast("IO[bytes]", open(pathlib.Path(path), "rb", opener=opener))


def read_bytes(path: str | os.PathLike) -> bytes:
  """Return the content of a regular file; see `open_bytes`."""
  with open_bytes(path) as file:
    return file.read()
