"""Replace a folder in one piece, and go on with one that was interrupted.

The new folder grows beside its target as `<target>.parts`, file by file, each
whole or absent. When all are there it takes the place of the target. A process
that dies leaves the parts; the same job goes on from them.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jaxpruner._tools import atomic, fingerprint, regular

try:
  import fcntl
except ImportError:  # Windows has no flock: two writers are not noticed
  fcntl = None

_JOB = "job.json"


def claim(folder: pathlib.Path, facts: Mapping[str, Any]) -> str:
  """Store the description of a job, or refuse a folder of another job.

  Returns:
    A name for the job, which its parts may carry.
  """
  path = folder / _JOB
  text = json.dumps(facts, indent=1, sort_keys=True)
  try:
    found = regular.read_bytes(path)
  except FileNotFoundError:
    atomic.write_bytes(path, text.encode())
    return fingerprint.text(text)
  try:
    stored = json.loads(found)
  except (ValueError, RecursionError):
    stored = None
  differing = fingerprint.differences(stored, facts)
  if stored is None or differing:
    raise ValueError(
      f"{folder} holds the parts of another job: "
      f"{'; '.join(differing[:5]) if stored else 'job.json is damaged'}; "
      "choose another folder or delete it"
    )
  return fingerprint.text(text)


def check_parts(folder: pathlib.Path) -> None:
  """Refuse a folder that may hold more than the parts of a job.

  What is in such a folder is overwritten, moved or deleted when the job ends.

  Args:
    folder: where parts are to be kept; it may be missing or empty.
  """
  cure = "move or delete it, or name another output"
  for path in (folder, folder / _JOB):
    if path.is_symlink():
      raise ValueError(f"{path} is a link, which is not followed; {cure}")
  if not os.path.lexists(folder):
    return
  if not folder.is_dir():
    raise ValueError(f"{folder} is in the way of a folder of parts; {cure}")
  found = sorted(p.name for p in folder.iterdir() if not atomic.is_temporary(p))
  if found and _JOB not in found:
    raise ValueError(f"{folder} holds {found[0]!r} of no job; {cure}")


def check_target(target: str | os.PathLike, overwrite: bool) -> pathlib.Path:
  """Return the path, if a folder may be written there."""
  # "" would be the current folder.
  if not os.fspath(target):
    raise atomic.PathError("output path '' names no file; give one")
  path = pathlib.Path(os.path.abspath(target))
  if not path.parent.is_dir():
    raise atomic.PathError(
      f"{target}: the folder {path.parent} does not exist; make it first"
    )
  if os.path.lexists(path):
    if path.is_symlink() or not path.is_dir():
      raise atomic.PathError(
        f"{target} is no folder; a folder is written: name a new one"
      )
    if not overwrite:
      raise atomic.PathError(
        f"{target} exists; name a new folder, or replace it with --overwrite"
      )
    _check_replaceable(path)
  return path


# What a folder with a checkpoint holds, of the hub or of Orbax.
_MARKS = {"config.json", "_METADATA", "manifest.ocdbt"}


def _check_replaceable(path: pathlib.Path) -> None:
  """Raise if the old folder is no checkpoint: all that it holds is deleted."""
  if path.resolve() in (here := pathlib.Path.cwd().resolve(), *here.parents):
    raise atomic.PathError(
      f"{path} is the current folder, or holds it, and would be replaced by "
      "another; name a new one"
    )
  names = set(os.listdir(path))
  is_hub = any(name.endswith(".safetensors") for name in names)
  if names and not is_hub and not names & _MARKS:
    raise atomic.PathError(
      f"{path} holds no checkpoint but {min(names)!r}, which --overwrite would "
      "delete; name a new folder"
    )


@contextlib.contextmanager
def replacing(
  target: str | os.PathLike, facts: Mapping[str, Any], overwrite: bool = False
) -> Iterator[pathlib.Path]:
  """Yield the folder of parts; it becomes `target` when the block ends.

  Args:
    target: the folder.
    facts: what decides the result; parts of other facts are refused.
    overwrite: replace a folder that exists.
  """
  path = check_target(target, overwrite)
  parts = path.with_name(path.name + ".parts")
  check_parts(parts)
  parts.mkdir(exist_ok=True)
  claim(parts, facts)
  with open(parts / _JOB, "rb") as lock:
    if fcntl is not None:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise ValueError(
          f"{parts}: another process is writing it; wait for it"
        ) from None
      except OSError:  # a file system without locks
        pass
    yield parts
    atomic.sync_folder(parts)
    if path.exists():
      _exchange(parts, path)
    else:
      os.rename(parts, path)
    atomic.sync_folder(path.parent)
    # Last: parts without a job would be refused if this process died here.
    os.unlink(path / _JOB)
    atomic.sync_folder(path)
    if parts.exists():
      shutil.rmtree(parts)


def _exchange(one: pathlib.Path, other: pathlib.Path) -> None:
  """Swap two folders: in one call where the system can, else in two."""
  if sys.platform == "linux":
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if swap and not swap(
      here, os.fsencode(one), here, os.fsencode(other), flag
    ):
      return
  aside = other.with_name(other.name + ".old")
  os.rename(other, aside)
  os.rename(one, other)
  os.rename(aside, one)
