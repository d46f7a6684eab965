"""The compiled step computes what the decoder says, on any threads."""

import functools

import hub_models
import jax
import numpy as np
import pytest

from jaxpruner import post_training
from jaxpruner.post_training import _step, generation, models
from jaxpruner.post_training.models import decoder

pytest.importorskip("numba")
TOKENS = [1, 5, 30, 7, 3, 9, 9, 2]
FAMILIES = (
  "llama2", "llama3", "smollm2", "mistral", "qwen2", "qwen3", "gemma2",
  "gemma3",
)  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
  path = tmp_path_factory.mktemp("hub") / "model"
  hub_models.write_folder(path, request.param)
  return models.load_folder(path)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  path = tmp_path_factory.mktemp("hub") / "model"
  hub_models.write_folder(path, "smollm2")
  return models.load_folder(path)


def forward(model, *inputs):
  return jax.jit(functools.partial(decoder.forward, model.config))(
    model.params, *inputs
  )


def made(model, values="float32", threads=2, length=16):
  if _step.kernel(model.config, values) is None:
    pytest.skip("no AVX-512, or none that expands bytes")
  masks = generation._masks(model)
  return _step.Step(model.config, model.params, masks, length, values, threads)


def pruned(model):
  """Remove half of each matrix."""
  params = {
    name: np.where(np.abs(a) > np.median(np.abs(a)), a, 0) if a.ndim == 2 else a
    for name, a in model.params.items()
  }
  return model._replace(params=params)


def logits(step, config, tokens, prompt=0, kept=None):
  if kept is None:
    kept = decoder.empty_cache(config, 1, 16)
  cache = step.start(kept, prompt)
  return np.stack(
    [
      step(token, cache, at)[0]
      for at, token in enumerate(tokens)
      if at >= prompt
    ]
  )


def test_steps_give_the_logits_of_the_decoder(model):
  empty = decoder.empty_cache(model.config, 1, 16)
  for each in (model, pruned(model)):
    expected, kept = forward(each, np.array([TOKENS]), empty)
    step = made(each)
    found = logits(step, model.config, TOKENS)
    np.testing.assert_allclose(found, expected[0], atol=5e-5)
    # And they go on from a prompt; what is kept behind it is not looked at.
    found = logits(step, model.config, TOKENS, 5, kept)
    np.testing.assert_allclose(found, expected[0, 5:], atol=5e-5)


@pytest.mark.parametrize("values", ["float32", "int8"])
def test_threads_change_no_bit(one, values):
  model = pruned(one)
  alone, three = (
    logits(made(model, values, n), model.config, TOKENS) for n in (1, 3)
  )
  np.testing.assert_array_equal(alone, three)


def test_rounding_disturbs_as_little_as_its_bits(one):
  exact = logits(made(one), one.config, TOKENS)
  error = lambda values: float(
    np.abs(logits(made(one, values), one.config, TOKENS) - exact).mean()
    / exact.std()
  )
  assert error("bfloat16") < 0.06
  assert error("int8") < 0.12


def test_texts_of_one_writer_do_not_mix(one):
  writer = post_training.Writer(one, 16, values="int8")
  alone = [
    [t.id for t in writer.write(prompt, 6)] for prompt in ([1, 2], [3, 4, 5])
  ]
  texts = [writer.write(prompt, 6) for prompt in ([1, 2], [3, 4, 5])]
  turns = [[next(t).id for t in texts] for _ in range(6)]
  assert [list(t) for t in zip(*turns, strict=True)] == alone


def test_tokens_and_positions_outside_are_refused(one):
  step = made(one)
  cache = step.start(decoder.empty_cache(one.config, 1, 16), 0)
  for token, at in ((32, 0), (-1, 0), (0, 16), (0, -1)):
    with pytest.raises(ValueError, match="must be within"):
      step(token, cache, at)


@pytest.mark.parametrize("family", ["opt", "mixtral"])
def test_other_decoders_are_left_to_xla(tmp_path, family):
  hub_models.write_folder(tmp_path / "m", family)
  model = models.load_folder(tmp_path / "m")
  assert _step.kernel(model.config, "float32") is None
  writer = post_training.Writer(model, 16, values="int8")
  assert len(list(writer.write([1, 2], 3))) == 3
