"""`jaxpruner report`: rebuild the report of one or several run folders."""

import argparse
import pathlib
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options."""
  parser.add_argument(
    "runs", nargs="+", metavar="RUN", help="run folders, or files of records"
  )
  parser.add_argument(
    "--out",
    help="where report.html goes (default: the first run folder; for a file of "
    "records, a folder of its name beside it)",
  )
  parser.add_argument(
    "--import",
    dest="imports",
    action="append",
    metavar="MODULE",
    help="import one of your modules; modules that a run names are not",
  )
  for name in ("json", "csv", "latex", "markdown"):
    parser.add_argument(
      f"--{name}",
      nargs="?",
      const="-",
      metavar="FILE",
      help=f"export the table as {name} (to standard output without FILE); "
      "the report is then written with --out only",
    )


def run(args: argparse.Namespace) -> int:
  """Write report.html and the pictures, or export the table."""
  from jaxpruner.compare import (
    exports,
    files,
    page,
    record_files,
    run_folder,
    table,
    terminal,
  )
  from jaxpruner.compare.modules import import_modules

  writers = {
    "json": exports.to_json,
    "csv": exports.to_csv,
    "latex": exports.to_latex,
    "markdown": exports.to_markdown,
  }
  chosen = {name: getattr(args, name) for name in writers}
  try:
    for name, value in {"out": args.out, **chosen}.items():
      if value == "":
        raise ValueError(f"--{name} '': is empty; give a path")
    for path in args.runs:
      run_folder.check_named(path)
    import_modules(args.imports or ())
    if not args.out and pathlib.Path(args.runs[0]).is_file():
      args.out = str(pathlib.Path(args.runs[0]).with_suffix(""))
    with record_files.as_folders(args.runs) as runs:
      rows = [row for path in runs for row in table.rows(path)]
      exported = any(chosen.values())
      if args.out or not exported:
        out = args.out or args.runs[0]
        page.write_report(runs, out)
        if not exported:  # standard output may be one
          terminal.print_table(rows)
          print(f"report: {pathlib.Path(out) / 'report.html'}")
    for name, target in chosen.items():
      if target == "-":
        sys.stdout.write(writers[name](rows))
      elif target:
        run_folder.export(target, writers[name](rows).encode())
  except (files.RunFolderError, ValueError) as error:
    files.say(str(error), "report")
    return 1
  return 0
