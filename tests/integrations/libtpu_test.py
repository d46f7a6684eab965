"""libtpu: the TPU's own compiler takes our kernels and steps, without a TPU."""

import os
import re

import pytest

pytest.importorskip("libtpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no cloud to ask
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxpruner
from jaxpruner import sparse


@pytest.fixture(scope="module")
def chips():
  # A program that was compiled without a device cannot be read from a cache.
  kept = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  yield topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
  jax.config.update("jax_enable_compilation_cache", kept)


def matrix(format):
  rows = np.arange(1024)
  if format == "block":
    mask = (rows[:, None] // 128 + rows // 128) % 4 == 0
    options = {"block_shape": (128, 128)}
  elif format == "strided_nm":
    mask = np.broadcast_to((rows[:, None] // 128) % 2 == 0, (1024, 1024))
    options = {"n": 2, "m": 4}
  else:
    mask, options = (rows - rows[:, None]) % 1024 < 40, {}
  return sparse.pack(np.where(mask, 1.0, 0.0), mask, format=format, **options)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("format", ["block", "strided_nm", "diagonals"])
def test_a_step_with_sparse_weights_compiles_for_a_chip(format, dtype, chips):
  on = SingleDeviceSharding(chips[0])
  w = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(
      a.shape, dtype if a.dtype.kind == "f" else a.dtype, sharding=on
    ),
    matrix(format),
  )

  def loss(x, w):
    return jnp.sum((x @ w).astype(jnp.float32) ** 2)

  step = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))
  x = jax.ShapeDtypeStruct((300, 1024), dtype, sharding=on)
  lowered = step.lower(x, w)
  assert lowered.as_text().count("@tpu_custom_call") == 3
  program = lowered.compile()
  dense = jax.jit(jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), argnums=(0, 1)))
  dense = dense.lower(
    x, jax.ShapeDtypeStruct((1024, 1024), dtype, sharding=on)
  ).compile()
  size = lambda p: p.memory_analysis().argument_size_in_bytes
  assert size(program) < size(dense)


@pytest.mark.parametrize("algorithm", ["magnitude", "rigl", "magnitude_ste"])
def test_a_pruning_step_compiles_for_four_chips_and_gathers_no_weights(
  algorithm, chips
):
  mesh = jax.sharding.Mesh(np.reshape(chips, (4,)), ("model",))
  spread = NamedSharding(mesh, PartitionSpec(None, "model"))
  whole = NamedSharding(mesh, PartitionSpec())
  side = 2048
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": algorithm, "sparsity": 0.9, "total_steps": 100}
  )
  tx = pruner.wrap_optax(optax.adam(1e-3))

  def step(params, state, x):
    loss = lambda p: jnp.sum((x @ p["a"] @ p["b"].T) ** 2)
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  def placed(a):
    on = spread if a.shape == (side, side) else whole
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on)

  params = {n: jax.ShapeDtypeStruct((side, side), jnp.float32) for n in "ab"}
  state = jax.eval_shape(tx.init, params)
  x = jax.ShapeDtypeStruct((64, side), jnp.float32, sharding=whole)
  arguments = jax.tree.map(placed, (params, state))
  program = jax.jit(step).lower(*arguments, x).compile().as_text()
  gathered = re.findall(r"= \w+\[([\d,]*)\][^=]* all-gather", program)
  sizes = [np.prod([int(d) for d in g.split(",") if d]) for g in gathered]
  assert max(sizes, default=0) < side * side / 16
