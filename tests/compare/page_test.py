"""The report: what is shown, in every form, from records made by hand."""

import csv
import dataclasses
import io
import json
import math
import re

import compare_helpers as helpers
import pytest

from jaxpruner.compare import columns, exports, page, report_command, table
from jaxpruner.compare.run_folder import RunFolder
from jaxpruner.compare.statistics import estimate

HOSTILE = "<script>alert(1)</script>&'\"$x$"


@pytest.fixture
def run_folder(tmp_path):
  info = helpers.run_info(
    versions={"jax": "1", "jaxpruner": HOSTILE},
    device=HOSTILE,
    command=f"jaxpruner compare --out {HOSTILE}",
    started="now",
  )
  with RunFolder(tmp_path) as run:
    run.open_run(info)
    for record in (
      helpers.record("dense", [90.0, 92.0]),
      helpers.record("small_dense@0.8", [80.0, 81.0]),
      helpers.record("magnitude@0.8", [88.0, 91.0]),
      helpers.record("static_sparse@0.8", [0.0, 0.0], problem=HOSTILE),
    ):
      run.append(record)
    for cell in ("dense", "magnitude@0.8"):
      for start in (0, 12):
        density = {} if cell == "dense" else {f"{HOSTILE}/kernel": 0.2}
        run.append(helpers.chunk(cell, start, density=density, stored=density))
  return tmp_path


@pytest.fixture
def no_pictures(monkeypatch):
  """Drawing takes seconds; another test looks at the pictures."""
  monkeypatch.setattr(page.pictures, "draw_all", lambda *_: {})


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
  from_json = json.loads(exports.to_json(rows))
  from_csv = list(csv.DictReader(io.StringIO(exports.to_csv(rows))))
  assert len(from_json) == len(from_csv) == 4
  for a, b in zip(from_json, from_csv, strict=True):
    assert a["algorithm"] == b["algorithm"]
    if a["mean"] is not None:
      assert float(b["mean"]) == a["mean"]
  assert from_json[3]["mean"] is None


def test_latex_and_markdown_escape_their_own_marks(run_folder):
  rows = table.rows(str(run_folder))
  latex = exports.to_latex(rows)
  assert r"small\_dense" in latex and r"\begin{tabular}" in latex
  assert latex.count("{") == latex.count("}")
  markdown = exports.to_markdown(rows)
  widths = {
    line.replace(r"\|", "").count("|")
    for line in markdown.splitlines()
    if line.startswith("|")
  }
  assert len(widths) == 1


def test_spreadsheets_never_get_a_formula(run_folder):
  rows = table.rows(str(run_folder))
  bad = dataclasses.replace(rows[0], algorithm="=cmd|' /C calc'!A0")
  assert "\n'=cmd" in exports.to_csv([bad]).replace("Baselines,", "\n")


def test_unfinished_cells_are_shown_as_such(tmp_path):
  with RunFolder(tmp_path) as run:
    run.open_run(helpers.run_info())
  rows = table.rows(str(tmp_path))
  assert {r.problem for r in rows} == {"not finished"}
  text = exports.to_markdown(rows)
  assert "not finished" in text and "failed" not in text


def test_one_seed_shows_no_interval(run_folder):
  row = table.rows(str(run_folder))[0]
  alone = dataclasses.replace(row, metric=estimate([90.0]))
  texts = columns.cells_as_text(alone)
  assert texts[1] == "90.00" and texts[2] == ""
  assert not any("nan" in text for text in texts)
  assert not math.isnan(alone.metric.mean)


@pytest.mark.usefixtures("no_pictures")
def test_the_command_exports_and_explains(run_folder, capsys, tmp_path):
  import argparse

  parser = argparse.ArgumentParser()
  report_command.add_arguments(parser)
  target = run_folder / "table.csv"
  args = parser.parse_args([str(run_folder), "--csv", str(target), "--json"])
  assert report_command.run(args) == 0
  assert json.loads(capsys.readouterr().out)[0]["algorithm"] == "dense"
  assert target.read_text().startswith("task,sparsity")
  assert not (tmp_path / "page").exists()
  words = [str(run_folder), "--csv", "--out", str(tmp_path / "page")]
  assert report_command.run(parser.parse_args(words)) == 0
  assert capsys.readouterr().out == target.read_text()
  assert (tmp_path / "page" / "report.html").exists()
  args = parser.parse_args([str(run_folder / "nothing")])
  assert report_command.run(args) == 1
  assert "not a run folder" in capsys.readouterr().err
  args = parser.parse_args([str(run_folder), str(run_folder)])
  assert report_command.run(args) == 0
  assert "magnitude" in capsys.readouterr().out


