"""Laws of sparse training that no single paper states."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner


def make(name="rigl", **options):
  made = {"algorithm": name, "sparsity": 0.5}
  return jaxpruner.create_updater_from_config({**made, **options})


def test_an_untrained_network_is_not_rewired():
  params = {"a": jnp.asarray(np.arange(16.0).reshape(4, 4) - 7.5)}
  grads = {"a": params["a"][::-1]}
  pruner = make(drop_fraction=0.5)
  state = pruner.init_state(params)
  same = pruner.update_state(state, params, grads).masks["a"]
  np.testing.assert_array_equal(same, state.masks["a"])
  other = pruner.update_state(state._replace(count=1), params, grads)
  assert not np.array_equal(other.masks["a"], state.masks["a"])
  assert int(other.masks["a"].sum()) == 8


@pytest.mark.parametrize("count", [0, 1])
def test_a_fraction_of_ones_own_replaces_the_cosine(count):
  pruner = jaxpruner.SET(drop_fraction_fn=lambda step: 0.25 + 0 * step)
  state = jaxpruner.SparseState(None, count=jnp.int32(count))
  left = pruner.survivors(state, jnp.asarray([8, 40]), None, None)
  assert left.tolist() == ([8, 40] if count == 0 else [6, 30])
