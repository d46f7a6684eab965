"""A model of 160 weights, its loss, and one way to train it.

Every distinct program costs a compilation, far more than its run: tests share
the shapes and the jitted steps here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import _leaves, mask_calculator

# The paper's algorithms. The others recombine their mechanisms: what depends on
# those alone, such as how a step is compiled, they show in the slow tests.
CORE = (
  "no_prune magnitude random saliency magnitude_ste random_ste "
  "global_magnitude global_saliency static_sparse set rigl"
).split()
every_algorithm = pytest.mark.parametrize(
  "name", jaxpruner.all_algorithm_names()
)
every_mechanism = pytest.mark.parametrize(
  "name",
  [
    name if name in CORE else pytest.param(name, marks=pytest.mark.slow)
    for name in jaxpruner.all_algorithm_names()
  ],
)
STEPS = 8
SPARSITY = 0.75
# Of the 96 + 48 weights in kernels.
KEPT = 36
PRUNED_LEAVES = ("in/kernel", "out/kernel")
# Adam's usual eps is zero in float16.
ADAM = optax.adam(0.05, eps=1e-4)


def make_params(seed: int = 0) -> Any:
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return {
    "in": {"kernel": draw(8, 12), "bias": draw(12)},
    "out": {"kernel": draw(12, 4)},
    "temperature": draw(4),
  }


def make_batch() -> Any:
  rng = np.random.default_rng(99)
  return (
    jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
    jnp.asarray(rng.normal(size=(16, 4)), jnp.float32),
  )


def apply_fn(params: Any, x: Any) -> Any:
  hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
  return hidden @ params["out"]["kernel"]


def loss_fn(params: Any, batch: Any) -> Any:
  x, y = batch
  error = apply_fn(params, x) - y
  # The temperature's gradient depends on no other leaf: a control.
  return jnp.mean(error**2) + jnp.sum((params["temperature"] - 2) ** 2)


def make_updater(name: str, **config: Any) -> jaxpruner.BaseUpdater:
  """Return an algorithm that is done by step 6 of 8."""
  if jaxpruner.algorithm_category(name).start == "dense":
    return jaxpruner.create_updater_from_config({"algorithm": name})
  updater = jaxpruner.create_updater_from_config(
    {"algorithm": name, "sparsity": SPARSITY, "total_steps": STEPS, **config}
  )
  batch = make_batch()
  return updater.bind(loss_fn, batch, apply_fn, batch[0])


class Trainer:
  """Train the model with one updater and one optimizer; count the traces."""

  def __init__(self, updater: Any, inner: Any):
    self.updater = updater
    self.tx = updater.wrap_optax(inner)
    self.traces = 0
    self.jitted = jax.jit(self.step)

  def start(self, params: Any) -> Any:
    state = self.tx.init(params)
    return self.updater.post_gradient_update(params, state), state

  def step(self, params: Any, state: Any, batch: Any) -> Any:
    self.traces += 1

    def loss(params):
      return loss_fn(self.updater.pre_forward_update(params, state), batch)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = self.tx.update(
      grads, state, params, grad_fn=jax.grad(loss)
    )
    return optax.apply_updates(params, updates), state

  def run(self, params: Any, state: Any, batch: Any, steps: int = STEPS) -> Any:
    for _ in range(steps):
      params, state = self.jitted(params, state, batch)
    return params, state


@functools.cache
def adam_trainer(name: str, packed: bool = False) -> Trainer:
  config = {"use_packed_masks": True} if packed else {}
  return Trainer(make_updater(name, **config), ADAM)


@functools.cache
def reference_run(name: str, seed: int = 0) -> Any:
  """Return `(params, state)` after each of the steps, the start included."""
  trainer = adam_trainer(name)
  history = [trainer.start(make_params(seed))]
  for _ in range(STEPS):
    history.append(trainer.jitted(*history[-1], make_batch()))
  return history


def masks_by_name(updater: Any, params: Any, state: Any) -> dict[str, Any]:
  """Return the unpacked NumPy masks of pruned leaves."""
  masks = jaxpruner.find_state(state).masks
  leaves = _leaves.flatten_with_names(params)[0]
  result = {}
  for (names, leaf), mask in zip(
    leaves, _leaves.align(params, masks), strict=True
  ):
    if mask is not None:
      if updater.use_packed_masks:
        mask = mask_calculator.unpack_mask(mask, leaf.shape)
      result[_leaves.join(names)] = np.asarray(mask)
  return result


def assert_confined(updater: Any, params: Any, state: Any) -> None:
  """Assert that weights under the masks are +0.0, to the sign bit."""
  leaves = {
    _leaves.join(names): np.asarray(leaf.astype(jnp.float32))
    for names, leaf in _leaves.flatten_with_names(params)[0]
  }
  for name, mask in masks_by_name(updater, params, state).items():
    pruned = leaves[name][mask == 0]
    assert not pruned.any() and not np.signbit(pruned).any(), name


def _without_key_type(leaf: Any) -> Any:
  if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
    return jax.random.key_data(leaf)
  return leaf


def assert_identical(a: Any, b: Any) -> None:
  """Assert that two trees have the same structure, dtypes and bits."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  names = [_leaves.join(n) for n, _ in _leaves.flatten_with_names(a)[0]]
  for name, x, y in zip(
    names, jax.tree.leaves(a), jax.tree.leaves(b), strict=True
  ):
    x, y = (np.asarray(_without_key_type(leaf)) for leaf in (x, y))
    assert x.dtype == y.dtype and x.shape == y.shape, name
    assert x.tobytes() == y.tobytes(), name


def assert_close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
  """Assert integers equal, floats close: compilations may round apart."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  names = [_leaves.join(n) for n, _ in _leaves.flatten_with_names(a)[0]]
  for name, x, y in zip(
    names, jax.tree.leaves(a), jax.tree.leaves(b), strict=True
  ):
    x, y = np.asarray(x), np.asarray(y)
    if np.issubdtype(x.dtype, np.floating):
      np.testing.assert_allclose(x, y, tolerance, tolerance, err_msg=name)
    else:
      np.testing.assert_array_equal(x, y, err_msg=name)
