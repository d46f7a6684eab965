"""The door of the engine: values in, values out, nothing mutated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import engine
from jaxpruner.engine import expression


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_keys_of_a_single_leaf_are_not_stored(dtype):
  """A loop that stored them would take as many bytes as the scores."""
  masks = lambda x: engine.select([x], [9]).masks
  leaf = jax.ShapeDtypeStruct((2000, 1000), dtype)
  memory = jax.jit(masks).lower(leaf).compile().memory_analysis()
  assert memory.temp_size_in_bytes <= 0.1 * leaf.size


@pytest.mark.quick
def test_an_expression_is_shaped_like_its_scores():
  scores = jnp.ones((3, 4), jnp.bfloat16)
  found = expression.trace(lambda: 2 * scores)
  for name in ("shape", "ndim", "size", "dtype"):
    assert getattr(found, name) == getattr(scores, name), name


def test_leaves_of_several_dtypes_are_one_selection():
  rng = np.random.default_rng(0)
  whole = 2**24 + rng.integers(0, 9, 700)  # as floats, neighbours are equal
  leaves = [
    jnp.asarray(rng.standard_normal(500), "bfloat16"),
    jnp.asarray(whole, "int32"),
    jnp.asarray(rng.standard_normal(900), "float32").at[3].set(jnp.inf),
    jnp.asarray(rng.integers(0, 9, 300), "uint8"),
  ]
  hint = engine.new_hint(4)
  found = jax.jit(lambda x: engine.select(x, [100] * 4, hint=hint))(leaves)
  for leaf, mask in zip(leaves, found.masks, strict=True):
    scores = np.asarray(leaf, np.float64)
    kept = np.argsort(-scores, kind="stable")[:100]
    assert sorted(np.flatnonzero(mask)) == sorted(kept)
  assert found.finite.tolist() == [True, True, False, True]
