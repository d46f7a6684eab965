"""Edges of sparsity types: bounds, types of the user's, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import mask_calculator, sparsity_types
from jaxpruner.sparsity_types import masks


def test_n_by_m_forgives_a_millionth_and_no_more():
  kind = jaxpruner.NByM(2, 4)
  for sparsity in (0.0, 0.5, 0.5 + 1e-6):
    kind.check((4, 2), sparsity, "w")
  with pytest.raises(ValueError, match="w: sparsity=.*removes exactly 0.5"):
    kind.check((4, 2), float(np.nextafter(0.5 + 1e-6, 1)), "w")


@dataclasses.dataclass(frozen=True)
class First:
  """A type of the user's: keeps the first weights, whatever their scores."""

  def mask(self, scores, sparsity):
    kept = jnp.round(scores.size * (1 - sparsity))
    return (jnp.arange(scores.size) < kept).reshape(scores.shape)


def test_a_type_of_the_users_gets_a_number_at_every_step():
  scores = jnp.arange(8.0).reshape(2, 4)
  now = mask_calculator.AtStep(jnp.float32(0.25), 0.5)
  for sparsity, kept in ((0.5, 4), (now, 6), (jnp.float32(0.75), 2)):
    found = sparsity_types.select_masks([First()], [scores], [sparsity])
    (mask,) = found.masks
    assert mask.dtype == jnp.uint8
    assert mask.ravel().tolist() == [1] * kept + [0] * (8 - kept)


def test_what_an_explicit_mesh_shards_is_told_from_the_rest():
  mesh = jax.make_mesh(
    (2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)
  )
  place = lambda *spec: jax.device_put(
    jnp.ones((2, 4)), jax.NamedSharding(mesh, jax.P(*spec))
  )
  assert not masks._is_placed(jnp.ones((2, 4)))
  assert not masks._is_placed(place(None, None))
  assert masks._is_placed(place("x", None)) and masks._is_placed(
    place(None, "x")
  )


@pytest.mark.parametrize("is_mean", [True, False])
def test_a_block_longer_than_its_leaf_is_as_long_as_the_leaf(is_mean):
  # It is never filled up: that would take 4 TB.
  scores = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 8)))
  for long, whole in (((10**11, 3), (16, 3)), ((5, 10**11), (5, 8))):
    found = jaxpruner.Block(long, is_mean).mask(scores, 0.5)
    wanted = jaxpruner.Block(whole, is_mean).mask(scores, 0.5)
    np.testing.assert_array_equal(found, wanted)
  assert jaxpruner.Block((10**11, 10**11)).units((4, 0, 3)) == 0
