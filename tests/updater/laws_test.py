"""Laws of the step: resting, patterns, sparse starts, warnings, alignment."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_schedules

UNIFORM = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
W = jnp.asarray(np.random.default_rng(0).permutation(32).reshape(8, 4) - 15.5)
PARAMS = {"a": W.astype(jnp.float32), "b": -W.T.astype(jnp.float32)}
GRADS = jax.tree.map(lambda w: 0.1 + 0.01 * w**2, PARAMS)


def pruner(**options):
  made = {
    "sparsity_distribution_fn": UNIFORM,
    "scheduler": sparsity_schedules.PeriodicSchedule(2, 0),
  }
  return jaxpruner.MagnitudePruning(**(made | options))


def steps(updater, count, tx=None, params=PARAMS):
  """Return (params, state) before and after each step."""
  tx = updater.wrap_optax(tx or optax.adam(0.1))
  found = [(params, tx.init(params))]
  for _ in range(count):
    params, state = found[-1]
    updates, state = tx.update(GRADS, state, params)
    found.append((optax.apply_updates(params, updates), state))
  return found


def test_an_optimizer_that_rests_moves_no_kept_weight_and_stays():
  # Masks are updated at steps 0 and 2.
  found = steps(pruner(skip_gradients=True), 3)
  for i, rests in enumerate([True, False, True]):
    (old, before), (new, after) = found[i : i + 2]
    for name, mask in after.masks.items():
      kept = np.asarray(mask) == 1
      same = np.asarray(new[name] == old[name])[kept]
      assert same.all() if rests else not same.any()
      assert not np.asarray(new[name])[~kept].any()
    adam = [state.inner_state[0] for state in (before, after)]
    assert int(adam[1].count) - int(adam[0].count) == (not rests)
    moved = bool(jnp.any(adam[0].mu["a"] != adam[1].mu["a"]))
    assert moved == (not rests)


def test_a_leaf_that_no_pattern_names_is_unstructured():
  kind = jaxpruner.NByM(2, 4)
  masks = pruner(sparsity_type={"a": kind}).instant_sparsify(PARAMS)[1]
  plain = jaxpruner.Unstructured()
  assert np.array_equal(masks["a"], kind.mask(abs(PARAMS["a"]), 0.5))
  assert np.array_equal(masks["b"], plain.mask(abs(PARAMS["b"]), 0.5))
  assert not np.array_equal(masks["a"], plain.mask(abs(PARAMS["a"]), 0.5))


@pytest.mark.parametrize(
  "zeros, selected", [(15, True), (16, True), (17, False)]
)
def test_a_sparse_start_stays_while_more_weights_are_asked_for(zeros, selected):
  # Weights 0 … 31, of which the first are gone; the schedule asks for 16.
  w = jnp.arange(32.0).reshape(8, 4)
  start = {"a": jnp.where(w < zeros, 0, w)}
  tx = pruner(continue_sparse=True).wrap_optax(optax.sgd(1.0))
  state = tx.init(start)
  assert int(state.masks["a"].sum()) == 32 - zeros
  # Larger than all others: it is kept if, and only if, masks are selected.
  params = {"a": start["a"].at[0, 0].set(99.0)}
  masks = tx.update({"a": jnp.zeros((8, 4))}, state, params)[1].masks
  assert int(masks["a"].sum()) == min(32 - zeros, 16)
  assert bool(masks["a"][0, 0]) == selected


def test_a_pruner_that_never_prunes_says_so():
  with pytest.warns(
    UserWarning, match="MagnitudePruning.*never.*sparsity is 0"
  ):
    pruner(
      sparsity_distribution_fn=functools.partial(
        sparsity_distributions.uniform, sparsity=0.0
      )
    ).wrap_optax(optax.sgd(0.1)).init(PARAMS)
  never = sparsity_schedules.NoUpdateSchedule()
  with pytest.warns(UserWarning, match="never"):
    pruner(scheduler=never).wrap_optax(optax.sgd(0.1)).init(PARAMS)


def test_gradients_are_aligned_with_the_parameters():
  tx = pruner().wrap_optax(optax.sgd(0.1))
  state = tx.init(PARAMS)
  with pytest.raises(ValueError, match="no entry for params leaf 'b'"):
    tx.update({"a": GRADS["a"]}, state, PARAMS)
  with pytest.raises(ValueError, match="shape"):
    tx.update({"a": GRADS["a"].T, "b": GRADS["b"]}, state, PARAMS)
  with pytest.raises(ValueError, match="params"):
    tx.update(GRADS, state)
