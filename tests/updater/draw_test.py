"""Random scores: as good as independent, by element, leaf and step."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.updater import draw

SHAPE, TRIALS = (256, 256), 100
SIZE = SHAPE[0] * SHAPE[1]


@functools.cache
def drawn() -> np.ndarray:
  """Scores of two leaves, at many steps: [steps, leaves, elements]."""
  data = jax.random.key_data(jax.random.key(0))
  leaves, names = [jnp.zeros(SHAPE)] * 2, (("a",), ("b",))
  rows = jax.jit(lambda t: jnp.stack(draw.draw(data, t, leaves, names)))
  every = [rows(jnp.int32(t)) for t in range(TRIALS)]
  return np.asarray(every, np.float64).reshape(TRIALS, 2, SIZE)


def assert_normal(z: np.ndarray) -> None:
  """Deviations of independent numbers, in their standard deviations."""
  z = np.ravel(z)
  assert np.abs(z).max() < 5.5
  assert abs(z.mean()) < 5 / np.sqrt(z.size)
  assert 0.8 < z.std() < 1.25


def mixed(bits: np.ndarray) -> np.ndarray:
  """Two rounds of xor, shift and product, in 32 bits."""
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    bits = ((bits ^ (bits >> shift)) * factor) % 2**32
  return bits ^ (bits >> 16)


@pytest.mark.quick
def test_scores_are_a_hash_of_path_key_step_and_index():
  # In Python's integers: a seed's masks are the same in every version.
  data, step, name = (3, 2**32 - 5), 17, "encoder/kernel"
  word, odd = (zlib.crc32(name.encode()) + i * 0x9E3779B9 for i in (0, 1))
  words = np.array([word, odd], np.uint64) % 2**32
  for part in (*data, step):
    words = mixed(words) ^ np.uint64(part)
  word, odd = mixed(words)
  index = np.arange(12, dtype=np.uint64)
  bits = mixed(((index * (odd | np.uint64(1))) % 2**32) ^ word)
  leaves, names = [jnp.zeros((3, 4))], (("encoder", "kernel"),)
  found = draw.draw(jnp.array(data, jnp.uint32), step, leaves, names)[0]
  np.testing.assert_array_equal(found.ravel(), (bits >> 8) / 2**24)


@pytest.mark.quick
def test_scores_are_uniform():
  scores = drawn()
  assert_normal((scores.mean(-1) - 0.5) * np.sqrt(12 * SIZE))
  counts = np.stack([np.histogram(s, 64, (0, 1))[0] for s in scores[:, 0]])
  assert_normal((counts - SIZE / 64) / np.sqrt(SIZE / 64))


@pytest.mark.parametrize("lag", [1, 2, 3, 7, 16, 64, 256, 1024])
def test_neighbours_are_independent(lag):
  kept = (drawn() > 0.9) - 0.1
  products = (kept[..., :-lag] * kept[..., lag:]).sum(-1)
  assert_normal(products / (0.09 * np.sqrt(SIZE - lag)))


def test_leaves_and_steps_are_independent():
  kept = (drawn() > 0.9) - 0.1
  leaves = (kept[:, 0] * kept[:, 1]).sum(-1)
  steps = (kept[1:] * kept[:-1]).sum(-1)
  for products in (leaves, steps):
    assert_normal(products / (0.09 * np.sqrt(SIZE)))
