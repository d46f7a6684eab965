"""FedJAX: prune on the server, in federated averaging; one line."""

import functools

import framework
import jax
import numpy as np
import optax
from framework import STEPS, assert_same, assert_sparse, make_batch, make_pruner

framework.require("fedjax", "fedjax", "haiku")

# FedJAX calls a name that JAX has moved.
if not hasattr(jax, "tree_map"):
  jax.tree_map = jax.tree.map

import fedjax
import haiku as hk

NET = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 4])(x)))


@jax.jit
def grad_fn(params, batch, rng):
  loss = lambda p: framework.mean_square(NET.apply(p, batch["x"]), batch["y"])
  return jax.grad(loss)(params)


@functools.cache
def make_clients():
  x, y = make_batch()
  return [
    (
      str(i).encode(),
      fedjax.ClientDataset({"x": x[i::4], "y": y[i::4]}),
      jax.random.PRNGKey(i),
    )
    for i in range(4)
  ]


def make(tx):
  """Return federated averaging whose server takes an Optax optimizer."""
  return fedjax.algorithms.fed_avg.federated_averaging(
    grad_fn,
    fedjax.optimizers.sgd(0.1),
    fedjax.optimizers.create_optimizer_from_optax(tx),
    fedjax.ShuffleRepeatBatchHParams(batch_size=8, num_epochs=1, seed=0),
  )


def make_params():
  return NET.init(jax.random.key(0), make_batch()[0])


def run(algorithm, state, rounds):
  for _ in range(rounds):
    state, _ = algorithm.apply(state, make_clients())
  return state


@framework.each_kind
def test_fifty_rounds_end_exactly_sparse_and_survive(algorithm, tmp_path):
  pruner = make_pruner(algorithm)
  loop = make(pruner.wrap_optax(optax.sgd(1.0)))  # added
  state = run(loop, loop.init(make_params()), STEPS)
  assert_sparse(state.params, state.opt_state, grows=algorithm == "rigl")
  fedjax.training.save_checkpoint(str(tmp_path), state, round_num=1)
  again, number = fedjax.training.load_latest_checkpoint(str(tmp_path))
  assert number == 1
  assert_same(again, jax.tree.map(np.asarray, state))
  again = run(loop, again, 1)
  assert_sparse(again.params, again.opt_state, grows=algorithm == "rigl")


def test_straight_through_equals_a_plain_loop():
  pruner = make_pruner("magnitude_ste")
  loop = make(pruner.wrap_optax(optax.sgd(1.0)))
  state = run(loop, loop.init(make_params()), STEPS)
  dense = make(optax.sgd(1.0))

  def grad(params):
    """The step of one round of a server without a pruner."""
    after = run(dense, dense.init(params), 1).params
    return jax.tree.map(lambda a, b: a - b, params, after)

  framework.assert_straight_through(
    pruner,
    optax.sgd(1.0),
    make_params(),
    grad,
    (state.params, state.opt_state),
  )


@framework.each_kind
def test_the_recipe_of_the_papers_table_ends_exactly_sparse(algorithm):
  recipe = framework.recipe("emnist_fedjax")
  rng = np.random.default_rng(0)
  writers = {
    str(i).encode(): {
      "x": rng.normal(size=(6, 28, 28, 1)).astype(np.float32),
      "y": rng.integers(0, 62, 6),
    }
    for i in range(4)
  }
  state = recipe.train(
    algorithm,
    fedjax.models.emnist.create_conv_model(only_digits=False),
    fedjax.InMemoryFederatedData(writers),
    rounds=8,
    per_round=2,
  )
  grows = algorithm == "rigl"
  assert_sparse(state.params, state.opt_state, 0.8, grows)
