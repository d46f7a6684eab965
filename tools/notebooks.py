"""Run the notebooks of the documentation, and keep their outputs.

    pip install nbclient ipykernel && python tools/notebooks.py [NAME …]

Outputs are committed: readers see them without running anything. Tests run the
same cells.
"""

import argparse
import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "notebooks"


def execute(path: pathlib.Path) -> None:
  """Run a notebook from the top; replace it whole, or leave it as it was."""
  import nbformat
  from nbclient import NotebookClient

  notebook = nbformat.read(path, as_version=4)
  NotebookClient(notebook, timeout=600, iopub_timeout=60).execute()
  for cell in notebook.cells:
    # Times and counters would change the file at every run.
    cell.metadata.pop("execution", None)
  temporary = path.with_suffix(".tmp")
  nbformat.write(notebook, temporary)
  os.replace(temporary, path)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  every = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
  parser.add_argument("names", nargs="*", metavar="NAME", default=every)
  for name in parser.parse_args().names:
    print(name)
    execute(FOLDER / f"{name}.ipynb")
  return 0


if __name__ == "__main__":
  sys.exit(main())
