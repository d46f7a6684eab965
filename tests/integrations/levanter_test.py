"""Levanter: its Trainer takes the wrapped optimizer; one line."""

import datetime
import itertools

import framework
import jax
import numpy as np
import pytest
from framework import SGD, STEPS, assert_same, assert_sparse, make_pruner

framework.require("levanter", "levanter", "haliax")

import equinox as eqx
import haliax as hax
import jmp
from levanter import checkpoint, trainer
from levanter.tracker import NoopConfig

In, Mid, Out = hax.make_axes(In=8, Mid=16, Out=4)
Batch = hax.Axis("batch", 32)


class Model(eqx.Module):
  first: hax.nn.Linear
  last: hax.nn.Linear

  def __call__(self, x):
    return self.last(hax.nn.relu(self.first(x)))


def make_model():
  keys = jax.random.split(jax.random.PRNGKey(0))
  return Model(
    hax.nn.Linear.init(In, Mid, key=keys[0]),
    hax.nn.Linear.init(Mid, Out, key=keys[1]),
  )


def loss(model, example, *, key=None):
  x, y = example
  return hax.mean((model(x) - y) ** 2)


def make(pruner, folder, steps):
  config = trainer.TrainerConfig(
    id="sparse",
    tracker=NoopConfig(),
    mp=jmp.get_policy("f32"),
    num_train_steps=steps,
    train_batch_size=Batch.size,
    steps_per_eval=10_000,
    require_accelerator=False,
    log_dir=folder / "logs",
    checkpointer=checkpoint.CheckpointerConfig(
      base_path=str(folder / "checkpoints"),
      save_interval=datetime.timedelta(days=1),
    ),
  )
  return trainer.Trainer(
    config,
    pruner.wrap_optax(SGD),  # added
    loss,
    add_default_hooks=False,
  )


def train(pruner, folder, steps):
  """Train up to a step, from the last checkpoint if there is one; save."""
  x, y = framework.make_batch()
  with make(pruner, folder, steps) as loop:
    x = hax.named(jax.numpy.asarray(x), (Batch, In))
    y = hax.named(jax.numpy.asarray(y), (Batch, Out))
    state = loop.initial_state(jax.random.PRNGKey(1), model_init=make_model)
    state = loop.train(state, itertools.repeat((x, y))).state
    saver = loop.config.checkpointer.create("sparse")
    saver.save_checkpoint(
      trainer.StepInfo(state, 0.0, 0.0), f"step-{int(state.step)}"
    )
    saver.wait_until_finished()
  is_named = lambda node: isinstance(node, hax.NamedArray)
  return jax.tree.map(
    lambda x: x.array if is_named(x) else x,
    (state.trainable_model, state.opt_state),
    is_leaf=is_named,
  )


@pytest.mark.filterwarnings("default")
@framework.each_kind
def test_a_trainer_ends_exactly_sparse_and_resumes(algorithm, tmp_path):
  pruner = make_pruner(algorithm)
  model, state = train(pruner, tmp_path / "whole", STEPS)
  assert int(state.count) == STEPS
  assert_sparse(model, state, grows=algorithm == "rigl")
  train(pruner, tmp_path / "parts", STEPS - 20)
  again = train(pruner, tmp_path / "parts", STEPS)
  assert_same(
    jax.tree.map(np.asarray, again), jax.tree.map(np.asarray, (model, state))
  )
