"""Run folders: nothing finished is lost, whatever happens to the process."""

import errno
import json
import os
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxpruner.compare import folder

records = st.lists(
  st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20)),
  max_size=5,
)


@pytest.mark.quick
@hypothesis.given(records, st.data())
def test_a_torn_write_loses_only_the_line_it_tore(
  tmp_path_factory, given, data
):
  path = tmp_path_factory.mktemp("run") / "results.jsonl"
  for record in given:
    folder.append_line(path, record)
  before = path.read_bytes() if given else b""
  folder.append_line(path, {"last": 1})
  whole = path.read_bytes()
  cut = data.draw(st.integers(len(before), len(whole) - 1))
  path.write_bytes(whole[:cut])
  assert folder.read_lines(path) == given
  folder.cut_torn_line(path)
  folder.append_line(path, {"again": 2})
  assert folder.read_lines(path) == [*given, {"again": 2}]


@hypothesis.given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_is_found_and_its_line_named(tmp_path_factory, at, bit):
  path = tmp_path_factory.mktemp("run") / "results.jsonl"
  for i in range(3):
    folder.append_line(path, {"cell": f"c{i}", "value": i / 7})
  raw = bytearray(path.read_bytes())
  at %= len(raw) - 1  # a flipped last newline is a torn line
  raw[at] ^= 1 << bit
  path.write_bytes(raw)
  with pytest.raises(folder.FolderError, match=r"line \d+: damaged"):
    folder.read_lines(path)


def test_values_that_json_lacks_become_null(tmp_path):
  path = tmp_path / "steps.jsonl"
  folder.append_line(path, {"loss": [1.0, float("nan"), float("inf")]})
  assert folder.read_lines(path) == [{"loss": [1.0, None, None]}]


def test_a_second_process_is_refused_and_told_by_whom(tmp_path):
  with folder.RunFolder(tmp_path):
    code = (
      "from jaxpruner.compare import folder\n"
      f"folder.RunFolder({str(tmp_path)!r}).__enter__()"
    )
    found = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert found.returncode != 0
    assert f"process {os.getpid()}" in found.stderr


def test_a_dead_process_leaves_no_lock(tmp_path):
  code = (
    "import os, signal\n"
    "from jaxpruner.compare import folder\n"
    f"folder.RunFolder({str(tmp_path)!r}).__enter__()\n"
    "os.kill(os.getpid(), signal.SIGKILL)"
  )
  subprocess.run([sys.executable, "-c", code], check=False)
  assert (tmp_path / "lock").exists()
  with folder.RunFolder(tmp_path):
    pass


FACTS = {"settings": {"seeds": 3}, "versions": {"jax": "1"}}


@pytest.mark.parametrize("part", ["settings", "versions"])
def test_another_run_in_the_folder_is_refused(tmp_path, part):
  with folder.RunFolder(tmp_path) as run:
    run.open_run(FACTS)
    run.open_run(FACTS)
    key = next(iter(FACTS[part]))
    with pytest.raises(folder.FolderError, match=f"{part} {key}"):
      run.open_run(FACTS | {part: {key: 99}})


def test_a_corrupt_run_json_is_a_clear_error(tmp_path):
  (tmp_path / "run.json").write_text("{")
  with pytest.raises(folder.FolderError, match=r"run\.json: cannot be read"):
    folder.read_run(tmp_path)
  with pytest.raises(folder.FolderError, match="not a run folder"):
    folder.read_run(tmp_path / "nothing")


def test_a_full_disk_is_explained_and_the_old_file_stays(tmp_path, monkeypatch):
  path = tmp_path / "run.json"
  folder.write_atomic(path, b"old")

  def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(folder.FolderError, match="free some space"):
    folder.write_atomic(path, b"new")
  assert path.read_bytes() == b"old"
  assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
  with pytest.raises(folder.FolderError, match="What was finished is safe"):
    folder.append_line(tmp_path / "results.jsonl", {"a": 1})


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no device")
def test_a_truly_full_device_is_explained():
  with pytest.raises(folder.FolderError, match="No space left"):
    folder.append_line(pathlib.Path("/dev/full"), {"a": 1})


def test_a_folder_that_cannot_be_made_is_explained(tmp_path):
  (tmp_path / "file").write_text("")
  with (
    pytest.raises(folder.FolderError, match="choose another --out"),
    folder.RunFolder(tmp_path / "file"),
  ):
    pass
  with (
    pytest.raises(folder.FolderError),
    folder.RunFolder("/proc/nothing/here"),
  ):
    pass


def test_arrays_survive_and_damage_is_named(tmp_path):
  path = tmp_path / "w.npz"
  arrays = {"file": np.arange(3), "mask:a/b": np.ones((2, 2), np.uint8)}
  folder.write_atomic(path, folder.pack_arrays(arrays))
  found = folder.unpack_arrays(path)
  assert set(found) == set(arrays)
  for name in arrays:
    np.testing.assert_array_equal(found[name], arrays[name])
  path.write_bytes(path.read_bytes()[:-30])
  with pytest.raises(folder.FolderError, match=r"w\.npz: damaged"):
    folder.unpack_arrays(path)


def test_repeated_stretches_count_once(tmp_path):
  path = tmp_path / "steps.jsonl"
  for start in (0, 10, 0, 10, 20):
    folder.append_line(path, {"cell": "a", "start": start})
  found = folder.read_steps(tmp_path)["a"]
  assert [s["start"] for s in found] == [0, 10, 20]
  assert json.dumps(found)
