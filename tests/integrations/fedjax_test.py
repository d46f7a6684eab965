"""FedJAX: prune on the server, in federated averaging; one line."""

import framework
import jax
import numpy as np
import optax
import pytest
from framework import assert_same, assert_sparse, make_batch, make_pruner

framework.require("fedjax", "fedjax", "haiku")

# FedJAX calls a name that JAX has moved.
if not hasattr(jax, "tree_map"):
  jax.tree_map = jax.tree.map

import fedjax
import haiku as hk


@pytest.mark.parametrize("algorithm", ["magnitude", "rigl"])
def test_fifty_rounds_end_exactly_sparse_and_survive(algorithm, tmp_path):
  x, y = make_batch()
  net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 4])(x)))

  def grad_fn(params, batch, rng):
    loss = lambda p: framework.mean_square(net.apply(p, batch["x"]), batch["y"])
    return jax.grad(loss)(params)

  pruner = make_pruner(algorithm)
  server = fedjax.optimizers.create_optimizer_from_optax(
    pruner.wrap_optax(optax.sgd(1.0))  # added
  )
  algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    grad_fn,
    fedjax.optimizers.sgd(0.1),
    server,
    fedjax.ShuffleRepeatBatchHParams(batch_size=8, num_epochs=1, seed=0),
  )
  state = algorithm.init(net.init(jax.random.key(0), x))
  clients = [
    (
      str(i).encode(),
      fedjax.ClientDataset({"x": x[i::4], "y": y[i::4]}),
      jax.random.PRNGKey(i),
    )
    for i in range(4)
  ]
  for _ in range(framework.STEPS):
    state, _ = algorithm.apply(state, clients)
  assert_sparse(state.params, state.opt_state)
  fedjax.training.save_checkpoint(str(tmp_path), state, round_num=1)
  again, number = fedjax.training.load_latest_checkpoint(str(tmp_path))
  assert number == 1
  assert_same(again, jax.tree.map(np.asarray, state))
  again, _ = algorithm.apply(again, clients)
  assert_sparse(again.params, again.opt_state)
