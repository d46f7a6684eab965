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
    if mask is not None
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
    assert not param[mask == 0].any()
    assert not np.signbit(param[mask == 0]).any()


def assert_same(a, b):
  """Assert that two trees hold the same bits."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


def assert_examples_run(bridge):
  """Assert that the docstring examples of a bridge give their results."""
  module = importlib.import_module(f"jaxpruner.integrations.{bridge}")
  result = doctest.testmod(module)
  assert result.attempted and not result.failed


SGD = optax.sgd(0.05, momentum=0.9)
