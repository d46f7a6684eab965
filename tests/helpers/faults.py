"""Let each I/O call of `jaxpruner._tools.atomic` fail in turn.

Every writer of the library goes through that one module, so replacing its
`open` and `os` reaches all of them. Folders are renamed by `_staging`.
"""

import contextlib
import errno
import os

from jaxpruner._tools import atomic
from jaxpruner.sparse import _staging

ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR)
COUNTED = {atomic: ("fsync", "replace", "dup"), _staging: ("rename", "unlink")}


class Faults:
  """Count the calls, and fail the one numbered `at`; keep their names."""

  def __init__(self, at=None, error=errno.EIO, short=None):
    self.at, self.error, self.short = at, error, short
    self.calls = []

  def call(self, name, function, *args, **kwargs):
    number = len(self.calls)
    self.calls.append(name)
    if number == self.at:
      if name == "write" and self.short is not None:
        # The disk takes part of the bytes before it fails.
        function(bytes(memoryview(args[0]).cast("B")[: self.short]))
      raise OSError(self.error, os.strerror(self.error))
    return function(*args, **kwargs)

  @contextlib.contextmanager
  def installed(self):
    faults = self

    class Os:
      def __init__(self, counted):
        self._counted = counted

      def __getattr__(self, name):
        found = getattr(os, name)
        if name not in self._counted:
          return found
        return lambda *a, **k: faults.call(name, found, *a, **k)

    def opened(*args, **kwargs):
      return FaultyFile(faults, faults.call("open", open, *args, **kwargs))

    for module, counted in COUNTED.items():
      module.os = Os(counted)
    atomic.open = opened
    try:
      yield self
    finally:
      for module in COUNTED:
        module.os = os
      del atomic.open


class FaultyFile:
  def __init__(self, faults, file):
    self._faults, self._file = faults, file

  def __getattr__(self, name):
    found = getattr(self._file, name)
    if name not in ("write", "flush", "seek", "close"):
      return found

    def call(*args):
      if name == "close":
        if self._file.closed:
          return None
        # A close that fails has closed the file all the same.
        self._file.close()
        return self._faults.call(name, lambda: None)
      return self._faults.call(name, found, *args)

    return call


def places(calls):
  """Return where to fail: of many equal calls the first, second and last."""
  return [
    i
    for i, call in enumerate(calls)
    if calls[i - 2 : i + 2] != [call] * 4 or i < 2
  ]


def count_calls(action):
  """Return the names of the I/O calls that an action makes."""
  with Faults().installed() as faults:
    action()
  return faults.calls
