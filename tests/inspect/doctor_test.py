"""The doctor finds each way a loop ends dense, and nothing in a sound one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_model import loss_fn, make_batch, make_params, make_updater

import jaxpruner

SGD = optax.sgd(0.05)


def magnitude(**config):
  return make_updater("magnitude", **config)


def names(checkup):
  return [finding.name for finding in checkup.findings]


def gradients(params):
  return jax.grad(loss_fn)(params, make_batch())


@pytest.mark.quick
@pytest.mark.parametrize("name", ["magnitude", "magnitude_ste", "rigl"])
def test_a_sound_setup_gets_a_clean_bill(name):
  pruner = make_updater(name)
  tx = pruner.wrap_optax(SGD)
  params = make_params()
  params = pruner.post_gradient_update(params, tx.init(params))
  checkup = jaxpruner.check(
    tx,
    params,
    grads=gradients,
    reload=lambda state: jax.tree.map(np.asarray, state),
    eval_params=lambda p, s: pruner.post_gradient_update(
      pruner.pre_forward_update(p, s), s
    ),
    total_steps=8,
  )
  assert checkup.ok and "nothing is wrong" in str(checkup), str(checkup)
  assert checkup.sparsity == 0.75


def test_the_end_of_a_long_schedule_is_reached_in_a_few_steps():
  tx = magnitude(total_steps=10**6, use_packed_masks=True).wrap_optax(SGD)
  checkup = jaxpruner.check(tx, make_params(), grads=gradients)
  assert checkup.ok and checkup.sparsity == 0.75 and checkup.steps <= 12


@pytest.mark.parametrize(
  "chained",
  [
    lambda tx: optax.chain(tx, optax.add_decayed_weights(0.1)),
    lambda tx: optax.chain(optax.clip(1.0), tx, optax.trace(0.9)),
  ],
  ids=["decay", "momentum"],
)
def test_what_is_chained_after_the_wrapper_is_named(chained):
  tx = chained(magnitude().wrap_optax(SGD))
  checkup = jaxpruner.check(tx, make_params(), grads=gradients)
  assert names(checkup) == ["not outermost"]
  assert "is chained after the wrapper" in str(checkup)


def test_what_is_chained_before_the_wrapper_is_fine():
  tx = optax.chain(optax.clip(1.0), magnitude().wrap_optax(SGD))
  assert jaxpruner.check(tx, make_params(), grads=gradients).ok


def test_updates_changed_by_an_outer_wrapper_are_found():
  inner = magnitude().wrap_optax(SGD)

  def update(grads, state, params=None, **extra):
    updates, state = inner.update(grads, state, params, **extra)
    return jax.tree.map(lambda u: 0.5 * u, updates), state

  tx = optax.GradientTransformation(inner.init, update)
  checkup = jaxpruner.check(tx, make_params(), grads=gradients)
  assert names(checkup) == ["not outermost"]


def test_params_that_never_reach_update_are_found():
  tx = magnitude().wrap_optax(SGD)

  def step(params, opt_state):
    updates, opt_state = tx.update(gradients(params), opt_state)
    return optax.apply_updates(params, updates), opt_state

  checkup = jaxpruner.check(tx, make_params(), step=step)
  assert names(checkup) == ["params not passed"]
  assert "tx.update(grads, opt_state, params)" in str(checkup)


def test_an_update_that_fails_is_reported_in_its_own_words():
  tx = magnitude().wrap_optax(SGD)

  def step(params, opt_state):
    raise ValueError("the batch is empty")

  checkup = jaxpruner.check(tx, make_params(), step=step)
  assert names(checkup) == ["update fails"]
  assert "the batch is empty" in str(checkup) and checkup.steps == 0


def test_weights_that_come_back_through_the_users_own_step_are_found():
  tx = magnitude().wrap_optax(SGD)

  @jax.jit
  def step(params, opt_state):
    updates, opt_state = tx.update(gradients(params), opt_state, params)
    new = optax.apply_updates(params, updates)
    return jax.tree.map(lambda p: p + 0.01, new), opt_state

  checkup = jaxpruner.check(tx, make_params(), step=step)
  assert names(checkup) == ["weights come back"]


def test_a_step_that_keeps_the_old_state_is_found():
  tx = magnitude().wrap_optax(SGD)
  step = jax.jit(lambda params, opt_state: (params, opt_state))
  checkup = jaxpruner.check(tx, make_params(), step=step)
  assert "the clock stands still" in names(checkup)


def test_accumulated_gradients_are_followed():
  tx = optax.MultiSteps(magnitude().wrap_optax(SGD), 3)
  tx = tx.gradient_transformation()
  checkup = jaxpruner.check(tx, make_params(), grads=gradients)
  assert checkup.ok and checkup.sparsity == 0.75


def test_a_bare_optimizer_is_found():
  checkup = jaxpruner.check(SGD, make_params())
  assert names(checkup) == ["not wrapped"]


def test_a_filter_that_hides_every_leaf_is_found():
  tx = jaxpruner.MagnitudePruning(
    sparsity_distribution_fn=lambda params: jax.tree.map(
      lambda _: None, params
    ),
    scheduler=jaxpruner.sparsity_schedules.OneShotSchedule(0),
  ).wrap_optax(SGD)
  checkup = jaxpruner.check(tx, make_params(), grads=gradients)
  assert names(checkup) == ["nothing to prune"]


@pytest.mark.filterwarnings("ignore:MagnitudePruning will never")
def test_sparsity_that_never_rises_is_found():
  uniform = functools.partial(
    jaxpruner.sparsity_distributions.uniform, sparsity=0.5
  )
  never = jaxpruner.MagnitudePruning(sparsity_distribution_fn=uniform)
  checkup = jaxpruner.check(never.wrap_optax(SGD), make_params())
  assert names(checkup) == ["sparsity never rises"]
  assert "give the pruner a schedule" in str(checkup)
  zero = magnitude(sparsity=0.0).wrap_optax(SGD)
  checkup = jaxpruner.check(zero, make_params())
  assert names(checkup) == ["warned at init", "sparsity never rises"]


def test_a_schedule_longer_than_the_training_is_found():
  tx = magnitude(total_steps=1000).wrap_optax(SGD)
  checkup = jaxpruner.check(tx, make_params(), grads=gradients, total_steps=500)
  assert names(checkup) == ["training ends too soon"]
  assert "step 750" in str(checkup)


def test_gradients_that_are_not_finite_are_found():
  tx = make_updater("saliency").wrap_optax(SGD)
  grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), make_params())
  checkup = jaxpruner.check(tx, make_params(), grads=grads)
  assert "scores not finite" in names(checkup)


def without_masks(state):
  found = jaxpruner.find_state(state)
  return found._replace(masks=jax.tree.map(lambda _: None, found.masks))


@pytest.mark.parametrize(
  "reload, words",
  [
    (without_masks, "is gone"),
    (lambda state: state.inner_state, "has no masks"),
    (lambda s: jax.tree.map(jnp.ones_like, s), "other values"),
    (
      lambda s: jax.tree.map(lambda x: np.asarray(x, np.float32), s),
      "float32",
    ),
  ],
  ids=["none", "inner only", "fresh", "cast"],
)
def test_masks_lost_in_a_checkpoint_are_found(reload, words):
  tx = magnitude().wrap_optax(SGD)
  checkup = jaxpruner.check(tx, make_params(), grads=gradients, reload=reload)
  assert names(checkup) == ["masks not restored"] and words in str(checkup)


@pytest.mark.parametrize("name", ["magnitude", "magnitude_ste"])
def test_dense_parameters_for_evaluation_are_found(name):
  tx = make_updater(name).wrap_optax(SGD)
  dense = make_params()
  checkup = jaxpruner.check(
    tx, dense, grads=gradients, eval_params=lambda _params, _: dense
  )
  assert names(checkup) == ["dense eval params"]
  assert "pruner.post_gradient_update" in str(checkup)
  checkup = jaxpruner.check(
    tx, dense, grads=gradients, eval_params=lambda params, _: params["in"]
  )
  assert names(checkup) == ["other eval params"]


def test_a_sparse_trainer_that_starts_dense_is_found():
  tx = make_updater("rigl").wrap_optax(SGD)
  checkup = jaxpruner.check(tx, make_params(), grads=gradients)
  assert names(checkup) == ["starts dense"]
