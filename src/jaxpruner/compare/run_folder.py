"""A run folder: the results of a comparison on disk.

    run.json        settings, fingerprint, commit, device; written once
    results.jsonl   one line per finished cell: a Record or a Failure
    steps.jsonl     losses, densities and churn, a line per Chunk of steps
    latency.jsonl   measured inference times
    measures.jsonl  what a question measured on the trained networks
    weights/        the trained parameters and masks of the first seed
    checkpoints/    unfinished cells, so that long cells can resume
    worker-N.log    the output of a worker process
    lock            held (flock) by the process that writes

Lines are only appended and have a CRC; whole files are replaced atomically. A
process that is killed can leave an incomplete last line, which the next process
removes with a message.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
from typing import Any

from jaxpruner.compare import files, settings
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.files import RunFolderError
from jaxpruner.compare.groups import Group, Listed, group
from jaxpruner.compare.plan import cells_of
from jaxpruner.compare.records import (
  Chunk,
  Failure,
  Latency,
  Measures,
  Record,
  SchemaError,
  Stored,
  result_from_json,
)

try:
  import fcntl
except ImportError:  # Windows has no flock: a second process is not refused.
  fcntl = None

# Of run.json: 1 had no fingerprint and no list of cells, 2 had no axes.
FORMAT = 3
# The files that are only appended to.
JOURNALS = ("results.jsonl", "steps.jsonl", "latency.jsonl", "measures.jsonl")
# The parts of run.json that determine the numbers: its fingerprint.
FINGERPRINT = ("settings", "task", "data", "imports", "versions", "jax")


@dataclasses.dataclass(frozen=True)
class RunInfo(Stored):
  """The content of run.json.

  Attributes:
    settings: the settings (`ComparisonSettings.to_json`).
    versions: the versions of the packages and of Python, and the device.
    task: the task's fields, including defaults.
    data: SHA-256 of the data.
    imports: SHA-256 of the source of each module named by --import.
    jax: the JAX settings that change numbers.
    cells: for each cell its algorithm, sparsity, type, distribution and
      options, the distribution that it got, and order and title of its group.
    metric: the name of the metric in the table.
    unit: its unit.
    higher_is_better: whether a higher metric is better.
    notes: what a reader of the table must know, such as a missing baseline.
    device: a description of the machine.
    commit: the commit of the library's source.
    command: the command line.
    started: the time of the start.
    format: the version of this file.
  """

  settings: dict[str, Any]
  versions: dict[str, str]
  task: dict[str, Any] = dataclasses.field(default_factory=dict)
  data: dict[str, str] = dataclasses.field(default_factory=dict)
  imports: dict[str, str] = dataclasses.field(default_factory=dict)
  jax: dict[str, str] = dataclasses.field(default_factory=dict)
  cells: list[list] = dataclasses.field(default_factory=list)
  metric: str = ""
  unit: str = "%"
  higher_is_better: bool = True
  notes: list[str] = dataclasses.field(default_factory=list)
  device: str = ""
  commit: str = ""
  command: str = ""
  started: str = ""
  format: int = 1


class RunFolder:
  """The only writer of a run folder; use it as a context manager.

  Args:
    path: the folder; it is created if it does not exist.

  Attributes:
    path: the folder.

  Raises:
    RunFolderError: another process writes there, the folder cannot be made,
      or one of its files is a link.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    self._lock = None

  def __enter__(self) -> "RunFolder":
    with files.explained(self.path):
      self.path.mkdir(parents=True, exist_ok=True)
    refuse_links(self.path)
    # flock belongs to the open file: the system releases it when the process
    # ends in any way, so that no lock is left behind.
    self._lock = files.open_own(self.path / "lock", "a+")
    if fcntl is not None:
      try:
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as error:
        self._lock.seek(0)
        holder = self._lock.read().strip() or "another process"
        self._lock.close()
        raise RunFolderError(
          f"{self.path} is in use by {holder}; wait for it, or choose "
          "another --out"
        ) from error
    with files.explained(self.path):
      self._lock.truncate(0)
      self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
      self._lock.flush()
    self._sweep()
    for name in JOURNALS:
      files.cut_torn_line(self.path / name)
    return self

  def __exit__(self, *exc_info: object) -> None:
    if self._lock is not None:
      self._lock.close()

  def _sweep(self) -> None:
    """Delete temporary files of killed writers; we hold the lock."""
    for folder in (self.path, self.path / "weights", self.path / "checkpoints"):
      for left in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
          left.unlink()

  def open_run(self, info: RunInfo) -> None:
    """Write run.json, or check that the folder contains the same run.

    Args:
      info: the content of run.json for this run.

    Raises:
      RunFolderError: the folder has another fingerprint; the message lists all
        differences.
    """
    path = self.path / "run.json"
    if not path.exists():
      self._refuse_orphans()
      content = json.dumps(info.to_json(), indent=2, sort_keys=True)
      files.write_atomic(path, content.encode())
      return
    found = read_run(self.path)
    if found.format < info.format:
      raise RunFolderError(
        f"{self.path} was made by an older version, which stored less of what "
        "decides its numbers; `jaxpruner report` still reads it. Choose "
        "another --out, or delete that folder"
      )
    if differing := differences(found, info):
      raise RunFolderError(
        f"{self.path} was made with other inputs; one table cannot mix them: "
        + "; ".join(differing)
        + ". Choose another --out, or delete that folder"
      )

  def _refuse_orphans(self) -> None:
    """Raise if results lie here that no run.json describes."""
    for name in (*JOURNALS, "weights", "checkpoints"):
      found = self.path / name
      try:
        holds = any(found.iterdir()) if found.is_dir() else found.stat().st_size
      except FileNotFoundError:
        continue
      if holds:
        raise RunFolderError(
          f"{found}: results of a run whose run.json is missing, so that "
          "nobody knows of which; restore run.json, choose another --out, or "
          "delete that folder"
        )

  def append(
    self, event: Chunk | Record | Failure | Latency | Measures
  ) -> None:
    """Append an event to its file."""
    names = {
      Chunk: "steps.jsonl",
      Latency: "latency.jsonl",
      Measures: "measures.jsonl",
    }
    name = names.get(type(event), "results.jsonl")
    files.append_line(self.path / name, event.to_json())


