"""Tunix: PeftTrainer takes the wrapped optimizer unchanged; one line."""

import framework
import jax
from framework import SGD, STEPS, assert_sparse, make_batch, make_pruner

framework.require("tunix", "tunix")

import orbax.checkpoint as ocp
from flax import nnx
from tunix.sft import peft_trainer


class Model(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(8, 16, rngs=rngs)
    self.last = nnx.Linear(16, 4, rngs=rngs)

  def __call__(self, x):
    return self.last(nnx.relu(self.first(x)))


def make(pruner, folder, steps):
  config = peft_trainer.TrainingConfig(
    eval_every_n_steps=1000,
    max_steps=steps,
    checkpoint_root_directory=str(folder),
    checkpointing_options=ocp.CheckpointManagerOptions(
      save_interval_steps=STEPS
    ),
  )
  trainer = peft_trainer.PeftTrainer(
    Model(nnx.Rngs(0)),
    pruner.wrap_optax(SGD),  # added
    config,
  )
  trainer.with_gen_model_input_fn(
    lambda batch: {"x": batch.input_tokens, "y": batch.input_mask}
  )
  return trainer.with_loss_fn(
    lambda model, x, y: framework.mean_square(model(x), y)
  )


def parts(trainer):
  is_variable = lambda node: isinstance(node, nnx.Variable)
  unbox = lambda tree: jax.tree.map(
    lambda v: v.get_value() if is_variable(v) else v, tree, is_leaf=is_variable
  )
  params = unbox(nnx.state(trainer.model, nnx.Param))
  return params, unbox(trainer.optimizer.opt_state)


def make_input():
  x, y = make_batch()
  return peft_trainer.TrainingInput(input_tokens=x, input_mask=y)


@framework.each_kind
def test_a_real_trainer_ends_exactly_sparse_and_resumes(algorithm, tmp_path):
  pruner = make_pruner(algorithm)
  trainer = make(pruner, tmp_path, STEPS)
  trainer.train([make_input()] * STEPS)
  grows = algorithm == "rigl"
  assert_sparse(*parts(trainer), grows=grows)
  trainer.close()
  again = make(pruner, tmp_path, STEPS + 5)
  params, state = parts(again)
  assert int(state.count) == STEPS, "the checkpoint was not restored"
  assert_sparse(params, state, grows=grows)
  again.train([make_input()] * (STEPS + 5))
  assert_sparse(*parts(again), grows=grows)
  again.close()


def test_straight_through_equals_a_plain_loop(tmp_path):
  pruner = make_pruner("magnitude_ste")
  trainer = make(pruner, tmp_path, STEPS)
  start, _ = parts(trainer)
  trainer.train([make_input()] * STEPS)
  x, y = make_batch()

  def loss(params):
    layer = lambda x, name: x @ params[name]["kernel"] + params[name]["bias"]
    return framework.mean_square(layer(nnx.relu(layer(x, "first")), "last"), y)

  framework.assert_straight_through(
    pruner, SGD, start, jax.jit(jax.grad(loss)), parts(trainer)
  )
  trainer.close()
