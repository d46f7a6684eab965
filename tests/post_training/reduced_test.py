"""Fewer experts, fewer layers: what goes, what is left, the folder."""

import json

import hub_models
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import cli
from jaxpruner.post_training import contrib, models
from jaxpruner.post_training.contrib import depth, experts
from jaxpruner.post_training.models import decoder, decoder_config

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 4, 9))
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def loaded(tmp_path, family, **changes):
  hub_models.write_folder(tmp_path / "whole", family, **changes)
  return models.load_folder(tmp_path / "whole")


def slow_scores(model, tokens):
  """REAP by its definition: token by token, in float64."""
  config, positions = model.config, jnp.arange(tokens.shape[1])
  wide = {k: np.asarray(v, np.float64) for k, v in model.params.items()}
  x = decoder.embed(config, model.params, tokens, positions)
  found = []
  for i, kind in enumerate(config.experts):
    x, h, _ = decoder.attend(config, model.params, i, x, None, positions)
    if kind is None:
      found.append(None)
    else:
      base = f"{config.root}layers.{i}.{kind.prefix}"
      sums, counts = np.zeros(kind.count), np.zeros(kind.count)
      for token in np.asarray(h, np.float64).reshape(-1, config.dim):
        logits = wide[f"{base}.gate.weight"] @ token
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        chosen = np.argsort(-chances)[: kind.used]
        total = chances[chosen].sum() if kind.normalise else 1
        for j in chosen:
          gate, up, down = (
            wide[f"{base}.experts.{j}.{n}.weight"] for n in kind.names
          )
          inner = gate @ token
          y = down @ (inner / (1 + np.exp(-inner)) * (up @ token))
          sums[j] += chances[j] / total * np.linalg.norm(y)
          counts[j] += 1
      found.append(sums / np.maximum(counts, 1))
    x = decoder.feed_forward(config, model.params, i, x, h)
  return found


@pytest.mark.parametrize("family", MIXTURES)
def test_scores_of_experts_are_reap(tmp_path, family):
  model = loaded(tmp_path, family)
  found = experts.expert_scores(model, TOKENS)
  for got, want in zip(
    found, slow_scores(model, TOKENS.reshape(-1, 9)), strict=True
  ):
    assert (got is None) == (want is None)
    if got is not None:
      np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("family", MIXTURES)
def test_half_of_the_experts_is_a_folder(tmp_path, family):
  model = loaded(tmp_path, family)
  small = contrib.prune_experts(model, TOKENS, keep=2)
  models.save_folder(small, tmp_path / "small")
  again = models.load_folder(tmp_path / "small")
  for i, kept in enumerate(small.kept):
    if kept is None:
      continue
    scores = small.scores[i]
    assert min(scores[kept]) >= max(np.delete(scores, kept))
    kind = again.config.experts[i]
    base = f"model.layers.{i}.{kind.prefix}."
    assert kind.count == 2
    for j, old in enumerate(kept):
      for n in kind.names:
        np.testing.assert_array_equal(
          again.params[f"{base}experts.{j}.{n}.weight"],
          model.params[f"{base}experts.{old}.{n}.weight"],
        )
    router = model.params[f"{base}gate.weight"][np.array(kept)]
    np.testing.assert_array_equal(again.params[f"{base}gate.weight"], router)
  logits = [m.apply_fn(m.params, TOKENS[0]) for m in (small.model, again)]
  np.testing.assert_array_equal(*logits)


def test_experts_are_counted_by_the_name_that_the_folder_uses(tmp_path):
  """transformers 5 writes Qwen3-MoE's count under Mixtral's name."""
  names = {"num_experts": None, "num_local_experts": 4}
  model = loaded(tmp_path, "qwen3_moe", **names)
  assert model.config.experts[0].count == 4
  small = contrib.prune_experts(model, TOKENS[:1, :1], keep=2)
  models.save_folder(small, tmp_path / "small")
  config = json.loads((tmp_path / "small" / "config.json").read_text())
  assert config["num_local_experts"] == 2 and config["num_experts"] is None
  assert models.load_folder(tmp_path / "small").config.experts[0].count == 2


