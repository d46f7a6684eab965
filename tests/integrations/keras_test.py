"""Keras 3 on JAX: the pruner is the optimizer of `model.compile`."""

import functools
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import framework
import numpy as np
import pytest
from framework import SPARSITY, assert_sparse, make_batch, make_pruner

framework.require("keras", "keras")

import keras

from jaxpruner.integrations.keras import SparseOptimizer, SparsityCallback


@functools.cache
def trained(algorithm):
  keras.utils.set_random_seed(0)
  model = keras.Sequential(
    [
      keras.Input((8,)),
      keras.layers.Dense(16, "relu"),
      keras.layers.LayerNormalization(),
      keras.layers.Dense(4),
    ]
  )
  model.compile(
    SparseOptimizer(make_pruner(algorithm), "adam", 1e-2),  # added
    "mse",
  )
  x, y = make_batch()
  history = model.fit(
    x,
    y,
    batch_size=16,
    epochs=framework.STEPS // 2,
    verbose=0,
    callbacks=[SparsityCallback()],
  )
  return model, history.history


@framework.each_kind
def test_fit_ends_exactly_sparse_without_a_hook(algorithm):
  model, history = trained(algorithm)
  assert_sparse(*model.optimizer.trees, grows=algorithm == "rigl")
  assert history["sparsity"][-1] == SPARSITY
  assert history["loss"][-1] < history["loss"][0]


# Keras's own variables do not know NumPy's newest protocol.
@pytest.mark.filterwarnings("ignore:__array__ implementation")
@framework.each_kind
def test_a_saved_model_comes_back_with_masks_and_goes_on(algorithm, tmp_path):
  model, _ = trained(algorithm)
  model.save(tmp_path / "model.keras")
  again = keras.models.load_model(tmp_path / "model.keras")
  for a, b in zip(
    model.optimizer.variables, again.optimizer.variables, strict=True
  ):
    np.testing.assert_array_equal(a, b)
  grows = algorithm == "rigl"
  assert_sparse(*again.optimizer.trees, grows=grows)
  again.fit(*make_batch(), batch_size=16, epochs=1, verbose=0)
  assert_sparse(*again.optimizer.trees, grows=grows)


def test_a_learning_rate_schedule_is_followed():
  model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
  rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.0])
  model.compile(SparseOptimizer(make_pruner(), "sgd", rate), "mse")
  x, y = make_batch()
  model.fit(x, y, batch_size=16, epochs=1, verbose=0)
  first = np.asarray(model.layers[0].kernel)
  model.fit(x, y, batch_size=16, epochs=1, verbose=0)
  np.testing.assert_array_equal(first, np.asarray(model.layers[0].kernel))


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_weights_without_a_gradient_stay_as_they_were():
  used, unused = keras.layers.Dense(4), keras.layers.Dense(4)
  for layer in (used, unused):
    layer.build((None, 8))
  variables = used.trainable_variables + unused.trainable_variables
  before = [np.array(v) for v in variables]
  optimizer = SparseOptimizer(make_pruner(), "sgd", 1.0)
  grads = [np.ones(v.shape, "float32") for v in variables[:2]] + [None, None]
  with pytest.warns(UserWarning, match="Gradients do not exist"):
    optimizer.apply_gradients(zip(grads, variables, strict=True))
  moved = [
    (np.array(v) != x).any() for v, x in zip(variables, before, strict=True)
  ]
  assert moved == [True, True, False, False]


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("keras")