def check_named(path: str) -> None:
  """Raise if the path of a run folder is empty: it is not the current one."""
  if not path:
    raise RunFolderError("the path of a run folder is empty; give one")


def export(path: str | os.PathLike, content: bytes) -> None:
  """Write a file that a user asked for, but not over a file of a run.

  Args:
    path: the file; replaced if it exists.
    content: its bytes.

  Raises:
    RunFolderError: the file cannot be written, or belongs to a run folder.
  """
  target = pathlib.Path(path)
  own = target.name in ("run.json", "lock", *JOURNALS)
  if own and (target.parent / "run.json").exists():
    raise RunFolderError(f"{path}: belongs to the run there; name another file")
  files.write_atomic(target, content)


def refuse_links(path: pathlib.Path) -> None:
  """Raise if one of the folder's files is a link."""
  for entry in sorted(path.iterdir()):
    if entry.is_symlink():
      raise RunFolderError(
        f"{entry}: is a link; a run folder's own files are not, and links are "
        "not followed: delete it, or choose another --out"
      )


def differences(found: RunInfo, mine: RunInfo) -> list[str]:
  """Return the differences between two fingerprints.

  Args:
    found: the content of the folder's run.json.
    mine: the content for this run.

  Returns:
    Texts such as "versions jax='0.10' there, '0.11' now".

  Example:
    >>> differences(
    ...   RunInfo({}, {"jax": "0.10"}), RunInfo({}, {"jax": "0.11"}))
    ["versions jax='0.10' there, '0.11' now"]
  """
  named = []
  for part in FINGERPRINT:
    # Convert through JSON, as the stored side: tuples become lists.
    new = json.loads(json.dumps(getattr(mine, part)))
    old = getattr(found, part)
    named += [
      f"{part} {key}={old.get(key)!r} there, {new.get(key)!r} now"
      for key in sorted(new.keys() | old.keys())
      if new.get(key) != old.get(key)
    ]
  return named


