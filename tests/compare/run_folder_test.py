"""Run folders: nothing finished is lost, whatever happens to the process."""

import errno
import json
import os
import pathlib
import subprocess
import sys

import compare_helpers as helpers
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxpruner.compare import files, fingerprint, run_folder
from jaxpruner.compare.files import RunFolderError
from jaxpruner.compare.records import SchemaError, result_from_json

records = st.lists(
  st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20)),
  max_size=5,
)


def values(path):
  return [line.value for line in files.read_lines(path)]


@pytest.fixture
def memory_disk(monkeypatch):
  """Do not wait for the disk: what a file holds does not depend on it."""
  monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.quick
@pytest.mark.usefixtures("memory_disk")
@hypothesis.given(records, st.data())
def test_a_torn_write_loses_only_the_line_it_tore(
  tmp_path_factory, given, data
):
  path = tmp_path_factory.mktemp("run") / "results.jsonl"
  for record in given:
    files.append_line(path, record)
  before = path.read_bytes() if given else b""
  files.append_line(path, {"last": 1})
  whole = path.read_bytes()
  cut = data.draw(st.integers(len(before), len(whole) - 1))
  path.write_bytes(whole[:cut])
  assert values(path) == given
  files.cut_torn_line(path)
  files.append_line(path, {"again": 2})
  assert values(path) == [*given, {"again": 2}]


@pytest.mark.usefixtures("memory_disk")
@hypothesis.given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_is_found_and_its_line_named(tmp_path_factory, at, bit):
  path = tmp_path_factory.mktemp("run") / "results.jsonl"
  for i in range(3):
    files.append_line(path, {"cell": f"c{i}", "value": i / 7})
  raw = bytearray(path.read_bytes())
  at %= len(raw) - 1  # a flipped last newline is a torn line
  raw[at] ^= 1 << bit
  path.write_bytes(raw)
  with pytest.raises(RunFolderError, match=r"line \d+: damaged"):
    files.read_lines(path)


@pytest.mark.parametrize(
  "content",
  ["NaN", "[1e999]", '"\\ud800"', str(10**300), "9" * 5000, "[" * 10**5, "{"],
)
def test_json_that_no_writer_of_ours_writes_is_refused(content):
  with pytest.raises(ValueError):
    files.parse(content.encode())
  assert files.parse(b'[18446744073709551616, 1.5e3, "\xc3\xa9"]') == [
    2**64, 1500.0, "é",
  ]  # fmt: skip


def test_values_that_json_lacks_become_null(tmp_path):
  path = tmp_path / "steps.jsonl"
  files.append_line(path, {"loss": [1.0, float("nan"), float("inf")]})
  assert values(path) == [{"loss": [1.0, None, None]}]


def test_a_second_process_is_refused_and_told_by_whom(tmp_path):
  with run_folder.RunFolder(tmp_path):
    code = (
      "from jaxpruner.compare import run_folder\n"
      f"run_folder.RunFolder({str(tmp_path)!r}).__enter__()"
    )
    found = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert found.returncode != 0
    assert f"process {os.getpid()}" in found.stderr


def test_a_dead_process_leaves_no_lock(tmp_path):
  code = (
    "import os, signal\n"
    "from jaxpruner.compare import run_folder\n"
    f"run_folder.RunFolder({str(tmp_path)!r}).__enter__()\n"
    "os.kill(os.getpid(), signal.SIGKILL)"
  )
  subprocess.run([sys.executable, "-c", code], check=False)
  assert (tmp_path / "lock").exists()
  with run_folder.RunFolder(tmp_path):
    pass


@pytest.mark.parametrize(
  "part, key",
  [
    ("settings", "seeds"),
    ("versions", "jax"),
    ("task", "steps"),
    ("data", "sha256"),
    ("imports", "mine"),
    ("jax", "jax_enable_x64"),
  ],
)
def test_another_run_in_the_folder_is_refused(tmp_path, part, key):
  with run_folder.RunFolder(tmp_path) as run:
    info = helpers.run_info(**{part: helpers.run_info().to_json()[part]})
    run.open_run(info)
    run.open_run(info)
    changed = getattr(info, part) | {key: "99"}
    with pytest.raises(RunFolderError, match=f"{part} {key}=.*'99' now"):
      run.open_run(helpers.run_info(**{part: changed}))


def test_all_that_differs_is_named_at_once(tmp_path):
  with run_folder.RunFolder(tmp_path) as run:
    run.open_run(helpers.run_info(jax={"a": "1"}, data={"sha256": "x"}))
    with pytest.raises(RunFolderError, match="data sha256.*jax a="):
      run.open_run(helpers.run_info(jax={"a": "2"}, data={"sha256": "y"}))