FORMULAS = ["=1", "+1", "-1", "@x", "\t=1", " =1", "a;=1", "a,=1", "a\n=1"]


@pytest.mark.parametrize("text", [*FORMULAS, 'x"=1', "a\r+1", "a|@x", "＝1"])
def test_a_csv_cell_is_neutral_as_a_whole(text):
  found = exports.neutral(text)
  assert all(c.isprintable() for c in found)
  assert not re.search(r"""(^|[,;|"])\s*[=+\-@＝]""", found)
  assert "'" in found or "=" not in found or found.startswith("a ")


def test_markdown_escapes_as_html_does(run_folder):
  row = table.rows(str(run_folder))[2]
  bad = "<img src=x onerror=alert(1)> [a](javascript:b) `c` *d*\n| e |"
  for field in ("algorithm", "metric_name", "group", "task", "collapsed"):
    text = exports.to_markdown([dataclasses.replace(row, **{field: bad})])
    assert "<img" not in text and "[a](" not in text
    assert "`c`" not in text.replace("\\`", "")
    widths = {
      len(re.sub(r"\\\|", "", line).split("|"))
      for line in text.splitlines()
      if line.startswith("|")
    }
    assert len(widths) == 1


def test_the_terminal_gets_no_control_characters(run_folder, capsys):
  from jaxpruner.compare import terminal

  row = table.rows(str(run_folder))[3]
  bad = dataclasses.replace(
    row, problem="\x1b]0;title\x07[red]x", group="\x1b[2J"
  )
  terminal.print_table([bad])
  assert "\x1b" not in capsys.readouterr().out


def test_columns_of_low_priority_give_way_first():
  names = lambda width: [
    c.name for c in columns.fitting(columns.COLUMNS, lambda _: 10, width)
  ]
  assert names(170) == [c.name for c in columns.COLUMNS]
  assert set(names(170)) - set(names(150)) == {"step time", "train memory"}
  assert set(names(150)) - set(names(140)) == {"95 % interval"}
  assert names(0) == ["algorithm", "metric", "vs dense", "sparsity"]


@pytest.mark.usefixtures("no_pictures")
def test_reading_a_run_imports_nothing_that_it_names(
  tmp_path, monkeypatch, capsys
):
  out = tmp_path / "run"
  (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
  monkeypatch.syspath_prepend(str(tmp_path))
  settings = helpers.settings(imports=("planted",), algorithms=("theirs",))
  cells = [
    ["dense", 0.0, "", "", "", "", 0, "Baselines"],
    ["theirs", 0.8, "", "", "", "erk", 1, "Theirs"],
  ]
  with RunFolder(out) as run:
    run.open_run(helpers.run_info(settings=settings.to_json(), cells=cells))
    run.append(helpers.record("dense", [90.0, 92.0]))
    run.append(helpers.record("theirs@0.8", [80.0, 82.0]))
  assert report_command.run(parse(str(out))) == 0
  assert "theirs" in capsys.readouterr().out
  # A folder of the first format has no list of cells: told what to type.
  old = {"settings": settings.to_json(), "versions": {}}
  (out / "run.json").write_text(json.dumps(old))
  assert report_command.run(parse(str(out))) == 1
  assert "--import" in capsys.readouterr().err
  assert report_command.run(parse(str(out), "--import", "no_such")) == 1
  assert "--import 'no_such'" in capsys.readouterr().err


def test_a_path_that_is_empty_is_refused(run_folder, capsys):
  assert report_command.run(parse("")) == 1
  assert "path of a run folder is empty" in capsys.readouterr().err
  for option in ("--out", "--csv"):
    assert report_command.run(parse(str(run_folder), option, "")) == 1
    assert "is empty" in capsys.readouterr().err


def parse(*words):
  import argparse

  parser = argparse.ArgumentParser()
  report_command.add_arguments(parser)
  return parser.parse_args(words)
