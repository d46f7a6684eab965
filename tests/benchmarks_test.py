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
  text = run("engine", "--most", "3000", peak=lambda _case: 0.0)
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


def test_sparse_ops(run, tmp_path):
  pytest.importorskip("numba")
  # What takes long, or says nothing of a small case.
  cell = {"dense_ms": 2.0, "sparse_ms": 1.0, "rest_ms": 0.5, "ratio": 2.0}
  place = {"shape": [64, 64], "sparsity": 0.9, "format": "sell"}
  left_out = {
    "bounds": {"fma": 2.0, "fma_with_load": 1.0},
    "models": [cell | {"tokens": n, "bytes": 0.1} for n in range(4)],
    "spread": [cell | place],
  }
  sections = importlib.import_module("sparse_ops").SECTIONS
  text = run(
    "sparse_ops",
    *("--output", str(tmp_path), "--budget", "0"),
    SHAPES=[(64, 128), (128, 64), (128, 128)],
    SPARSITIES=[0.5],
    BATCHES=[8, 512],
    SPREAD_BATCHES=[1],
    SECTIONS=sections
    | {name: lambda *_, x=x: x for name, x in left_out.items()},
  )
  assert "| 64×128 | 50% | bitmask, sell |" in text
  assert "| 128×128 | 90% | block |" in text


def test_before_after(monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(str(SCRIPTS))
  page = importlib.import_module("page")
  script = importlib.import_module("before_after")
  monkeypatch.setattr(page, "RESULTS", tmp_path)
  monkeypatch.setattr(script, "MODELS", {"4-4": [4, 4]})
  monkeypatch.setattr(script, "REST", [4, 4])
  monkeypatch.setattr(script, "SIZES", (3000,))
  monkeypatch.setattr(script, "TURNS", 1)
  monkeypatch.setattr(script, "_in_process", lambda _source: script.measure())
  monkeypatch.setattr("sys.argv", ["before_after", str(tmp_path)])
  script.main()
  text = (tmp_path / "before_after.md").read_text()
  assert "| compile ÷ dense, 4-4, rigl |" in text
  assert "| step at rest ÷ dense, 12 × 512², magnitude_ste |" in text
