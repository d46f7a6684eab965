"""Tunix: PeftTrainer takes the wrapped optimizer unchanged; one line."""

import framework
import jax
from framework import SGD, assert_sparse, make_batch, make_pruner

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


def make(folder, steps):
  config = peft_trainer.TrainingConfig(
    eval_every_n_steps=1000,
    max_steps=steps,
    checkpoint_root_directory=str(folder),
    checkpointing_options=ocp.CheckpointManagerOptions(
      save_interval_steps=framework.STEPS
    ),
  )
  trainer = peft_trainer.PeftTrainer(
    Model(nnx.Rngs(0)),
    make_pruner().wrap_optax(SGD),  # added
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


def test_a_real_trainer_ends_exactly_sparse_and_resumes(tmp_path):
  x, y = make_batch()
  batch = peft_trainer.TrainingInput(input_tokens=x, input_mask=y)
  trainer = make(tmp_path, framework.STEPS)
  trainer.train([batch] * framework.STEPS)
  assert_sparse(*parts(trainer))
  trainer.close()
  again = make(tmp_path, framework.STEPS + 5)
  params, state = parts(again)
  assert int(state.count) == framework.STEPS, "the checkpoint was not restored"
  assert_sparse(params, state)
  again.train([batch] * (framework.STEPS + 5))
  assert_sparse(*parts(again))
  again.close()
