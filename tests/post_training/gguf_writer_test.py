"""A GGUF file holds the weights of the folder, in llama.cpp's order."""

import hub_models
import numpy as np
import pytest
from gguf_files import dense_file

from jaxpruner import cli
from jaxpruner.datasets.archives import DataError
from jaxpruner.post_training import models
from jaxpruner.post_training.models import gguf, gguf_writer


def loaded(tmp_path, family, **config):
  hub_models.write_folder(tmp_path / family, family, **config)
  return models.load_folder(tmp_path / family)


def neighbours(w, heads):
  """Order rows as llama.cpp turns them, one by one."""
  size = w.shape[0] // heads
  rows = [
    head * size + half * (size // 2) + i
    for head in range(heads)
    for i in range(size // 2)
    for half in (0, 1)
  ]
  return w[rows]


@pytest.mark.parametrize(
  "family, kind",
  [("smollm2", "llama"), ("llama2", "llama"), ("qwen2", "qwen2"),
   ("qwen3", "qwen3")],
)  # fmt: skip
def test_every_tensor_is_read_back(tmp_path, family, kind):
  model = loaded(tmp_path, family)
  more = {"rope_freqs.weight": (4,)} if family == "llama2" else {}
  like = dense_file(tmp_path / "like.gguf", model, kind, more)
  out = tmp_path / "out.gguf"
  models.save_gguf(out, model, like, "float32")
  file = gguf.parse(out.read_bytes())
  assert file.metadata == gguf.parse(like.read_bytes()).metadata
  config, seen = model.config, 0
  for theirs, ours in gguf_writer._sources(config, set(file.entries)).items():
    expected = np.asarray(model.params[ours])
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
    part = theirs.split(".")[-2]
    if kind == "llama" and part in heads:
      expected = neighbours(expected, heads[part])
    found = file.read(theirs, expected.shape)
    np.testing.assert_array_equal(found, expected)
    seen += 1
  assert seen == len(model.params)


def test_zeros_stay_zeros_and_bytes_are_near(tmp_path):
  model = loaded(tmp_path, "smollm2", hidden_size=64, intermediate_size=96)
  cut = {
    name: np.where(np.abs(a) > np.median(np.abs(a)), a, 0) if a.ndim == 2 else a
    for name, a in model.params.items()
  }
  model = model._replace(params=cut)
  like = dense_file(tmp_path / "like.gguf", model, "llama")
  sizes = {}
  for values in gguf_writer.VALUES:
    out = tmp_path / f"{values}.gguf"
    models.save_gguf(out, model, like, values)
    sizes[values] = out.stat().st_size
    file = gguf.parse(out.read_bytes())
    name = "model.layers.1.mlp.down_proj.weight"
    w = np.asarray(cut[name])
    found = file.read("blk.1.ffn_down.weight", w.shape)
    assert not found[w == 0].any()
    np.testing.assert_allclose(found, w, atol=np.abs(w).max() / 127)
  assert sizes["q8_0"] < sizes["float16"] < sizes["float32"]


def test_files_of_another_model_are_refused(tmp_path):
  model = loaded(tmp_path, "smollm2")
  out, like = tmp_path / "out.gguf", tmp_path / "like.gguf"
  save = lambda: models.save_gguf(out, model, like)
  dense_file(like, model, "qwen2")
  with pytest.raises(ValueError, match="architecture 'qwen2'"):
    save()
  dense_file(like, model, "llama", {"other.weight": (4, 4)})
  with pytest.raises(ValueError, match="'other.weight' is not in"):
    save()
  dense_file(like, model, "llama", left_out={"blk.0.ffn_up.weight"})
  with pytest.raises(ValueError, match="no tensor for .*up_proj"):
    save()
  dense_file(like, model, "llama", {"output_norm.weight": (17,)})
  with pytest.raises(ValueError, match=r"output_norm.* is \(17,\)"):
    save()
  like.write_bytes(b"GGUF")
  with pytest.raises(DataError, match="cut short"):
    save()
  dense_file(like, model, "llama")
  large = dict(model.params) | {"model.norm.weight": np.ones(16, np.float32)}
  large["model.embed_tokens.weight"] = np.full((32, 16), 1e6, np.float32)
  with pytest.raises(ValueError, match="not finite as float16"):
    models.save_gguf(out, model._replace(params=large), like, "float16")
  with pytest.raises(ValueError, match="must be one of"):
    models.save_gguf(out, model, like, "q2")
  assert not out.exists()


def test_the_command_writes_a_file_once(tmp_path, capsys):
  model = loaded(tmp_path, "smollm2")
  like = dense_file(tmp_path / "like.gguf", model, "llama")
  out = tmp_path / "out.gguf"
  args = [
    "gguf",
    str(tmp_path / "smollm2"),
    "--like",
    str(like),
    "-o",
    str(out),
  ]
  assert cli.main(args) == 0
  assert "zeros are stored as zeros" in capsys.readouterr().out
  assert cli.main(args) == 1
  assert "exists" in capsys.readouterr().err
  args[-1] = str(tmp_path / "other.gguf")
  like.write_bytes(b"no")
  assert cli.main(args) == 1
  assert "cut short" in capsys.readouterr().err
