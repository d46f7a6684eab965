"""Why a leaf is pruned or not, in words."""

import functools

import jax
import jax.numpy as jnp

import jaxpruner
from jaxpruner import sparsity_distributions
from jaxpruner.updater import prunable

PARAMS = {"b": jnp.ones(3), "v": jnp.ones((4, 4)), "w": jnp.ones((4, 4))}


def reasons(pruner):
  return prunable.reasons(pruner, PARAMS)


def test_filters_and_maps_are_named():
  uniform = functools.partial(
    sparsity_distributions.uniform,
    sparsity=0.5,
    custom_sparsity_map={"v": 0.25},
  )
  ours = reasons(jaxpruner.MagnitudePruning(sparsity_distribution_fn=uniform))
  plain = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
  theirs = reasons(jaxpruner.MagnitudePruning(sparsity_distribution_fn=plain))
  assert ours[0] == theirs[0] and ours[2] == theirs[2]
  assert ours[1] != theirs[1] and "custom_sparsity_map" in ours[1]
  unset = reasons(jaxpruner.MagnitudePruning())
  assert unset == theirs


def test_a_global_ranking_speaks_of_its_own_fields():
  found = reasons(
    jaxpruner.GlobalMagnitudePruning(
      sparsity=0.5, custom_sparsity_map={"v": 0.25}
    )
  )
  assert "custom_sparsity_map" in found[1]
  assert "custom_sparsity_map" not in found[2]


def test_a_distribution_of_the_users_is_taken_at_its_word():
  def mine(params):
    return jax.tree.map(lambda p: 0.5 if p.ndim == 2 else None, params)

  assert reasons(jaxpruner.MagnitudePruning(sparsity_distribution_fn=mine)) == [
    "left out by the distribution",
    "chosen by the distribution",
    "chosen by the distribution",
  ]
  none = reasons(jaxpruner.MagnitudePruning(sparsity_distribution_fn=None))
  assert none == ["no distribution"] * 3
