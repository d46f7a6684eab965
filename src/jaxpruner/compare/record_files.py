"""A finished comparison as one small file of JSON lines, to publish and cite.

    {"run": …}        settings, versions, commit, device, command, date
    {"record": …}     a finished cell: its numbers for each seed, its costs
    {"training": …}   its learning curve, and a SHA-256 of the loss of all steps
    {"latency": …}    its measured inference time
    {"measures": …}   what a question measured on its networks

Weights and the losses of single steps stay in the run folder. Several files
make one report, each with its own commit; a folder can be restored from a file
and continued.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from jaxpruner.compare import files, run_folder
from jaxpruner.compare.files import RunFolderError
from jaxpruner.compare.records import (
  Chunk,
  Latency,
  Measures,
  Numbers,
  Record,
  SchemaError,
  Stored,
)
from jaxpruner.compare.run_folder import RunFolder, RunInfo

LARGEST = 64 * 2**20  # bytes of a file that is read


@dataclasses.dataclass(frozen=True)
class Training(Stored):
  """The learning curve of a cell.

  Attributes:
    cell: the cell's id.
    steps: the number of steps.
    starts: the first step of each chunk.
    losses: per chunk, the mean loss of each seed.
    sha256: the SHA-256 of the loss of every step and seed; "" if only the means
      are known, in a folder restored from a file.
  """

  cell: str
  steps: int
  starts: Numbers
  losses: list[Numbers]
  sha256: str


@dataclasses.dataclass(frozen=True)
class Records:
  """The content of a file of records.

  Attributes:
    info: the run.
    records: cell id -> its record.
    trainings: cell id -> its learning curve.
    latencies: cell id -> its measured inference time.
    measures: cell id -> what a question measured.
  """

  info: RunInfo
  records: dict[str, Record]
  trainings: dict[str, Training]
  latencies: dict[str, Latency]
  measures: dict[str, Measures] = dataclasses.field(default_factory=dict)


def training_of(chunks: Sequence[Chunk]) -> Training:
  """Return the learning curve of a cell from the chunks of its training.

  Args:
    chunks: all chunks of one cell, in order.

  Returns:
    The curve.

  Example:
    >>> chunk = Chunk("dense", 0, 2, 2, [[1.0, 3.0]], {}, {}, [], [])
    >>> training_of([chunk]).losses
    [[2.0]]
  """
  whole = all(
    len(seed) == chunk.count for chunk in chunks for seed in chunk.loss
  )
  raw = json.dumps([chunk.loss for chunk in chunks])
  return Training(
    chunks[0].cell,
    chunks[0].steps,
    [chunk.start for chunk in chunks],
    [[_mean(seed) for seed in chunk.loss] for chunk in chunks],
    hashlib.sha256(raw.encode()).hexdigest() if whole else "",
  )


def _mean(values: Numbers) -> float | None:
  finite = [value for value in values if value is not None]
  return sum(finite) / len(finite) if len(finite) == len(values) else None


def of_folder(path: str) -> Records:
  """Return the finished cells of a run folder."""
  info = run_folder.read_run(path)
  results = run_folder.read_results(path)
  known = [entry.cell.id for entry in run_folder.listed_cells(info, path)]
  records = {
    cell: record
    for cell in known
    if isinstance(record := results.get(cell), Record)
  }
  if not records:
    raise RunFolderError(f"{path}: no cell is finished")
  steps = run_folder.read_steps(path)
  latency = run_folder.read_latency(path)
  measures = run_folder.read_measures(path)
  return Records(
    info,
    records,
    {cell: training_of(steps[cell]) for cell in records if cell in steps},
    {cell: latency[cell] for cell in records if cell in latency},
    {cell: measures[cell] for cell in records if cell in measures},
  )


def load(path: str) -> Records:
  """Return the records of a run folder, or of a file of records.

  Args:
    path: the folder or the file.

  Returns:
    Its records.

  Raises:
    RunFolderError: it cannot be read, or no cell is finished.
  """
  run_folder.check_named(path)
  return read(path) if pathlib.Path(path).is_file() else of_folder(path)


def save(found: Records, file: str) -> None:
  """Write records to a file, whole or not at all.

  Args:
    found: the records.
    file: the file; replaced if it exists.

  Raises:
    RunFolderError: the file cannot be written.
  """
  lines: list[dict[str, Any]] = [{"run": found.info.to_json()}]
  for cell, record in found.records.items():
    lines.append({"record": record.to_json()})
    if cell in found.trainings:
      lines.append({"training": found.trainings[cell].to_json()})
    if cell in found.latencies:
      lines.append({"latency": found.latencies[cell].to_json()})
    if cell in found.measures:
      lines.append({"measures": found.measures[cell].to_json()})
  text = "".join(
    json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in lines
  )
  run_folder.export(file, text.encode())


def read(file: str) -> Records:
  """Return the content of a file of records, checked.

  Args:
    file: the file.

  Returns:
    Its records.

  Raises:
    RunFolderError: it cannot be read, is too large, or a line is not a record
      of this version; the message names the line.
  """
  path = pathlib.Path(file)
  with files.explained(path), files.open_own(path, "rb") as opened:
    raw = opened.read(LARGEST + 1)
  if len(raw) > LARGEST:
    raise RunFolderError(
      f"{file}: more than {LARGEST // 2**20} MiB; a file of records is small"
    )
  kinds: dict[str, type[Stored]] = {
    "run": RunInfo,
    "record": Record,
    "training": Training,
    "latency": Latency,
    "measures": Measures,
  }
  found: dict[str, list[Any]] = {name: [] for name in kinds}
  for number, line in enumerate(raw.splitlines(), 1):
    where = f"{file}, line {number}"
    try:
      value = files.parse(line)
      if not isinstance(value, dict) or len(value) != 1:
        raise SchemaError(f"{where}: not an object with one key")
      ((name, content),) = value.items()
      if name not in kinds:
        raise SchemaError(f"{where}: {name!r:.40} is none of {sorted(kinds)}")
      found[name].append(kinds[name].from_json(content, where))
    except SchemaError as error:
      raise RunFolderError(f"{error}; is it a file of records?") from error
    except (ValueError, RecursionError) as error:
      raise RunFolderError(
        f"{where}: not JSON ({error}); is it a file of records?"
      ) from error
  if len(found["run"]) != 1 or not found["record"]:
    raise RunFolderError(
      f"{file}: {len(found['run'])} runs and {len(found['record'])} records; a "
      "file holds one run and its records"
    )
  run_folder.check_format(found["run"][0], file)
  for name in kinds.keys() - {"run"}:
    counts = collections.Counter(item.cell for item in found[name])
    for cell, count in counts.most_common(1):
      if count > 1:
        raise RunFolderError(
          f"{file}: {count} lines are the {name} of {cell!r:.60}, and which "
          "holds is not known; delete all but one"
        )
  for training in found["training"]:
    _check_curve(training, file)
  by_cell = lambda name: {item.cell: item for item in found[name]}
  return Records(
    found["run"][0],
    by_cell("record"),
    by_cell("training"),
    by_cell("latency"),
    by_cell("measures"),
  )


def _check_curve(training: Training, file: str) -> None:
  """Raise if the chunks of a learning curve do not follow each other."""
  starts = [start for start in training.starts if isinstance(start, int)]
  ends = [*starts[1:], training.steps]
  if not (len(starts) == len(training.starts) == len(training.losses)) or any(
    start >= end for start, end in zip(starts, ends, strict=False)
  ):
    raise RunFolderError(
      f"{file}: the training of {training.cell!r:.60} has chunks that do not "
      "follow each other"
    )


def restore(found: Records, folder: str) -> None:
  """Write records into a new run folder, which `compare` then continues.

  Args:
    found: the records.
    folder: the run folder; it must not hold a run.

  Raises:
    RunFolderError: the folder holds a run.
  """
  if (pathlib.Path(folder) / "run.json").exists():
    raise RunFolderError(f"{folder}: holds a run; choose a new folder")
  with RunFolder(folder) as run:
    run.open_run(found.info)
    for cell, record in found.records.items():
      for chunk in _chunks(found.trainings.get(cell)):
        run.append(chunk)
      if cell in found.latencies:
        run.append(found.latencies[cell])
      if cell in found.measures:
        run.append(found.measures[cell])
      run.append(record)


def _chunks(training: Training | None) -> Iterator[Chunk]:
  if training is None:
    return
  starts = [int(start or 0) for start in training.starts]
  ends = [*starts[1:], training.steps]
  for start, end, losses in zip(starts, ends, training.losses, strict=True):
    means = [[loss] for loss in losses]
    count = end - start
    yield Chunk(
      training.cell, start, count, training.steps, means, {}, {}, [], []
    )


@contextlib.contextmanager
def as_folders(paths: Sequence[str]) -> Iterator[list[str]]:
  """Yield run folders for a mixture of run folders and files of records.

  Args:
    paths: run folders, or files of records; these are unpacked into temporary
      folders.

  Yields:
    One run folder for each path.
  """
  with tempfile.TemporaryDirectory() as temporary:
    folders = []
    for i, path in enumerate(paths):
      run_folder.check_named(path)
      if pathlib.Path(path).is_file():
        folder = str(pathlib.Path(temporary) / str(i))
        restore(read(path), folder)
        folders.append(folder)
      else:
        folders.append(path)
    try:
      yield folders
    except RunFolderError as error:
      text = str(error)
      for folder, path in zip(folders, paths, strict=True):
        text = text.replace(folder, path)  # what the user typed
      raise RunFolderError(text) from error
