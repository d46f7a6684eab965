"""Inputs below a threshold count as zeros, and their weights are not read."""

import functools

import hub_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import post_training
from jaxpruner.post_training import _step, contrib, generation, models
from jaxpruner.post_training.models import decoder, functions
from jaxpruner.sparse import _strips

ROWS = np.array([[1, 5, 30, 7, 3, 9, 9, 2], [4, 4, 8, 21, 6, 0, 13, 17]])
FAMILIES = (
  "qwen2",
  *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3", "gemma2")),
)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
  path = tmp_path_factory.mktemp("hub") / "model"
  hub_models.write_folder(path, request.param)
  found = models.load_folder(path)
  rng = np.random.default_rng(0)
  half = lambda a: np.where(rng.random(a.shape) < 0.5, a, 0)
  return found._replace(
    params={k: half(a) if a.ndim == 2 else a for k, a in found.params.items()}
  )


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  path = tmp_path_factory.mktemp("hub") / "model"
  hub_models.write_folder(path, "smollm2")
  return models.load_folder(path)


def zeroed(model, thresholds, tokens):
  levels = {f"{k.removesuffix('.weight')}.threshold": t
            for k, t in thresholds.items()}  # fmt: skip
  run = jax.jit(functools.partial(decoder.apply, model.config))
  return run(dict(model.params) | levels, tokens)


def test_thresholds_are_quantiles_of_the_inputs(one, monkeypatch):
  seen = {}

  def linear(params, name, x):
    seen[f"{name}.weight"] = np.asarray(x)
    return plain(params, name, x)

  plain = functions.linear
  found = contrib.input_thresholds(one, [ROWS], sparsity=0.4)
  for where in (decoder, models.decoder.mixture):
    monkeypatch.setattr(where, "linear", linear)
  decoder.apply(one.config, one.params, ROWS)
  seen.pop("model.embed_tokens.weight")
  assert found.keys() == seen.keys()
  for name, level in found.items():
    assert level == pytest.approx(np.quantile(np.abs(seen[name]), 0.4), 1e-4)
  q, k = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "qk")
  assert found[q] == found[k]


def test_the_step_computes_what_zeroed_inputs_give(model):
  if _step.kernel(model.config, "float32") is None:
    pytest.skip("no AVX-512")
  thresholds = contrib.input_thresholds(model, [ROWS], sparsity=0.5)
  masks = generation._masks(model)
  tokens = ROWS[0]
  dense = np.asarray(zeroed(model, {}, ROWS[:1])[0])
  short = {
    k: a.astype(jnp.bfloat16).astype(np.float32) if a.ndim == 2 else a
    for k, a in model.params.items()
  }
  others = model._replace(params=short)
  for values, exact in (("float32", model), ("bfloat16", others)):
    expected = np.asarray(zeroed(exact, thresholds, ROWS[:1])[0])
    assert np.abs(expected - dense).max() > 1e-3
    found = []
    for threads in (1, 3):
      step = _step.Step(
        model.config, model.params, masks, 16, values, threads, thresholds
      )
      cache = step.start(decoder.empty_cache(model.config, 1, 16), 0)
      found.append(
        np.stack([step(t, cache, at)[0] for at, t in enumerate(tokens)])
      )
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], expected, atol=1e-4)


def test_tiles_hold_what_is_kept():
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(160, 9)).astype(np.float32)
  kept = rng.random(weights.shape) < 0.3
  again = np.zeros_like(weights)
  for tile in _strips.tiles(weights, "float32", kept):
    head = tile[: 4 * (3 + 10)].view(np.int32)
    inputs, vectors, first = head[:3]
    for i, (begin, end) in enumerate(zip(head[3:-1], head[4:], strict=True)):
      bits = np.unpackbits(tile[begin:][: 2 * vectors], bitorder="little")
      column = np.zeros(bits.size, np.float32)
      column[bits == 1] = tile[begin + 2 * vectors : end].copy().view("f4")
      again[16 * first :][: bits.size, i] = column
    assert inputs == 9 and head[-1] == tile.size
  np.testing.assert_array_equal(again, np.where(kept, weights, 0))


@pytest.mark.parametrize("family", ["smollm2", "opt"])
def test_a_writer_skips_with_or_without_machine_code(tmp_path, family):
  hub_models.write_folder(tmp_path / "m", family)
  model = models.load_folder(tmp_path / "m")
  levels = contrib.input_thresholds(model, [ROWS], sparsity=0.7)
  writer = post_training.Writer(model, 16, thresholds=levels)
  found = [t.id for t in writer.write([1, 5], 2)]
  logits, kept = jax.jit(functools.partial(decoder.forward, model.config))(
    model.params, np.array([[1, 5]]), decoder.empty_cache(model.config, 1, 16)
  )
  # The prompt is computed in full, and the step with what is left.
  assert found[0] == int(jnp.argmax(logits[0, -1]))
  names = {generation._level_of(name): level for name, level in levels.items()}
  step = jax.jit(functools.partial(decoder.forward, model.config))
  logits, _ = step(model.params | names, np.array([found[:1]]), kept, 2)
  assert found[1] == int(jnp.argmax(logits[0, -1]))


@pytest.mark.parametrize(
  "options, message",
  [
    ({"values": "int8"}, "four inputs at once"),
    ({"accelerate": True}, "leave out accelerate"),
    ({"thresholds": {"model.q": 1.0}}, "model.q"),
    ({"thresholds": {"model.norm.weight": float("nan")}}, "finite"),
  ],
)
def test_thresholds_that_make_no_sense_are_refused(one, options, message):
  with pytest.raises(ValueError, match=message):
    post_training.Writer(one, 16, **({"thresholds": {}} | options))


def test_matrices_with_the_same_inputs_have_one_threshold(one):
  if _step.kernel(one.config, "float32") is None:
    pytest.skip("no AVX-512")
  name = "model.layers.0.self_attn.{}_proj.weight"
  levels = {name.format("q"): 0.1, name.format("k"): 0.2}
  with pytest.raises(ValueError, match="read the same inputs"):
    post_training.Writer(one, 16, thresholds=levels)


def test_thresholds_need_batches(one):
  with pytest.raises(ValueError, match="batches is empty"):
    contrib.input_thresholds(one, [], sparsity=0.5)
