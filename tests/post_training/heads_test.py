"""Fewer heads: scores by their definition, the folder, the logits."""

import json

import hub_models
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.post_training import contrib, models
from jaxpruner.post_training.contrib import heads
from jaxpruner.post_training.models import decoder

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 4, 9))
GROUPED = ("llama2", "qwen2", "qwen3", "gemma2", "mixtral")


def loaded(tmp_path, family):
  hub_models.write_folder(tmp_path / "whole", family)
  return models.load_folder(tmp_path / "whole")


def slow_scores(model, tokens):
  """Head by head and token by token, in float64."""
  config, positions = model.config, jnp.arange(tokens.shape[1])
  x = decoder.embed(config, model.params, tokens, positions)
  size, share = config.head_dim, config.heads // config.kv_heads
  found = []
  for i in range(config.layers):
    mixed = np.asarray(
      decoder.heads(config, model.params, i, x, positions), np.float64
    ).reshape(-1, config.heads, size)
    name = f"{config.root}layers.{i}.{config.names['o']}.weight"
    out = np.asarray(model.params[name], np.float64)
    row = np.zeros(config.kv_heads)
    for h in range(config.heads):
      part = out[:, h * size : (h + 1) * size]
      norms = [np.linalg.norm(part @ token[h]) for token in mixed]
      row[h // share] += np.mean(norms)
    found.append(row)
    x, h, _ = decoder.attend(config, model.params, i, x, None, positions)
    x = decoder.feed_forward(config, model.params, i, x, h)
  return found


@pytest.mark.parametrize("family", ["llama2", "gemma2"])
def test_scores_are_summed_over_the_heads_of_a_group(tmp_path, family):
  model = loaded(tmp_path, family)
  found = heads.head_scores(model, TOKENS)
  want = slow_scores(model, TOKENS.reshape(-1, 9))
  np.testing.assert_allclose(found, want, rtol=1e-4)


@pytest.mark.parametrize("family", GROUPED)
def test_fewer_heads_are_a_folder_with_the_logits_of_silenced_ones(
  tmp_path, family
):
  model = loaded(tmp_path, family)
  config = model.config
  small = contrib.prune_heads(model, TOKENS, keep=1)
  models.save_folder(small, tmp_path / "small")
  again = models.load_folder(tmp_path / "small")
  assert (again.config.kv_heads, again.config.head_dim) == (1, config.head_dim)
  assert again.config.heads == config.heads // config.kv_heads
  silenced = dict(model.params)
  share, size = config.heads // config.kv_heads, config.head_dim
  for i, kept in enumerate(small.kept):
    assert small.scores[i][kept[0]] == max(small.scores[i])
    name = f"{config.root}layers.{i}.{config.names['o']}.weight"
    group = np.arange(config.heads * size) // size // share
    silenced[name] = jnp.where(group == kept[0], silenced[name], 0)
  logits = again.apply_fn(again.params, TOKENS[0])
  want = model.apply_fn(silenced, TOKENS[0])
  np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)


def test_all_heads_kept_change_nothing(tmp_path):
  model = loaded(tmp_path, "llama2")
  small = contrib.prune_heads(model, TOKENS, keep=model.config.kv_heads)
  np.testing.assert_array_equal(
    small.model.apply_fn(small.model.params, TOKENS[0]),
    model.apply_fn(model.params, TOKENS[0]),
  )
  config = json.loads((tmp_path / "whole/config.json").read_text())
  assert small.config["num_attention_heads"] == config["num_attention_heads"]


def test_wrong_numbers_and_models_are_refused(tmp_path):
  model = loaded(tmp_path, "llama2")
  with pytest.raises(ValueError, match="keep=9"):
    contrib.prune_heads(model, TOKENS, keep=9)
  with pytest.raises(ValueError, match="batches is empty"):
    contrib.prune_heads(model, [], keep=1)
  hub_models.write_folder(tmp_path / "opt", "opt")
  with pytest.raises(ValueError, match="head_dim"):
    contrib.prune_heads(models.load_folder(tmp_path / "opt"), TOKENS, keep=1)
