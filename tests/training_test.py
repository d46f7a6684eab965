"""Laws of training: what stays zero, what is counted, what is the same."""

import functools

import flax.serialization
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import training
from training import KERNELS, STEPS, Run

import jaxpruner
from jaxpruner.updater import seeds

cache = functools.cache


def same(one, two):
  """Equal bit for bit, structure and dtypes included."""
  left, right = jax.tree.flatten(one), jax.tree.flatten(two)
  return left[1] == right[1] and all(
    np.asarray(a).dtype == np.asarray(b).dtype
    and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for a, b in zip(left[0], right[0], strict=True)
  )


@cache
def sparsity_at(name, leaf, step):
  return training.sparsity_at(training.updater(name), leaf, step)


@cache
def is_due(name, step):
  return bool(training.updater(name).scheduler.is_mask_update_iter(step))


@pytest.mark.quick
@hypothesis.given(st.sampled_from(training.HOLDING_ZEROS), training.inputs())
def test_pruned_weights_are_plus_zero_after_plain_apply_updates(name, inputs):
  run = Run(name, *inputs)
  for step in range(STEPS + 1):
    for leaf in KERNELS:
      weights = run.params(step)[leaf]["kernel"]
      removed = weights[run.mask(leaf, step) == 0]
      assert (removed.view(np.uint32) == 0).all(), (step, leaf)


@pytest.mark.quick
@hypothesis.given(st.sampled_from(["magnitude", "saliency"]), training.inputs())
def test_masks_keep_the_best_of_each_leaf_at_the_schedules_sparsity(
  name, inputs
):
  run = Run(name, *inputs)
  for leaf in KERNELS:
    wanted = np.ones(training.SHAPES[leaf]["kernel"], np.uint8)
    for step in range(STEPS):
      scores = np.abs(run.params(step)[leaf]["kernel"])
      if name == "saliency":
        scores = np.abs(scores * run.grads[leaf]["kernel"][step])
      if is_due(name, step):
        sparsity = sparsity_at(name, leaf, step)
        wanted = reference.unstructured(scores, sparsity)
      assert np.array_equal(run.mask(leaf, step + 1), wanted), step


@hypothesis.given(
  st.sampled_from(["global_magnitude", "global_saliency"]), training.inputs()
)
def test_global_masks_keep_the_best_of_all_leaves_together(name, inputs):
  run = Run(name, *inputs)
  schedule = training.updater(name).scheduler
  wanted = [np.ones(training.SHAPES[leaf]["kernel"]) for leaf in KERNELS]
  for step in range(STEPS):
    scores = [np.abs(run.params(step)[leaf]["kernel"]) for leaf in KERNELS]
    if name == "global_saliency":
      scores = [
        np.abs(s * run.grads[leaf]["kernel"][step])
        for s, leaf in zip(scores, KERNELS, strict=True)
      ]
    if is_due(name, step):
      target = training.SPARSITY
      value = np.asarray(schedule.get_sparsity_at_step(target, step))
      value = target if value >= np.float32(target) else value
      wanted = reference.together(scores, value)
    for leaf, mask in zip(KERNELS, wanted, strict=True):
      assert np.array_equal(run.mask(leaf, step + 1), mask), (step, leaf)


@hypothesis.given(training.inputs())
def test_random_pruning_only_ever_removes(inputs):
  run = Run("random", *inputs)
  for leaf in KERNELS:
    for step in range(STEPS):
      assert (run.mask(leaf, step + 1) <= run.mask(leaf, step)).all()
      if is_due("random", step):
        size = run.mask(leaf, 0).size
        sparsity = sparsity_at("random", leaf, step)
        ones = reference.num_ones(size, sparsity)
        assert run.mask(leaf, step + 1).sum() == ones