def read_run(path: str | os.PathLike) -> RunInfo:
  """Return the content of a folder's run.json, checked."""
  file = pathlib.Path(path) / "run.json"
  if not file.exists() and not file.is_symlink():
    raise RunFolderError(f"{path}: no run.json, so not a run folder")
  try:
    with files.open_own(file, "rb") as opened:
      info = RunInfo.from_json(files.parse(opened.read()), str(file))
  except (OSError, ValueError) as error:
    raise RunFolderError(
      f"{file}: cannot be read ({error}); restore it, or start again with "
      "another --out"
    ) from error
  check_format(info, file)
  return info


def check_format(info: RunInfo, file: str | os.PathLike) -> None:
  """Raise if a run was written by a later version.

  Args:
    info: the content of run.json.
    file: where it is from, for the message.

  Raises:
    RunFolderError: it was.
  """
  if info.format > FORMAT:
    raise RunFolderError(
      f"{file}: has format {info.format}, this version reads up to {FORMAT}; "
      "use a newer jaxpruner"
    )


def settings_of(info: RunInfo, path: str) -> settings.ComparisonSettings:
  """Return the settings of a run; import none of the modules they name."""
  where = f"{pathlib.Path(path) / 'run.json'}: settings"
  try:
    return settings.from_json(info.settings, where)
  except ValueError as error:
    raise RunFolderError(str(error)) from error


_ENTRY = [str, float, str, str, str, str, int, str]


def listed_cells(info: RunInfo, path: str) -> list[Listed]:
  """Return the cells of a run and their groups, as stored in run.json."""
  where = f"{pathlib.Path(path) / 'run.json'}: cells"
  if info.format == 1:  # without a list: derive it from the settings
    chosen = settings_of(info, path)
    try:
      settings.check_names(chosen)
      return [Listed(c, "", group(c.algorithm)) for c in cells_of(chosen)]
    except ValueError as error:
      raise RunFolderError(
        f"{where}: {error}; if you trust the modules this run imported, name "
        "them with --import"
      ) from error
  found = []
  for item in info.cells:
    kinds = [type(value) for value in item]
    if info.format == 2 and kinds == [str, float, int, str]:
      found.append(Listed(Cell(*item[:2]), "", Group(*item[2:])))
    elif info.format > 2 and kinds == _ENTRY:
      found.append(Listed(Cell(*item[:5]), item[5], Group(*item[6:])))
    else:
      raise RunFolderError(
        f"{where}: {item!r:.80} is not [algorithm, sparsity, type, "
        "distribution, options, shown distribution, order, title]"
      )
  return found


def read_results(path: str | os.PathLike) -> dict[str, Record | Failure]:
  """Return cell id -> its last record."""
  found = {}
  for line in files.read_lines(pathlib.Path(path) / "results.jsonl"):
    record = _checked(result_from_json, line)
    found[record.cell] = record
  return found


def read_steps(path: str | os.PathLike) -> dict[str, list[Chunk]]:
  """Return cell id -> the chunks of its training, in order.

  An interrupted cell may have written a chunk twice; both are equal, and the
  last one is returned.

  Args:
    path: the run folder.

  Returns:
    The chunks of each cell.
  """
  chunks: dict[str, dict[int, Chunk]] = {}
  for line in files.read_lines(pathlib.Path(path) / "steps.jsonl"):
    chunk = _checked(Chunk.from_json, line)
    chunks.setdefault(chunk.cell, {})[chunk.start] = chunk
  return {
    cell: [found[start] for start in sorted(found)]
    for cell, found in chunks.items()
  }


def read_latency(path: str | os.PathLike) -> dict[str, Latency]:
  """Return cell id -> its measured inference time."""
  lines = files.read_lines(pathlib.Path(path) / "latency.jsonl")
  found = [_checked(Latency.from_json, line) for line in lines]
  return {latency.cell: latency for latency in found}


def read_measures(path: str | os.PathLike) -> dict[str, Measures]:
  """Return cell id -> what a question measured on its networks."""
  lines = files.read_lines(pathlib.Path(path) / "measures.jsonl")
  found = [_checked(Measures.from_json, line) for line in lines]
  return {measures.cell: measures for measures in found}


def _checked(read: Any, line: files.Line) -> Any:
  try:
    return read(line.value, line.where)
  except SchemaError as error:
    raise RunFolderError(
      f"{error}; delete that line: only that record is computed again"
    ) from error
