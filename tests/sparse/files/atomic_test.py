"""A failed write leaves the old file, and nothing beside it."""

import errno
import os

import numpy as np
import pytest

from jaxpruner.sparse import _layouts, files


class DiskFull:
  """A file that accepts some bytes and then has no room."""

  def __init__(self, file, room):
    self._file, self._room = file, room

  def write(self, data):
    self._room -= len(data)
    if self._room < 0:
      raise OSError(errno.ENOSPC, "No space left on device")
    return self._file.write(data)

  def __getattr__(self, name):
    return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 100, 4000, 4500])
@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, room, layout):
  path = tmp_path / "x.safetensors"
  files.save(path, {"w": np.ones(3)})
  before = path.read_bytes()
  real = open
  monkeypatch.setattr(
    "jaxpruner._tools.atomic.open",
    lambda *a: DiskFull(real(*a), room),
    raising=False,
  )
  with pytest.raises(OSError, match="No space"):
    files.save(path, {"v": np.full(1000, 2.0)}, layout=layout)
  monkeypatch.undo()
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_before_the_move_leaves_the_old_file(
  tmp_path, monkeypatch, call
):
  path = tmp_path / "x.safetensors"
  files.save(path, {"w": np.ones(3)})
  before = path.read_bytes()

  def crash(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, call, crash)
  with pytest.raises(KeyboardInterrupt):
    files.save(path, {"w": np.zeros(3)})
  monkeypatch.undo()
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


def test_a_file_can_be_rewritten_from_itself(tmp_path):
  path = tmp_path / "x.safetensors"
  files.save(path, {"w": np.eye(64), "b": np.ones(2)})
  with _layouts.SparseFile(path) as file:
    _layouts.write(path, file.tensors.values(), file.content, layout="dense")
  assert files.load(path)[0]["w"].tolist() == np.eye(64).tolist()
