"""What every registered algorithm owes; registering one enrols it here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_model import (
  ADAM,
  KEPT,
  PRUNED_LEAVES,
  STEPS,
  Trainer,
  adam_trainer,
  assert_close,
  assert_confined,
  assert_identical,
  every_algorithm,
  every_mechanism,
  loss_fn,
  make_batch,
  make_params,
  make_updater,
  masks_by_name,
  reference_run,
)

import jaxpruner


def prunes(name: str) -> bool:
  return jaxpruner.algorithm_category(name).start != "dense"


def count_ones(masks) -> int:
  return sum(int(mask.sum(dtype=np.int64)) for mask in masks.values())


@pytest.mark.quick
@every_algorithm
def test_sparsity_is_exact_at_the_end(name):
  updater = adam_trainer(name).updater
  masks = masks_by_name(updater, *reference_run(name)[-1])
  if not prunes(name):
    assert not masks
    return
  assert tuple(masks) == PRUNED_LEAVES
  assert count_ones(masks) == KEPT
  for mask in masks.values():
    assert mask.dtype == np.uint8 and set(np.unique(mask)) <= {0, 1}


@pytest.mark.quick
@every_algorithm
def test_pruned_weights_are_zero_after_every_step(name):
  updater = adam_trainer(name).updater
  for params, state in reference_run(name):
    assert_confined(updater, params, state)


@every_algorithm
def test_no_algorithm_needs_the_forward_hook(name):
  """Leaving it out changes nothing; of masked params it is the identity."""
  trainer, history = adam_trainer(name), reference_run(name)
  for params, state in history:
    assert_identical(trainer.updater.pre_forward_update(params, state), params)
  if not trainer.updater.straight_through:
    return  # it returned its argument: no other program needs compiling

  @jax.jit
  def step(params, state):
    grads = jax.grad(loss_fn)(params, make_batch())
    updates, state = trainer.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  at = history[0]
  for hooked in history[1:]:
    at = step(*at)
    assert_close(at, hooked)


@every_algorithm
def test_states_hold_no_none(name):
  is_none = lambda node: node is None
  for params, state in reference_run(name)[::STEPS]:
    for leaf in jax.tree.leaves((params, state), is_leaf=is_none):
      assert leaf is not None


@every_algorithm
def test_sparsity_never_falls_while_training(name):
  updater = adam_trainer(name).updater
  schedules = jaxpruner.sparsity_schedules
  if isinstance(updater.scheduler, schedules.AlternatingSchedule):
    pytest.skip("is dense by turns")
  counts = [
    count_ones(masks_by_name(updater, *at)) for at in reference_run(name)
  ]
  assert counts == sorted(counts, reverse=True)


@every_algorithm
def test_steps_after_the_first_do_not_retrace(name):
  trainer = Trainer(make_updater(name), optax.sgd(0.1))
  params, state = trainer.start(make_params())
  # Tracing is what is counted; nothing needs to be compiled for it.
  traced = jax.jit(trainer.step)
  shape = jax.eval_shape(traced, params, state, make_batch())
  assert trainer.traces == 1
  described = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), shape)
  given = jax.tree.map(
    lambda x: (x.shape, x.dtype, x.aval.weak_type), (params, state)
  )
  assert described == given
  # A change of JAX's settings by another test empties caches: fill them first.
  adam_trainer(name).jitted(*reference_run(name)[0], make_batch())
  assert adam_trainer(name).jitted._cache_size() >= 1
  before = adam_trainer(name).traces
  adam_trainer(name).run(*reference_run(name)[0], make_batch())
  assert adam_trainer(name).traces == before


@every_mechanism
def test_eager_equals_jit(name):
  trainer, history = adam_trainer(name), reference_run(name)
  # Step 4 updates the masks of all algorithms that update any, step 7 of none.
  for step in (4, 7):
    eager = trainer.step(*history[step], make_batch())
    assert_close(eager, history[step + 1])
    assert_confined(trainer.updater, *eager)


@every_mechanism
def test_scan_on_donated_buffers_equals_a_loop(name):
  trainer = adam_trainer(name)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def scanned(params, state):
    body = lambda carry, _: (trainer.step(*carry, make_batch()), None)
    return jax.lax.scan(body, (params, state), length=STEPS)[0]

  start = jax.tree.map(jnp.copy, reference_run(name)[0])
  result = scanned(*start)
  assert_close(result, reference_run(name)[-1])
  assert_confined(trainer.updater, *result)
  assert all(x.is_deleted() for x in jax.tree.leaves(start[0]))


@every_mechanism
def test_vmap_over_seeds_equals_each_seed_alone(name):
  trainer = adam_trainer(name)
  stack = lambda *xs: jnp.stack(xs)
  together = jax.tree.map(
    stack, reference_run(name, 0)[0], reference_run(name, 1)[0]
  )
  stepped = jax.jit(jax.vmap(trainer.step, (0, 0, None)))
  for _ in range(STEPS):
    together = stepped(*together, make_batch())
  for seed in (0, 1):
    alone = reference_run(name, seed)[-1]
    assert_close(jax.tree.map(lambda x, i=seed: x[i], together), alone)


@every_algorithm
def test_seeds_draw_masks_of_their_own(name):
  if "random" not in jaxpruner.algorithm_category(name).needs:
    pytest.skip("draws nothing")
  updater = adam_trainer(name).updater
  a, b = (masks_by_name(updater, *reference_run(name, s)[-1]) for s in (0, 1))
  assert any((a[leaf] != b[leaf]).any() for leaf in a)


@every_algorithm
def test_half_precision_keeps_dtypes_and_exact_sparsity(name):
  trainer, params = adam_trainer(name), make_params()
  # Both in one tree: one compilation, and a global ranking across dtypes.
  cast = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype), tree)
  params = params | {
    "in": cast(params["in"], jnp.bfloat16),
    "out": cast(params["out"], jnp.float16),
  }
  params, state = trainer.start(params)
  before = jax.tree.map(lambda x: (x.shape, x.dtype), (params, state))
  params, state = trainer.run(params, state, make_batch())
  assert jax.tree.map(lambda x: (x.shape, x.dtype), (params, state)) == before
  assert_confined(trainer.updater, params, state)
  if prunes(name):
    assert not np.any(state.skipped)
    assert count_ones(masks_by_name(trainer.updater, params, state)) == KEPT


# Packing is the base class's: an algorithm's code never sees it.
@every_mechanism
def test_packed_masks_train_the_same_parameters(name):
  if not prunes(name):
    pytest.skip("has no masks")
  trainer = adam_trainer(name, packed=True)
  params, state = trainer.start(make_params())
  for leaf, size in (("in", 96), ("out", 48)):
    assert state.masks[leaf]["kernel"].size == size // 8
  params, state = trainer.run(params, state, make_batch())
  expected, expected_state = reference_run(name)[-1]
  assert_close(params, expected)
  assert_identical(
    masks_by_name(trainer.updater, params, state),
    masks_by_name(adam_trainer(name).updater, expected, expected_state),
  )
  assert_confined(trainer.updater, params, state)
  summary = jaxpruner.summarize_sparsity(state.masks, params=params)
  assert summary["_nparams_nnz"] == KEPT and summary["_nparams"] == 144


@every_algorithm
def test_dense_leaves_train_as_if_nothing_were_pruned(name):
  trainer = adam_trainer(name)
  category = trainer.updater.category
  if category.gradients_per_step > 1:
    pytest.skip("takes every gradient at another point")
  if category.trainings is not None:
    pytest.skip("rewinds every leaf")
  state = reference_run(name)[-1][1]
  if prunes(name):
    assert state.masks["temperature"] is None
    assert state.masks["in"]["bias"] is None
    assert state.target_sparsities["temperature"] == optax.MaskedNode()
  rested = 0
  if trainer.updater.skip_gradients:
    due = trainer.updater.scheduler.is_mask_update_iter
    rested = sum(bool(due(step)) for step in range(STEPS))
  bare, leaf = ADAM, make_params()["temperature"]
  bare_state = bare.init(leaf)

  @jax.jit
  def step(leaf, bare_state):
    updates, bare_state = bare.update(2 * (leaf - 2), bare_state)
    return optax.apply_updates(leaf, updates), bare_state

  for _ in range(STEPS - rested):
    leaf, bare_state = step(leaf, bare_state)
  np.testing.assert_allclose(
    reference_run(name)[-1][0]["temperature"], leaf, 1e-5
  )


@every_mechanism
def test_eight_devices_equal_one(name):
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  place = lambda tree, *spec: jax.device_put(
    tree, jax.NamedSharding(mesh, jax.P(*spec))
  )
  trainer = adam_trainer(name)
  params, state = place(reference_run(name)[0])
  batch = place(make_batch(), "data")
  params, state = trainer.run(params, state, batch)
  assert_close((params, state), reference_run(name)[-1])
  assert_confined(trainer.updater, params, state)
  for leaf in jax.tree.leaves((params, state)):
    assert len(leaf.sharding.device_set) == 8


@every_algorithm
def test_instant_sparsify_is_exact_or_says_why_not(name):
  updater, params = make_updater(name), make_params()
  grads = jax.grad(loss_fn)(params, make_batch())
  if jaxpruner.algorithm_category(name).start == "sparse-to-sparse":
    with pytest.raises(RuntimeError, match="wrap_optax"):
      updater.instant_sparsify(params, grads)
    return
  pruned, masks = updater.instant_sparsify(params, grads)
  if not prunes(name):
    assert_identical(pruned, params)
    return
  assert jaxpruner.summarize_sparsity(masks)["_nparams_nnz"] == KEPT
  assert_identical(pruned, updater.apply_masks(params, masks))


@every_algorithm
def test_category_is_filled_in(name):
  category = jaxpruner.algorithm_category(name)
  assert category.when in ("before", "during", "after")
  assert category.start in ("dense", "dense-to-sparse", "sparse-to-sparse")
  known = {"gradients", "data", "activations", "random", "loss"}
  assert category.needs <= known
  assert category.cost and (category.paper or not prunes(name))