@hypothesis.given(training.inputs())
def test_a_static_mask_never_changes_and_has_its_count(inputs):
  run = Run("static_sparse", *inputs)
  for leaf in KERNELS:
    first = run.mask(leaf, 0)
    ones = reference.num_ones(first.size, sparsity_at("static_sparse", leaf, 0))
    assert first.sum() == ones
    for step in range(STEPS):
      assert np.array_equal(run.mask(leaf, step + 1), first)


@pytest.mark.quick
@hypothesis.given(st.sampled_from(training.REWIRING), training.inputs())
def test_rewiring_keeps_the_count_for_ever(name, inputs):
  run = Run(name, *inputs)
  for leaf in KERNELS:
    ones = reference.num_ones(
      run.mask(leaf, 0).size, sparsity_at(name, leaf, 0)
    )
    for step in range(STEPS + 1):
      assert run.mask(leaf, step).sum() == ones


@cache
def dropped_at(name, count, step):
  """How many of `count` weights are replaced, in float32 as documented."""
  if step == 0 or not is_due(name, step):
    return 0
  fraction = np.asarray(training.updater(name).drop_fraction_at(step))
  return int(np.floor(np.float32(fraction) * np.float32(count)))


@pytest.mark.quick
@hypothesis.given(training.inputs())
def test_rigl_drops_the_smallest_weights_and_grows_the_largest_gradients(
  inputs,
):
  run = Run("rigl", *inputs)
  for leaf in KERNELS:
    for step in range(STEPS):
      mask = run.mask(leaf, step)
      wanted = reference.drop_and_grow(
        mask,
        np.abs(run.params(step)[leaf]["kernel"]),
        np.abs(run.grads[leaf]["kernel"][step]),
        dropped_at("rigl", int(mask.sum()), step),
      )
      assert np.array_equal(run.mask(leaf, step + 1), wanted), (leaf, step)


@hypothesis.given(training.inputs())
def test_set_drops_the_smallest_weights_and_grows_as_it_draws(inputs):
  run = Run("set", *inputs)
  for step in range(STEPS):
    state = run.state(step)
    drawn = draw_scores(state.key, step + 1)
    for leaf in KERNELS:
      mask = run.mask(leaf, step)
      wanted = reference.drop_and_grow(
        mask,
        np.abs(run.params(step)[leaf]["kernel"]),
        np.asarray(drawn[leaf]["kernel"]),
        dropped_at("set", int(mask.sum()), step),
      )
      assert np.array_equal(run.mask(leaf, step + 1), wanted), (leaf, step)


@jax.jit
def draw_scores(key, salt):
  params = jax.tree.map(
    jnp.zeros, training.SHAPES, is_leaf=lambda x: isinstance(x, tuple)
  )
  state = jaxpruner.SparseState(masks=None, key=key)
  return training.updater("set").random_scores(params, state, salt)


@pytest.mark.quick
@hypothesis.given(st.sampled_from(training.REWIRING), training.inputs())
def test_grown_weights_start_at_zero_with_fresh_moments(name, inputs):
  run = Run(name, *inputs)
  for step in range(STEPS):
    moments = run.state(step + 1).inner_state[0].trace
    for leaf in KERNELS:
      grown = run.mask(leaf, step + 1) > run.mask(leaf, step)
      for tree in (run.params(step + 1), moments):
        values = tree[leaf]["kernel"][grown]
        assert (values.view(np.uint32) == 0).all(), (step, leaf)


@hypothesis.given(st.sampled_from(training.REWIRING), training.inputs())
def test_the_optimizer_rests_while_masks_are_rewired(name, inputs):
  run = Run(name, *inputs)
  for step in range(STEPS):
    before, after = (
      (run.params(t), run.state(t).inner_state[0].trace)
      for t in (step, step + 1)
    )
    if is_due(name, step):
      # By value: adding an update of zero makes -0.0 to 0.0.
      assert np.array_equal(after[0]["a"]["bias"], before[0]["a"]["bias"])
      for leaf in KERNELS:
        stays = run.mask(leaf, step + 1) & run.mask(leaf, step) == 1
        for new, old in zip(after, before, strict=True):
          new, old = (tree[leaf]["kernel"][stays] for tree in (new, old))
          assert np.array_equal(new, old), (step, leaf)


