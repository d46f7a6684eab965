"""The benchmarks run: on little, to the pages they write."""

import importlib
import json
import pathlib

import pytest

SCRIPTS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch, tmp_path):
  """Runs a benchmark with arguments; returns the page it writes."""
  pytest.importorskip("matplotlib")
  monkeypatch.syspath_prepend(str(SCRIPTS))
  page = importlib.import_module("page")
  monkeypatch.setattr(page, "RESULTS", tmp_path)

  def run(name: str, *arguments: str, **replaced) -> str:
    script = importlib.import_module(name)
    for key, value in replaced.items():
      monkeypatch.setattr(script, key, value)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    script.main()
    assert (tmp_path / f"{name}.png").exists()
    assert json.loads((tmp_path / f"{name}.json").read_text())
    return (tmp_path / f"{name}.md").read_text()

  return run


def test_engine(run):
  text = run("engine", "--most", "3000", peak=lambda case: 0.0)
  assert "| float32 | 3e+03 |" in text
  assert "| bfloat16 | 3e+03 |" in text


def test_step(run, tmp_path):
  text = run(
    "step",
    *("--only", "mlp", "compile", "memory", "--algorithms", "magnitude"),
    *("--layers", "1", "--repeats", "1"),
    RECORD=tmp_path / "step.json",
  )
  assert "| mlp | 8 | magnitude |" in text
  assert "| 12 | magnitude |" in text
