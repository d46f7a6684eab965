"""t5x: its trainer on a tiny T5, with a partitioned state; gin."""

import functools
import itertools
import pathlib

import framework
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from framework import SPARSITY, STEPS, assert_same, assert_sparse, make_pruner

framework.require("t5x --source t5x=DIR", "t5x", "airio", "jestimator")

import gin
import seqio
from t5x import (
  adafactor,
  checkpoints,
  gin_utils,
  models,
  partitioning,
  trainer,
  utils,
)
from t5x.examples.t5 import network

from jaxpruner.integrations import t5x

LEARNING = 0.05


def make_config(algorithm):
  return {"algorithm": algorithm, "sparsity": SPARSITY, "total_steps": STEPS}


def make_model(algorithm, definition=None):
  config = network.T5Config(
    vocab_size=32,
    emb_dim=8,
    num_heads=8,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=2,
    mlp_dim=16,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.0,
  )
  words = seqio.PassThroughVocabulary(32)
  return models.EncoderDecoderModel(
    module=network.Transformer(config),
    input_vocabulary=words,
    output_vocabulary=words,
    optimizer_def=definition
    or t5x.sparse_optimizer(  # added
      optax.sgd(LEARNING, momentum=0.9), make_config(algorithm)
    ),
    loss_normalizing_factor=16 * 8,
  )


@functools.cache
def make_batch():
  rng = np.random.default_rng(0)
  words = lambda: rng.integers(1, 32, size=(16, 8)).astype(np.int32)
  return {
    "encoder_input_tokens": words(),
    "decoder_input_tokens": words(),
    "decoder_target_tokens": words(),
    "decoder_loss_weights": np.ones((16, 8), np.int32),
  }


class Run:
  """A model, its partitioner and its initializer, on all devices."""

  def __init__(self, algorithm, definition=None):
    self.model = make_model(algorithm, definition)
    self.partitioner = partitioning.PjitPartitioner(num_partitions=1)
    batch = make_batch()
    self.initializer = utils.TrainStateInitializer(
      optimizer_def=self.model.optimizer_def,
      init_fn=self.model.get_initial_variables,
      input_shapes={k: v.shape for k, v in batch.items()},
      input_types={k: v.dtype for k, v in batch.items()},
      partitioner=self.partitioner,
    )
    self.start = self.initializer.from_scratch(jax.random.PRNGKey(0))

  def train(self, state, steps):
    with trainer.Trainer(
      model=self.model,
      train_state=state,
      partitioner=self.partitioner,
      eval_names=[],
      summary_dir=None,
      train_state_axes=self.initializer.train_state_axes,
      rng=jax.random.PRNGKey(1),
      learning_rate_fn=lambda _: 0.0,  # not Optax's
      num_microbatches=None,
    ) as loop:
      # One by one: XLA gives up on the collectives of many steps in flight, of
      # virtual devices on few cores.
      for _ in range(steps):
        loop.train(itertools.repeat(make_batch()), 1).result()
      return loop.train_state

  def through_legacy(self, state, folder):
    make = lambda: checkpoints.Checkpointer(
      self.initializer.global_train_state_shape, self.partitioner, str(folder)
    )
    make().save(state)
    return make().restore(step=int(state.step))

  def through_orbax(self, state, folder):
    make = lambda: checkpoints.OrbaxCheckpointManagerInterface(
      str(folder),
      self.initializer.global_train_state_shape,
      self.partitioner,
    )
    manager = make()
    manager.save(state)
    manager.close()
    return make().restore(step=int(state.step))


def parts(state):
  return state.params, state.param_states


def test_masks_lie_where_their_parameters_lie():
  run = Run("magnitude")
  params, state = parts(run.start)
  kernel = lambda tree: tree["encoder"]["layers_0"]["mlp"]["wo"]["kernel"]
  if jax.device_count() > 1:
    assert not kernel(params).sharding.is_fully_replicated
  assert kernel(state.masks).sharding == kernel(params).sharding


