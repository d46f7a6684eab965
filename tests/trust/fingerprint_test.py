"""A fingerprint sees all that decides a result, and nothing else."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpruner import _fingerprint


def one_bit_other(x):
  raw = np.array(x).reshape(-1).view(np.uint8)
  raw[0] ^= 1
  return raw.view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize(
  "dtype",
  [
    np.float64, np.int64, np.complex128, np.complex64, np.float32, np.uint8,
    np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
  ],
)  # fmt: skip
def test_one_bit_of_any_dtype_changes_the_digest(dtype):
  x = np.arange(6).reshape(2, 3).astype(dtype)
  assert _fingerprint.arrays(x) != _fingerprint.arrays(one_bit_other(x))
  assert _fingerprint.arrays(x) == _fingerprint.arrays(x.copy())
  assert _fingerprint.arrays(x) == _fingerprint.arrays(np.asfortranarray(x))


def test_shapes_dtypes_paths_and_kinds_change_the_digest():
  x = np.zeros(4, np.float32)
  trees = [
    x, x.reshape(2, 2), x.view(np.int32), {"a": x}, {"b": x}, [x, x],
    jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg"),
    x[:0], 3, "3", None, {"a": (x, 3)}, {"a": (x, 4)},
  ]  # fmt: skip
  assert len({_fingerprint.arrays(t) for t in trees}) == len(trees)


def test_a_function_is_known_by_what_it_computes():
  x = jnp.ones(3)
  table = np.arange(3.0)
  first = _fingerprint.function(lambda x: x * table, x)
  assert first == _fingerprint.function(lambda y: y * table, x)
  assert first != _fingerprint.function(lambda x: x * (table + 1), x)
  assert first != _fingerprint.function(lambda x: x + table, x)


def test_descriptions_see_options_and_closures():
  def make(power):
    return lambda x: x**power

  names = [
    _fingerprint.describe(v)
    for v in (make(2), make(3), functools.partial(pow, 2), max, np.ones(2))
  ]
  assert len(set(names)) == len(names)
  assert names[0] == _fingerprint.describe(make(2))
  assert "0x7" not in _fingerprint.describe(object())


PROCESS = """
import jax, numpy as np
from jaxpruner import _fingerprint as f
g = jax.jit(lambda x: jax.nn.relu(x) + jax.lax.while_loop(
  lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0])
print(f.function(g, np.ones(2)), f.describe(g), f.settings(), f.versions())
"""


def test_two_processes_agree():
  run = lambda: (
    subprocess.run(
      [sys.executable, "-c", PROCESS],
      capture_output=True,
      text=True,
      check=True,
    ).stdout
  )
  assert run() == run()


def test_settings_name_what_changes_numbers(monkeypatch):
  before = _fingerprint.settings()
  with jax.enable_x64(not jax.config.jax_enable_x64):
    (said,) = _fingerprint.differences(before, _fingerprint.settings())
  assert "jax_enable_x64" in said
  with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
    (said,) = _fingerprint.differences(before, _fingerprint.settings())
  assert "threefry_partitionable" in said
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
  (said,) = _fingerprint.differences(before, _fingerprint.settings())
  assert "fast_math" in said
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
  assert _fingerprint.differences(before, _fingerprint.settings()) == []


def test_differences_tell_truth_from_one_and_missing_from_null():
  compare = _fingerprint.differences
  assert compare({"a": (1, 2)}, {"a": [1, 2]}) != []
  assert compare({"a": [1, 2]}, {"a": (1, 2)}) == []
  assert compare({"a": True}, {"a": 1}) == ["a is True there, 1 here"]
  assert compare({}, {"a": None}) == ["a is missing there, None here"]
  assert compare(["x"], {"a": 1}) == ["a is missing there, 1 here"]
