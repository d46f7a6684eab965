"""Laws of training: hidden weights, stacks, moments, rankings, warnings."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_schedules
from jaxpruner.updater import moments

HALF = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
ALWAYS = sparsity_schedules.PeriodicSchedule(1, 0)
NEVER = sparsity_schedules.NoUpdateSchedule()
W = np.random.default_rng(0).permutation(32).astype(np.float32) - 15.5
PARAMS = {"a": jnp.asarray(W.reshape(8, 4)), "b": jnp.ones(3)}
GRADS = {"a": jnp.asarray(W[::-1].reshape(8, 4)), "b": jnp.ones(3)}


def made(kind=jaxpruner.MagnitudePruning, **options):
  fields = {"sparsity_distribution_fn": HALF, "scheduler": ALWAYS}
  return kind(**(fields | options))


def largest(w, kept):
  """The mask of the largest of different magnitudes, by NumPy."""
  order = np.argsort(-abs(np.asarray(w)).ravel())
  mask = np.zeros(w.size, np.uint8)
  mask[order[:kept]] = 1
  return mask.reshape(w.shape)


# --- hidden weights ----------------------------------------------------------


def test_straight_through_training_is_that_of_the_dense_weights():
  """By hand: the optimizer moves the dense weights, params show the kept."""
  updater = made(jaxpruner.SteMagnitudePruning)
  tx = updater.wrap_optax(optax.sgd(0.125))
  dense, state = PARAMS["a"], tx.init(PARAMS)
  params = updater.post_gradient_update(PARAMS, state)
  for _ in range(2):
    updates, state = tx.update(GRADS, state, params)
    params = optax.apply_updates(params, updates)
    dense = dense - 0.125 * GRADS["a"]
    mask = largest(dense, 16)
    np.testing.assert_array_equal(state.masks["a"], mask)
    np.testing.assert_array_equal(params["a"], np.where(mask, dense, 0))
    np.testing.assert_array_equal(state.hidden["a"], dense)
  assert state.hidden["b"] == optax.MaskedNode()  # dense leaves need no copy
  np.testing.assert_array_equal(params["b"], 1 - 2 * 0.125)
  # A weight that was changed from outside is taken as params have it.
  changed = {**params, "a": params["a"].at[0].set(7.0)}
  found = updater.dense_params(changed, state)["a"]
  np.testing.assert_array_equal(found[0], 7.0)
  np.testing.assert_array_equal(found[1:], dense[1:])


def test_a_state_without_its_hidden_weights_is_refused():
  for updater in (
    made(jaxpruner.SteMagnitudePruning),
    made(master_dtype="float32"),
  ):
    tx = updater.wrap_optax(optax.sgd(0.125))
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), PARAMS)
    state = tx.init(half)._replace(hidden=optax.MaskedNode())
    with pytest.raises(ValueError, match="holds no hidden weights"):
      tx.update(half, state, half)


def test_a_master_copy_has_its_dtype_and_the_optimizer_sees_it():
  half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), PARAMS)
  tx = made(master_dtype="float32").wrap_optax(optax.sgd(2.0**-12))
  state = tx.init(half)
  updates, state = tx.update(GRADS, state, half)
  assert {x.dtype for x in jax.tree.leaves(state.hidden)} == {jnp.float32.dtype}
  np.testing.assert_array_equal(state.hidden["b"], 1 - 2.0**-12)
  shown = optax.apply_updates(half, updates)
  assert shown["b"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(shown["b"], 1)  # bfloat16 has 8 bits


# --- stacks ------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("axis", [0, 2])
def test_layers_of_a_stack_are_selected_refused_and_counted_alone(axis, packed):
  rng = np.random.default_rng(1)
  layers = rng.permutation(3 * 5 * 4).reshape(3, 5, 4).astype(np.float32) + 1
  whole = np.moveaxis(layers, 0, axis)
  whole = np.ascontiguousarray(whole)
  plain = jnp.arange(1.0, 9).reshape(2, 4)
  params = {"a": plain, "w": jnp.asarray(whole), "x": plain}
  updater = made(stacked_axis={"w": axis}, use_packed_masks=packed)
  tx = updater.wrap_optax(optax.sgd(0.0))
  state = tx.init(params)
  bad = np.moveaxis(layers.copy(), 0, axis)
  bad[(slice(None),) * axis + (1,)] = np.inf
  bad = {**params, "w": jnp.asarray(bad)}
  _, state = jax.jit(tx.update)(params, state, bad)
  view = updater.view(params)
  found = [np.asarray(m) for m in view.of(state.masks)]
  for i, (mask, layer) in enumerate(zip(found[1:4], layers, strict=True)):
    expected = np.ones((5, 4)) if i == 1 else largest(layer, 10)
    np.testing.assert_array_equal(mask, expected)
  for mask in (found[0], found[4]):
    np.testing.assert_array_equal(mask.ravel(), [0] * 4 + [1] * 4)
  assert state.skipped.tolist() == [0, 0, 1, 0, 0]
  assert state.tally.kept.tolist() == [4, 10, 20, 10, 4]
  assert state.tally.dropped.tolist() == [4, 10, 0, 10, 4]
  assert state.tally.size.tolist() == [8, 20, 20, 20, 8]
  assert view.stacks == [[1, 2, 3]]


# --- rankings ----------------------------------------------------------------


def test_a_normalized_ranking_compares_shares_of_norms():
  # Without norms all of "a" is larger than all of "b".
  params = {
    "a": jnp.array([[40.0, 30.0], [39.0, 29.0]]),
    "b": jnp.array([[0.2, 0.1], [0.19, 0.09]]),
  }
  make = functools.partial(
    jaxpruner.GlobalMagnitudePruning, sparsity=0.5, scheduler=ALWAYS
  )
  with pytest.warns(UserWarning, match="removed every weight of b"):
    masks = make().instant_sparsify(params)[1]
  assert [masks[k].ravel().tolist() for k in "ab"] == [[1] * 4, [0] * 4]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    masks = make(use_normalization=True).instant_sparsify(params)[1]
  assert [masks[k].ravel().tolist() for k in "ab"] == [[1, 0, 1, 0]] * 2


def test_a_leaf_that_is_ranked_alone_keeps_its_own_share():
  params = {"a": jnp.arange(1.0, 9).reshape(2, 4)}
  params["b"] = 10 + params["a"]
  pruner = jaxpruner.GlobalMagnitudePruning(
    sparsity=0.5, custom_sparsity_map={"a": 0.25}
  )
  masks = pruner.instant_sparsify(params)[1]
  assert masks["a"].ravel().tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
  assert masks["b"].ravel().tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_leaf_keeps_one_weight_without_a_warning():
  few = functools.partial(sparsity_distributions.uniform, sparsity=0.999)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    masks = made(sparsity_distribution_fn=few).instant_sparsify(PARAMS)[1]
  assert int(masks["a"].sum()) == 1


# --- moments -----------------------------------------------------------------


def test_pruned_weights_of_a_training_that_regrows_have_fresh_moments():
  """In jit, where the program of the optimizer is rewritten, and outside."""
  updater = made(
    jaxpruner.RigL, scheduler=sparsity_schedules.PeriodicSchedule(2, 0)
  )
  for inner in (optax.adam(0.1), optax.chain(optax.clip_by_global_norm(1.0),
                                             optax.adagrad(0.1))):  # fmt: skip
    tx = updater.wrap_optax(inner)
    state = tx.init(PARAMS)
    params = updater.post_gradient_update(PARAMS, state)
    at = {"eager": (params, state), "jit": (params, state)}
    for step in range(3):
      for name, fn in (("eager", tx.update), ("jit", jax.jit(tx.update))):
        params, state = at[name]
        updates, state = fn(GRADS, state, params)
        at[name] = optax.apply_updates(params, updates), state
      jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        *at.values(),
      )
      params, state = at["jit"]
      pruned = np.asarray(state.masks["a"]) == 0
      fresh = inner.init(jax.tree.map(jnp.zeros_like, PARAMS))
      for old, new in zip(
        jax.tree.leaves(fresh), jax.tree.leaves(state.inner_state), strict=True
      ):
        if old.shape == pruned.shape:
          np.testing.assert_array_equal(new[pruned], old[pruned])
          # At step 0 the optimizer rests, at step 2 weights have grown.
          assert step != 1 or (new[~pruned] != old[~pruned]).all()


def test_shared_statistics_of_pruned_weights_are_named():
  shapes = {"v": jnp.ones((256, 128)), "w": jnp.ones((256, 128))}
  state = optax.adafactor(0.1).init(shapes)
  name = lambda keep: moments.unmatched(state, shapes, keep)
  both, one = name([1, 1]), name([None, 1])
  assert name([None, None]) == [] or not any(
    "/w" in n for n in name([None] * 2)
  )
  assert any(n.endswith("v_row/w") for n in one), one
  assert not any(n.endswith("v_row/v") for n in one)
  assert {n for n in both if "v_row" in n} >= {n for n in one if "v_row" in n}
  assert moments.unmatched(optax.adam(0.1).init(shapes), shapes, [1, 1]) == []
  with pytest.warns(UserWarning, match="RigL: the optimizer keeps shared"):
    made(jaxpruner.RigL).wrap_optax(optax.adafactor(0.1)).init(shapes)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    made().wrap_optax(optax.adafactor(0.1)).init(shapes)
    made(jaxpruner.RigL).wrap_optax(optax.adam(0.1)).init(shapes)


# --- warnings, and walks through the state -----------------------------------


def test_only_what_could_change_its_masks_warns_that_it_never_will():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for updater in (
      jaxpruner.NoPruning(),
      made(jaxpruner.StaticRandomSparse, scheduler=NEVER),
      made(jaxpruner.SteMagnitudePruning, scheduler=NEVER),
    ):
      updater.wrap_optax(optax.sgd(0.1))
  with pytest.warns(UserWarning, match="RigL will never.*PeriodicSchedule"):
    made(jaxpruner.RigL, scheduler=NEVER).wrap_optax(optax.sgd(0.1))
  with pytest.warns(UserWarning, match="never.*PolynomialSchedule"):
    made(scheduler=NEVER).wrap_optax(optax.sgd(0.1))


@pytest.mark.parametrize("before", [0, 1])
def test_a_walk_over_what_is_like_params_reaches_the_rest_once(before):
  """Whether `init` has run before the walk, or not."""
  tx = made(jaxpruner.RigL).wrap_optax(optax.adam(0.1))
  if before:
    tx.init(PARAMS)
  state = made(jaxpruner.RigL).wrap_optax(optax.adam(0.1)).init(PARAMS)
  found = optax.tree_map_params(
    tx, lambda _: "params", state, transform_non_params=lambda _: "other"
  )
  leaves = jax.tree.leaves(found)
  masks = 1  # of "a"; "b" stays dense
  assert leaves.count("params") == masks + 2 * 2
  if before:
    assert jax.tree.structure(found) == jax.tree.structure(state)
  assert found.count == "other" and found.inner_state[0].count == "other"


def test_two_moments_that_are_one_value_are_made_fresh_each_as_it_began():
  def update(grads, state, params=None):
    del state, params
    new = jax.tree.map(lambda g: 2 * g, grads)
    return grads, {"m": new, "n": new}

  inner = optax.GradientTransformation(
    lambda params: {
      "m": jax.tree.map(jnp.zeros_like, params),
      "n": jax.tree.map(jnp.ones_like, params),
    },
    update,
  )
  updater = made(
    jaxpruner.RigL, skip_gradients=False, is_sparse_gradients=False
  )
  tx = updater.wrap_optax(inner)
  state = tx.init(PARAMS)
  params = updater.post_gradient_update(PARAMS, state)
  _, state = jax.jit(tx.update)(GRADS, state, params)
  kept = np.asarray(state.masks["a"]) == 1
  for name, start in (("m", 0), ("n", 1)):
    expected = np.where(kept, 2 * GRADS["a"], start)
    np.testing.assert_array_equal(state.inner_state[name]["a"], expected)
