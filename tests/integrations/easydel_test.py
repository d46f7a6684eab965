"""EasyDeL: it speaks the paper's API; one argument of its trainer."""

import os

import framework
import jax
import numpy as np
from framework import STEPS, assert_same, assert_sparse, make_pruner

framework.require("easydel", "easydel")

# EasyDeL sets flags of XLA that this version of it does not know.
flags = os.environ.get("XLA_FLAGS", "")
import easydel as ed

os.environ["XLA_FLAGS"] = flags
from datasets import Dataset
from flax import nnx


def make_model():
  config = ed.LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=16,
    attn_mechanism=ed.AttentionMechanisms.VANILLA,
    sharding_axis_dims=(jax.device_count(), 1, 1, 1, 1),
  )
  f32 = jax.numpy.float32
  return ed.LlamaForCausalLM(
    config, dtype=f32, param_dtype=f32, rngs=nnx.Rngs(0)
  )


def make_data():
  rng = np.random.default_rng(0)
  words = rng.integers(1, 32, size=(8 * 80, 16)).tolist()
  ones = [[1] * 16] * len(words)
  return Dataset.from_dict({"input_ids": words, "attention_mask": ones})


def make(pruner, folder, steps):
  arguments = ed.TrainingArguments(
    pruning_module=pruner,  # added
    save_directory=str(folder),
    model_name="sparse",
    max_training_steps=steps,
    num_train_epochs=1,
    total_batch_size=8,
    max_length=16,
    learning_rate=1e-2,
    optimizer=ed.EasyDeLOptimizers.ADAMW,
    scheduler=ed.EasyDeLSchedulers.NONE,
    save_steps=STEPS - 20,
    save_optimizer_state=True,
    resume_if_possible=True,
    shuffle_train_dataset=False,
    use_wandb=False,
    progress_bar_type="json",
    do_eval=False,
    track_memory=False,
  )
  return ed.Trainer(
    arguments=arguments, model=make_model(), dataset_train=make_data()
  )


def parts(state):
  is_variable = lambda node: isinstance(node, nnx.Variable)
  unbox = lambda tree: jax.tree.map(
    lambda v: v.get_value() if is_variable(v) else v, tree, is_leaf=is_variable
  )
  return unbox(state.graphstate), unbox(state.opt_state)


@framework.each_kind
def test_a_trainer_ends_exactly_sparse_and_resumes(algorithm, tmp_path):
  pruner = make_pruner(algorithm)
  state = make(pruner, tmp_path / "whole", STEPS).train().state
  params, opt_state = parts(state)
  assert int(opt_state.count) == STEPS
  assert_sparse(params, opt_state, grows=algorithm == "rigl")
  make(pruner, tmp_path / "parts", STEPS - 20).train()
  again = make(pruner, tmp_path / "parts", STEPS).train().state
  assert_same(
    jax.tree.leaves(parts(again)), jax.tree.leaves((params, opt_state))
  )
