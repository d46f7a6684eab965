"""rejax and Brax: agents with a sparse network; one or two lines."""

import framework
import jax
import numpy as np
import optax
import pytest
from framework import SGD, assert_same, assert_sparse, make_pruner

framework.require("rl", "rejax", "brax")

from jaxpruner.integrations.no_params import keep_params


def test_a_rejax_agent_ends_exactly_sparse(tmp_path):
  import orbax.checkpoint as ocp
  import rejax

  algo = rejax.DQN.create(
    env="CartPole-v1",
    num_envs=1,
    total_timesteps=200,
    fill_buffer=16,
    buffer_size=64,
    batch_size=8,
    eval_freq=200,
    max_grad_norm=10,
    num_epochs=1,
    target_update_freq=50,
  )
  ts = algo.init_state(jax.random.key(0))
  tx = make_pruner().wrap_optax(ts.q_ts.tx)  # added
  ts = ts.replace(  # added
    q_ts=ts.q_ts.replace(tx=tx, opt_state=tx.init(ts.q_ts.params))  # added
  )
  iteration = jax.jit(algo.train_iteration)
  for _ in range(80):
    ts = iteration(ts)
  state = ts.q_ts
  assert int(jax.numpy.asarray(state.opt_state.count)) >= framework.STEPS
  assert_sparse(state.params, state.opt_state)
  saved = (state.params, state.opt_state)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path.resolve() / "state", saved)
  with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.restore(tmp_path.resolve() / "state", saved)
  assert_same(found, saved)


@pytest.mark.parametrize("algorithm", ["magnitude", "set"])
def test_braxs_update_without_params_ends_exactly_sparse(algorithm):
  from brax.training import gradients, networks

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
  state = tx.init(params)
  for _ in range(framework.STEPS):
    _, params, state = update(params, x, optimizer_state=state)
  assert_sparse(params, state, grows=algorithm == "set")
  assert_same(params, state.params)


def test_brax_without_the_bridge_says_what_is_missing():
  from brax.training import gradients

  params = {"w": jax.numpy.ones((8, 4))}
  tx = make_pruner().wrap_optax(optax.sgd(0.1))
  update = gradients.gradient_update_fn(lambda p: p["w"].sum(), tx, None)
  with pytest.raises(ValueError, match="needs params"):
    update(params, optimizer_state=tx.init(params))
