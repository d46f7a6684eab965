"""A folder grows from parts of its own job, and takes nothing else over."""

import os

import hub_models
import jax
import pytest

from jaxpruner import cli
from jaxpruner.sparse import _staging

FACTS = {"settings": {"sparsity": 0.5}}


@pytest.mark.parametrize("name", ["model.safetensors", "thesis.tex", ".hidden"])
def test_files_of_no_job_are_neither_taken_over_nor_removed(tmp_path, name):
  parts = tmp_path / "new.parts"
  parts.mkdir()
  (parts / name).write_text("mine")
  with pytest.raises(ValueError, match=f"holds '{name}' of no job.*delete"):
    with _staging.replacing(tmp_path / "new", FACTS):
      pass
  assert [p.name for p in parts.iterdir()] == [name]
  assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("link", ["new.parts", "new.parts/job.json"])
def test_parts_are_not_reached_through_a_link(tmp_path, link):
  target = tmp_path / "target"
  if link == "new.parts":
    target.mkdir()
    (target / "thesis.tex").write_text("mine")
  else:
    (tmp_path / "new.parts").mkdir()
    target.write_text('{"settings": {"sparsity": 0.5}}')
  (tmp_path / link).symlink_to(target)
  with pytest.raises((ValueError, OSError), match="link"):
    with _staging.replacing(tmp_path / "new", FACTS):
      pass
  assert (tmp_path / link).is_symlink() and not (tmp_path / "new").exists()
  if link == "new.parts":
    assert os.listdir(target) == ["thesis.tex"]


def test_what_a_killed_writer_left_before_its_job_is_no_obstacle(tmp_path):
  parts = tmp_path / "new.parts"
  parts.mkdir()
  name = f".job.json.{_staging.atomic._host()}-00000000.jaxpruner.tmp"
  (parts / name).write_text("half")
  with _staging.replacing(tmp_path / "new", FACTS) as folder:
    (folder / "x").write_text("whole")
  assert os.listdir(tmp_path) == ["new"]
  assert os.listdir(tmp_path / "new") == ["x"]


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
  """A hub folder whose pruning died after the first of two shards."""
  hub_models.write_folder(tmp_path / "old", "llama3", shards=2)
  true, done = _staging.atomic.replacing, []

  def dies(path):
    if str(path).endswith(".safetensors"):
      done.append(path)
      if len(done) == 2:
        raise KeyboardInterrupt
    return true(path)

  with monkeypatch.context() as patch:
    patch.setattr(_staging.atomic, "replacing", dies)
    with pytest.raises(KeyboardInterrupt):
      prune(tmp_path)
  assert len(list((tmp_path / "new.parts").glob("*.safetensors"))) == 1
  return tmp_path


def prune(folder):
  words = ["--algorithm", "random", "--sparsity", "0.5"]
  old, new = str(folder / "old"), str(folder / "new")
  return cli.main(["prune", old, *words, "-o", new])


def test_a_shard_that_was_replaced_keeping_size_and_time_is_another_job(
  interrupted, capsys
):
  # Archives give all their files one date.
  path = min((interrupted / "old").glob("*.safetensors"))
  about, content = path.stat(), bytearray(path.read_bytes())
  content[-1] ^= 1
  path.write_bytes(content)
  os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
  assert prune(interrupted) == 1
  assert f"input.shards.{path.name} is" in capsys.readouterr().err


def test_another_random_generator_is_another_job(interrupted, capsys):
  with jax.default_prng_impl("rbg"):
    assert prune(interrupted) == 1
  assert "jax_default_prng_impl is 'threefry2x32'" in capsys.readouterr().err
  assert prune(interrupted) == 0