def test_a_folder_of_an_older_version_is_read_but_not_continued(tmp_path):
  old = {"settings": helpers.settings().to_json(), "versions": {"jax": "1"}}
  (tmp_path / "run.json").write_text(json.dumps(old))
  assert len(run_folder.listed_cells(run_folder.read_run(tmp_path), "")) == 4
  with run_folder.RunFolder(tmp_path) as run:
    with pytest.raises(RunFolderError, match="made by an older version"):
      run.open_run(helpers.run_info())
  two = {"format": 2, "cells": [["dense", 0.0, 0, "Baselines"]]}
  (tmp_path / "run.json").write_text(json.dumps(old | two))
  (entry,) = run_folder.listed_cells(run_folder.read_run(tmp_path), "")
  assert entry.cell.id == "dense" and entry.group.title == "Baselines"
  (tmp_path / "run.json").write_text(json.dumps(old | {"format": 99}))
  with pytest.raises(RunFolderError, match="use a newer jaxpruner"):
    run_folder.read_run(tmp_path)


def test_the_fingerprint_sees_data_sources_and_jax(tmp_path, monkeypatch):
  settings = helpers.settings(imports=("told_by_me",))
  monkeypatch.syspath_prepend(str(tmp_path))
  source = tmp_path / "told_by_me.py"
  source.write_text("x = 1")
  data = {"x": np.arange(3)}
  before = fingerprint.run_info(settings, data)
  assert not run_folder.differences(
    before, fingerprint.run_info(settings, data)
  )
  source.write_text("x = 2")
  (named,) = run_folder.differences(
    before, fingerprint.run_info(settings, data)
  )
  assert named.startswith("imports told_by_me=")
  source.write_text("x = 1")
  (named,) = run_folder.differences(
    before, fingerprint.run_info(settings, {"x": np.array([0, 1, 3])})
  )
  assert named.startswith("data sha256=")
  with jax.enable_x64(not jax.config.jax_enable_x64):
    (named,) = run_folder.differences(
      before, fingerprint.run_info(settings, data)
    )
  assert named.startswith("jax jax_enable_x64=")


def test_a_corrupt_run_json_is_a_clear_error(tmp_path):
  (tmp_path / "run.json").write_text("{")
  with pytest.raises(RunFolderError, match=r"run\.json: cannot be read"):
    run_folder.read_run(tmp_path)
  with pytest.raises(RunFolderError, match="not a run folder"):
    run_folder.read_run(tmp_path / "nothing")


def test_a_full_disk_is_explained_and_the_old_file_stays(tmp_path, monkeypatch):
  path = tmp_path / "run.json"
  files.write_atomic(path, b"old")

  def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(RunFolderError, match="free some space"):
    files.write_atomic(path, b"new")
  assert path.read_bytes() == b"old"
  assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
  with pytest.raises(RunFolderError, match="What was finished is safe"):
    files.append_line(tmp_path / "results.jsonl", {"a": 1})


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no device")
def test_a_truly_full_device_is_explained():
  path = pathlib.Path("/dev/full")
  with pytest.raises(RunFolderError, match="No space left"):
    with files.explained(path), open(path, "wb", buffering=0) as file:
      files.write_synced(file, b"line")


def test_a_folder_that_cannot_be_made_is_explained(tmp_path):
  (tmp_path / "file").write_text("")
  with (
    pytest.raises(RunFolderError, match="choose another --out"),
    run_folder.RunFolder(tmp_path / "file"),
  ):
    pass
  with (
    pytest.raises(RunFolderError),
    run_folder.RunFolder("/proc/nothing/here"),
  ):
    pass


def test_arrays_survive_and_damage_is_named(tmp_path):
  path = tmp_path / "w.npz"
  arrays = {"file": np.arange(3), "mask:a/b": np.ones((2, 2), np.uint8)}
  files.write_atomic(path, files.pack_arrays(arrays))
  found = files.unpack_arrays(path)
  assert set(found) == set(arrays)
  for name in arrays:
    np.testing.assert_array_equal(found[name], arrays[name])
  path.write_bytes(path.read_bytes()[:-30])
  with pytest.raises(RunFolderError, match=r"w\.npz: damaged"):
    files.unpack_arrays(path)


def test_repeated_chunks_count_once(tmp_path):
  with run_folder.RunFolder(tmp_path) as run:
    for start in (0, 10, 0, 10, 20):
      run.append(helpers.chunk("a", start))
  found = run_folder.read_steps(tmp_path)["a"]
  assert [chunk.start for chunk in found] == [0, 10, 20]


