"""Strips keep every weight; their product is that of the rounded numbers."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpruner.sparse import _int8, _strips, kernels

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(
  kernels.load("int8") is None, reason="no AVX-512"
)


def multiplied():
  """The formats whose strips this processor multiplies."""
  from jaxpruner.sparse import _strip_simd

  return [v for v in _strips.SIZES if v != "int8" or _strip_simd.BYTES]


def decoded(weights, values):
  """Return the weights as a format stores them, in float64."""
  if values == "int8":
    return _int8.decode(*_int8.encode(weights, "w")).astype(np.float64)
  return weights.astype(jnp.dtype(values)).astype(np.float64)


def rounded(x):
  """Return inputs as the int8 product sees them: 64 share a scale."""
  padded = np.zeros(-(-x.size // 64) * 64)
  padded[: x.size] = x
  groups = padded.reshape(-1, 64)
  scales = np.abs(groups).max(1, keepdims=True) / 127
  codes = np.rint(groups / np.where(scales > 0, scales, 1))
  return (codes * scales).reshape(-1)[: x.size]


def stored(packed, threads, inputs):
  from jaxpruner.post_training import _step_kernel as kernel

  count = len(packed.starts)
  kinds = np.full(count, packed.size + 8 * packed.masked, np.int64)
  none = np.zeros(0, np.float32)
  ropes, levels = np.zeros((1, 1, 1), np.float32), np.zeros((1, 4), np.float32)
  weights = kernel.Weights(
    packed.data, packed.starts, kinds, none, ropes, levels
  )
  wide = -(-inputs // 64) * 64
  team = kernel.Team(
    threads, np.zeros((1, threads), np.int64), np.zeros(1, np.int64)
  )
  room = kernel.Room(
    np.zeros((4, wide), np.float32),
    np.zeros((threads, 6, wide), np.float32),
    np.zeros((threads, wide), np.uint8),
    np.zeros((threads, wide // 64), np.float32),
    np.zeros((threads, 1), np.float32),
    np.zeros((threads, wide), np.int32),
    np.zeros((threads, 1), np.float32),
  )
  return kernel, weights, team, room, none


def product(packed, x, threads=1):
  """Multiply by strips; other threads come too late for work."""
  kernel, weights, team, room, none = stored(packed, threads, x.size)
  padded = np.zeros(-(-x.size // 64) * 64, np.float32)
  padded[: x.size] = x
  out = np.zeros(16 * len(packed.starts), np.float32)
  for me in range(threads):
    kernel.product(
      me, team, 0, weights, 0, len(packed.starts), padded, padded.size // 64,
      packed.size == 1, room, out, -1, none, np.float32(0),
    )  # fmt: skip
  return out[: packed.shape[0]]


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  shape=st.tuples(st.integers(1, 70), st.integers(1, 150)),
  kept=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
  values=st.deferred(lambda: st.sampled_from(multiplied())),
  threads=st.integers(1, 3),
  seed=st.integers(0, 99),
)
def test_the_product_is_that_of_the_rounded_numbers(
  shape, kept, values, threads, seed
):
  rng = np.random.default_rng(seed)
  mask = rng.random(shape) < kept
  w = np.where(mask, rng.standard_normal(shape), 0).astype(np.float32)
  x = rng.standard_normal(shape[1]).astype(np.float32)
  packed = _strips.pack(w, values, mask)
  seen = rounded(x) if values == "int8" else x.astype(np.float64)
  expected = decoded(w, values) @ seen
  found = product(packed, x, threads)
  np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-5)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  shape=st.tuples(st.integers(1, 40), st.integers(1, 150)),
  kept=st.sampled_from([0.3, 1.0]),
  values=st.deferred(lambda: st.sampled_from(multiplied())),
  seed=st.integers(0, 99),
)
def test_a_gathered_row_is_the_stored_one(shape, kept, values, seed):
  rng = np.random.default_rng(seed)
  mask = rng.random(shape) < kept
  w = np.where(mask, rng.standard_normal(shape), 0).astype(np.float32)
  kernel, weights, *_ = stored(_strips.pack(w, values, mask), 1, shape[1])
  row, groups = int(rng.integers(shape[0])), -(-shape[1] // 64)
  out = np.zeros(64 * groups, np.float32)
  kernel.gather(weights, 0, row, groups, out)
  expected = decoded(w, values)[row]
  np.testing.assert_allclose(out[: shape[1]], expected, rtol=1e-6)
  assert not out[shape[1] :].any()


@pytest.mark.parametrize("values, size", _strips.SIZES.items())
def test_zeros_take_a_bit_each(values, size):
  w = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
  mask = np.arange(w.size).reshape(w.shape) % 2 == 0
  scales = 2 * 64 * 4 if size == 1 else 0
  half = _strips.pack(w, values, mask)
  assert half.masked
  assert half.data.size - _strips.SLACK == w.size * (size / 2 + 1 / 8) + scales
  full = _strips.pack(w, values, None)
  assert not full.masked
  assert full.data.size - _strips.SLACK == w.size * size + scales


def test_weights_outside_of_the_mask_count_as_zeros():
  w = np.ones((16, 64), np.float32)
  mask = np.zeros(w.shape, bool)
  mask[:, 0] = True
  found = product(_strips.pack(w, "float32", mask), np.ones(64, np.float32))
  np.testing.assert_array_equal(found, np.ones(16))
