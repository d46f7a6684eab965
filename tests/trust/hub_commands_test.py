"""Commands on folders of the hub: damaged companions, wrong numbers, no path.

What belongs to a model (a GGUF file, a tokenizer) is as little trusted as the
model, and everything is checked before something is computed.
"""

import struct
import sys
import types

import hub_models
import numpy as np
import pytest
from gguf_files import dense_file

from jaxpruner import cli
from jaxpruner.datasets.archives import DataError
from jaxpruner.post_training import models
from jaxpruner.post_training.models import gguf, hub_tokenizer


@pytest.fixture
def folder(tmp_path):
  hub_models.write_folder(
    tmp_path / "hub", "llama2", shards=1, num_hidden_layers=1
  )
  return tmp_path / "hub"


def command(*args):
  return cli.main([str(a) for a in args])


@pytest.mark.parametrize("kind, value", [("<If", 32.0), ("<Id", 8.0)])
def test_an_alignment_that_is_no_whole_number_is_refused(kind, value):
  name = b"general.alignment"
  number = 6 if kind == "<If" else 12
  raw = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
  raw += struct.pack("<Q", len(name)) + name + struct.pack(kind, number, value)
  with pytest.raises(DataError, match="alignment"):
    gguf.parse(raw)


@pytest.mark.parametrize(
  "length, offset",
  [(4, 2**64 - 1), (4, 2**62), (2**61, 0), (2**63, 0), (10**6, 0)],
)
def test_a_tensor_outside_of_its_gguf_file_is_refused(
  folder, tmp_path, capsys, length, offset
):
  like, out = tmp_path / "like.gguf", tmp_path / "out.gguf"
  extra = "rope_freqs.weight"
  dense_file(like, models.load_folder(folder), "llama", {extra: (4,)})
  raw, name = like.read_bytes(), extra.encode()
  at = raw.index(name) + len(name) + 4  # behind the number of axes
  raw = raw[:at] + struct.pack("<QIQ", length, 0, offset) + raw[at + 20 :]
  like.write_bytes(raw)
  assert command("gguf", folder, "--like", like, "-o", out) == 1
  assert "does not lie within the file" in capsys.readouterr().err
  assert not out.exists()


def test_a_tensor_without_a_dot_in_its_name_is_kept(folder, tmp_path):
  like, out = tmp_path / "like.gguf", tmp_path / "out.gguf"
  dense_file(like, models.load_folder(folder), "llama", {"x": (4,)})
  assert command("gguf", folder, "--like", like, "-o", out) == 0
  assert gguf.parse(out.read_bytes()).entries["x"].shape == (4,)


class Panic(BaseException):
  """What Rust code raises: no Exception."""


class Tokenizer:
  """Stands in for the class of the `tokenizers` package."""

  limits = ("truncation", "padding")

  @classmethod
  def from_file(cls, _):
    made = cls()
    made.active = set(cls.limits)
    return made

  def no_truncation(self):
    self.active.discard("truncation")

  def no_padding(self):
    self.active.discard("padding")

  def encode(self, text):
    if "panic" in text:
      raise Panic("stride must be less")
    if "stop" in text:
      raise KeyboardInterrupt
    assert not self.active
    return types.SimpleNamespace(ids=[int(word) for word in text.split()])

  def decode(self, ids):
    return " ".join(map(str, ids))


@pytest.fixture
def tokenizer(folder, monkeypatch):
  fake = types.SimpleNamespace(Tokenizer=Tokenizer)
  monkeypatch.setitem(sys.modules, "tokenizers", fake)
  (folder / "tokenizer.json").write_text("{}")
  return hub_tokenizer.HubTokenizer(folder)


def test_no_tokenizer_cuts_or_fills_a_text(tokenizer):
  # As in `transformers`: what tokenizer.json says about it is for others.
  assert tokenizer.encode("1 2 3") == [1, 2, 3]


def test_a_panic_of_a_tokenizer_is_told_in_words(folder, tokenizer, capsys):
  with pytest.raises(KeyboardInterrupt):
    tokenizer.encode("stop")
  assert command("generate", folder, "--prompt", "panic") == 1
  assert "tokenizer.json: Panic: stride" in capsys.readouterr().err


