"""rejax: an agent with a sparse network; its state goes to Orbax."""

import framework
import jax
from framework import assert_same, assert_sparse, make_pruner

framework.require("rl", "rejax", "orbax")

import orbax.checkpoint as ocp
import rejax


def make(algorithm):
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
  ts = algo.init_state(jax.random.PRNGKey(0))
  tx = make_pruner(algorithm).wrap_optax(ts.q_ts.tx)  # added
  ts = ts.replace(  # added
    q_ts=ts.q_ts.replace(tx=tx, opt_state=tx.init(ts.q_ts.params))  # added
  )
  return jax.jit(algo.train_iteration), ts


@framework.each_kind
def test_a_rejax_agent_ends_exactly_sparse_and_resumes(algorithm, tmp_path):
  iteration, ts = make(algorithm)
  for _ in range(40):
    ts = iteration(ts)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path.resolve() / "state", ts)
  # rejax starts with Python's numbers, and goes on with JAX's.
  fresh = jax.tree.map(jax.numpy.asarray, make(algorithm)[1])
  with ocp.StandardCheckpointer() as checkpointer:
    again = checkpointer.restore(tmp_path.resolve() / "state", fresh)
  # The functions a TrainState carries are no part of a checkpoint.
  assert_same(jax.tree.leaves(again), jax.tree.leaves(ts))
  again = jax.tree.unflatten(jax.tree.structure(ts), jax.tree.leaves(again))
  for _ in range(40):
    ts, again = iteration(ts), iteration(again)
  assert_same(jax.tree.leaves(again), jax.tree.leaves(ts))
  assert int(ts.q_ts.opt_state.count) >= framework.STEPS
  grows = algorithm == "rigl"
  assert_sparse(ts.q_ts.params, ts.q_ts.opt_state, grows=grows)
