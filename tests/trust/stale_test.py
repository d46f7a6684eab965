"""A finished layer is reused by the very job that made it, and no other."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import ERRORS, Faults, count_calls

from jaxpruner import post_training

RNG = np.random.default_rng(0)
PARAMS = {
  "a": {"w": RNG.normal(size=(8, 8)).astype(np.float32), "b": np.zeros(8, "f")},
  "c": {"w": RNG.normal(size=(8, 4)).astype(np.float32)},
}
DATA = [RNG.normal(size=(16, 8)).astype(np.float32) for _ in range(2)]


def model(params, x):
  return jnp.tanh(x @ params["a"]["w"] + params["a"]["b"]) @ params["c"]["w"]


def steeper(params, x):
  return (
    jnp.tanh(2 * x @ params["a"]["w"] + params["a"]["b"]) @ params["c"]["w"]
  )


prune = functools.partial(
  post_training.prune, model, PARAMS, DATA, sparsity=0.5, method="wanda"
)


def changed(tree, name):
  return tree | {name: {**tree[name], "b": np.ones(8, "f")}}


# What the refusal must name, and the job that is refused.
OTHERS = [
  ("data", model, PARAMS, [DATA[0], DATA[1] + 1], {}),
  ("data", model, PARAMS, [DATA[0]], {}),
  ("data", model, PARAMS, DATA[::-1], {}),
  ("function", steeper, PARAMS, DATA, {}),
  ("weights", model, changed(PARAMS, "a"), DATA, {}),
  ("settings.method", model, PARAMS, DATA, {"method": "sparsegpt"}),
  ("settings.damping", model, PARAMS, DATA, {"damping": 0.1}),
  ("targets.a/w", model, PARAMS, DATA, {"sparsity": 0.25}),
  ("type", model, PARAMS, DATA, {"sparsity_type": "2:4"}),
  ("refit", model, PARAMS, DATA, {"refit": True}),
  ("sequential", model, PARAMS, DATA, {"sequential": False}),
]


@pytest.mark.parametrize("i", range(len(OTHERS)))
def test_another_job_is_refused_and_what_differs_is_named(tmp_path, i):
  prune(folder=tmp_path)
  name, apply_fn, params, data, options = OTHERS[i]
  options = {"sparsity": 0.5, "method": "wanda", **options}
  with pytest.raises(ValueError, match=f"another job.*{name} is .* there, "):
    post_training.prune(apply_fn, params, data, folder=tmp_path, **options)


def test_another_setting_of_jax_is_refused(tmp_path):
  prune(folder=tmp_path)
  with jax.default_matmul_precision("highest"):
    with pytest.raises(ValueError, match="jax_default_matmul_precision"):
      prune(folder=tmp_path)


def test_layers_without_their_job_are_refused(tmp_path):
  prune(folder=tmp_path)
  (tmp_path / "job.json").unlink()
  with pytest.raises(ValueError, match="layer of another job|another job"):
    post_training.prune(
      model, PARAMS, DATA[::-1], sparsity=0.5, method="wanda", folder=tmp_path
    )


@pytest.mark.parametrize(
  "text", ["", "{", "[]", "null", "[" * 10**5, '{"a":1}']
)
def test_a_damaged_job_file_is_refused_in_words(tmp_path, text):
  prune(folder=tmp_path)
  (tmp_path / "job.json").write_text(text)
  with pytest.raises(ValueError, match="another job.*delete"):
    prune(folder=tmp_path)


@pytest.mark.parametrize("size", [0, 7, 100, 600])
def test_a_cut_layer_is_refused_with_the_cure(tmp_path, size):
  prune(folder=tmp_path)
  path = min(tmp_path.glob("cut-*"))
  path.write_bytes(path.read_bytes()[:size])
  with pytest.raises(ValueError, match="only this layer is computed again"):
    prune(folder=tmp_path)
  path.unlink()
  assert_same(prune(folder=tmp_path)[:2], prune()[:2])


def test_the_same_job_continues(tmp_path):
  first = prune(folder=tmp_path)
  times = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
  assert_same(prune(folder=tmp_path)[:2], first[:2])
  assert times == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
  facts = json.loads((tmp_path / "job.json").read_bytes())
  assert len(facts["data"]) == 64


def assert_same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("error", ERRORS)
def test_every_failing_call_leaves_a_folder_that_continues(tmp_path, error):
  whole = prune()[:2]
  calls = count_calls(lambda: prune(folder=tmp_path / "count"))
  for at in range(len(calls)):
    folder = pathlib.Path(tmp_path) / f"{at}"
    with Faults(at, error).installed(), pytest.raises(OSError):
      prune(folder=folder)
    assert not list(folder.glob(".*"))
    assert_same(prune(folder=folder)[:2], whole)
