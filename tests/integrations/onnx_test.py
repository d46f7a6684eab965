"""ONNX: sparse initializers run in onnxruntime, and are smaller."""

import framework
import jax
import numpy as np
from framework import make_pruner

framework.require("onnx", "jax2onnx", "onnxruntime")

import jax2onnx
import onnxruntime

from jaxpruner.integrations import onnx

SPARSITY = 0.9


def make_model():
  keys = jax.random.split(jax.random.key(0), 2)
  params = {
    "up": jax.random.normal(keys[0], (128, 256)),
    "down": jax.random.normal(keys[1], (256, 64)),
  }
  params, masks = make_pruner(sparsity=SPARSITY).instant_sparsify(params)
  model = lambda x: jax.nn.relu(x @ params["up"]) @ params["down"]
  return model, params


def run(proto, x):
  session = onnxruntime.InferenceSession(
    proto.SerializeToString(), providers=["CPUExecutionProvider"]
  )
  return session.run(None, {session.get_inputs()[0].name: x})[0]


def test_a_pruned_model_is_stored_sparse_and_gives_the_same_answers():
  model, params = make_model()
  dense = jax2onnx.to_onnx(model, [("B", 128)])
  sparse = onnx.sparsify(dense)  # added
  x = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
  # One unfolds the other: the same program, bit for bit.
  np.testing.assert_array_equal(run(sparse, x), run(dense, x))
  np.testing.assert_allclose(run(sparse, x), model(x), rtol=1e-4, atol=1e-3)
  stored = [
    int(np.prod(t.values.dims)) for t in sparse.graph.sparse_initializer
  ]
  kept = [int((np.asarray(w) != 0).sum()) for w in params.values()]
  assert sorted(stored) == sorted(kept)
  ratio = sparse.ByteSize() / dense.ByteSize()
  assert ratio < 3 * (1 - SPARSITY) + 0.05


def test_weights_that_are_not_sparse_enough_stay_dense():
  params = jax.random.normal(jax.random.key(0), (16, 16))
  dense = jax2onnx.to_onnx(lambda x: x @ params, [("B", 16)])
  assert not onnx.sparsify(dense).graph.sparse_initializer


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("onnx")
