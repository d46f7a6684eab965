"""LiteRT: the converter's own sparsity makes the file smaller; a recipe."""

import framework
import jax
import numpy as np
from framework import make_pruner

framework.require("litert", "ai_edge_litert", "tensorflow")

import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from jax.experimental import jax2tf


def convert(model, sparse):
  function = tf.function(
    jax2tf.convert(model, native_serialization=False),
    input_signature=[tf.TensorSpec((4, 128), tf.float32)],
    autograph=False,
  )
  converter = tf.lite.TFLiteConverter.from_concrete_functions(
    [function.get_concrete_function()], function
  )
  if sparse:
    converter.optimizations = [tf.lite.Optimize.EXPERIMENTAL_SPARSITY]  # added
  return converter.convert()


def run(content, x):
  interpreter = Interpreter(model_content=content)
  interpreter.allocate_tensors()
  interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
  interpreter.invoke()
  return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def test_a_pruned_model_converts_smaller_with_the_same_answers():
  keys = jax.random.split(jax.random.key(0), 2)
  params = {
    "up": jax.random.normal(keys[0], (128, 256)) / 11,
    "down": jax.random.normal(keys[1], (256, 64)) / 16,
  }
  params, _ = make_pruner(sparsity=0.9).instant_sparsify(params)
  params = jax.tree.map(np.asarray, params)
  model = lambda x: jax.nn.relu(x @ params["up"]) @ params["down"]
  x = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
  dense, sparse = convert(model, False), convert(model, True)
  assert len(sparse) < 0.5 * len(dense)
  np.testing.assert_allclose(run(sparse, x), run(dense, x), atol=1e-5)
  np.testing.assert_allclose(run(sparse, x), model(x), rtol=1e-4, atol=1e-4)
