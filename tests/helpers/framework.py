"""What the tests of all frameworks share: a pruner, and what must hold.

Kept to JAX, Optax and jaxpruner: it runs in every framework's environment.
"""

import doctest
import importlib
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner

STEPS = 50
SPARSITY = 0.75


def require(group, *modules):
  """Skip the test file unless the modules are here; say how to get them."""
  for module in modules:
    if importlib.util.find_spec(module) is None:
      pytest.skip(
        f"{module} is not installed: python tools/integrations.py {group}",
        allow_module_level=True,
      )


def make_pruner(algorithm="magnitude", **config):
  """Return an algorithm that is done within 50 steps."""
  return jaxpruner.create_updater_from_config(
    {
      "algorithm": algorithm,
      "sparsity": SPARSITY,
      "total_steps": STEPS,
      **config,
    }
  )


# A pruner of each kind: gradual, straight-through, with weights that grow.
KINDS = ("magnitude", "magnitude_ste", "rigl")
each_kind = pytest.mark.parametrize("algorithm", KINDS)


def make_batch():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(32, 8)).astype(np.float32)
  return x, np.tanh(x @ rng.normal(size=(8, 4))).astype(np.float32)


def mean_square(x, y):
  return jnp.mean((x - y) ** 2)


def masked_leaves(params, opt_state):
  """Return `(param, mask)` in NumPy for every leaf that has a mask."""
  masks = jaxpruner.find_state(opt_state).masks
  leaves, treedef = jax.tree.flatten(params)
  return [
    (np.asarray(leaf), np.asarray(mask))
    for leaf, mask in zip(leaves, treedef.flatten_up_to(masks), strict=True)
    if hasattr(mask, "shape")
  ]


def assert_sparse(params, opt_state, sparsity=SPARSITY, grows=False):
  """Assert that exactly the asked share of prunable weights is +0.0.

  Where weights grow, from zero, some may have had no gradient yet.
  """
  pairs = masked_leaves(params, opt_state)
  assert pairs
  zeros = sum(int((param == 0).sum()) for param, _ in pairs)
  removed = sum(int((mask == 0).sum()) for _, mask in pairs)
  size = sum(mask.size for _, mask in pairs)
  assert removed == round(sparsity * size)
  assert zeros >= removed if grows else zeros == removed
  for param, mask in pairs:
    assert np.isfinite(param).all()
    assert not param[mask == 0].any()
    assert not np.signbit(param[mask == 0]).any()


def assert_same(a, b):
  """Assert that two trees hold the same bits."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  named, _ = jax.tree_util.tree_flatten_with_path(a)
  for (path, x), y in zip(named, jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    same = x.dtype == y.dtype and x.tobytes() == y.tobytes()
    assert same, f"{jax.tree_util.keystr(path)} differs"


def assert_examples_run(bridge):
  """Assert that the docstring examples of a bridge give their results."""
  module = importlib.import_module(f"jaxpruner.integrations.{bridge}")
  result = doctest.testmod(module)
  assert result.attempted and not result.failed


def keep_largest(weights, sparsity):
  """Return the mask of the largest magnitudes, in NumPy; law 2."""
  kept = max(1, round(weights.size * (1 - sparsity)))
  order = np.argsort(-np.abs(np.asarray(weights)).ravel(), kind="stable")
  mask = np.zeros(weights.size, bool)
  mask[order[:kept]] = True
  return mask.reshape(weights.shape)


def assert_straight_through(pruner, inner, params, grad, found, steps=STEPS):
  """Assert that a trainer did what straight-through training is.

  A plain loop trains dense weights, takes the gradient at the masked ones, and
  ranks the dense ones after every step. The pruner gives it only a schedule.

  Args:
    pruner: an updater that ranks magnitudes, straight-through.
    inner: the optimizer of the dense weights.
    params: the parameters that the trainer started from.
    grad: `masked params -> gradients`, compiled or not.
    found: the trainer's params and optimizer state at the end.
    steps: number of steps of the trainer.
  """
  treedef = jax.tree.structure(params)
  ends = treedef.flatten_up_to(jaxpruner.find_state(found[1]).masks)
  is_masked = [hasattr(mask, "shape") for mask in ends]
  masks = jax.tree.map(lambda x: np.ones(x.shape, bool), params)
  state = inner.init(params)
  mask_tree = lambda tree, masks: jax.tree.map(
    lambda x, mask: jnp.where(mask, x, 0), tree, masks
  )

  @jax.jit
  def apply(grads, state, dense):
    updates, state = inner.update(grads, state, dense)
    return optax.apply_updates(dense, updates), state

  for count in range(1, steps + 1):
    params, state = apply(grad(mask_tree(params, masks)), state, params)
    now = float(pruner.scheduler.get_sparsity_at_step(SPARSITY, count))
    masks = [
      keep_largest(x, now if masked else 0.0)
      for x, masked in zip(
        treedef.flatten_up_to(params), is_masked, strict=True
      )
    ]
    masks = jax.tree.unflatten(treedef, masks)
  for mask, end in zip(jax.tree.leaves(masks), ends, strict=True):
    if hasattr(end, "shape"):
      np.testing.assert_array_equal(np.asarray(end) != 0, mask)
  wanted = jax.tree.leaves(mask_tree(params, masks))
  for x, y in zip(jax.tree.leaves(found[0]), wanted, strict=True):
    np.testing.assert_allclose(np.asarray(x), y, rtol=1e-3, atol=1e-4)


SGD = optax.sgd(0.05, momentum=0.9)
