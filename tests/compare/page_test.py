"""The report: what is shown, in every form, from records made by hand."""

import csv
import io
import json
import math
import re

import compare_helpers as helpers
import pytest

from jaxpruner.compare import folder, page, plan, report_command, table
from jaxpruner.compare.statistics import estimate

HOSTILE = "<script>alert(1)</script>&'\"$x$"


def record(cell, values, **changes):
  name, _, sparsity = cell.partition("@")
  return {
    "cell": cell,
    "algorithm": name,
    "sparsity": float(sparsity or 0),
    "problem": "",
    "metrics": {
      "accuracy": values,
      "noise_accuracy": values,
      "ece": [v / 50 for v in values],
    },
    "realised": [float(sparsity or 0)] * len(values),
    "training_flops": 30.0,
    "training_flops_dense": 60.0,
    "inference_flops": 10.0,
    "inference_flops_dense": 20.0,
    "bytes": 1234,
    "weights": 99,
    "seconds": 3.2,
  } | changes


@pytest.fixture
def run_folder(tmp_path):
  settings = helpers.settings()
  facts = {
    "settings": plan.as_dict(settings),
    "versions": {"jax": "1", "jaxpruner": HOSTILE},
    "device": HOSTILE,
    "command": f"jaxpruner compare --out {HOSTILE}",
    "started": "now",
  }
  with folder.RunFolder(tmp_path) as run:
    run.open_run(facts)
    for line in (
      record("dense", [90.0, 92.0]),
      record("small_dense@0.8", [80.0, 81.0]),
      record("magnitude@0.8", [88.0, 91.0]),
      record("static_sparse@0.8", [0.0, 0.0], problem=HOSTILE),
    ):
      folder.append_line(tmp_path / "results.jsonl", line)
    for cell in ("dense", "magnitude@0.8"):
      for start in (0, 12):
        density = {} if cell == "dense" else {f"{HOSTILE}/kernel": 0.2}
        folder.append_line(
          tmp_path / "steps.jsonl",
          {
            "cell": cell,
            "start": start,
            "count": 12,
            "steps": 24,
            "loss": [[1.0, 0.5], [1.1, 0.6]],
            "density": density,
            "stored": density,
            "churn": [0.1, 0.2],
            "explored": [0.3, 0.4],
          },
        )
  return tmp_path


def test_rows_are_grouped_and_paired_with_dense(run_folder):
  rows = table.rows(str(run_folder))
  assert [r.algorithm for r in rows] == [
    "dense",
    "small_dense",
    "magnitude",
    "static_sparse",
  ]
  assert len({r.group for r in rows}) == 3
  found = rows[2]
  assert found.metric == estimate([88.0, 91.0])
  assert found.difference == estimate([-2.0, -1.0])
  assert found.training_flops == 0.5
  assert rows[0].difference is None
  assert rows[3].metric is None and rows[3].problem == HOSTILE


def test_html_escapes_whatever_names_contain(run_folder):
  page.write_report([str(run_folder)], str(run_folder))
  text = (run_folder / "report.html").read_text()
  assert "<script" not in text
  assert "&lt;script&gt;" in text
  # Self-contained: nothing is fetched.
  links = re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", text)
  assert all(link.startswith(("#", "data:")) for link in links)
  for name in ("metric", "layers", "masks", "loss"):
    assert (run_folder / f"{name}.png").stat().st_size > 1000
    assert "<svg" in (run_folder / f"{name}.svg").read_text()


def test_exports_hold_the_same_numbers(run_folder):
  rows = table.rows(str(run_folder))
  from_json = json.loads(table.to_json(rows))
  from_csv = list(csv.DictReader(io.StringIO(table.to_csv(rows))))
  assert len(from_json) == len(from_csv) == 4
  for a, b in zip(from_json, from_csv, strict=True):
    assert a["algorithm"] == b["algorithm"]
    if a["mean"] is not None:
      assert float(b["mean"]) == a["mean"]
  assert from_json[3]["mean"] is None


def test_latex_and_markdown_escape_their_own_marks(run_folder):
  rows = table.rows(str(run_folder))
  latex = table.to_latex(rows)
  assert r"small\_dense" in latex and r"\begin{tabular}" in latex
  assert latex.count("{") == latex.count("}")
  markdown = table.to_markdown(rows)
  widths = {
    line.replace(r"\|", "").count("|")
    for line in markdown.splitlines()
    if line.startswith("|")
  }
  assert len(widths) == 1


def test_spreadsheets_never_get_a_formula(run_folder):
  rows = table.rows(str(run_folder))
  bad = table.dataclasses.replace(rows[0], algorithm="=cmd|' /C calc'!A0")
  assert "\n'=cmd" in table.to_csv([bad]).replace("Baselines,", "\n")


def test_unfinished_cells_are_shown_as_such(tmp_path):
  with folder.RunFolder(tmp_path) as run:
    run.open_run({"settings": plan.as_dict(helpers.settings()), "versions": {}})
  rows = table.rows(str(tmp_path))
  assert {r.problem for r in rows} == {"not finished"}
  assert "failed: not finished" in table.to_markdown(rows)


def test_one_seed_shows_no_interval(run_folder):
  row = table.rows(str(run_folder))[0]
  alone = table.dataclasses.replace(row, metric=estimate([90.0]))
  texts = table.spelled(alone)
  assert texts[1] == "90.00" and texts[2] == ""
  assert not any("nan" in text for text in texts)
  assert not math.isnan(alone.metric.mean)


def test_the_command_exports_and_explains(run_folder, capsys, tmp_path):
  import argparse

  parser = argparse.ArgumentParser()
  report_command.add_arguments(parser)
  target = run_folder / "table.csv"
  args = parser.parse_args([str(run_folder), "--csv", str(target), "--json"])
  assert report_command.run(args) == 0
  assert json.loads(capsys.readouterr().out)[0]["algorithm"] == "dense"
  assert target.read_text().startswith("task,sparsity")
  args = parser.parse_args([str(run_folder / "nothing")])
  assert report_command.run(args) == 1
  assert "not a run folder" in capsys.readouterr().err
  args = parser.parse_args([str(run_folder), str(run_folder)])
  assert report_command.run(args) == 0
  assert "magnitude" in capsys.readouterr().out
