"""Hugging Face's transformers: the same logits from the same folder.

With `PYTHONPATH=tests/helpers`, running this file writes the logits that tests
without transformers compare with.
"""

import json
import pathlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import hub_models
import numpy as np

from jaxpruner import cli
from jaxpruner.post_training import contrib, models

GOLDEN = pathlib.Path(__file__).parents[1] / "post_training" / "hub_logits.json"


def theirs(folder, family):
  """Load a folder as its users do; every tensor must have found its place."""
  config = transformers.AutoConfig.from_pretrained(folder)
  plain = family in ("bert", "vit")
  kind = transformers.AutoModel if plain else transformers.AutoModelForCausalLM
  options = {"add_pooling_layer": False} if plain else {}
  model, about = kind.from_pretrained(
    folder, config=config, attn_implementation="eager",
    output_loading_info=True, **options,
  )  # fmt: skip
  assert not about["missing_keys"] and not about["unexpected_keys"]
  assert not about["mismatched_keys"]
  with torch.no_grad():
    out = model.eval()(torch.as_tensor(hub_models.inputs(family)))
  return (out.last_hidden_state if plain else out.logits).numpy()


def ours(folder, family):
  model = models.load_folder(folder)
  return np.asarray(model.apply_fn(model.params, hub_models.inputs(family)))


@pytest.mark.parametrize("family", hub_models.CONFIGS)
def test_logits_are_those_of_transformers(tmp_path, family):
  folder = tmp_path / "model"
  hub_models.write_folder(folder, family)
  np.testing.assert_allclose(
    ours(folder, family), theirs(folder, family), atol=1e-4, rtol=1e-4
  )


@pytest.mark.parametrize("family", hub_models.CONFIGS)
def test_pruned_folders_load_back_into_transformers(tmp_path, family):
  old, new = tmp_path / "old", tmp_path / "new"
  hub_models.write_folder(old, family)
  args = ["prune", str(old), "--sparsity", "0.5", "-o", str(new)]
  assert cli.main(args) == 0
  found = theirs(new, family)
  np.testing.assert_allclose(ours(new, family), found, atol=1e-4, rtol=1e-4)
  assert np.abs(found - theirs(old, family)).max() > 1e-3


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_half_of_the_experts_load_into_transformers(tmp_path, family):
  hub_models.write_folder(tmp_path / "old", family)
  model = models.load_folder(tmp_path / "old")
  small = contrib.prune_experts(model, [hub_models.inputs(family)], keep=2)
  models.save_folder(small, tmp_path / "new")
  found = theirs(tmp_path / "new", family)
  for logits in (
    ours(tmp_path / "new", family),
    small.model.apply_fn(small.model.params, hub_models.inputs(family)),
  ):
    np.testing.assert_allclose(logits, found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
  "family", [f for f in hub_models.CONFIGS if f not in ("bert", "vit")]
)
def test_fewer_layers_load_into_transformers(tmp_path, family):
  hub_models.write_folder(tmp_path / "old", family)
  model = models.load_folder(tmp_path / "old")
  small = contrib.drop_blocks(model, [hub_models.inputs(family)], drop=1)
  models.save_folder(small, tmp_path / "new")
  np.testing.assert_allclose(
    ours(tmp_path / "new", family), theirs(tmp_path / "new", family),
    atol=1e-4, rtol=1e-4,
  )  # fmt: skip


@pytest.mark.parametrize(
  "family",
  [f for f in hub_models.CONFIGS if f not in ("bert", "vit", "opt")],
)
def test_fewer_heads_load_into_transformers(tmp_path, family):
  hub_models.write_folder(tmp_path / "old", family)
  model = models.load_folder(tmp_path / "old")
  small = contrib.prune_heads(model, [hub_models.inputs(family)], keep=1)
  models.save_folder(small, tmp_path / "new")
  np.testing.assert_allclose(
    ours(tmp_path / "new", family), theirs(tmp_path / "new", family),
    atol=1e-4, rtol=1e-4,
  )  # fmt: skip


def test_generate_writes_what_transformers_would(tmp_path, capsys):
  folder = tmp_path / "model"
  hub_models.write_folder(folder, "smollm2")
  words = {f"w{i}": i for i in range(32)}
  inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  inner.save(str(folder / "tokenizer.json"))
  model = transformers.AutoModelForCausalLM.from_pretrained(folder)
  drawn = model.generate(
    torch.tensor([[5, 7, 11]]), max_new_tokens=12, do_sample=False,
    eos_token_id=[], pad_token_id=0,
  )[0].tolist()  # fmt: skip
  text = " ".join(f"w{i}" for i in drawn)
  if 2 in drawn:  # what `config.json` ends a text with
    text = text[: text.index("w2") + 2]
  args = ["generate", str(folder), "--prompt", "w5 w7 w11", "--tokens", "12"]
  assert cli.main(args) == 0
  out, err = capsys.readouterr()
  assert out.strip() == text and "tokens/s" in err


def main():
  import tempfile

  found = {}
  for family in hub_models.CONFIGS:
    folder = pathlib.Path(tempfile.mkdtemp()) / "model"
    hub_models.write_folder(folder, family)
    # The last token of each row: enough to notice any difference.
    found[family] = np.round(theirs(folder, family)[:, -1], 6).tolist()
  GOLDEN.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
  main()