@hypothesis.given(st.sampled_from(training.REWIRING), training.inputs())
def test_dropping_nothing_is_the_identity(name, inputs):
  run = Run(name, *inputs, drop_fraction=0.0)
  for leaf in KERNELS:
    for step in range(STEPS):
      assert np.array_equal(run.mask(leaf, step + 1), run.mask(leaf, 0))


@pytest.mark.quick
@hypothesis.given(training.inputs())
def test_straight_through_masks_are_those_of_the_next_forward_pass(inputs):
  """Chosen from the new parameters, at the sparsity of the next step."""
  run = Run("magnitude_ste", *inputs)
  for leaf in KERNELS:
    for step in range(STEPS + 1):
      scores = np.abs(run.params(step)[leaf]["kernel"])
      sparsity = sparsity_at("magnitude_ste", leaf, step)
      wanted = reference.unstructured(scores, sparsity)
      assert np.array_equal(run.mask(leaf, step), wanted), step


@cache
def forward(name):
  pruner = training.updater(name)

  def loss(params, state, weights):
    seen = pruner.pre_forward_update(params, state)
    terms = jax.tree.map(lambda w, s: jnp.sum(w * s * s), weights, seen)
    return sum(jax.tree.leaves(terms)), seen

  return jax.jit(jax.grad(loss, has_aux=True))


@hypothesis.given(
  st.sampled_from(training.STRAIGHT_THROUGH),
  training.inputs(),
  st.integers(0, STEPS),
)
def test_straight_through_gradients_reach_every_weight(name, inputs, step):
  run = Run(name, *inputs)
  params, state = run.params(step), run.state(step)
  weights = jax.tree.map(lambda g: g[0], run.grads)
  grads, seen = jax.tree.map(np.asarray, forward(name)(params, state, weights))
  for leaf in KERNELS:
    mask = run.mask(leaf, step)
    masked = np.where(mask, params[leaf]["kernel"], 0)
    assert np.array_equal(seen[leaf]["kernel"], masked)
    # d/dp of w·s² is 2·w·s at the masked weight s, passed on unmasked.
    np.testing.assert_allclose(
      grads[leaf]["kernel"], 2 * weights[leaf]["kernel"] * masked, rtol=1e-6
    )
  assert same(seen["a"]["bias"], params["a"]["bias"])


@cache
def bare():
  tx = training.optimizer("no_prune")

  def run(params, grads):
    def body(carry, grad):
      params, state = carry
      updates, state = tx.update(grad, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), (state, params)

    return jax.lax.scan(body, (params, tx.init(params)), grads)[1]

  return jax.jit(run)


@pytest.mark.quick
@hypothesis.given(training.inputs())
def test_no_pruning_is_bare_optax_bit_for_bit(inputs):
  run = Run("no_prune", *inputs)
  states, after = bare()(*inputs)
  assert same(run.states.inner_state, states)
  assert same(run.after, after)


@hypothesis.given(
  st.sampled_from(
    ["magnitude", "global_saliency", "magnitude_ste", "static_sparse", "rigl"]
  ),
  training.inputs(),
)
def test_packed_masks_are_the_same_masks(name, inputs):
  plain, packed = Run(name, *inputs), Run(name, *inputs, use_packed_masks=True)
  assert same(plain.after, packed.after)
  assert same(plain.states.inner_state, packed.states.inner_state)
  for step in range(STEPS + 1):
    masks = packed.state(step).masks
    assert masks["a"]["bias"] is None
    params = packed.params(step)
    for leaf in KERNELS:
      bits = np.packbits(plain.mask(leaf, step))
      assert np.array_equal(masks[leaf]["kernel"].ravel(), bits)
    assert jaxpruner.summarize_sparsity(
      masks, params=params
    ) == jaxpruner.summarize_sparsity(plain.state(step).masks)