def test_a_text_that_is_no_unicode_is_told_in_words(folder, tokenizer, capsys):
  assert command("generate", folder, "--prompt", "a\udcff") == 1
  assert "--prompt" in capsys.readouterr().err


def test_more_tokens_than_memory_holds_are_told_in_words(
  folder, tokenizer, capsys
):
  assert command("generate", folder, "--prompt", "1", "--tokens", 10**12) == 1
  assert "more than memory holds; fewer tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
  "words",
  [
    ["reduce", "hub", "--drop", "1", "--overwrite", "-o", ""],
    ["prune", "hub", "--sparsity", "0.5", "--overwrite", "-o", ""],
    ["pack", "hub", "--overwrite", "-o", ""],
    ["oneshot", "--model", "hub", "--sparsity", "0.5", "--out", ""],
  ],
)
def test_no_path_is_not_the_current_folder(folder, monkeypatch, capsys, words):
  monkeypatch.chdir(folder.parent)
  assert command(*words) == 1
  assert "names no file" in capsys.readouterr().err
  assert [p.name for p in folder.parent.iterdir()] == ["hub"]


@pytest.mark.parametrize(
  "words",
  [
    ["reduce", "hub", "--drop", "1"],
    ["prune", "hub", "--sparsity", "0.5"],
    ["unpack", "hub"],
  ],
)
def test_a_folder_of_other_things_is_not_overwritten(
  folder, monkeypatch, capsys, words
):
  notes = folder.parent / "notes"
  notes.mkdir()
  (notes / "thesis.tex").write_text("all of it")
  monkeypatch.chdir(folder.parent)
  for out, reason in (
    ("notes", "holds no checkpoint but 'thesis.tex'"),
    (".", "is the current folder, or holds it"),
    ("..", "is the current folder, or holds it"),
  ):
    assert command(*words, "--overwrite", "-o", out) == 1
    assert reason in capsys.readouterr().err
  assert (notes / "thesis.tex").read_text() == "all of it"
  assert (folder / "config.json").exists()


@pytest.mark.parametrize(
  "words, reason",
  [
    (["--samples", "0"], "--samples 0 must be at least 1"),
    (["--samples", "-3"], "--samples -3 must be at least 1"),
    (["--judge", "0"], "--judge 0 must be at least 1"),
    (["--blocks", "-1"], "--blocks -1 must be at least 0"),
    (["--distill", "nan"], "--distill nan must be finite"),
    (["--distill", "inf"], "--distill inf must be finite"),
    (["--distill", "-1"], "--distill -1.0 must be finite"),
    (["--out", "hub"], "exists"),
    (["--out", "no/such/new"], "does not exist; make it first"),
    (["--model", "stories15M", "--out", "hub"], "is a folder; name a file"),
    (["--model", "stories15M", "--out", "/dev/null"], "a pipe, a device"),
    (["--model", "hub/config.json"], "says nothing of its model; name the"),
  ],
)
def test_oneshot_checks_its_options_first(
  folder, monkeypatch, capsys, words, reason
):
  monkeypatch.chdir(folder.parent)

  def loaded(*_):
    raise AssertionError("a model was loaded first")

  for name in ("load", "load_folder"):
    monkeypatch.setattr(models, name, loaded)
  given = ["--model", "hub", "--sparsity", "0.5", "--out", "new"]
  assert command("oneshot", *given, *words) == 1
  assert reason in capsys.readouterr().err
  assert [p.name for p in folder.parent.iterdir()] == ["hub"]


def test_distillation_without_an_end_is_refused():
  from jaxpruner.post_training import contrib

  params = {"w": np.eye(2, dtype=np.float32)}
  for seconds in (float("nan"), -1.0):
    with pytest.raises(ValueError, match="seconds"):
      contrib.distill(
        lambda p, x: x @ p["w"], params, {"w": None}, params, [np.eye(2)],
        seconds=seconds,
      )  # fmt: skip
