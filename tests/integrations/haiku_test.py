"""Haiku: wrap the optimizer, one line; checkpoints are Orbax's."""

import framework
import jax
import optax
from framework import SGD, assert_same, assert_sparse, make_batch, make_pruner

framework.require("core", "haiku", "orbax")

import haiku as hk
import orbax.checkpoint as ocp


@framework.each_kind
def test_a_haiku_net_ends_exactly_sparse_and_survives(algorithm, tmp_path):
  x, y = make_batch()
  net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 4])(x)))
  params = net.init(jax.random.key(0), x)
  pruner = make_pruner(algorithm)
  tx = pruner.wrap_optax(SGD)  # added
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state):
    loss = lambda params: framework.mean_square(net.apply(params, x), y)
    updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  for _ in range(framework.STEPS):
    params, opt_state = step(params, opt_state)
  grows = algorithm == "rigl"
  assert_sparse(params, opt_state, grows=grows)
  saved = (params, opt_state)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path.resolve() / "state", saved)
  with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.restore(
      tmp_path.resolve() / "state", (params, tx.init(params))
    )
  assert_same(found, saved)
  assert_sparse(*step(*found), grows=grows)