@hypothesis.given(
  st.sampled_from(["magnitude", "magnitude_ste", "rigl"]),
  training.inputs(),
  st.integers(0, STEPS),
)
def test_stop_and_resume_is_uninterrupted_and_loop_is_scan(name, inputs, stop):
  """Also after a round trip through bytes, at any step."""
  run = Run(name, *inputs)
  init, step = training.stepper(name)
  state = init(run.given)
  assert same(state, run.first)
  params = run.start
  for t in range(STEPS):
    if t == stop:
      saved = flax.serialization.to_bytes((params, state))
      template = jax.tree.map(np.zeros_like, (params, state))
      params, state = flax.serialization.from_bytes(template, saved)
      state = jax.tree.map(jnp.asarray, state)
    grads = jax.tree.map(lambda g, t=t: g[t], run.grads)
    params, state = step(params, state, grads)
  assert same(params, run.params(STEPS))
  assert same(state, run.state(STEPS))


@cache
def vmapped(name):
  return jax.jit(jax.vmap(training.runner(name)))


@hypothesis.given(
  st.sampled_from(["magnitude", "rigl"]), training.inputs(), training.inputs()
)
def test_vmap_is_a_loop(name, one, two):
  both = jax.tree.map(lambda a, b: np.stack([a, b]), one, two)
  _, _, states, _ = vmapped(name)(*both)
  for i, inputs in enumerate((one, two)):
    masks = jax.tree.map(lambda x, i=i: np.asarray(x)[i], states.masks)
    assert same(masks, Run(name, *inputs).states.masks)


@hypothesis.given(training.inputs(), training.inputs())
def test_vmapped_seeds_draw_different_masks(one, two):
  hypothesis.assume(not same(one[0], two[0]))
  first, second = Run("rigl", *one).first, Run("rigl", *two).first
  assert not np.array_equal(first.key, second.key)
  assert not same(first.masks, second.masks)


@pytest.mark.quick
@hypothesis.given(
  st.sampled_from(["saliency", "rigl"]),
  training.inputs(),
  st.integers(0, STEPS - 1),
  st.sampled_from([np.nan, np.inf, -np.inf]),
  st.integers(0, 47),
)
def test_a_gradient_that_is_not_finite_leaves_that_leafs_mask_alone(
  name, inputs, at, poison, where
):
  clean = Run(name, *inputs)
  grads = jax.tree.map(np.copy, inputs[1])
  grads["a"]["kernel"][at].flat[where] = poison
  run = Run(name, inputs[0], grads)
  for step in range(STEPS):
    assert np.array_equal(run.mask("b", step), clean.mask("b", step))
    if step <= at:
      assert np.array_equal(run.mask("a", step), clean.mask("a", step))
  if is_due(name, at):
    assert np.array_equal(run.mask("a", at + 1), run.mask("a", at))
    assert run.state(at + 1).skipped.tolist() == [1, 0]
  assert run.state(at).skipped.tolist() == [0, 0]
  table = jaxpruner.sparsity_table(
    run.params(STEPS), opt_state=run.state(STEPS)
  )
  assert ("skipped" in table) == bool(run.state(STEPS).skipped.any())


@hypothesis.given(training.inputs(), st.data())
def test_nan_outside_jit_is_an_error_with_path_and_count(inputs, data):
  params = jax.tree.map(np.copy, inputs[0])
  leaf = data.draw(st.sampled_from(KERNELS))
  size = params[leaf]["kernel"].size
  holes = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
  params[leaf]["kernel"].flat[list(holes)] = np.nan
  for name in ("magnitude", "global_magnitude"):
    with pytest.raises(ValueError, match=f"'{leaf}/kernel' hold {len(holes)} "):
      training.updater(name).instant_sparsify(params)


