"""Kernels of TPU and GPU: equal to dense in interpret mode, and lowered."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

import jaxpruner
from jaxpruner import sparse
from jaxpruner.sparse._pallas import block, diagonals, strided_nm

TPU = pltpu.InterpretParams(detect_races=True)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
FEW = hypothesis.settings(max_examples=3)
MANY = hypothesis.settings(max_examples=200)


@pytest.fixture(autouse=True)
def no_races():
  """Fail if the interpreter saw two accesses that no order separates."""
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call

  pltpu.reset_tpu_interpret_mode_state()
  yield
  found = interpret_pallas_call.races
  assert found is None or not found.races_found
  pltpu.reset_tpu_interpret_mode_state()


def close(actual, expected, dtype):
  actual, expected = (np.asarray(a, np.float32) for a in (actual, expected))
  scale = max(1.0, float(np.abs(expected).max(initial=0)))
  np.testing.assert_allclose(actual, expected, atol=TOLERANCE[dtype] * scale)


def draw_arrays(data, rows, columns):
  """Return x (batch, rows), g (batch, columns), a generator and the dtype."""
  dtype = data.draw(st.sampled_from(sorted(TOLERANCE)))
  batch = data.draw(st.integers(1, 40))
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  x, g = (
    jnp.asarray(rng.standard_normal((batch, side)), dtype)
    for side in (rows, columns)
  )
  return x, g, rng, dtype


def check_blocks(platform, data):
  side = {"tpu": 128, "cuda": 16}[platform]
  rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
  x, g, rng, dtype = draw_arrays(data, rows * side, columns * side)
  found = rng.random((rows, columns)) < 0.4
  found[rng.integers(rows), rng.integers(columns)] = True
  mask = np.repeat(np.repeat(found, side, 0), side, 1)
  dense = jnp.asarray(rng.standard_normal(mask.shape) * mask, dtype)
  w = sparse.pack(dense, mask, format="block", block_shape=(side, side)).matrix
  run = TPU if platform == "tpu" else True
  product = functools.partial(
    block.product, values=w.values, platform=platform, interpret=run
  )
  walk = functools.partial(block.walk, w.rows, w.cols)
  exact = functools.partial(jnp.matmul, preferred_element_type="float32")
  y = product(x, order=walk(False), columns=columns)
  close(y[: len(x)], exact(x, dense), dtype)
  y = product(g, order=walk(True), columns=rows, back=True)
  close(y[: len(g)], exact(g, dense.T), dtype)
  values = block.at_blocks(
    x, g, w.values, w.rows, w.cols, platform=platform, interpret=run
  )
  close(values, w.gather(exact(x.T, g)), dtype)


def check_strided(data):
  n, m = data.draw(st.sampled_from([(2, 4), (1, 2), (1, 4), (3, 8)]))
  rows = 128 * m * data.draw(st.integers(1, 2))
  columns = 128 * data.draw(st.integers(1, 3))
  x, g, rng, dtype = draw_arrays(data, rows, columns)
  dense = jnp.asarray(rng.standard_normal((rows, columns)), dtype)
  kind = jaxpruner.NByM(n, m, stride=128)
  mask = kind.mask(jnp.abs(dense), 1 - n / m)
  dense = jaxpruner.apply_mask(dense, mask)
  w = sparse.pack(dense, mask, format="strided_nm", n=n, m=m).matrix
  stored = w.values, w.indices, m
  exact = functools.partial(jnp.matmul, preferred_element_type="float32")
  y = strided_nm.product(x, *stored, interpret=TPU)
  close(y[: len(x)], exact(x, dense), dtype)
  y = strided_nm.product(g, *stored, back=True, interpret=TPU)
  close(y[: len(g)], exact(g, dense.T), dtype)
  values = strided_nm.at_values(x, g, *stored, interpret=TPU)
  close(values, w.gather(exact(x.T, g)), dtype)


def check_diagonals(data):
  side = 128 * data.draw(st.integers(1, 3))
  x, g, rng, dtype = draw_arrays(data, side, side)
  scores = jnp.asarray(rng.standard_normal((side, side)), dtype)
  sparsity = data.draw(st.sampled_from([0.9, 0.97]))
  mask = jaxpruner.sparsity_types.Diagonals().mask(scores, sparsity)
  dense = jaxpruner.apply_mask(scores, mask)
  w = sparse.pack(dense, mask, format="diagonals").matrix
  exact = functools.partial(jnp.matmul, preferred_element_type="float32")
  y = diagonals.product(x, w.values, w.offsets, interpret=TPU)
  close(y[: len(x)], exact(x, dense), dtype)
  y = diagonals.product(g, w.values, w.offsets, back=True, interpret=TPU)
  close(y[: len(g)], exact(g, dense.T), dtype)
  values = diagonals.at_values(x, g, w.offsets, interpret=TPU)
  close(values, w.gather(exact(x.T, g)), dtype)


CHECKS = {
  "block, tpu": functools.partial(check_blocks, "tpu"),
  "block, cuda": functools.partial(check_blocks, "cuda"),
  "strided N:M, tpu": check_strided,
  "diagonals, tpu": check_diagonals,
}


@pytest.mark.parametrize("check", CHECKS)
@FEW
@hypothesis.given(data=st.data())
def test_products_and_gradients_equal_dense(check, data):
  CHECKS[check](data)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@MANY
@hypothesis.given(data=st.data())
def test_200_shapes_equal_dense(check, data):
  CHECKS[check](data)


PACKED = {
  "block": {"block_shape": (128, 128)},
  "strided_nm": {"n": 2, "m": 4},
  "diagonals": {},
}


def packed(format, dtype=jnp.bfloat16):
  rows = np.arange(512)
  if format == "block":
    mask = (rows[:, None] // 128 + rows // 128) % 2 == 0
  elif format == "strided_nm":
    mask = np.broadcast_to((rows[:, None] // 128) % 2 == 0, (512, 512))
  else:
    mask = (rows - rows[:, None]) % 512 < 3
  dense = jnp.asarray(np.where(mask, 1.0, 0.0), dtype)
  return sparse.pack(dense, mask, format=format, **PACKED[format])


def calls(w, platform):
  """Return the number of device kernels in a training step's program."""

  def loss(x, values):
    y = x @ w.with_values(values)
    return jnp.sum(y.astype("float32") ** 2)

  x = jax.ShapeDtypeStruct((64, 512), w.dtype)
  step = jax.jit(jax.grad(loss, argnums=(0, 1)))
  allowed = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
  program = export.export(step, platforms=[platform], disabled_checks=[allowed])
  text = program(x, w.values).mlir_module()
  return text.count("@tpu_custom_call") + text.count("@__gpu$xla.gpu.triton")


@pytest.mark.parametrize("format", PACKED)
def test_a_training_step_lowers_to_three_kernels_on_tpu(format):
  assert calls(packed(format), "tpu") == 3


def test_a_training_step_lowers_to_three_kernels_on_gpu():
  assert calls(packed("block"), "cuda") == 3


@pytest.mark.parametrize("format", PACKED)
def test_other_platforms_and_dtypes_have_plain_programs(format):
  assert calls(packed(format), "cpu") == 0
  assert calls(packed(format, jnp.float16), "tpu") == 0


def test_blocks_that_do_not_fill_a_register_stay_with_xla():
  w = sparse.pack(np.eye(64), format="block", block_shape=(32, 32)).matrix
  assert not block.supports("tpu", w.values)
  assert block.supports("cuda", w.values.astype("float32"))
  odd = jax.ShapeDtypeStruct((2, 48, 48), jnp.float32)
  assert not block.supports("cuda", odd)
