"""PureJaxRL: one file per agent, compiled whole; wrap its `tx`, one line."""

import importlib.util
import pathlib
import sys

import framework
import jax
import pytest
from framework import STEPS, assert_same, assert_sparse, make_pruner

framework.require("purejaxrl --source purejaxrl=DIR", "purejaxrl", "gymnax")

import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

CONFIG = {
  "LR": 2.5e-3,
  "NUM_ENVS": 4,
  "NUM_STEPS": 16,
  "TOTAL_TIMESTEPS": 13 * 64,
  "UPDATE_EPOCHS": 2,
  "NUM_MINIBATCHES": 2,
  "GAMMA": 0.99,
  "GAE_LAMBDA": 0.95,
  "CLIP_EPS": 0.2,
  "ENT_COEF": 0.01,
  "VF_COEF": 0.5,
  "MAX_GRAD_NORM": 0.5,
  "ACTIVATION": "tanh",
  "ENV_NAME": "CartPole-v1",
  "ANNEAL_LR": False,
}


@pytest.fixture
def ppo(monkeypatch):
  """The script `ppo.py`; it imports its neighbours by their bare names."""
  spec = importlib.util.find_spec("purejaxrl")
  folder = pathlib.Path(next(iter(spec.submodule_search_locations)))
  monkeypatch.syspath_prepend(str(folder))
  spec = importlib.util.spec_from_file_location("ppo", folder / "ppo.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  yield module
  sys.modules.pop("wrappers", None)


def sparse_state(pruner):
  """The script's `TrainState`, as if its line `tx=tx` were edited."""

  class Sparse(TrainState):
    @classmethod
    def create(cls, *, tx, **options):
      tx = pruner.wrap_optax(tx)  # added
      return TrainState.create(tx=tx, **options)

  return Sparse


@framework.each_kind
def test_an_agent_compiled_whole_ends_exactly_sparse(
  algorithm, ppo, monkeypatch, tmp_path
):
  pruner = make_pruner(algorithm)
  monkeypatch.setattr(ppo, "TrainState", sparse_state(pruner))
  out = jax.jit(ppo.make_train(dict(CONFIG)))(jax.random.PRNGKey(0))
  state = out["runner_state"][0]
  assert int(state.opt_state.count) >= STEPS
  grows = algorithm == "rigl"
  assert_sparse(state.params, state.opt_state, grows=grows)
  # PureJaxRL has no checkpoints; its users take Orbax.
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path.resolve() / "state", state)
  with ocp.StandardCheckpointer() as checkpointer:
    again = checkpointer.restore(tmp_path.resolve() / "state", state)
  assert_same(jax.tree.leaves(again), jax.tree.leaves(state))
  grads = jax.tree.map(jax.numpy.ones_like, state.params)
  after = again.apply_gradients(grads=grads)
  assert_same(
    jax.tree.leaves(after), jax.tree.leaves(state.apply_gradients(grads=grads))
  )
  assert_sparse(after.params, after.opt_state, grows=grows)


def test_vmapped_agents_have_masks_of_their_own(ppo, monkeypatch):
  pruner = make_pruner("set")
  monkeypatch.setattr(ppo, "TrainState", sparse_state(pruner))
  train = jax.jit(jax.vmap(ppo.make_train(dict(CONFIG))))
  state = train(jax.random.split(jax.random.PRNGKey(0), 2))["runner_state"][0]
  each = [
    jax.tree.map(lambda x, i=i: x[i], (state.params, state.opt_state))
    for i in range(2)
  ]
  for params, opt_state in each:
    assert_sparse(params, opt_state, grows=True)
  masks = [jax.tree.leaves(opt_state.masks) for _, opt_state in each]
  assert any((a != b).any() for a, b in zip(*masks, strict=True))