def test_all_experts_kept_change_nothing(tmp_path):
  model = loaded(tmp_path, "mixtral")
  small = contrib.prune_experts(model, TOKENS, keep=4)
  np.testing.assert_array_equal(
    small.model.apply_fn(small.model.params, TOKENS[0]),
    model.apply_fn(model.params, TOKENS[0]),
  )


def test_influence_is_one_minus_the_cosine(tmp_path):
  model = loaded(tmp_path, "llama2")
  found = depth.block_influence(model, TOKENS)
  config, positions = model.config, jnp.arange(9)
  x = decoder.embed(config, model.params, TOKENS.reshape(-1, 9), positions)
  for i in range(config.layers):
    before = np.asarray(x, np.float64).reshape(-1, config.dim)
    x, h, _ = decoder.attend(config, model.params, i, x, None, positions)
    x = decoder.feed_forward(config, model.params, i, x, h)
    after = np.asarray(x, np.float64).reshape(-1, config.dim)
    cosines = [
      a @ b / np.linalg.norm(a) / np.linalg.norm(b)
      for a, b in zip(before, after, strict=True)
    ]
    np.testing.assert_allclose(found[i], 1 - np.mean(cosines), rtol=1e-3)


@pytest.mark.parametrize("family", ["llama2", "gemma2", "qwen2", "qwen2_moe"])
def test_dropped_layers_leave_the_others_as_they_were(tmp_path, family):
  model = loaded(tmp_path, family)
  small = contrib.drop_blocks(model, TOKENS, drop=1)
  assert len(small.kept) == 2 and small.kept == sorted(small.kept)
  (gone,) = {0, 1, 2} - set(small.kept)
  assert small.scores[gone] == min(small.scores)
  parsed = decoder_config.parse(small.config)
  for name in ("windows", "experts"):
    whole = getattr(model.config, name)
    assert getattr(parsed, name) == tuple(whole[i] for i in small.kept)
  models.save_folder(small, tmp_path / "small")
  again = models.load_folder(tmp_path / "small")
  whole, positions = model.config, jnp.arange(9)
  x = decoder.embed(whole, model.params, TOKENS[0], positions)
  for i in small.kept:
    x, h, _ = decoder.attend(whole, model.params, i, x, None, positions)
    x = decoder.feed_forward(whole, model.params, i, x, h)
  np.testing.assert_allclose(
    again.apply_fn(again.params, TOKENS[0]),
    decoder.finish(whole, model.params, x),
    rtol=1e-4,
    atol=1e-5,
  )


def test_wrong_counts_are_refused(tmp_path):
  mixture = loaded(tmp_path / "a", "mixtral")
  plain = loaded(tmp_path / "b", "llama2")
  with pytest.raises(ValueError, match="keep=1 must be from 2"):
    contrib.prune_experts(mixture, TOKENS, keep=1)
  with pytest.raises(ValueError, match="llama has no experts"):
    contrib.prune_experts(plain, TOKENS, keep=2)
  with pytest.raises(ValueError, match="drop=3 must be from 1 to 2"):
    contrib.drop_blocks(plain, TOKENS, drop=3)
  with pytest.raises(ValueError, match="batches is empty"):
    contrib.drop_blocks(plain, [], drop=1)


def test_command_writes_the_smaller_folder(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(
    "jaxpruner.post_training.reduce_command.HubTokenizer",
    lambda _: type("T", (), {"encode": staticmethod(
      lambda text: [ord(c) % 32 for c in text]
    )}),
  )  # fmt: skip
  loaded(tmp_path, "mixtral")
  text = tmp_path / "text.txt"
  text.write_text("abc def " * 400)
  options = ["--calibration", text, "--samples", 4, "-o", tmp_path / "new"]
  args = ["reduce", tmp_path / "whole", "--experts", 2, *options]
  assert cli.main([str(a) for a in args]) == 0
  config = json.loads((tmp_path / "new" / "config.json").read_text())
  assert config["num_local_experts"] == 2
  assert "layer 0: experts" in capsys.readouterr().out
  args[2:4] = ["--drop", 9]
  args[-1] = tmp_path / "other"
  assert cli.main([str(a) for a in args]) == 1
  assert "drop=9" in capsys.readouterr().err
