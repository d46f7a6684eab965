"""Folders, models and records: each I/O call of their writers fails in turn.

`faults_test.py` has the files that commands write; here are the writers of
whole folders, which go on from the parts that are there, and those of files
that are made from a model or a run.
"""

import errno
import functools
import hashlib
import shutil

import compare_helpers
import flax.serialization
import hub_models
import jax
import numpy as np
import pytest
from faults import Faults, count_calls, places
from gguf_files import dense_file

from jaxpruner import cli, kept
from jaxpruner.compare import files as compare_files
from jaxpruner.compare import record_files, run_folder
from jaxpruner.post_training import contrib, models

ERROR = errno.ENOSPC
RNG = np.random.default_rng(0)


def content(folder):
  """Return name -> hash of all files of a folder, hidden ones too."""
  return {
    str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
    for p in sorted(folder.rglob("*"))
    if p.is_file()
  }


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
  folder = tmp_path_factory.mktemp("hub") / "old"
  hub_models.write_folder(
    folder, "llama2", shards=2, num_hidden_layers=2, hidden_size=8,
    intermediate_size=8, vocab_size=8,
  )  # fmt: skip
  return folder


def pruned(hub):
  def write(out):
    words = ["--algorithm", "magnitude", "--sparsity", "0.5", "--overwrite"]
    if cli.main(["prune", str(hub), *words, "-o", str(out)]):
      raise OSError("the command failed")

  return write


def reduced(hub):
  tokens = RNG.integers(0, 8, (1, 2, 9))
  small = contrib.drop_blocks(models.load_folder(hub), tokens, drop=1)
  return lambda out: models.save_folder(small, out, overwrite=True)


FOLDERS = {"pruned": pruned, "reduced": reduced}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_failing_call_leaves_the_old_folder_or_the_new(
  hub, tmp_path, capsys, name
):
  write = FOLDERS[name](hub)
  out, parts = tmp_path / "out", tmp_path / "out.parts"
  write(out)
  new = content(out)
  all_places = places(count_calls(lambda: write(out)))
  # Every third while files are written; every one where folders are swapped.
  for at in all_places[:-8:3] + all_places[-8:]:
    shutil.rmtree(out)
    out.mkdir()
    (out / "mine.safetensors").write_text("old")
    old = content(out)
    with Faults(at, ERROR).installed(), pytest.raises(OSError):
      write(out)
    found = content(out)
    found.pop("job.json", None)
    assert found in (old, new)
    assert not list(tmp_path.rglob(".*"))
    if (parts / "mine.safetensors").exists():
      # Only the old folder was not removed: that is not done by guessing.
      assert found == new
      with pytest.raises((ValueError, OSError)):
        write(out)
      shutil.rmtree(parts)
    write(out)
    assert content(out) == new
    assert not parts.exists()
  capsys.readouterr()


def gguf(hub, folder):
  model = models.load_folder(hub)
  like = dense_file(folder / "like", model, "llama")
  return lambda out: models.save_gguf(out, model, like)


def kept_weights(_hub, _folder):
  w = np.eye(8, dtype=np.float32)
  tree = {"w": kept.from_dense(w), "b": np.ones(3, np.float32)}
  return lambda out: kept.save(out, tree)


def checkpoint(suffix):
  def make(_hub, folder):
    source = folder / f"source{suffix}"
    tree = {"w": RNG.normal(size=(8, 8)).astype(np.float32)}
    if suffix == ".npz":
      np.savez(source, **tree)
    else:
      source.write_bytes(flax.serialization.to_bytes(tree))
    words = ["prune", str(source), "--sparsity", "0.5", "-o"]

    def write(out):
      if cli.main([*words, str(out)]):
        raise OSError("the command failed")

    return write

  return make


def run_records(_hub, folder):
  found = record_files.Records(INFO, {CELL.cell: CELL}, {}, {})
  return lambda out: record_files.save(found, str(out))


INFO = run_folder.RunInfo({"task": "digits"}, {"jax": "1"}, format=3)
CELL = compare_helpers.record("rigl@0.8", [1.0])
FILES = {
  "gguf": gguf,
  "kept": kept_weights,
  "npz": checkpoint(".npz"),
  "msgpack": checkpoint(".msgpack"),
  "records": run_records,
}


@pytest.mark.parametrize("name", FILES)
def test_every_failing_call_leaves_the_old_file_or_the_new(
  hub, tmp_path, capsys, name
):
  write = FILES[name](hub, tmp_path)
  (tmp_path / "new").mkdir()
  out = tmp_path / "new" / "out"
  write(out)
  new = out.read_bytes()
  calls = count_calls(lambda: write(out))
  assert {"open", "write", "fsync", "close", "replace"} <= set(calls)
  for at in places(calls):
    if name == "npz" and calls[at] == "seek":
      continue  # `zipfile` then writes without seeking
    out.write_bytes(b"old")
    with Faults(at, ERROR).installed() as faults:
      with pytest.raises((OSError, compare_files.RunFolderError)):
        write(out)
    renamed = "replace" in faults.calls[:at]
    assert out.read_bytes() == (new if renamed else b"old"), calls[at]
    assert list(out.parent.iterdir()) == [out]
  capsys.readouterr()


def test_every_failing_call_leaves_blocks_that_continue(tmp_path):
  params = {"w": RNG.normal(size=(8, 8)).astype(np.float32)}
  data = [RNG.normal(size=(4, 8)).astype(np.float32)]
  prune = functools.partial(
    contrib.prune_blocks, lambda p, x: x @ p["w"], params, data,
    sparsity=0.5, epochs=1,
  )  # fmt: skip
  whole = prune()[:2]
  for at in places(count_calls(lambda: prune(folder=tmp_path / "count"))):
    folder = tmp_path / f"{at}"
    with Faults(at, ERROR).installed(), pytest.raises(OSError):
      prune(folder=folder)
    assert not list(folder.glob(".*"))
    jax.tree.map(np.testing.assert_array_equal, prune(folder=folder)[:2], whole)
