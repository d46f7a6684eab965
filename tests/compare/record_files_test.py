"""Files of records: a run published, restored, and computed again."""

import json

import compare_helpers as helpers
import pytest

from jaxpruner import cli
from jaxpruner.compare import (
  files,
  from_python,
  record_files,
  reproduce_command,
  run_folder,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A finished run of two algorithms."""
  path = tmp_path_factory.mktemp("runs") / "tiny"
  from_python.run(
    "digits",
    algorithms=["static_sparse"],
    sparsity=0.8,
    seeds=2,
    out=str(path),
    jobs=1,
    quiet=True,
    options=helpers.TINY,
  )
  return path


@pytest.fixture
def saved(folder, tmp_path):
  path = tmp_path / "tiny.jsonl"
  assert cli.main(["records", str(folder), "--save", str(path)]) == 0
  return path


def test_a_file_holds_every_number_of_every_seed(folder, saved, capsys):
  found = record_files.read(str(saved))
  assert found == record_files.of_folder(str(folder))
  assert found.records == run_folder.read_results(folder)
  assert found.trainings["dense"].steps == helpers.TINY["steps"]
  assert len(found.records["dense"].metrics["accuracy"]) == 2
  kinds = [
    next(iter(json.loads(line))) for line in saved.read_text().splitlines()
  ]
  assert kinds[0] == "run"
  assert kinds.count("record") == kinds.count("training") == 3
  assert cli.main(["records", str(saved)]) == 0
  assert "static_sparse@0.8" in capsys.readouterr().out


def test_a_restored_folder_has_the_table_and_is_continued(saved, tmp_path):
  restored = tmp_path / "restored"
  assert cli.main(["records", str(saved), "--restore", str(restored)]) == 0
  assert record_files.of_folder(str(restored)).records == (
    record_files.read(str(saved)).records
  )
  lines = (restored / "results.jsonl").read_bytes().splitlines(keepends=True)
  cut = [line for line in lines if b"static_sparse" not in line]
  (restored / "results.jsonl").write_bytes(b"".join(cut))
  done = from_python.run(
    "digits",
    algorithms=["static_sparse"],
    sparsity=0.8,
    seeds=2,
    out=str(restored),
    jobs=1,
    quiet=True,
    options=helpers.TINY,
  )
  again = record_files.of_folder(str(done.path)).records["static_sparse@0.8"]
  before = record_files.read(str(saved)).records["static_sparse@0.8"]
  assert again.metrics == before.metrics
  with pytest.raises(files.RunFolderError, match="holds a run"):
    record_files.restore(record_files.read(str(saved)), str(restored))


def test_a_report_is_made_from_files_and_folders(folder, saved, tmp_path):
  out = tmp_path / "page"
  assert cli.main(["report", str(saved), str(folder), "--out", str(out)]) == 0
  page = (out / "report.html").read_text()
  assert page.count("sparse training compared") == 2
  table = tmp_path / "table.csv"
  assert cli.main(["report", str(saved), "--csv", str(table)]) == 0
  other = tmp_path / "other.csv"
  assert cli.main(["report", str(folder), "--csv", str(other)]) == 0
  assert table.read_text() == other.read_text()


def test_reproduce_is_equal_bit_for_bit_and_sees_the_last_bit(
  saved, capsys, monkeypatch
):
  compute, computed = reproduce_command._computed, []

  def once(*arguments):
    if not computed:
      computed.append(compute(*arguments))
    return computed[0]

  monkeypatch.setattr(reproduce_command, "_computed", once)
  # As a version wrote it that did not record this number yet.
  lines = [json.loads(line) for line in saved.read_text().splitlines()]
  for line in lines:
    line.get("record", {}).pop("training_bytes", None)
  saved.write_text("".join(json.dumps(line) + "\n" for line in lines))
  assert cli.main(["reproduce", str(saved), "static_sparse@0.8"]) == 0
  out = capsys.readouterr().out
  assert "same versions, data, settings and device" in out
  assert "equal bit for bit: 3 metrics of 2 seeds" in out
  assert "not recorded then: training_bytes" in out
  found = record_files.read(str(saved)).records["static_sparse@0.8"]
  ece = found.metrics["ece"][1]
  assert ece is not None
  changed = saved.read_text().replace(repr(ece), repr(ece * (1 + 2**-52)))
  changed = changed.replace(
    record_files.read(str(saved)).trainings["static_sparse@0.8"].sha256, "0"
  )
  saved.write_text(changed)
  assert cli.main(["reproduce", str(saved), "static_sparse@0.8"]) == 1
  out = capsys.readouterr().out
  assert "differs: metrics" in out
  assert "differs: the losses of single steps" in out


def test_reproduce_lists_cells_and_names_the_nearest(saved, capsys):
  assert cli.main(["reproduce", str(saved)]) == 0
  assert "small_dense@0.8" in capsys.readouterr().out
  assert cli.main(["reproduce", str(saved), "static_sparse@0.9"]) == 2
  assert "static_sparse@0.8" in capsys.readouterr().err


def test_reproduce_refuses_another_task(saved, capsys):
  assert cli.main(["reproduce", str(saved), "dense", "--task", "copy"]) == 2
  assert "the run's task is 'digits'" in capsys.readouterr().err


def test_reproduce_imports_no_module_on_the_word_of_a_file(saved, capsys):
  lines = saved.read_text().splitlines()
  info = json.loads(lines[0])
  info["run"]["settings"] |= {"task": "this:that", "imports": ["antigravity"]}
  saved.write_text("\n".join([json.dumps(info), *lines[1:]]))
  assert cli.main(["reproduce", str(saved), "dense"]) == 2
  assert "type --task this:that" in capsys.readouterr().err


@pytest.mark.parametrize(
  "text, words",
  [
    ("", "0 runs and 0 records"),
    ("[1]\n", "line 1: not an object with one key"),
    ('{"weights": 1}\n', "is none of"),
    ('{"run": {"settings": 1}}\n', "line 1"),
    ("{" * 100_000, "line 1: not JSON"),
    ('{"run": NaN}', "line 1: not JSON"),
    ('{"run": 1' + "0" * 400 + "}", "line 1: not JSON"),
    ('{"run": "\\ud800"}', "line 1: not JSON"),
    ("\x00", "line 1: not JSON"),
  ],
)
def test_a_file_of_something_else_is_refused(text, words, tmp_path, capsys):
  path = tmp_path / "bad.jsonl"
  path.write_text(text)
  assert cli.main(["records", str(path)]) == 1
  assert words in capsys.readouterr().err


def test_records_that_do_not_fit_their_run_are_refused(saved, tmp_path, capsys):
  first, *rest = saved.read_text().splitlines()
  info = json.loads(first)
  info["run"]["format"] = run_folder.FORMAT + 1
  saved.write_text("\n".join([json.dumps(info), *rest]))
  assert cli.main(["reproduce", str(saved), "dense"]) == 2
  assert "use a newer jaxpruner" in capsys.readouterr().err
  info["run"] |= {"format": run_folder.FORMAT, "cells": []}
  saved.write_text("\n".join([json.dumps(info), *rest]))
  assert cli.main(["reproduce", str(saved), "dense"]) == 2
  assert "is not among the cells of its run" in capsys.readouterr().err
  out = str(tmp_path / "out")
  assert cli.main(["report", str(saved), "--out", out]) == 1
  assert "lists no cell" in capsys.readouterr().err


def test_a_folder_without_a_finished_cell_is_refused(tmp_path, capsys):
  info = run_folder.RunInfo({"task": "digits"}, {}, format=run_folder.FORMAT)
  with run_folder.RunFolder(tmp_path / "run") as run:
    run.open_run(info)
  assert cli.main(["records", str(tmp_path / "run"), "--save", "x"]) == 1
  assert "no cell is finished" in capsys.readouterr().err
