"""`jaxpruner records`: publish the records of a run, or restore a run."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options."""
  parser.add_argument(
    "source", metavar="RUN", help="a run folder, or a file of records"
  )
  group = parser.add_mutually_exclusive_group()
  group.add_argument(
    "--save", metavar="FILE", help="write the finished cells to a small file"
  )
  group.add_argument(
    "--restore",
    metavar="FOLDER",
    help="make a run folder of a file of records; `compare --out FOLDER` with "
    "the same settings continues it",
  )


def run(args: argparse.Namespace) -> int:
  """Save, restore, or print the numbers of each seed."""
  from jaxpruner.compare import files, record_files

  try:
    if args.save == "" or args.restore == "":
      raise ValueError("--save or --restore is empty; give a path")
    found = record_files.load(args.source)
    if args.save:
      record_files.save(found, args.save)
      print(f"{args.save}: {len(found.records)} records")
      return 0
    if args.restore:
      record_files.restore(found, args.restore)
      print(f"{args.restore}: {len(found.records)} records")
      return 0
    print("\n".join(described(found)))
  except (files.RunFolderError, ValueError) as error:
    files.say(str(error), "records")
    return 1
  return 0


def described(found) -> list[str]:
  """Return the lines that name a run and list the metric of each seed."""
  from jaxpruner.compare.files import printable

  info = found.info
  lines = [
    info.command,
    f"commit {info.commit or 'unknown'}, started {info.started}, {info.device}",
    ", ".join(f"{name} {text}" for name, text in info.versions.items()),
    "",
  ]
  for cell, record in found.records.items():
    values = record.metrics.get(info.metric) or []
    texts = ["–" if value is None else f"{value:.4f}" for value in values]
    lines.append(f"  {cell:30} {info.metric} {' '.join(texts)}")
  seconds = sum(record.seconds for record in found.records.values())
  lines += ["", f"{len(found.records)} cells, {seconds / 60:.1f} minutes"]
  return [printable(line) for line in lines]
