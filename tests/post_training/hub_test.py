"""Models of the hub: logits of transformers, the cache, hostile folders."""

import functools
import json
import pathlib

import hub_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import cli, post_training, sparse
from jaxpruner.post_training import models
from jaxpruner.post_training.models import decoder, decoder_config, hub

FileFormatError = sparse.FileFormatError
# Written by tests/integrations/transformers_test.py, with transformers.
GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / "hub_logits.json").read_text()
)
CACHED = ["llama3", "qwen2", "gemma3", "opt"]  # rotations, windows, positions


def build(family):
  config = hub_models.parsed(family)
  params = {n: hub_models.weight(n, s) for n, s in config.shapes().items()}
  return config, params


@pytest.mark.parametrize("family", hub_models.CONFIGS)
def test_logits_are_those_of_transformers(tmp_path, family):
  hub_models.write_folder(tmp_path / "m", family)
  model = models.load_folder(tmp_path / "m")
  found = jax.jit(model.apply_fn)(model.params, hub_models.inputs(family))
  np.testing.assert_allclose(found[:, -1], GOLDEN[family], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", CACHED)
def test_the_cache_gives_the_logits_of_the_whole(family):
  config, params = build(family)
  tokens = hub_models.TOKENS
  forward = jax.jit(functools.partial(decoder.forward, config))
  whole, _ = forward(params, tokens)
  cache = decoder.empty_cache(config, len(tokens), 12)
  found, cache = forward(params, tokens[:, :5], cache)
  np.testing.assert_allclose(found, whole[:, :5], atol=2e-5)
  for i in range(5, tokens.shape[1]):
    one, cache = forward(params, tokens[:, i : i + 1], cache, i)
    np.testing.assert_allclose(one[:, 0], whole[:, i], atol=2e-5)


def test_a_packed_folder_is_the_same_model(tmp_path):
  old, new, packed = (tmp_path / n for n in ("old", "new", "packed"))
  hub_models.write_folder(old, "smollm2")
  for args in (
    ["prune", old, "--sparsity", "0.5", "-o", new], ["pack", new, "-o", packed]
  ):  # fmt: skip
    assert cli.main([str(a) for a in args]) == 0
  one, other = models.load_folder(new), models.load_folder(packed)
  for name, array in one.params.items():
    np.testing.assert_array_equal(array, other.params[name])


def test_half_precision_is_kept(tmp_path):
  hub_models.write_folder(tmp_path / "m", "llama2")
  model = models.load_folder(tmp_path / "m", jnp.bfloat16)
  found = model.apply_fn(model.params, hub_models.TOKENS)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    found[:, -1].astype(np.float32), GOLDEN["llama2"], atol=0.15
  )


@pytest.mark.parametrize("family", ["opt", "mixtral"])
def test_calibration_prunes_every_weight_but_ends_and_routers(family):
  config, params = build(family)
  apply_fn = lambda p, x: decoder.apply(config, p, x)
  new, masks, report = post_training.prune(
    apply_fn, params, [hub_models.TOKENS], method="wanda", sparsity=0.5,
    filter_fn=hub.filter_fn,
  )  # fmt: skip
  assert not report.skipped
  for name, mask in masks.items():
    inner = params[name].ndim == 2 and ".layers." in name
    inner = inner and not name.endswith(".gate.weight")
    assert (mask is not None) == inner, name
    if inner:
      assert 1 - mask.mean() == 0.5
      assert (np.asarray(new[name])[mask == 0] == 0).all()


BAD = {
  "unknown type": {"model_type": "mamba"},
  "type is a list": {"model_type": ["llama"]},
  "absurd vocabulary": {"vocab_size": 10**15},
  "absurd width": {"hidden_size": 1 << 40},
  "absurd depth": {"num_hidden_layers": 10**9},
  "negative": {"num_attention_heads": -4},
  "zero heads": {"num_attention_heads": 0},
  "fraction": {"hidden_size": 16.5},
  "boolean size": {"vocab_size": True},
  "heads do not divide": {"num_key_value_heads": 3},
  "unknown activation": {"hidden_act": "__import__"},
  "negative norm": {"rms_norm_eps": -1},
  "infinite theta": {"rope_theta": float("inf")},
  "unknown rope": {"rope_scaling": {"rope_type": "longrope"}},
  "rope is a list": {"rope_parameters": [1]},
  "rope without factor": {"rope_parameters": {"rope_type": "llama3"}},
  "odd head": {"head_dim": 5},
  "layer types too few": {"layer_types": ["full_attention"]},
  "layer types unknown": {"layer_types": ["a", "b", "c"]},
  "tie is a word": {"tie_word_embeddings": "yes"},
  "other width": {"hidden_size": 32},
  "other vocabulary": {"vocab_size": 33},
  "more layers": {"num_hidden_layers": 4},
  "fewer layers": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("case", BAD)
def test_configurations_that_do_not_fit_are_refused(tmp_path, case):
  hub_models.write_folder(tmp_path / "m", "llama2")
  path = tmp_path / "m" / "config.json"
  path.write_text(json.dumps(hub_models.CONFIGS["llama2"] | BAD[case]))
  with pytest.raises(FileFormatError, match="m"):
    models.load_folder(tmp_path / "m")


def test_integer_weights_are_refused(tmp_path):
  hub_models.write_folder(tmp_path / "m", "llama2", shards=1)
  (shard,) = (tmp_path / "m").glob("*.safetensors")
  params, _ = sparse.load(shard)
  params["model.norm.weight"] = np.ones(16, np.int8)
  sparse.save(shard, params, layout="dense")
  with pytest.raises(FileFormatError, match="int8"):
    models.load_folder(tmp_path / "m")


def test_more_experts_used_than_there_are_is_refused():
  config = hub_models.CONFIGS["mixtral"] | {"num_experts_per_tok": 5}
  with pytest.raises(FileFormatError, match="num_experts_per_tok=5"):
    decoder_config.parse(config)
