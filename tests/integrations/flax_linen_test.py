"""Flax Linen: the pruner is the `tx` of a TrainState, one line."""

import functools

import framework
import jax
from framework import SGD, assert_same, assert_sparse, make_batch, make_pruner

framework.require("core", "flax", "msgpack", "orbax")

import flax.linen as nn
import flax.serialization
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints
from flax.training.train_state import TrainState


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))


@functools.cache
def trained(algorithm="magnitude"):
  pruner = make_pruner(algorithm)
  model = Model()
  x, y = make_batch()
  state = TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), x)["params"],
    tx=pruner.wrap_optax(SGD),  # added
  )

  @jax.jit
  def step(state):
    def loss(params):
      return framework.mean_square(state.apply_fn({"params": params}, x), y)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))

  for _ in range(framework.STEPS):
    state = step(state)
  return state, step


@framework.each_kind
def test_a_train_state_ends_exactly_sparse(algorithm):
  state, _ = trained(algorithm)
  assert_sparse(state.params, state.opt_state, grows=algorithm == "rigl")


def fresh_like(state):
  return jax.tree.map(jax.numpy.zeros_like, state)


def through_msgpack(state, folder):
  (folder / "state").write_bytes(flax.serialization.to_bytes(state))
  data = (folder / "state").read_bytes()
  return flax.serialization.from_bytes(fresh_like(state), data)


def through_flax(state, folder):
  checkpoints.save_checkpoint(folder.resolve(), state, step=1)
  return checkpoints.restore_checkpoint(folder.resolve(), fresh_like(state))


def through_orbax(state, folder):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder.resolve() / "state", state)
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(folder.resolve() / "state", fresh_like(state))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
  "through", [through_msgpack, through_flax, through_orbax]
)
def test_masks_survive_every_checkpoint_of_flax(through, tmp_path):
  state, step = trained()
  restored = through(state, tmp_path)
  assert_same(restored, state)
  after = step(restored)
  assert_same(after, step(state))
  assert_sparse(after.params, after.opt_state)
