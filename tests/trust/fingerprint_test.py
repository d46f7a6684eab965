"""A fingerprint sees all that decides a result, and nothing else."""

import dataclasses
import functools
import importlib.metadata
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpruner._tools import fingerprint


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
  assert fingerprint.arrays(x) != fingerprint.arrays(one_bit_other(x))
  assert fingerprint.arrays(x) == fingerprint.arrays(x.copy())
  assert fingerprint.arrays(x) == fingerprint.arrays(np.asfortranarray(x))


def test_shapes_dtypes_paths_and_kinds_change_the_digest():
  x = np.zeros(4, np.float32)
  trees = [
    x, x.reshape(2, 2), x.view(np.int32), {"a": x}, {"b": x}, [x, x],
    jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg"),
    x[:0], 3, "3", None, {"a": (x, 3)}, {"a": (x, 4)}, jnp.float32, jnp.int32,
  ]  # fmt: skip
  assert len({fingerprint.arrays(t) for t in trees}) == len(trees)


def test_a_function_is_known_by_what_it_computes():
  x = jnp.ones(3)
  table = np.arange(3.0)
  first = fingerprint.function(lambda x: x * table, x)
  assert first == fingerprint.function(lambda y: y * table, x)
  assert first != fingerprint.function(lambda x: x * (table + 1), x)
  assert first != fingerprint.function(lambda x: x + table, x)


@dataclasses.dataclass
class Options:
  power: int = 2
  kind: str = "a"


def test_descriptions_see_options_and_closures():
  def make(power):
    return lambda x: x**power

  names = [
    fingerprint.describe(v)
    for v in (
      *(make(2), make(3), max, np.ones(2)),
      *(functools.partial(pow, 2), functools.partial(pow, 3)),
      *(Options(), Options(3), Options(3, "b")),
    )
  ]
  assert len(set(names)) == len(names)
  assert names[-1] == "Options(('power', 3), ('kind', 'b'))"
  assert names[0] == fingerprint.describe(make(2))
  assert "0x7" not in fingerprint.describe(object())


def test_parts_that_read_alike_together_are_told_apart():
  def digest(*parts):
    found = fingerprint.Digest()
    for part in parts:
      found._add(part)
    return found.hexdigest()

  assert digest(b"ab", b"c") != digest(b"a", b"bc")
  assert digest(b"a", b"", b"b") != digest(b"a", b"b")


def test_code_without_source_is_known_by_its_bytecode():
  def make(text):
    space = {}
    exec(text, space)
    return space["f"]

  texts = ["def f(x): return x + 1", "def f(x): return x + 2",
           "def f(x): return x.a", "def f(x): return x.b"]  # fmt: skip
  found = [fingerprint.source(make(text)) for text in texts]
  assert len(set(found)) == 4
  assert found[0] == fingerprint.source(make(texts[0]))
  assert fingerprint.source(len) != fingerprint.source(max)
  assert len(found[0]) == 64


def test_arrays_are_described_by_their_bits():
  one, other = np.zeros(2), -np.zeros(2)
  assert fingerprint.describe([one]) != fingerprint.describe([other])
  assert "float64(2,)" in fingerprint.describe(one)


def test_a_function_that_closes_over_itself_ends_at_eight_levels():
  def again(x):
    return again(x)

  assert fingerprint.describe(again).count("again:") == 3  # levels 8, 5, 2
  deep = lambda n: [deep(n - 1)] if n else "bottom"
  assert "bottom" in fingerprint.describe(deep(7))
  assert "bottom" not in fingerprint.describe(deep(8))


def test_long_values_are_cut_and_hashes_shortened():
  text = lambda n: "x" * (n - 2)  # with its quotes n characters
  (said,) = fingerprint.differences({"a": text(100)}, {"a": text(101)})
  old, new = said.removeprefix("a is ").split(" there, ")
  assert old == repr(text(100))
  assert new == repr(text(101))[:97] + "… here"
  (said,) = fingerprint.differences({"a": "0" * 64}, {"a": {"b": 1}})
  assert said == "a is 000000000000… there, {'b': 1} here"


PROCESS = """
import jax, numpy as np
from jaxpruner._tools import fingerprint as f
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
  before = fingerprint.settings()
  with jax.enable_x64(not jax.config.jax_enable_x64):
    (said,) = fingerprint.differences(before, fingerprint.settings())
  assert "jax_enable_x64" in said
  with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
    (said,) = fingerprint.differences(before, fingerprint.settings())
  assert "threefry_partitionable" in said
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
  (said,) = fingerprint.differences(before, fingerprint.settings())
  assert "fast_math" in said
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
  assert fingerprint.differences(before, fingerprint.settings()) == []
  assert before["backend"] == jax.default_backend()


def test_versions_are_those_installed():
  found = fingerprint.versions()
  assert [*found] == ["jaxpruner", "jax", "jaxlib", "numpy", "optax"]
  assert found["jax"] == jax.__version__ and found["numpy"] == np.__version__
  assert fingerprint.versions("optax", "no-such-package") == {
    "optax": importlib.metadata.version("optax"),
    "no-such-package": None,
  }


def test_differences_name_the_path():
  old = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": {"g": 1}, "h": 2}
  new = {"a": {"b": {"c": 1, "d": 4}, "e": 5}, "f": 6, "h": {"i": 1}}
  assert fingerprint.differences(old, new) == [
    "a.b.d is 2 there, 4 here",
    "a.e is 3 there, 5 here",
    "f is {'g': 1} there, 6 here",
    "h is 2 there, {'i': 1} here",
  ]


def test_differences_tell_truth_from_one_and_missing_from_null():
  compare = fingerprint.differences
  assert compare({"a": (1, 2)}, {"a": [1, 2]}) != []
  assert compare({"a": [1, 2]}, {"a": (1, 2)}) == []
  assert compare({"a": True}, {"a": 1}) == ["a is True there, 1 here"]
  assert compare({}, {"a": None}) == ["a is missing there, None here"]
  assert compare(["x"], {"a": 1}) == ["a is missing there, 1 here"]
