"""Scenic: its classification trainer inside a context; one line."""

import functools

import framework
import jax
import numpy as np
import optax
import pytest
from framework import STEPS, assert_same, assert_sparse, make_pruner

framework.require("scenic --source scenic=DIR", "scenic")
# PyPI's package of this name is another project.
pytest.importorskip("scenic.train_lib.optimizers", reason="another scenic")

import flax.core
import ml_collections
from clu import metric_writers
from flax import jax_utils
from scenic.dataset_lib import dataset_utils
from scenic.model_lib import models
from scenic.train_lib import classification_trainer, optimizers

import jaxpruner
from jaxpruner.integrations import scenic

MODELS = {
  "perceptron": "fully_connected_classification",
  "vit": "vit_multilabel_classification",
}


def make_config(steps):
  return ml_collections.ConfigDict(
    {
      "batch_size": 16,
      "num_training_steps": steps,
      "num_training_epochs": None,
      "log_eval_steps": steps,
      "lr_configs": {
        "learning_rate_schedule": "compound",
        "factors": "constant",
        "base_learning_rate": 0.05,
      },
      "optimizer": "momentum",  # Scenic's old spelling
      "hid_sizes": [16],
      "model": {
        "patches": {"size": (4, 4)},
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_heads": 2,
        "num_layers": 2,
        "representation_size": None,
        "classifier": "token",
        "attention_dropout_rate": 0.0,
        "dropout_rate": 0.0,
      },
      "checkpoint": True,
      "debug_train": False,
      "debug_eval": False,
      "xprof": False,
    }
  )


@functools.cache
def make_batch():
  """Return a batch; its first axis is that of the devices."""
  rng = np.random.default_rng(0)
  batch = {
    "inputs": rng.normal(size=(16, 8, 8, 1)).astype(np.float32),
    "label": np.eye(4, dtype=np.float32)[rng.integers(4, size=16)],
    "batch_mask": np.ones(16, np.float32),
  }
  devices = jax.local_device_count()
  return {k: v.reshape(devices, -1, *v.shape[1:]) for k, v in batch.items()}


def make_data():
  again = lambda: iter(make_batch, None)
  about = {
    "input_shape": (-1, 8, 8, 1),
    "num_classes": 4,
    "num_train_examples": 16,
    "num_eval_examples": 16,
    "target_is_onehot": True,
  }
  return dataset_utils.Dataset(again(), again(), None, about)


def train(pruner, model, folder, steps=STEPS):
  with scenic.pruned(pruner):  # added
    state, _, _ = classification_trainer.train(
      rng=jax.random.PRNGKey(0),
      config=make_config(steps),
      model_cls=models.get_model_cls(MODELS[model]),
      dataset=make_data(),
      workdir=str(folder),
      writer=metric_writers.MultiWriter([]),
    )
  return jax_utils.unreplicate(state)


@pytest.mark.parametrize("model", MODELS)
@framework.each_kind
def test_a_trainer_ends_exactly_sparse_and_resumes(algorithm, model, tmp_path):
  pruner = make_pruner(algorithm)
  state = train(pruner, model, tmp_path / "whole")
  assert int(state.opt_state.count) == STEPS
  assert_sparse(state.params, state.opt_state, grows=algorithm == "rigl")
  train(pruner, model, tmp_path / "parts", STEPS - 20)
  again = train(pruner, model, tmp_path / "parts")
  assert_same((again.params, again.opt_state), (state.params, state.opt_state))


def test_straight_through_equals_a_plain_loop(tmp_path):
  pruner = make_pruner("magnitude_ste")
  state = train(pruner, "perceptron", tmp_path)
  model = models.get_model_cls(MODELS["perceptron"])(
    make_config(STEPS), make_data().meta_data
  )
  batch = {k: v.reshape(-1, *v.shape[2:]) for k, v in make_batch().items()}
  _, key = jax.random.split(jax.random.PRNGKey(0))
  x = batch["inputs"]
  variables = model.flax_model.init(key, x, train=False, debug=False)
  params = flax.core.freeze(variables["params"])

  def loss(params):
    logits = model.flax_model.apply({"params": params}, x, train=True)
    return model.loss_function(logits, batch, params)

  framework.assert_straight_through(
    pruner,
    optax.sgd(0.05, momentum=0.9),
    params,
    jax.jit(jax.grad(loss)),
    (state.params, state.opt_state),
  )


def test_a_trainer_of_several_optimizers_gets_each_wrapped():
  params = {"a": {"kernel": np.ones((8, 4))}, "b": {"kernel": np.ones((4, 4))}}
  config = ml_collections.ConfigDict({"optimizer": "sgd", "momentum": 0.9})
  with scenic.pruned(make_pruner("static_sparse")):
    parts = {k: optimizers.get_optimizer(config, 0.1, params) for k in params}
  tx = optax.multi_transform(parts, {"a": "a", "b": "b"})
  states = tx.init(params).inner_states
  for name, part in params.items():
    masks = jaxpruner.find_state(states[name]).masks
    assert int(masks[name]["kernel"].sum()) == part["kernel"].size // 4


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("scenic")


@pytest.mark.parametrize(
  "row, algorithm", [("resnet50", "magnitude"), ("vit_b16", "rigl")]
)
def test_the_recipe_of_the_papers_table_ends_exactly_sparse(
  row, algorithm, tmp_path
):
  recipe = framework.recipe("imagenet_scenic")
  config = recipe.get_config(f"{row},{algorithm}")
  assert config.num_training_epochs == {"resnet50": 100, "vit_b16": 90}[row]
  steps = 12
  dense = recipe.DENSE[row]
  with config.unlocked():
    config.pruner = recipe.paper.pruner_config(row, algorithm, steps, dense)
    config.update(
      {
        "batch_size": 16,
        "num_training_epochs": None,
        "num_training_steps": steps,
        "log_eval_steps": steps,
        "num_filters": 4,
        "num_layers": 5,
      }
    )
    config.lr_configs.update({"total_steps": steps, "steps_per_cycle": steps})
    config.lr_configs.warmup_steps = 2
    if row == "vit_b16":
      small = {"hidden_size": 8, "num_heads": 2, "mlp_dim": 16, "num_layers": 1}
      config.model.update(small | {"representation_size": 8})
      config.model.patches.size = [4, 4]
  state, _, _ = recipe.train(
    jax.random.PRNGKey(0),
    config,
    make_data(),
    str(tmp_path),
    metric_writers.MultiWriter([]),
  )
  state = jax_utils.unreplicate(state)
  found = jaxpruner.summarize_sparsity(state.params)
  for name in dense:
    assert f"{name}" in found
  if row == "resnet50":  # uniform: each leaf by itself
    assert found["stem_conv/kernel"] == 0
    for _, mask in framework.masked_leaves(state.params, state.opt_state):
      assert abs(int(mask.sum()) - 0.2 * mask.size) <= 1
  else:
    assert_sparse(state.params, state.opt_state, 0.8, grows=True)
