"""Records of a comparison with further seeds in files of their own.

`NAME-5.jsonl` has the seeds from 5 on of the comparison in `NAME.jsonl`: the
same command with `JAX_RANDOM_SEED_OFFSET=5`. Seeds that are there are not
trained again.
"""

import pathlib

from jaxpruner.compare import record_files


def files_of(file: pathlib.Path) -> list[pathlib.Path]:
  """Return a file of records, and those with further seeds of it."""
  return [file, *sorted(file.parent.glob(f"{file.stem}-[0-9]*.jsonl"))]


def is_further(file: pathlib.Path) -> bool:
  """Return whether a file has further seeds of another one."""
  name, _, number = file.stem.rpartition("-")
  first = file.with_stem(name) if name else file
  return number.isdigit() and first != file and first.exists()


def seeds_of(found: record_files.Records) -> range:
  """Return the numbers of the seeds of a file of records."""
  first = int(found.info.jax.get("jax_random_seed_offset", 0))
  return range(first, first + int(found.info.settings["seeds"]))


def joined(
  file: pathlib.Path,
) -> tuple[list[record_files.Records], dict[str, list[float | None]]]:
  """Return the records of all files of a comparison, and its metric.

  Args:
    file: the file without a number.

  Returns:
    The records of each file, and cell -> the metric of all seeds. Cells that
    one of the files lacks are left out.

  Raises:
    ValueError: two files have a seed in common, or were made with other
      settings, so that their seeds are not draws of the same experiment.
  """
  paths = files_of(file)
  found = [record_files.read(str(path)) for path in paths]
  first, seen = found[0], set(seeds_of(found[0]))
  values: dict[str, list[float | None]] = {}
  for path, one in zip(paths, found, strict=True):
    if one is not first:
      for part in ("task", "metric", "data"):
        if getattr(one.info, part) != getattr(first.info, part):
          raise ValueError(f"{path}: its {part} is not that of {paths[0]}")
      if twice := seen.intersection(seeds_of(one)):
        raise ValueError(f"{path}: seeds {sorted(twice)} are in two files")
      seen.update(seeds_of(one))
    for cell, record in one.records.items():
      if not record.problem:
        values.setdefault(cell, []).extend(record.metrics[one.info.metric])
  return found, {k: v for k, v in values.items() if len(v) == len(seen)}
