"""Files that somebody named: not waited for, not guessed, not obeyed."""

import dataclasses
import json
import os
import signal
import socket
import types

import compare_helpers
import hub_models
import numpy as np
import pytest

from jaxpruner import cli, datasets
from jaxpruner._tools import regular
from jaxpruner._tools.atomic import PathError
from jaxpruner.compare import record_files, records, run_folder, settings
from jaxpruner.compare.files import RunFolderError
from jaxpruner.post_training import generate_command, generation
from jaxpruner.post_training.models import hub


@pytest.fixture
def pipe(tmp_path):
  """A pipe that nobody writes to; waiting for it ends the test."""
  os.mkfifo(tmp_path / "pipe")

  def waited(*_):
    raise AssertionError("a pipe was waited for")

  before = signal.signal(signal.SIGALRM, waited)
  signal.alarm(30)
  yield tmp_path / "pipe"
  signal.alarm(0)
  signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path):
  hub_models.write_folder(tmp_path / "hub", "llama3", shards=1)
  return tmp_path / "hub"


def command(*args):
  return cli.main([str(a) for a in args])


def test_only_regular_files_are_opened(tmp_path, pipe, monkeypatch):
  (tmp_path / "x").write_bytes(b"abc")
  (tmp_path / "link").symlink_to("x")
  for name in ("x", "link"):
    assert regular.read_bytes(tmp_path / name) == b"abc"
  with socket.socket(socket.AF_UNIX) as server:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    server.bind("socket")
    for path in (pipe, tmp_path, "/dev/zero", "socket"):
      with pytest.raises((PathError, IsADirectoryError)):
        regular.read_bytes(path)
  with pytest.raises(PathError, match="is empty"):
    regular.read_bytes("")
  with pytest.raises(FileNotFoundError):
    regular.read_bytes(tmp_path / "none")


def test_a_pipe_in_the_place_of_a_file_is_refused(
  pipe, folder, monkeypatch, capsys
):
  with pytest.raises(ValueError, match="no regular file"):
    settings.read_config(str(pipe))
  with pytest.raises(datasets.DataError, match="no regular file"):
    datasets.read_idx(pipe)
  calibrated = ["--calibration", pipe, "-o", pipe.parent / "new"]
  monkeypatch.setattr(
    "jaxpruner.post_training.reduce_command.HubTokenizer",
    lambda _: types.SimpleNamespace(encode=list),
  )
  assert command("reduce", folder, "--drop", 1, *calibrated) == 1
  assert "no regular file" in capsys.readouterr().err
  out = pipe.parent / "x.gguf"
  assert command("gguf", folder, "--like", pipe, "-o", out) == 1
  assert "no regular file" in capsys.readouterr().err
  (folder / "config.json").unlink()
  os.mkfifo(folder / "config.json")
  with pytest.raises((OSError, ValueError), match="config.json"):
    hub.read_config(folder)


def test_an_empty_path_is_not_absent(folder, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(
    "jaxpruner.post_training.reduce_command.HubTokenizer",
    lambda _: types.SimpleNamespace(encode=list),
  )
  for words in (
    ["reduce", folder, "--drop", 1, "--calibration", "", "-o", tmp_path / "n"],
    ["gguf", folder, "--like", "", "-o", tmp_path / "x.gguf"],
    # Nor is it the current folder.
    ["reduce", "", "--drop", 1, "-o", tmp_path / "n"],
    ["generate", "", "--prompt", "a"],
    ["gguf", "", "--like", "x", "-o", tmp_path / "x.gguf"],
  ):
    assert command(*words) == 1
    assert "is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
  "words, reason",
  [
    (["--samples", "0"], "--samples 0 must be at least 1"),
    (["--window", "0"], "--window 0 must be at least 1"),
    (["--window", "-3"], "--window -3 must be at least 1"),
    (["-o", "hub"], "exists; name a new folder"),
    (["-o", "no/such/new"], "does not exist; make it first"),
  ],
)
def test_reduce_checks_its_options_first(
  folder, monkeypatch, capsys, words, reason
):
  monkeypatch.chdir(folder.parent)

  def loaded(_):
    raise AssertionError("the model was loaded first")

  monkeypatch.setattr(
    "jaxpruner.post_training.reduce_command.models.load_folder", loaded
  )
  args = ["reduce", "hub", "--drop", "1", "-o", "new", *words]
  assert command(*args) == 1
  assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
  "words, reason",
  [
    (["--temperature", "nan"], "temperature=nan must be finite"),
    (["--temperature", "inf"], "temperature=inf must be finite"),
    (["--temperature", "-1"], "temperature=-1.0 must be finite"),
    (["--tokens", "0"], "tokens=0 must be at least 1"),
    (["--top-k", "-1"], "top_k=-1"),
    (["--seed", "-1"], "seed=-1"),
  ],
)
def test_generate_checks_its_options_first(tmp_path, capsys, words, reason):
  assert command("generate", tmp_path / "none", "--prompt", "a", *words) == 1
  assert reason in capsys.readouterr().err


def test_the_smallest_temperature_draws_the_likeliest():
  logits = np.array([1.0, 3.0, 2.0, 3.0 - 1e-6], np.float32)
  rng = np.random.default_rng(0)
  assert generation._draw(logits, rng, 5e-324, 0) == 1
  drawn = [generation._draw(logits, rng, 1.0, 2) for _ in range(50)]
  assert set(drawn) == {1, 3}


