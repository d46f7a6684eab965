"""Writing text: the cache changes nothing, drawing follows its seed."""

import functools
import itertools
import pathlib
import sys
import types

import hub_models
import jax
import numpy as np
import pytest

from jaxpruner import cli, post_training
from jaxpruner.post_training import (
  contrib,
  generation,
  models,
  oneshot_command,
)
from jaxpruner.post_training.contrib import reconstruction
from jaxpruner.post_training.models import decoder, hub

PROMPT = [1, 5, 30, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("hub") / "model"
  hub_models.write_folder(path, "smollm2")
  return path


@pytest.fixture(scope="module")
def model(folder):
  return models.load_folder(folder)


@pytest.fixture(scope="module")
def writer(model):
  return post_training.Writer(model, 16)


def ids(drawn):
  return [token.id for token in drawn]


def test_greedy_text_is_the_argmax_of_the_whole(model, writer):
  found = ids(writer.write(PROMPT, 6))
  whole = jax.jit(functools.partial(decoder.apply, model.config))
  logits = np.asarray(whole(model.params, np.array([PROMPT + found])))
  assert found == logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist()


def test_packed_weights_write_the_same_text(folder, tmp_path, writer):
  pruned, packed = tmp_path / "pruned", tmp_path / "packed"
  for args in (
    ["prune", folder, "--sparsity", "0.8", "-o", pruned],
    ["pack", pruned, "-o", packed],
  ):
    assert cli.main([str(a) for a in args]) == 0
  dense = post_training.Writer(models.load_folder(pruned), 16)
  fast = post_training.Writer(models.load_folder(packed), 16, accelerate=True)
  assert fast.report is not None and fast.report.layers
  assert ids(dense.write(PROMPT, 6)) == ids(fast.write(PROMPT, 6))


def test_drawing_follows_its_seed_and_temperature(writer):
  draw = lambda seed, **more: ids(
    writer.write(PROMPT, 8, temperature=1.5, seed=seed, **more)
  )
  assert draw(1) == draw(1) and draw(1) != draw(2)
  assert draw(1, top_k=1) == ids(writer.write(PROMPT, 8))


def test_frequencies_are_those_of_the_softmax():
  rng = np.random.default_rng(0)
  logits = np.array([0.0, 1.0, 2.0, -9.0], np.float32)
  drawn = [generation._draw(logits, rng, 2.0, 3) for _ in range(4000)]
  found = np.bincount(drawn, minlength=4) / 4000
  expected = np.exp([0.0, 0.5, 1.0])
  np.testing.assert_allclose(
    found[:3], expected / expected.sum(), atol=4 * (0.25 / 4000) ** 0.5
  )
  assert found[3] == 0


def test_a_stop_token_ends_the_text(writer):
  all_ = ids(writer.write(PROMPT, 8))
  assert ids(writer.write(PROMPT, 8, stop=[all_[3]]))[-1] == all_[3]
  assert len(ids(writer.write(PROMPT, 8, stop=[all_[3]]))) <= 4


@pytest.mark.parametrize(
  "prompt, options, message",
  [
    ([], {}, "prompt"),
    ([99], {}, "from 0 to 31"),
    ([1], {"temperature": -1.0}, "negative"),
    ([1], {"tokens": 0}, "at least 1"),
    ([1], {"tokens": 16}, "larger length"),
  ],
)
def test_wrong_arguments_are_told_at_once(writer, prompt, options, message):
  with pytest.raises(ValueError, match=message):
    writer.write(prompt, **({"tokens": 4} | options))


class FakeTokenizer:
  """Words are numbers; stands in for the `tokenizers` package."""

  @classmethod
  def from_file(cls, path):
    if "damaged" in pathlib.Path(path).read_text():
      raise Exception("no tokenizer")
    return cls()

  def no_truncation(self):
    pass

  def no_padding(self):
    pass

  def encode(self, text):
    return types.SimpleNamespace(ids=[int(word) for word in text.split()])

  def decode(self, ids):
    return " ".join(map(str, ids))


def test_the_command_streams_text_and_tells_the_speed(
  folder, tmp_path, monkeypatch, capsys, writer
):
  args = ["generate", str(folder), "--prompt", "1 5 30 7", "--tokens", "6"]
  assert cli.main(args) == 1
  assert "no tokenizer.json" in capsys.readouterr().err
  path = folder / "tokenizer.json"
  path.write_text("{}")
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  assert cli.main(args) == 1
  assert "jaxpruner[hub]" in capsys.readouterr().err
  fake = types.SimpleNamespace(Tokenizer=FakeTokenizer)
  monkeypatch.setitem(sys.modules, "tokenizers", fake)
  assert cli.main(args) == 0
  out, err = capsys.readouterr()
  found = ids(writer.write(PROMPT, 6, stop=[2]))
  assert out.strip() == " ".join(map(str, PROMPT + found))
  assert "tokens/s" in err
  text = tmp_path / "text"
  text.write_text("1 5 9 " * 9)
  assert cli.main([*args, "--skip-inputs", "0.5"]) == 1
  assert "need each other" in capsys.readouterr().err
  args += ["--skip-inputs", "0.5", "--calibration", str(text)]
  assert cli.main(args) == 0
  assert capsys.readouterr().out.startswith("1 5 30 7 ")
  path.write_text("damaged")
  assert cli.main(args) == 1
  assert "no tokenizer" in capsys.readouterr().err


def test_encoders_do_not_write(tmp_path):
  hub_models.write_folder(tmp_path / "m", "bert")
  with pytest.raises(ValueError, match="no decoder"):
    post_training.Writer(models.load_folder(tmp_path / "m"))


def test_texts_longer_than_the_positions_are_refused(tmp_path):
  hub_models.write_folder(tmp_path / "m", "opt")
  with pytest.raises(ValueError, match="64 positions"):
    post_training.Writer(models.load_folder(tmp_path / "m"), 65)


@pytest.fixture
def oneshot(tmp_path, monkeypatch):
  """The arguments of `jaxpruner oneshot` for a tiny folder and a text."""
  folder, text = tmp_path / "old", tmp_path / "text"
  hub_models.write_folder(folder, "llama2", num_hidden_layers=1)
  fake = types.SimpleNamespace(Tokenizer=FakeTokenizer)
  monkeypatch.setitem(sys.modules, "tokenizers", fake)
  (folder / "tokenizer.json").write_text("{}")
  rng = np.random.default_rng(0)
  text.write_text(" ".join(map(str, rng.integers(0, 32, 4_000))))
  return [
    "oneshot", "--model", str(folder), "--method", "magnitude", "--sparsity",
    "0.5", "--calibration", str(text), "--samples", "4", "--judge", "4",
    "--out", str(tmp_path / "new"),
  ]  # fmt: skip


@pytest.fixture
def untold(monkeypatch):
  """Leave out the table of `oneshot`, which compiles the model five times."""
  monkeypatch.setattr(oneshot_command, "_table", lambda *_: "")


@pytest.mark.usefixtures("untold")
def test_oneshot_goes_on_after_the_last_finished_block(
  tmp_path, monkeypatch, capsys, oneshot
):
  def broken(*_, **__):
    raise OSError("no space left")

  with monkeypatch.context() as patch:
    patch.setattr(oneshot_command, "_write_folder", broken)
    assert cli.main([*oneshot, "--blocks", "1"]) == 1
  assert "no space" in capsys.readouterr().err
  with monkeypatch.context() as patch:  # nothing is solved or trained again
    patch.setattr(reconstruction, "_solve", broken)
    assert cli.main([*oneshot, "--blocks", "1"]) == 0
  assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old", "text"]


@pytest.mark.usefixtures("untold")
def test_oneshot_trains_on_text_after_that_it_calibrated_on(
  monkeypatch, oneshot
):
  seen = []

  def distill(apply_fn, params, masks, teacher, batches, **_):
    seen.extend(next(batches) for _ in range(40))
    return params

  monkeypatch.setattr(contrib, "distill", distill)
  assert cli.main([*oneshot, "--distill", "1"]) == 0
  text = pathlib.Path(oneshot[oneshot.index("--calibration") + 1]).read_text()
  half = text[: len(text) // 2].split()
  window = seen[0].shape[1]
  rows = [half[i : i + window] for i in range(0, len(half), window)]
  there = [[rows.index(row) for row in x.astype(str).tolist()] for x in seen]
  assert set(itertools.chain(*there)) <= set(range(4, 4 + 16 * 4))
  assert len(set(itertools.chain(*there))) > 8


def test_oneshot_prunes_a_folder_and_writes_it_back(tmp_path, capsys, oneshot):
  args, folder, new = oneshot, tmp_path / "old", tmp_path / "new"
  assert cli.main(args) == 0
  assert "perplexity" in capsys.readouterr().out
  assert (new / "config.json").is_file()
  assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old", "text"]
  before, after = models.load_folder(folder), models.load_folder(new)
  for name, array in after.params.items():
    inner = hub.filter_fn((name,), array)
    kept = np.asarray(array) != 0
    assert kept.mean() == (0.5 if inner else 1.0), name
    old = np.asarray(before.params[name])
    np.testing.assert_array_equal(np.asarray(array)[kept], old[kept])
  assert cli.main(args) == 1
  assert "exists" in capsys.readouterr().err
  mine = tmp_path / "x.layers" / "mine"
  mine.parent.mkdir()
  mine.write_text("kept")
  assert cli.main([*args[:-1], str(tmp_path / "x")]) == 1
  assert "holds 'mine' of no job" in capsys.readouterr().err
  assert mine.read_text() == "kept"
  mine.unlink()
  trained = tmp_path / "trained"
  args[-1:] = [str(trained), "--blocks", "1", "--distill", "0.0001"]
  assert cli.main(args) == 0
  found = models.load_folder(trained)
  for name, array in found.params.items():
    old = np.asarray(after.params[name])
    assert not np.array_equal(array, old), name
    if hub.filter_fn((name,), array):  # the same mask, other values
      np.testing.assert_array_equal(np.asarray(array) != 0, old != 0)
  assert cli.main([*args[:-5], str(tmp_path / "x"), *args[-4:], "--refit"]) == 1
  assert "drop --refit" in capsys.readouterr().err
