"""Qwix: quantization keeps the zeros, after training and during it."""

import functools

import framework
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from framework import SGD, assert_same, assert_sparse, make_batch, make_pruner

framework.require("qwix", "qwix", "orbax")

import flax.linen as nn
import flax.serialization
import optax
import orbax.checkpoint as ocp
import qwix

import jaxpruner


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))


RULES = [
  qwix.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
]


@functools.cache
def trained(algorithm, quantized):
  x, y = make_batch()
  model = Model()
  params = model.init(jax.random.key(0), x)["params"]
  if quantized:
    model = qwix.quantize_model(model, qwix.QtProvider(_training_rules()))
  tx = make_pruner(algorithm).wrap_optax(SGD)  # added
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state):
    loss = lambda p: framework.mean_square(model.apply({"params": p}, x), y)
    grads = jax.grad(loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  for _ in range(framework.STEPS):
    params, opt_state = step(params, opt_state)
  return model, params, opt_state


def _training_rules():
  return [qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]


@framework.each_kind
def test_quantization_after_training_keeps_the_zeros(algorithm, tmp_path):
  x, _ = make_batch()
  model, params, opt_state = trained(algorithm, quantized=False)
  assert_sparse(params, opt_state, grows=algorithm == "rigl")
  ptq = qwix.quantize_model(model, qwix.PtqProvider(RULES))
  shapes = jax.eval_shape(ptq.init, jax.random.key(0), x)["params"]
  quantized = qwix.quantize_params(params, shapes)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path.resolve() / "quantized", quantized)
  with ocp.StandardCheckpointer() as checkpointer:
    quantized = checkpointer.restore(
      tmp_path.resolve() / "quantized",
      jax.tree.map(jax.numpy.zeros_like, quantized),
    )
  is_array = lambda node: isinstance(node, qwix.QArray)
  found = [
    node
    for node in jax.tree.leaves(quantized, is_leaf=is_array)
    if is_array(node)
  ]
  masks = jax.tree.leaves(opt_state.masks)
  assert len(found) == len(masks)
  for node, mask in zip(found, masks, strict=True):
    whole = np.asarray(qwix.dequantize(node))
    assert not whole[np.asarray(mask) == 0].any()
  close = ptq.apply({"params": quantized}, x)
  exact = model.apply({"params": params}, x)
  assert float(np.abs(close - exact).max()) < 0.1


@framework.each_kind
def test_quantized_training_ends_exactly_sparse(algorithm):
  _, params, opt_state = trained(algorithm, quantized=True)
  assert_sparse(params, opt_state, grows=algorithm == "rigl")
  data = flax.serialization.to_bytes((params, opt_state))
  empty = jax.tree.map(jax.numpy.zeros_like, (params, opt_state))
  assert_same(flax.serialization.from_bytes(empty, data), (params, opt_state))


@pytest.mark.parametrize("axis, order", [(0, "C"), (1, "R")])
@pytest.mark.parametrize("n, m, stride", [(1, 2, 128), (2, 4, 128), (1, 4, 8)])
def test_strided_masks_are_bit_equal(n, m, stride, axis, order):
  from qwix._src.core import sparsity

  shape = [4, 4]
  shape[axis] = 2 * m * stride
  # Few different sizes: what is kept of equals must agree too.
  w = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
  theirs = sparsity.get_sparsity_mask(w, n, m, order=order, offset=stride)
  kind = jaxpruner.sparsity_types.NByM(n, m, axis, stride)
  ours = kind.mask(jnp.abs(w), kind.sparsity)
  np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs, np.uint8))