@cache
def drawn(dtype):
  pruner = training.updater("random")

  def scores(key):
    params = jax.tree.map(
      lambda shape: jnp.zeros(shape, dtype),
      training.SHAPES,
      is_leaf=lambda x: isinstance(x, tuple),
    )
    return pruner.random_scores(
      params, jaxpruner.SparseState(masks=None, key=key)
    )

  return jax.jit(scores)


@hypothesis.given(st.integers(0, 2**31 - 1))
def test_random_scores_do_not_depend_on_dtype_and_a_key_is_its_seed(seed):
  typed = jaxpruner.RandomPruning(rng_seed=jax.random.key(seed))
  plain = jaxpruner.RandomPruning(rng_seed=seed)
  key = seeds.key_of(typed, None)
  assert same(key, seeds.key_of(plain, None))
  wide = drawn(jnp.float32)(key)
  assert wide["a"]["kernel"].dtype == jnp.float32
  for dtype in (jnp.bfloat16, jnp.float16):
    assert same(drawn(dtype)(key), wide)


@cache
def masked(name):
  return jax.jit(training.updater(name).post_gradient_update)


@hypothesis.given(
  st.sampled_from(["magnitude", "rigl", "magnitude_ste", "no_prune"]),
  training.inputs(),
  st.integers(0, STEPS),
)
def test_post_gradient_update_is_idempotent_and_changes_nothing(
  name, inputs, step
):
  run = Run(name, *inputs)
  state = run.state(step)
  assert same(masked(name)(run.params(step), state), run.params(step))
  once = masked(name)(run.given, state)
  assert same(masked(name)(once, state), once)


@cache
def accumulating(name):
  tx = optax.MultiSteps(
    training.updater(name).wrap_optax(training.optimizer(name)), 2
  )

  def run(params, grads):
    def body(carry, grad):
      params, state = carry
      updates, state = tx.update(grad, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), (state.inner_opt_state.masks, params)

    twice = jax.tree.map(lambda g: jnp.repeat(g, 2, axis=0), grads)
    _, out = jax.lax.scan(body, (params, tx.init(params)), twice)
    return jax.tree.map(lambda x: x[1::2], out)

  return jax.jit(run)


@hypothesis.given(st.sampled_from(["magnitude", "rigl"]), training.inputs())
def test_accumulated_steps_count_as_one(name, inputs):
  """MultiSteps around the wrapper: the clock counts real steps."""
  run = Run(name, *inputs)
  masks, after = accumulating(name)(run.start, run.grads)
  if name == "magnitude":  # RigL draws its first mask from the parameters
    assert same(masks, run.states.masks)
    for leaf in KERNELS:  # the mean of two zeros may lose its sign
      found = np.asarray(after[leaf]["kernel"])
      assert np.array_equal(found, run.after[leaf]["kernel"])
  for step in range(STEPS):
    for leaf in KERNELS:
      mask = np.asarray(masks[leaf]["kernel"])[step]
      assert mask.sum() == run.mask(leaf, step + 1).sum()
      removed = np.asarray(after[leaf]["kernel"])[step][mask == 0]
      assert (removed.view(np.uint32) == 0).all()


@hypothesis.given(st.sampled_from([*training.GRADUAL, "rigl"]))
def test_a_pruner_that_would_never_prune_says_so(name):
  cls = jaxpruner.algorithm_class(name)
  with pytest.warns(UserWarning, match="never change its masks"):
    cls().wrap_optax(optax.sgd(0.1))
  tx = jaxpruner.create_updater_from_config(
    {"algorithm": name, "sparsity": 0.0, "total_steps": 100}
  ).wrap_optax(optax.sgd(0.1))
  with pytest.warns(UserWarning, match="never prune"):
    tx.init({"kernel": np.ones((2, 2), np.float32)})
