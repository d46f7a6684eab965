"""JAX's own switches: five algorithms keep their contract under each.

Numbers that a switch does not touch stay the same to the bit. The model is a
given gradient, so that what a switch finds is ours and not a model's.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner

NAMES = ("magnitude", "magnitude_ste", "rigl", "global_magnitude", "set")
STEPS = 6
KEPT = 48  # of 192 weights


@contextlib.contextmanager
def switched(name, value):
  before = getattr(jax.config, name)
  jax.config.update(name, value)
  try:
    yield
  finally:
    jax.config.update(name, before)


# Switch -> whether the numbers stay those of a run without it.
SWITCHES = {
  "rank_promotion": (lambda: jax.numpy_rank_promotion("raise"), True),
  "dtype_promotion": (lambda: jax.numpy_dtype_promotion("strict"), True),
  "tracer_leaks": (jax.checking_leaks, True),
  "debug_nans": (lambda: jax.debug_nans(True), True),
  "debug_infs": (lambda: switched("jax_debug_infs", True), True),
  "disable_jit": (jax.disable_jit, True),
  "rbg": (lambda: jax.default_prng_impl("rbg"), False),
  "threefry": (lambda: jax.threefry_partitionable(False), False),
  "x64": (lambda: jax.enable_x64(True), False),
  "key_reuse": (lambda: jax.debug_key_reuse(True), True),
}


def make_params():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return {
    "in": {"kernel": draw(8, 16), "bias": draw(16)},
    "out": {"kernel": draw(16, 4)},
  }


def train(name, guard=contextlib.nullcontext):
  """Train with a given gradient; return parameters and state."""
  updater = jaxpruner.create_updater_from_config(
    {"algorithm": name, "sparsity": 0.75, "total_steps": STEPS, "rng_seed": 0}
  )
  tx = updater.wrap_optax(optax.sgd(0.1))
  params = make_params()
  state = tx.init(params)
  params = updater.post_gradient_update(params, state)
  one = jax.tree.map(jnp.ones_like, params)

  @jax.jit
  def step(params, state):
    grads = jax.tree.map(lambda p, o: jnp.sin(p) + o, params, one)
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(jnp.add, params, updates), state

  with guard():
    for _ in range(STEPS):
      params, state = step(params, state)
  return updater, params, state


@functools.cache
def reference(name):
  return train(name)[1:]


def assert_contract(updater, params, state):
  """Pruned weights are +0.0, and exactly the asked number is kept."""
  params = updater.pre_forward_update(params, state)
  masks = [state.masks[k]["kernel"] for k in ("in", "out")]
  kernels = [params[k]["kernel"] for k in ("in", "out")]
  assert sum(int(np.asarray(m).sum(dtype=np.int64)) for m in masks) == KEPT
  for mask, kernel in zip(masks, kernels, strict=True):
    pruned = np.asarray(kernel)[np.asarray(mask) == 0]
    assert not pruned.any() and not np.signbit(pruned).any()
    assert kernel.dtype == jnp.float32 and mask.dtype == jnp.uint8


# Each pass of a search runs operation by operation.
SLOW = ("disable_jit",)


@pytest.mark.parametrize(
  "switch",
  [
    pytest.param(s, marks=pytest.mark.slow) if s in SLOW else s
    for s in SWITCHES
  ],
)
@pytest.mark.parametrize("name", NAMES)
def test_algorithms_keep_their_contract_under_every_switch(name, switch):
  context, same = SWITCHES[switch]
  expected = reference(name)
  with context():
    found = train(name)
    assert_contract(*found)
  if not same:
    return
  for a, b in zip(
    jax.tree.leaves(found[1:]), jax.tree.leaves(expected), strict=True
  ):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    if switch == "disable_jit":  # operations are fused differently
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    else:
      np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_moves_nothing_between_host_and_device(name):
  # The first step compiles, which may place constants; the others run.
  assert_contract(*train(name, lambda: jax.transfer_guard("disallow")))