def test_generated_text_moves_no_cursor(capsys):
  tokenizer = types.SimpleNamespace(
    decode=lambda ids: "".join("a\x1b[2J\u3000\n\x9b"[i] for i in ids)
  )
  drawn = [generation.Token(i, 0.0) for i in range(1, 8)]
  generate_command._stream(tokenizer, [0], drawn)
  out = capsys.readouterr().out
  assert out == "a\N{SYMBOL FOR SUBSTITUTE}[2J\u3000\n" + (
    "\N{SYMBOL FOR SUBSTITUTE}\n"
  )


@pytest.fixture
def lines():
  """The lines of a file of records of one cell."""
  info = run_folder.RunInfo(
    {"task": "digits"}, {"jax": "1\x1b[2J"}, command="\x1b[2J", commit="\x9b",
    format=run_folder.FORMAT,
  )  # fmt: skip
  cell = compare_helpers.record("rigl@0.8", [1.0])
  time = records.Latency("rigl@0.8", 1.5, "dense")
  return [
    {"run": info.to_json()},
    {"record": cell.to_json()},
    {"latency": time.to_json()},
  ]


def written(path, lines):
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return path


@pytest.mark.parametrize("kind", ["record", "latency"])
def test_a_cell_that_is_recorded_twice_is_refused(tmp_path, lines, kind):
  twice = next(line for line in lines if kind in line)
  path = written(tmp_path / "x", [*lines, twice])
  with pytest.raises(RunFolderError, match=f"2 lines are the {kind} of 'rigl"):
    record_files.read(str(path))


@pytest.mark.parametrize("name", ["records", "reproduce"])
def test_records_of_others_move_no_cursor(tmp_path, lines, capsys, name):
  assert command(name, written(tmp_path / "x", lines)) == 0
  out = capsys.readouterr().out
  assert "rigl@0.8" in out
  assert all(c.isprintable() or c == "\n" for c in out)


@pytest.mark.parametrize("name", ["results.jsonl", "weights/dense.npz"])
def test_results_without_their_run_are_not_taken_over(tmp_path, lines, name):
  out = tmp_path / "run"
  found = record_files.read(str(written(tmp_path / "x", lines)))
  record_files.restore(found, str(out))
  (out / "weights").mkdir()
  (out / "weights" / "dense.npz").write_bytes(b"x")
  (out / "run.json").unlink()
  for other in ("results.jsonl", "latency.jsonl", "weights/dense.npz"):
    if other != name:
      (out / other).unlink()
  with pytest.raises(RunFolderError, match="whose run.json is missing"):
    record_files.restore(found, str(out))
  (out / name).unlink()
  record_files.restore(found, str(out))


@pytest.fixture
def run(tmp_path, lines, monkeypatch):
  """A restored run folder; the current folder is another."""
  out = tmp_path / "run"
  found = record_files.read(str(written(tmp_path / "x", lines)))
  info = dataclasses.replace(
    found.info,
    cells=[["rigl", 0.8, "", "", "", "", 0, "a group"]],
    metric="accuracy",
  )
  record_files.restore(dataclasses.replace(found, info=info), str(out))
  return out


@pytest.mark.parametrize("name", ["run.json", "results.jsonl", "lock"])
@pytest.mark.parametrize("words", [["records", "--save"], ["report", "--json"]])
def test_an_export_replaces_no_file_of_a_run(run, capsys, name, words):
  before = (run / name).read_bytes()
  assert command(words[0], run, words[1], run / name) == 1
  assert f"{name}: belongs to the run" in capsys.readouterr().err
  assert (run / name).read_bytes() == before
  assert command(words[0], run, words[1], run / "mine") == 0


@pytest.mark.parametrize("name", ["records", "reproduce", "fit", "report"])
def test_no_path_of_a_run_is_not_the_current_folder(
  run, monkeypatch, capsys, name
):
  monkeypatch.chdir(run)
  assert command(name, "") in (1, 2)
  assert "the path of a run folder is empty" in capsys.readouterr().err


def test_no_data_of_a_published_cell_are_not_its_own(run, capsys):
  assert command("reproduce", run, "rigl@0.8", "--data", "") == 2
  assert "--data '': is empty" in capsys.readouterr().err


def test_no_module_is_told_in_words(capsys):
  assert command("compare", "--task", "digits", "--import", "") == 1
  assert "--import '': is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
  "words",
  [
    ["fit", "--algorithm", "rigl"],
    ["report", "--json", "-"],
    ["reproduce", "rigl@0.8+x"],
    ["records", "--restore", "run"],
  ],
)
def test_errors_about_a_file_of_others_move_no_cursor(
  tmp_path, lines, monkeypatch, capsys, words
):
  monkeypatch.chdir(tmp_path)
  lines[0]["run"]["settings"] = {"task": "m:\x1b[2J", "imports": ["\x9b"]}
  lines[0]["run"]["metric"] = "\x1b[2J"
  lines[0]["run"]["higher_is_better"] = False
  lines[0]["run"]["cells"] = [["rigl", 0.8, "", "", "\x1b[2J", "", 0, "x"]]
  lines[1]["record"]["cell"] = "rigl@0.8+\x1b[2J"
  name, *rest = words
  command(name, written(tmp_path / "x", lines), *rest)
  out, err = capsys.readouterr()
  assert all(c.isprintable() or c == "\n" for c in out + err)
