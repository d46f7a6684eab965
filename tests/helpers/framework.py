"""What the tests of all frameworks share: a pruner, and what must hold.

Kept to JAX, Optax and jaxpruner: it runs in every framework's environment.
"""

import doctest
import importlib
import importlib.util
import pathlib
import sys

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


def keep_largest(weights, sparsity, axis=None):
  """Return the mask of the largest magnitudes, in NumPy; law 2.

  Of a stack of layers along an axis, each is ranked by itself.
  """
  if axis is not None:
    layers = [keep_largest(x, sparsity) for x in np.moveaxis(weights, axis, 0)]
    return np.stack(layers, axis)
  kept = max(1, round(weights.size * (1 - sparsity)))
  order = np.argsort(-np.abs(weights).ravel(), kind="stable")
  mask = np.zeros(weights.size, bool)
  mask[order[:kept]] = True
  return mask.reshape(weights.shape)


def assert_straight_through(
  pruner,
  inner,
  params,
  grad,
  found,
  steps=STEPS,
  stacked=lambda _: None,
  rtol=1e-5,
  atol=1e-6,
):
  """Assert that a trainer did what straight-through training is.

  Two plain loops are the references. The first trains dense weights, takes the
  gradient at the masked ones and ranks the dense ones after every step, in
  NumPy; the pruner gives it only a schedule. The second is the paper's: the
  wrapped optimizer, and `pre_forward_update` before every gradient.

  Args:
    pruner: an updater that ranks magnitudes, straight-through.
    inner: the optimizer of the dense weights.
    params: the parameters that the trainer started from.
    grad: `masked params -> gradients`, compiled or not.
    found: the trainer's params and optimizer state at the end.
    steps: number of steps of the trainer.
    stacked: `path -> axis` of the leaves that hold a stack of layers, each of
      which is ranked by itself; None of the others.
    rtol: relative error of the weights; masks must be equal.
    atol: absolute error of the weights.
  """
  ends = _masks_of(params, found[1])
  for loop in (_train_by_numpy, _train_with_the_hook):
    masks, wanted = loop(pruner, inner, params, grad, ends, steps, stacked)
    for end, mask in zip(ends, masks, strict=True):
      if hasattr(end, "shape"):
        np.testing.assert_array_equal(np.asarray(end) != 0, mask != 0)
    shown = jax.tree.leaves(found[0])
    for x, y in zip(shown, jax.tree.leaves(wanted), strict=True):
      np.testing.assert_allclose(np.asarray(x), y, rtol=rtol, atol=atol)


def _masks_of(params, opt_state):
  masks = jaxpruner.find_state(opt_state).masks
  return jax.tree.structure(params).flatten_up_to(masks)


def _train_by_numpy(pruner, inner, params, grad, ends, steps, stacked):
  """Return the masks and the masked weights of a loop without a pruner."""
  named, treedef = jax.tree_util.tree_flatten_with_path(params)
  axes = [stacked(jax.tree_util.keystr(path)) for path, _ in named]
  masks = [np.ones(x.shape, bool) for _, x in named]
  state = inner.init(params)
  show = lambda params: jax.tree.map(
    lambda x, mask: jnp.where(mask, x, 0), params, treedef.unflatten(masks)
  )

  @jax.jit
  def apply(grads, state, dense):
    updates, state = inner.update(grads, state, dense)
    return optax.apply_updates(dense, updates), state

  for count in range(1, steps + 1):
    params, state = apply(grad(show(params)), state, params)
    now = float(pruner.scheduler.get_sparsity_at_step(SPARSITY, count))
    masks = [
      keep_largest(np.asarray(x), now, axis) if hasattr(end, "shape") else mask
      for x, end, axis, mask in zip(
        jax.tree.leaves(params), ends, axes, masks, strict=True
      )
    ]
  return masks, show(params)


def _train_with_the_hook(pruner, inner, params, grad, ends, steps, stacked):
  """Return the masks and weights of the paper's loop, with its hook."""
  del ends, stacked
  tx = pruner.wrap_optax(inner)
  state = tx.init(params)

  @jax.jit
  def apply(grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  hook = jax.jit(pruner.pre_forward_update)
  for _ in range(steps):
    params, state = apply(grad(hook(params, state)), state, params)
    # With many steps in flight on virtual devices, XLA may abort.
    jax.block_until_ready((params, state))
  return _masks_of(params, state), params


SGD = optax.sgd(0.05, momentum=0.9)


def recipe(name):
  """Import a recipe of the paper's table."""
  folder = pathlib.Path(__file__).parents[2] / "examples" / "recipes"
  if str(folder) not in sys.path:
    sys.path.insert(0, str(folder))
  return importlib.import_module(name)
