"""Brax: training that calls update without params; one line."""

import framework
import jax
import numpy as np
import optax
import pytest
from framework import SGD, STEPS, assert_same, assert_sparse, make_pruner

framework.require("rl", "brax")

from brax.training import checkpoint, gradients, networks
from brax.training.acme import running_statistics, specs
from ml_collections import config_dict

from jaxpruner.integrations.no_params import keep_params


def make(algorithm):
  net = networks.make_value_network(
    obs_size=8,
    preprocess_observations_fn=lambda x, _: x,
    hidden_layer_sizes=(16, 16),
  )
  params = net.init(jax.random.PRNGKey(0))
  x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)

  def loss(params, x):
    return framework.mean_square(net.apply(None, params, x), x.sum(-1))

  tx = keep_params(make_pruner(algorithm).wrap_optax(SGD))  # added
  update = jax.jit(gradients.gradient_update_fn(loss, tx, None))

  def run(steps, params, state):
    for _ in range(steps):
      _, params, state = update(params, x, optimizer_state=state)
    return params, state

  return run, params, tx.init(params)


@framework.each_kind
def test_training_ends_exactly_sparse_and_resumes(algorithm, tmp_path):
  run, params, fresh = make(algorithm)
  params, state = run(STEPS - 20, params, fresh)
  # Brax saves a tuple, the statistics of observations first, and loads trees
  # without their types: leaves are enough, the structure is that of init.
  seen = running_statistics.init_state(specs.Array((8,), "float32"))
  config = config_dict.ConfigDict({"network_factory_kwargs": {}})
  saved = (seen, params, jax.tree.leaves(state))
  checkpoint.save(tmp_path.resolve(), 1, saved, config)
  _, loaded, leaves = checkpoint.load(tmp_path.resolve() / f"{1:012d}")
  again = jax.tree.unflatten(jax.tree.structure(fresh), leaves)
  assert_same((loaded, again), jax.tree.map(np.asarray, (params, state)))
  again = run(20, loaded, again)
  params, state = run(20, params, state)
  assert_same(again, (params, state))
  assert_sparse(params, state, grows=algorithm == "rigl")
  assert_same(params, state.params)


def test_brax_without_the_bridge_says_what_is_missing():
  params = {"w": jax.numpy.ones((8, 4))}
  tx = make_pruner().wrap_optax(optax.sgd(0.1))
  update = gradients.gradient_update_fn(lambda p: p["w"].sum(), tx, None)
  with pytest.raises(ValueError, match="needs params"):
    update(params, optimizer_state=tx.init(params))
