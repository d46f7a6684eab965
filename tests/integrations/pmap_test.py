"""`jax.pmap`: a replicated state, averaged gradients, donation."""

import functools

import framework
import jax
import numpy as np
import optax
from framework import SGD, STEPS, assert_same, assert_sparse, make_pruner

framework.require("core", "flax", "msgpack")

import flax.linen as nn
import flax.serialization
from flax import jax_utils


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))


@functools.cache
def make(algorithm):
  devices = jax.local_device_count()
  x, y = (a.reshape(devices, -1, a.shape[1]) for a in framework.make_batch())
  model = Model()
  params = model.init(jax.random.key(0), x[0])["params"]
  tx = make_pruner(algorithm).wrap_optax(SGD)  # added

  @functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0,))
  def step(carry, x, y):
    params, opt_state = carry
    loss = lambda p: framework.mean_square(model.apply({"params": p}, x), y)
    grads = jax.lax.pmean(jax.grad(loss)(params), "batch")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def run(carry, steps):
    carry = jax_utils.replicate(carry)
    for _ in range(steps):
      carry = jax.block_until_ready(step(carry, x, y))
    for leaf in jax.tree.leaves(carry):
      assert (np.asarray(leaf) == np.asarray(leaf)[0]).all()
    return jax.device_get(jax_utils.unreplicate(carry))

  return run, (params, tx.init(params))


@framework.each_kind
def test_replicas_agree_end_exactly_sparse_and_resume(algorithm):
  run, fresh = make(algorithm)
  end = run(fresh, STEPS)
  assert_sparse(*end, grows=algorithm == "rigl")
  data = flax.serialization.to_bytes(run(fresh, STEPS - 20))
  again = flax.serialization.from_bytes(fresh, data)
  assert_same(run(again, 20), end)
