"""A run folder: what a comparison has finished, safe at any instant.

    run.json        settings, versions, commit, device; written once
    results.jsonl   one line per finished cell
    steps.jsonl     losses, densities and churn, a line per stretch of steps
    weights/        the trained parameters and masks of the first seed
    checkpoints/    a cell half done, so that long cells resume too
    lock            held (flock) by the process that writes

Lines are only ever appended and carry a CRC; whole files are replaced
atomically. A killed process can at worst leave a torn last line, which the
next one cuts off.
"""

import contextlib
import errno
import io
import json
import os
import pathlib
import socket
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

try:
  import fcntl
except ImportError:  # Windows has no flock: a second process is not refused.
  fcntl = None


class FolderError(RuntimeError):
  """The run folder cannot be used; the message says why and what to do."""


@contextlib.contextmanager
def explained(path: pathlib.Path) -> Iterator[None]:
  """Turn an OSError into a FolderError with its cure."""
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
    }.get(error.errno or 0, "see the message")
    raise FolderError(
      f"{path}: {error.strerror or error}; {cure}. What was finished is safe: "
      "the same command continues from there."
    ) from error


def write_atomic(path: pathlib.Path, content: bytes) -> None:
  """Replace `path` by `content`: readers see the old file or the new one."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  with explained(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
      os.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):
        temporary.unlink()
      raise


def append_line(path: pathlib.Path, record: Mapping[str, Any]) -> None:
  """Append one record, and return only when it is on disk."""
  # NaN is not JSON: a diverged loss is stored as null.
  payload = json.dumps(_finite(record), sort_keys=True, allow_nan=False)
  line = f"{zlib.crc32(payload.encode()):08x} {payload}\n".encode()
  with explained(path), path.open("ab") as file:
    file.write(line)
    file.flush()
    os.fsync(file.fileno())


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Return the records; a torn last line is ignored, other damage raises."""
  try:
    raw = path.read_bytes()
  except FileNotFoundError:
    return []
  except OSError as error:
    raise FolderError(f"{path}: {error.strerror}") from error
  lines = raw.split(b"\n")
  torn = lines.pop()  # empty when the file ends in a newline
  del torn
  records = []
  for number, line in enumerate(lines, 1):
    checksum, _, payload = line.partition(b" ")
    if checksum.decode(errors="replace") != f"{zlib.crc32(payload):08x}":
      raise FolderError(
        f"{path}, line {number}: damaged (its checksum does not match); "
        "delete that line and run the same command: only that record is "
        "computed again"
      )
    records.append(json.loads(payload))
  return records


def cut_torn_line(path: pathlib.Path) -> None:
  """Drop what follows the last newline, left by a write that was killed."""
  with explained(path):
    if not path.exists():
      return
    raw = path.read_bytes()
    end = raw.rfind(b"\n") + 1
    if end != len(raw):
      with path.open("r+b") as file:
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
  """Return the arrays that `pack_arrays` stored; damage raises FolderError."""
  try:
    # Opened here: np.load leaks its file when the archive is damaged.
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
      return {name.removeprefix("a:"): file[name] for name in file.files}
  except Exception as error:  # zipfile, zlib, numpy: all mean the same here
    raise FolderError(f"{path}: damaged ({error}); delete it") from error


class RunFolder:
  """The one writer of a run folder; use as a context manager."""

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    self._lock = None

  def __enter__(self) -> "RunFolder":
    with explained(self.path):
      self.path.mkdir(parents=True, exist_ok=True)
      # flock belongs to the open file: the system drops it when its holder
      # dies, however it dies, so a dead process's lock needs no clean-up.
      self._lock = (self.path / "lock").open("a+")
    if fcntl is not None:
      try:
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as error:
        self._lock.seek(0)
        holder = self._lock.read().strip() or "another process"
        self._lock.close()
        raise FolderError(
          f"{self.path} is in use by {holder}; wait for it, or choose "
          "another --out"
        ) from error
    with explained(self.path):
      self._lock.truncate(0)
      self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
      self._lock.flush()
    for name in ("results.jsonl", "steps.jsonl", "latency.jsonl"):
      cut_torn_line(self.path / name)
    return self

  def __exit__(self, *exc_info: object) -> None:
    if self._lock is not None:
      self._lock.close()

  def open_run(self, facts: dict[str, Any]) -> None:
    """Store what the run is, or check that the folder holds the same run.

    `facts["settings"]` and `facts["versions"]` decide the numbers: a folder
    made with others is refused rather than mixed.
    """
    path = self.path / "run.json"
    if not path.exists():
      write_atomic(path, json.dumps(facts, indent=2, sort_keys=True).encode())
      return
    found = read_run(self.path)
    for part in ("settings", "versions"):
      # Through JSON, as the stored side went: tuples become lists.
      mine = json.loads(json.dumps(facts[part]))
      theirs = found.get(part, {})
      for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
          raise FolderError(
            f"{self.path} was made with {part} {key}={theirs.get(key)!r}, "
            f"this command has {mine.get(key)!r}; one table cannot mix them: "
            "choose another --out, or delete that folder"
          )


def read_run(path: str | os.PathLike) -> dict[str, Any]:
  """Return run.json of a run folder."""
  file = pathlib.Path(path) / "run.json"
  try:
    return json.loads(file.read_bytes())
  except FileNotFoundError as error:
    raise FolderError(f"{path}: no run.json, so not a run folder") from error
  except (OSError, ValueError) as error:
    raise FolderError(
      f"{file}: cannot be read ({error}); restore it, or start anew with "
      "another --out"
    ) from error


def read_results(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
  """Return cell id -> its latest record."""
  lines = read_lines(pathlib.Path(path) / "results.jsonl")
  return {record["cell"]: record for record in lines}


def read_steps(path: str | os.PathLike) -> dict[str, list[dict[str, Any]]]:
  """Return cell id -> its stretches of training, in order.

  A cell that was interrupted repeats stretches; repeats are equal, and the
  last one counts.
  """
  stretches: dict[str, dict[int, dict[str, Any]]] = {}
  for record in read_lines(pathlib.Path(path) / "steps.jsonl"):
    stretches.setdefault(record["cell"], {})[record["start"]] = record
  return {
    cell: [found[start] for start in sorted(found)]
    for cell, found in stretches.items()
  }
