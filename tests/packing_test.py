"""Packed masks: one bit per weight, rows kept where rows are whole bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner import mask_calculator

SHAPES = ((), (1,), (7,), (8,), (3, 5), (5, 8), (2, 3, 16), (4, 4, 1))


@pytest.mark.quick
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from(SHAPES))
def test_unpacking_undoes_packing_and_bytes_are_those_of_numpy(seed, shape):
  mask = np.random.default_rng(seed).integers(0, 2, shape, np.uint8)
  packed = mask_calculator.pack_mask(jnp.asarray(mask))
  assert packed.size == -(-mask.size // 8)
  np.testing.assert_array_equal(
    np.asarray(packed).reshape(-1), np.packbits(mask.reshape(-1))
  )
  np.testing.assert_array_equal(
    mask_calculator.unpack_mask(packed, shape), mask
  )


def test_packing_keeps_the_leading_axes_of_whole_rows():
  mask = jnp.ones((4, 16), jnp.uint8)
  assert mask_calculator.pack_mask(mask).shape == (4, 2)


def test_a_packed_mask_of_another_size_is_refused():
  with pytest.raises(ValueError, match=r"shape \(3,\).*\(4, 4\)"):
    mask_calculator.unpack_mask(jnp.zeros(3, jnp.uint8), (4, 4))


def test_the_n_of_n_by_m_may_be_traced():
  scores = jax.random.uniform(jax.random.key(0), (8, 3))
  ranked = jax.jit(lambda n: mask_calculator.n_by_m_mask(scores, n, 4, axis=0))
  for n in (1, 2, 3, 4):
    mask = ranked(n)
    np.testing.assert_array_equal(mask.reshape(2, 4, 3).sum(1), n)
    np.testing.assert_array_equal(
      mask, mask_calculator.n_by_m_mask(scores, n, 4, axis=0)
    )
