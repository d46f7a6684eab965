"""Dense weights that live in the state: straight-through with no hook."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_model import (
  ADAM,
  adam_trainer,
  assert_close,
  assert_confined,
  loss_fn,
  make_batch,
  make_params,
  make_updater,
  reference_run,
)

import jaxpruner
from jaxpruner import sparsity_schedules as schedules
from jaxpruner.updater import hidden

half = functools.partial(jaxpruner.sparsity_distributions.uniform, sparsity=0.5)


def jitted(tx):
  @jax.jit
  def step(params, state):
    grads = jax.grad(loss_fn)(params, make_batch())
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def test_straight_through_is_the_papers_loop():
  """Bengio et al. (2013) in NumPy: g at m·w, w ← w - η(μ·v + g + λw)."""
  rate, momentum, decay = 0.05, 0.9, 0.1
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(32, 6)), rng.normal(size=(32, 4))
  w = rng.normal(size=(6, 4))

  def largest(w):
    mask = np.zeros(w.size, bool)
    mask[np.argsort(-np.abs(w), axis=None, kind="stable")[:12]] = True
    return mask.reshape(w.shape)

  pruner = jaxpruner.SteMagnitudePruning(
    sparsity_distribution_fn=half, scheduler=schedules.NoUpdateSchedule()
  )
  tx = pruner.wrap_optax(
    optax.chain(
      optax.add_decayed_weights(decay), optax.sgd(rate, momentum=momentum)
    )
  )
  params = jnp.asarray(w, jnp.float32)
  state = tx.init(params)
  params = pruner.post_gradient_update(params, state)
  update, velocity = jax.jit(tx.update), np.zeros_like(w)
  for _ in range(20):
    mask = largest(w)
    np.testing.assert_array_equal(state.masks, mask)
    np.testing.assert_allclose(params, w * mask, 1e-4, 1e-5)
    assert not np.asarray(params)[~mask].any()
    # The optimizer sees the dense weights: decay moves masked ones too.
    grad = x.T @ (x @ (w * mask) - y) / len(x)
    velocity = momentum * velocity + grad + decay * w
    w = w - rate * velocity
    at = np.asarray(params, np.float64)
    grads = jnp.asarray(x.T @ (x @ at - y) / len(x), jnp.float32)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  np.testing.assert_allclose(pruner.dense_params(params, state), w, 1e-4, 1e-5)
  assert (largest(w) != largest(np.asarray(params))).any() or mask.sum() == 12


@hypothesis.given(
  st.floats(width=32, allow_nan=False, allow_infinity=False),
  st.floats(width=32, allow_nan=False, allow_infinity=False),
)
def test_the_difference_of_a_weight_and_its_next_value_is_exact(p, u):
  with np.errstate(over="ignore"):
    p, u = np.float32(p), np.float32(u)
    new = p + u
    if np.isfinite(new) and np.isfinite(new - p):
      assert p + (new - p) == new


@pytest.mark.parametrize("name", ["magnitude_ste", "str", "top_kast"])
def test_an_edit_of_params_from_outside_is_not_undone(name):
  trainer, at = adam_trainer(name), reference_run(name)[4]
  params, state = at
  mask = np.asarray(state.masks["out"]["kernel"])
  kept, gone = np.argwhere(mask == 1)[0], np.argwhere(mask == 0)[0]
  kernel = params["out"]["kernel"].at[tuple(kept)].set(9.0)
  kernel = kernel.at[tuple(gone)].set(-7.0)
  edited = params | {"out": {"kernel": kernel}}
  before = trainer.updater.dense_params(params, state)["out"]["kernel"]
  dense = trainer.updater.dense_params(edited, state)["out"]["kernel"]
  expected = np.array(before)
  shift = before[tuple(kept)] - params["out"]["kernel"][tuple(kept)]
  threshold = np.abs(shift)  # of soft thresholds; else nothing
  expected[tuple(kept)] = 9.0 + threshold
  expected[tuple(gone)] = -7.0 - threshold
  np.testing.assert_allclose(dense, expected, 1e-6)
  after, new = trainer.jitted(edited, state, make_batch())
  assert abs(after["out"]["kernel"][tuple(kept)] - 9.0) < 0.5
  assert_confined(trainer.updater, after, new)


def test_params_loaded_after_init_are_the_ones_that_are_trained():
  updater = make_updater("magnitude_ste")
  tx = updater.wrap_optax(ADAM)
  step = jitted(tx)
  loaded = make_params(1)
  late = step(loaded, tx.init(make_params(0)))
  right = step(loaded, tx.init(loaded))
  # The schedule is at 0 here, so no mask tells the two apart.
  assert_close(late[0], right[0])
  assert_close(late[1].hidden, right[1].hidden)


def test_a_first_step_at_dense_params_leaves_masked_ones():
  pruner = jaxpruner.SteMagnitudePruning(sparsity_distribution_fn=half)
  tx = pruner.wrap_optax(optax.sgd(0.1))
  params = make_params()
  state = tx.init(params)
  grads = jax.grad(loss_fn)(params, make_batch())
  updates, state = tx.update(grads, state, params)
  params = optax.apply_updates(params, updates)
  assert_confined(pruner, params, state)
  dense = optax.apply_updates(
    make_params(), jax.tree.map(lambda g: -0.1 * g, grads)
  )
  assert_close(pruner.dense_params(params, state), dense)


@pytest.mark.parametrize("name", ["magnitude_ste", "magnitude", "str"])
def test_a_master_copy_trains_bfloat16_params_as_float32(name):
  """The gradients are those at bfloat16 params, rounded by nothing else."""
  low = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
  high = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
  seen = lambda p: jax.grad(loss_fn)(high(low(p)), make_batch())
  runs = {}
  for kind in ("float32", "master"):
    config = {} if kind == "float32" else {"master_dtype": "float32"}
    updater = make_updater(name)
    updater.master_dtype = config.get("master_dtype")
    tx = updater.wrap_optax(ADAM)

    @jax.jit
    def step(params, state, tx=tx):
      updates, state = tx.update(seen(params), state, params)
      return optax.apply_updates(params, updates), state

    params = make_params()
    # Weights that bfloat16 represents: both runs start at the same point.
    params = low(params) if kind == "master" else high(low(params))
    state = tx.init(params)
    for _ in range(8):
      params, state = step(params, state)
    runs[kind] = updater, params, state
  (_, wanted, plain), (updater, params, state) = runs.values()
  assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
  moments = jax.tree.leaves(state.inner_state)
  assert all(x.dtype != jnp.bfloat16 for x in moments)
  dense = updater.dense_params(params, state)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(dense))
  assert_close(state.masks, plain.masks)
  if name == "magnitude_ste":
    assert_close(state.hidden["out"], plain.hidden["out"])
    assert_close(updater.apply_masks(dense, state.masks), wanted)
  elif name == "magnitude":
    assert_close(dense, wanted)
  assert_close(high(params), high(low(updater.forward(dense, state))))
  assert_confined(updater, params, state)


def test_a_master_copy_keeps_what_bfloat16_cannot_hold():
  """Steps far below the spacing of bfloat16 add up."""
  pruner = jaxpruner.NoPruning(master_dtype="float32")
  tx = pruner.wrap_optax(optax.sgd(1.0))
  params = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones(4, jnp.bfloat16)}
  state, update = tx.init(params), jax.jit(tx.update)
  grads = jax.tree.map(lambda p: jnp.full_like(p, 2.0**-10), params)
  for _ in range(64):
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  for leaf in jax.tree.leaves(params):
    assert leaf.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(leaf, np.float32), 1 - 2.0**-4)


@pytest.mark.parametrize("name", ["magnitude_ste", "rigl", "no_prune"])
def test_tree_map_params_reaches_masks_hidden_weights_and_moments(name):
  updater = make_updater(name)
  tx = optax.chain(optax.clip(1.0), updater.wrap_optax(ADAM))
  state = tx.init(make_params())
  marked = optax.tree_utils.tree_map_params(
    tx,
    lambda _: "param",
    state,
    transform_non_params=lambda _: "other",
  )
  found = jaxpruner.find_state(marked)
  own = jaxpruner.find_state(state)
  adam = found.inner_state[0]
  for field, like in (
    (found.stored_masks, own.stored_masks),
    (adam.mu, own.inner_state[0].mu),
    *([(found.hidden, own.hidden)] if hidden.hides(updater) else []),
  ):
    assert set(jax.tree.leaves(field)) <= {"param"}
    assert jax.tree.structure(field) == jax.tree.structure(like)
  for field in (found.count, found.target_sparsities, found.tally, adam.count):
    assert set(jax.tree.leaves(field)) <= {"other"}
  same = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf, state)
  assert jax.tree.structure(same) == jax.tree.structure(state)


def test_a_state_of_another_target_or_filter_is_refused():
  make = lambda **extra: make_updater("magnitude", **extra)
  params = make_params()
  state = make().wrap_optax(ADAM).init(params)
  other = make(sparsity=0.5)
  grads = jax.tree.map(jnp.zeros_like, params)
  with pytest.raises(
    ValueError, match=r"in/kernel.* is 0\.75, that of .* 0\.5"
  ):
    other.wrap_optax(ADAM).update(grads, state, params)
  with pytest.raises(ValueError, match="another configuration"):
    other.post_gradient_update(params, state)
  fewer = make(custom_sparsity_map={"out/kernel": None})
  with pytest.raises(ValueError, match="out/kernel.*holds a mask"):
    jax.eval_shape(fewer.wrap_optax(ADAM).update, grads, state, params)