@framework.each_kind
def test_a_trainer_ends_exactly_sparse_and_resumes(algorithm, tmp_path):
  run = Run(algorithm)
  middle = run.train(run.start, STEPS - 20)
  for through in (run.through_legacy, run.through_orbax):
    restored = through(middle, tmp_path / through.__name__)
    assert_same(jax.tree.leaves(restored), jax.tree.leaves(middle))
  end, again = run.train(middle, 20), run.train(restored, 20)
  assert_same(jax.tree.leaves(again), jax.tree.leaves(end))
  assert int(end.param_states.count) == STEPS
  assert_sparse(*parts(end), grows=algorithm == "rigl")


def test_straight_through_equals_a_plain_loop():
  run = Run("magnitude_ste")
  # Laid out as t5x does: sums over devices then run in the same order.
  params = jax.tree.map(jnp.copy, parts(run.start)[0])
  end = run.train(run.start, STEPS)
  spec = run.partitioner.data_partition_spec
  batch = jax.device_put(
    make_batch(), jax.sharding.NamedSharding(run.partitioner.mesh, spec)
  )

  def loss(params):
    return run.model.loss_fn(params, batch, None)[0]

  framework.assert_straight_through(
    make_pruner("magnitude_ste"),
    optax.sgd(LEARNING, momentum=0.9),
    params,
    jax.jit(jax.grad(loss)),
    parts(end),
    # Two programs for the same sums; measured after 50 steps: 4e-5.
    rtol=1e-4,
    atol=2e-5,
  )


GIN = """
from __gin__ import dynamic_registration
import optax
from jaxpruner.integrations import t5x
OPTIMIZER = @t5x.sparse_optimizer()
t5x.sparse_optimizer.tx = @optax.adamw()
t5x.sparse_optimizer.pruner_config = {
  "algorithm": "rigl", "sparsity": 0.75, "total_steps": 100_000}
optax.adamw.learning_rate = 1e-3
"""


def test_the_snippet_for_gin_configures_a_pruned_optimizer(tmp_path):
  # As t5x/main.py reads its files; the macro is used like t5x's models use it.
  (tmp_path / "sparse.gin").write_text(
    GIN
    + "from t5x import models\n"
    + "models.EncoderDecoderModel.optimizer_def = %OPTIMIZER\n"
  )
  gin.clear_config()
  gin_utils.parse_gin_flags([str(tmp_path)], ["sparse.gin"], [])
  definition = gin.query_parameter("%OPTIMIZER").scoped_configurable_fn()
  gin.clear_config()
  state = definition.init_state({"kernel": np.ones((4, 4), np.float32)})
  assert int(state.param_states.masks["kernel"].sum()) == 4


def test_t5xs_own_adafactor_is_refused_with_the_cure():
  with pytest.raises(ValueError, match="pass optax.adamw"):
    t5x.sparse_optimizer(adafactor.Adafactor(), make_config("magnitude"))


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("t5x")


@framework.each_kind
def test_the_recipe_of_the_papers_table_ends_exactly_sparse(algorithm):
  paper = framework.recipe("paper")
  folder = str(pathlib.Path(paper.__file__).parent)
  bindings = [f'ALGORITHM = "{algorithm}"']
  gin.clear_config()
  gin_utils.parse_gin_flags([folder], ["t5_base_pruner.gin"], bindings)
  named = gin.query_parameter("sparse_optimizer.pruner_config")
  published = {key: getattr(x, "name", x) for key, x in named.items()}
  row = paper.pruner_config("t5_base", "magnitude")
  assert published["sparsity"] == row["sparsity"]
  assert published["dist_type"] == row["dist_type"]
  assert gin.query_parameter("%START") == row["update_start_step"]
  assert gin.query_parameter("%END") == row["update_end_step"]
  assert gin.query_parameter("%EVERY") == row["update_freq"]
  assert gin.query_parameter("%TRAIN_STEPS") == paper.ROWS["t5_base"].steps
  start = 1 if algorithm == "rigl" else 5
  short = [f"START = {start}", "END = 15", "EVERY = 2", "TRAIN_STEPS = 20"]
  short.append("optax.warmup_cosine_decay_schedule.warmup_steps = 2")
  gin.clear_config()
  gin_utils.parse_gin_flags([folder], ["t5_base_pruner.gin"], bindings + short)
  definition = gin.query_parameter("%OPTIMIZER").scoped_configurable_fn()
  gin.clear_config()
  run = Run(algorithm, definition)
  end = run.train(run.start, 20)
  assert_sparse(*parts(end), 0.8, grows=algorithm == "rigl")
