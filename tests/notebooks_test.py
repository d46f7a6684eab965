"""Every notebook of the documentation runs, and shows its outputs."""

import json
import pathlib

import matplotlib.pyplot as plt
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code(path):
  cells = json.loads(path.read_text())["cells"]
  return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(path, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  namespace = {"__name__": "notebook"}
  for cell in code(path):
    exec(compile("".join(cell["source"]), path.name, "exec"), namespace)
  plt.close("all")


def test_outputs_are_kept_and_no_cell_failed():
  assert len(NOTEBOOKS) == 6
  for path in NOTEBOOKS:
    outputs = [output for cell in code(path) for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert "error" not in kinds, path.name
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert pictures, path.name
