"""What the state counts is what a look at the masks would count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_model import (
  STEPS,
  Trainer,
  adam_trainer,
  make_batch,
  make_params,
  make_updater,
  masks_by_name,
  reference_run,
)

import jaxpruner


@functools.cache
def explored_run(packed):
  options = {"track_exploration": True, "use_packed_masks": packed}
  trainer = Trainer(make_updater("set", **options), optax.sgd(0.1))
  history = [trainer.start(make_params())]
  for _ in range(STEPS):
    history.append(trainer.jitted(*history[-1], make_batch()))
  return trainer.updater, history


def flat(updater, at):
  masks = masks_by_name(updater, *at)
  return np.concatenate([mask.ravel() for mask in masks.values()])


@pytest.mark.parametrize("packed", [False, True])
def test_counts_follow_the_masks_of_a_rewiring_run(packed):
  updater, history = explored_run(packed)
  union, changes = flat(updater, history[0]), 0
  for before, after in zip(history[:-1], history[1:], strict=True):
    old, new = flat(updater, before), flat(updater, after)
    union = union | new
    found = jaxpruner.state_metrics(after[1])
    assert found["kept"] == new.sum()
    assert float(found["sparsity"]) == pytest.approx(1 - new.mean())
    assert float(found["exploration"]) == pytest.approx(union.mean())
    if (old != new).any():
      changes += 1
      grown = int((new > old).sum())
      assert float(found["churn"]) == pytest.approx(grown / new.sum())
      assert found["dropped"] == (old > new).sum()
      assert found["moments_reset"] == grown
  assert changes >= 3 and union.mean() > new.mean()


@pytest.mark.quick
def test_a_ramp_drops_and_never_grows():
  updater = adam_trainer("magnitude").updater
  for before, after in zip(
    reference_run("magnitude")[:-1], reference_run("magnitude")[1:], strict=True
  ):
    found = jaxpruner.state_metrics(after[1])
    assert found["churn"] == 0 and found["moments_reset"] == 0
    lost = flat(updater, before).sum() - flat(updater, after).sum()
    assert lost in (0, found["dropped"])
  assert "exploration" not in found


def test_metrics_are_scalars_under_jit_and_named_by_leaf():
  _, state = reference_run("magnitude")[-1]
  found = jax.jit(lambda s: jaxpruner.state_metrics(s, per_leaf=True))(state)
  assert all(x.shape == () for x in found.values())
  assert float(found["sparsity/in/kernel"]) == 0.75
  assert "churn/out/kernel" in found
  assert jaxpruner.state_metrics(reference_run("no_prune")[-1][1]) == {}


def test_leaves_with_hardly_a_weight_are_named():
  pruner = jaxpruner.MagnitudePruning(
    scheduler=jaxpruner.sparsity_schedules.OneShotSchedule(0),
    sparsity_distribution_fn=lambda _p: {"a": 0.99, "b": 0.5},
  )
  tx = pruner.wrap_optax(optax.sgd(0.1))
  params = {"a": jnp.ones((20, 10)), "b": jnp.ones((4, 4))}
  state = tx.update(params, tx.init(params), params)[1]
  assert jaxpruner.layers_near_collapse(state) == {"a": 2}
  assert jaxpruner.state_metrics(state)["near_collapse"] == 1
  assert jaxpruner.state_metrics(state)["collapsed"] == 0


def test_refused_updates_are_counted():
  trainer = adam_trainer("saliency")
  params, state = reference_run("saliency")[4]
  x, y = make_batch()
  _, state = trainer.jitted(params, state, (x * jnp.nan, y))
  assert jaxpruner.state_metrics(state)["skipped"] == 2


def test_pruning_goes_on_from_a_sparse_model():
  params = make_params()
  half = jax.tree.map(lambda p: jnp.where(p > 0, p, 0), params)
  trainer = Trainer(
    make_updater("magnitude", continue_sparse=True), optax.sgd(0.1)
  )
  history = [trainer.start(half)]
  for _ in range(STEPS):
    history.append(trainer.jitted(*history[-1], make_batch()))
  zero = {name: np.asarray(half[name]["kernel"]) == 0 for name in ("in", "out")}
  for params, state in history:
    for name, was in zero.items():
      assert not np.asarray(params[name]["kernel"])[was].any()
      assert not np.asarray(state.masks[name]["kernel"])[was].any()
  assert jaxpruner.state_metrics(history[0][1])["sparsity"] > 0.4
  assert jaxpruner.state_metrics(history[-1][1])["sparsity"] == 0.75