def test_what_is_dropped_is_said_with_file_and_line(tmp_path, capsys):
  path = tmp_path / "results.jsonl"
  for i in range(2):
    files.append_line(path, {"i": i})
  path.write_bytes(path.read_bytes()[:-1])
  assert values(path) == [{"i": 0}]
  assert f"{path}, line 2: dropped" in capsys.readouterr().err
  with run_folder.RunFolder(tmp_path):
    assert f"{path}, line 2: dropped" in capsys.readouterr().err
  assert values(path) == [{"i": 0}]
  assert capsys.readouterr().err == ""


OWN = ["lock", "results.jsonl", "run.json", "worker-0.log", "weights"]


@pytest.mark.parametrize("name", OWN)
def test_a_folder_whose_own_files_are_links_is_refused(tmp_path, name):
  target, out = tmp_path / "precious", tmp_path / "run"
  target.write_text("precious\ntail")
  out.mkdir()
  (out / name).symlink_to(target)
  with pytest.raises(RunFolderError, match=f"{name}: is a link"):
    with run_folder.RunFolder(out):
      pass
  assert target.read_text() == "precious\ntail"


def test_no_file_is_opened_through_a_link(tmp_path):
  target, link = tmp_path / "precious", tmp_path / "worker-0.log"
  target.write_text("precious\ntail")
  link.symlink_to(target)
  for mode in ("w", "ab", "a+", "r+b", "rb"):
    with pytest.raises(RunFolderError, match="link"):
      files.open_own(link, mode)
  with pytest.raises(RunFolderError, match="link"):
    files.append_line(link, {"a": 1})
  with pytest.raises(RunFolderError, match="link"):
    files.cut_torn_line(link)
  assert target.read_text() == "precious\ntail"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_pipes_and_devices_are_refused_not_replaced(tmp_path):
  pipe = tmp_path / "out.csv"
  os.mkfifo(pipe)
  for path, kind in ((pipe, "pipe"), (pathlib.Path(os.devnull), "device")):
    for write in (files.write_atomic, lambda p, _: files.append_line(p, {})):
      with pytest.raises(RunFolderError, match=f"is a {kind}"):
        write(path, b"x")
  with pytest.raises(RunFolderError, match="is a folder"):
    files.write_atomic(tmp_path, b"x")
  assert pipe.is_fifo()


def test_what_a_dead_writer_left_is_swept(tmp_path):
  for place in (tmp_path, tmp_path / "weights", tmp_path / "checkpoints"):
    place.mkdir(exist_ok=True)
    (place / ".run.json.123.tmp").write_text("half")
  with run_folder.RunFolder(tmp_path):
    assert not list(tmp_path.rglob("*.tmp"))


# Fields that a record of an older run may lack.
_OPTIONAL = (
  "collapsed", "problem", "batches", "notes", "step_seconds", "training_bytes",
)  # fmt: skip


@pytest.mark.parametrize(
  "made", [helpers.record("a@0.5", [1.0]), helpers.chunk("a")]
)
def test_records_survive_json_and_name_what_is_wrong(made):
  cls, good = type(made), json.loads(json.dumps(made.to_json()))
  assert cls.from_json(good) == made
  with pytest.raises(SchemaError, match=r"f, line 3: .*unknown fields \['x'\]"):
    cls.from_json(good | {"x": 1}, "f, line 3")
  for key in good:
    with pytest.raises(SchemaError, match=f"{key} is"):
      cls.from_json(good | {key: object()})
    if key in _OPTIONAL:
      continue
    less = {k: v for k, v in good.items() if k != key}
    with pytest.raises(SchemaError, match=rf"missing fields \['{key}'\]"):
      cls.from_json(less)
  for value in (None, [], 3, "x"):
    with pytest.raises(SchemaError, match="is an object"):
      result_from_json(value)


json_values = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3)
  ),
  max_leaves=5,
)


@hypothesis.given(
  st.sampled_from(sorted(helpers.run_info().to_json())), json_values
)
def test_a_run_json_of_wrong_types_never_gives_a_traceback(
  tmp_path_factory, key, value
):
  from jaxpruner.compare import table

  path = tmp_path_factory.mktemp("run")
  content = helpers.run_info().to_json() | {key: value}
  (path / "run.json").write_text(json.dumps(content))
  try:
    table.rows(str(path))
  except RunFolderError as error:
    assert "run.json" in str(error)
