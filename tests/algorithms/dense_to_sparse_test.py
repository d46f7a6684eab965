"""Dense-to-sparse methods against their papers' formulas, in NumPy.

The references are loops over plain arrays, written from the papers; gradients
are given, so that nothing but the method is tested.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_schedules as schedules

RATE = 0.25
STEPS = 6
SHAPES = {"a": (4, 6), "b": (6, 4)}
half = functools.partial(jaxpruner.sparsity_distributions.uniform, sparsity=0.5)
RAMP = schedules.PolynomialSchedule(1, 0, 4, power=1)


def draw(seed, *lead):
  rng = np.random.default_rng(seed)
  return {
    k: {"kernel": rng.normal(size=(*lead, *shape)).astype(np.float32)}
    for k, shape in SHAPES.items()
  }


WEIGHTS, GRADS = draw(0), draw(1, STEPS)


def at(tree, step):
  return {k: v["kernel"][step] for k, v in tree.items()}


def flat(tree):
  return {k: np.asarray(v["kernel"], np.float64) for k, v in tree.items()}


def run(pruner, inner=None, **extra):
  """Return `[(params, state)]` by step, the gradients being `GRADS`."""
  tx = pruner.wrap_optax(inner or optax.sgd(RATE))

  @jax.jit
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(jnp.asarray, WEIGHTS)
  history = [(params, tx.init(params))]
  for t in range(STEPS):
    grads = {k: {"kernel": g} for k, g in at(GRADS, t).items()}
    history.append(step(*history[-1], grads))
  return history


def top(scores, sparsity):
  """Keep the highest, one leaf."""
  keep = max(1, round(scores.size * (1 - sparsity)))
  order = np.argsort(-scores, axis=None, kind="stable")
  mask = np.zeros(scores.size, np.uint8)
  mask[order[:keep]] = 1
  return mask.reshape(scores.shape)


def top_together(scores, sparsity):
  whole = np.concatenate([s.ravel() for s in scores.values()])
  mask, result = top(whole, sparsity), {}
  for name, s in scores.items():
    result[name], mask = mask[: s.size].reshape(s.shape), mask[s.size :]
  return result


def ramp(step):
  return 0.5 * min(max(step, 0), 4) / 4


def check_masks(state, masks):
  for name, mask in masks.items():
    np.testing.assert_array_equal(state.masks[name]["kernel"], mask)


def check_params(params, expected):
  for name, value in expected.items():
    np.testing.assert_allclose(params[name]["kernel"], value, 2e-5, 1e-6)


def check_hidden(pruner, at, dense, mask):
  """Params show the masked weights, the state keeps the dense ones."""
  params, state = at
  check_masks(state, mask)
  check_params(pruner.dense_params(params, state), dense)
  check_params(params, {k: w * mask[k] for k, w in dense.items()})


def test_movement_keeps_what_moved_from_zero():
  pruner = jaxpruner.MovementPruning(
    sparsity_distribution_fn=half, scheduler=RAMP
  )
  history = run(pruner)
  w = flat(WEIGHTS)
  score = {k: np.zeros_like(v) for k, v in w.items()}
  mask = {k: np.ones(v.shape, np.uint8) for k, v in w.items()}
  for t in range(STEPS):
    for k, g in at(GRADS, t).items():
      score[k] -= w[k] * g
      w[k] -= RATE * mask[k] * g
      mask[k] = top(score[k], ramp(t + 1))
    check_hidden(pruner, history[t + 1], w, mask)


@pytest.mark.parametrize("momentum, decay", [(0.0, 0.0), (0.5, 0.0), (0, 0.1)])
def test_movement_moves_masked_weights_by_momentum_and_decay_only(
  momentum, decay
):
  pruner = jaxpruner.MovementPruning(
    sparsity_distribution_fn=half, scheduler=RAMP
  )
  inner = optax.chain(
    optax.add_decayed_weights(decay), optax.sgd(RATE, momentum or None)
  )
  history = run(pruner, inner)
  w = flat(WEIGHTS)
  v = {k: np.zeros_like(x) for k, x in w.items()}
  mask = {k: np.ones(x.shape) for k, x in w.items()}
  for t, (params, state) in enumerate(history[1:]):
    moved = 0.0
    for k, g in at(GRADS, t).items():
      v[k] = momentum * v[k] + np.where(mask[k] == 1, g, 0) + decay * w[k]
      w[k] = w[k] - RATE * v[k]
      moved += np.abs(np.where(mask[k] == 1, 0, v[k])).sum()
      mask[k] = np.asarray(state.masks[k]["kernel"])
    assert (moved > 0) == (t > 0 and momentum + decay > 0)
    check_params(pruner.dense_params(params, state), w)


def test_soft_movement_shares_one_threshold():
  pruner = jaxpruner.SoftMovementPruning(
    sparsity=0.5, scheduler=RAMP, penalty=0.3, score_rate=0.7
  )
  history = run(pruner)
  w = flat(WEIGHTS)
  score = {k: np.zeros_like(v) for k, v in w.items()}
  mask = {k: np.ones(v.shape, np.uint8) for k, v in w.items()}
  for t in range(STEPS):
    for k, g in at(GRADS, t).items():
      sigmoid = 1 / (1 + np.exp(-score[k]))
      score[k] -= 0.7 * (w[k] * g + 0.3 * sigmoid * (1 - sigmoid))
      w[k] -= RATE * mask[k] * g
    mask = top_together(score, ramp(t + 1))
    check_hidden(pruner, history[t + 1], w, mask)


def test_str_learns_thresholds_and_shrinks_the_kept():
  pruner = jaxpruner.SoftThresholdPruning(
    sparsity=0.5, scheduler=RAMP, threshold_rate=0.5, threshold_decay=0.1
  )
  history = run(pruner)
  w = flat(WEIGHTS)
  s = dict.fromkeys(w, -3.0)
  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  mask = {k: np.ones(v.shape, np.uint8) for k, v in w.items()}
  for t in range(STEPS):
    for k, g in at(GRADS, t).items():
      slope = sigmoid(s[k]) * (1 - sigmoid(s[k]))
      pull = -slope * np.sum(mask[k] * g * np.sign(w[k]))
      s[k] -= 0.5 * (pull + 0.1 * s[k])
      w[k] -= RATE * mask[k] * g
    mask = top_together(
      {k: abs(v) - sigmoid(s[k]) for k, v in w.items()}, ramp(t + 1)
    )
    params, state = history[t + 1]
    check_masks(state, mask)
    check_params(pruner.dense_params(params, state), w)
    cuts = {k: np.max(abs(v) * (1 - mask[k])) for k, v in w.items()}
    check_params(
      params,
      {
        k: np.sign(v) * np.maximum(abs(v) - cuts[k], 0) * mask[k]
        for k, v in w.items()
      },
    )
  for k, value in s.items():
    np.testing.assert_allclose(
      state.stats["thresholds"][k]["kernel"], value, 1e-4
    )


def test_sr_ste_pulls_masked_weights_to_zero():
  pruner = jaxpruner.SrStePruning(
    sparsity_distribution_fn=half, scheduler=RAMP, mask_decay=0.3
  )
  assert jaxpruner.SrStePruning().mask_decay == 2e-4
  history = run(pruner)
  w = flat(WEIGHTS)
  mask = {k: np.ones(v.shape, np.uint8) for k, v in w.items()}
  for t in range(STEPS):
    for k, g in at(GRADS, t).items():
      w[k] = w[k] - RATE * (g + 0.3 * (1 - mask[k]) * w[k])
      mask[k] = top(abs(w[k]), ramp(t + 1))
    check_hidden(pruner, history[t + 1], w, mask)


def test_straight_through_saliency_ranks_by_this_steps_gradient():
  pruner = jaxpruner.SteSaliencyPruning(
    sparsity_distribution_fn=half, scheduler=RAMP
  )
  history = run(pruner)
  w = flat(WEIGHTS)
  for t in range(STEPS):
    mask = {}
    for k, g in at(GRADS, t).items():
      w[k] = w[k] - RATE * g
      mask[k] = top(abs(w[k] * g), ramp(t + 1))
    check_hidden(pruner, history[t + 1], w, mask)


def test_decaying_masks_fade_what_the_target_removes():
  pruner = jaxpruner.DecayingMaskPruning(
    sparsity_type=jaxpruner.NByM(1, 2, axis=-1), scheduler=RAMP
  )
  history = run(pruner)
  dense = [jax.tree.map(np.asarray, pruner.dense_params(*at)) for at in history]
  for t, (seen, state) in enumerate(history[:5]):
    assert all((m == 1).all() for m in jax.tree.leaves(state.masks))
    beta = 1 - t / 4
    for k in SHAPES:
      w, previous = (dense[max(t - back, 0)][k]["kernel"] for back in (0, 1))
      # The mask fading now was chosen when the last update began.
      pairs = abs(previous.reshape(-1, 2))
      first = pairs[:, 0] >= pairs[:, 1]
      kept = np.stack([first, ~first], 1).reshape(w.shape)
      expected = np.where(kept, w, beta * w) if t else w
      np.testing.assert_allclose(seen[k]["kernel"], expected, 1e-6, 1e-6)
  masks = history[5][1].masks
  w = dense[4]["a"]["kernel"]
  pairs = masks["a"]["kernel"].reshape(-1, 2)
  assert (pairs.sum(1) == 1).all()
  assert (pairs.argmax(1) == abs(w.reshape(-1, 2)).argmax(1)).all()


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.0])
def test_powerpropagation_descends_in_theta(alpha):
  tx = jaxpruner.transforms.powerpropagation(
    optax.chain(optax.add_decayed_weights(0.1), optax.sgd(RATE)), alpha
  )
  params = jax.tree.map(jnp.asarray, WEIGHTS) | {"bias": jnp.ones(3)}
  state = tx.init(params)
  grads = {k: {"kernel": g} for k, g in at(GRADS, 0).items()}
  updates, _ = tx.update(grads | {"bias": jnp.ones(3)}, state, params)
  after = optax.apply_updates(params, updates)
  np.testing.assert_allclose(after["bias"], 1 - RATE * 1.1, 1e-6)
  for k, g in at(GRADS, 0).items():
    w = WEIGHTS[k]["kernel"].astype(np.float64)
    theta = np.sign(w) * abs(w) ** (1 / alpha)
    slope = g * alpha * abs(theta) ** (alpha - 1)
    theta = theta - RATE * (slope + 0.1 * theta)
    np.testing.assert_allclose(
      after[k]["kernel"], theta * abs(theta) ** (alpha - 1), 1e-4, 1e-5
    )


@pytest.mark.parametrize("inner", [optax.adam, optax.sgd])
def test_fisher_reads_adams_second_moment(inner):
  pruner = jaxpruner.FisherPruning(
    sparsity_distribution_fn=half, scheduler=schedules.OneShotSchedule(3)
  )
  history = run(pruner, inner(0.01))
  nu = {k: np.zeros(s) for k, s in SHAPES.items()}
  for t in range(3):
    for k, g in at(GRADS, t).items():
      nu[k] = 0.999 * nu[k] + 0.001 * g.astype(np.float64) ** 2
  if inner is optax.sgd:
    nu = {k: g.astype(np.float64) ** 2 for k, g in at(GRADS, 3).items()}
  w = flat(history[3][0])
  check_masks(history[4][1], {k: top(w[k] ** 2 * nu[k], 0.5) for k in SHAPES})


@pytest.mark.parametrize("block", [7, 64])
def test_wood_fisher_inverts_the_blocks(block):
  pruner = jaxpruner.WoodFisherPruning(
    sparsity_distribution_fn=half,
    scheduler=schedules.OneShotSchedule(4),
    window=3,
    block_size=block,
    damping=0.1,
  )
  history = run(pruner)
  params, state = history[5]
  expected = {}
  for k, w in flat(history[4][0]).items():
    # The mask was chosen at step 4, from the gradients of steps 2, 3 and 4.
    grads = [at(GRADS, t)[k].astype(np.float64).ravel() for t in (2, 3, 4)]
    lam = 0.1 * np.mean(np.square(grads))
    score = np.zeros(w.size)
    for start in range(0, w.size, block):
      part = slice(start, start + block)
      rows = [g[part] for g in grads]
      fisher = lam * np.eye(len(rows[0]))
      for row in rows:
        fisher += np.outer(row, row) / 3
      score[part] = w.ravel()[part] ** 2 / np.diag(np.linalg.inv(fisher))
    expected[k] = top(score.reshape(w.shape), 0.5)
  check_masks(state, expected)


def quadratic(params):
  scale = {"a": 1.0, "b": 3.0}
  return sum(
    scale[k] * jnp.sum((params[k]["kernel"] - 1) ** 2) / 2 for k in SHAPES
  )


@pytest.mark.parametrize("plus", [True, False])
def test_cram_takes_the_gradient_at_the_pruned_ascent_point(plus):
  pruner = jaxpruner.CrAM(
    sparsity_distribution_fn=half,
    scheduler=schedules.OneShotSchedule(STEPS + 1),
    rho=0.2,
    dense_gradient=plus,
  )
  history = run(pruner, grad_fn=jax.grad(quadratic))
  w = flat(WEIGHTS)
  for t in range(STEPS):
    for k, scale in (("a", 1.0), ("b", 3.0)):
      g = at(GRADS, t)[k]
      ascended = w[k] + 0.2 * g
      pruned = ascended * top(abs(ascended), 0.5)
      second = scale * (pruned - 1)
      w[k] = w[k] - RATE * (second + (g if plus else 0))
    check_params(history[t + 1][0], w)


def test_sharpness_aware_steps_climb_by_a_fixed_length():
  tx = jaxpruner.transforms.compression_aware(
    optax.sgd(RATE), rho=0.2, normalize=True
  )
  params = jax.tree.map(jnp.asarray, WEIGHTS)
  grads = jax.grad(quadratic)(params)
  updates, _ = tx.update(
    grads, tx.init(params), params, grad_fn=jax.grad(quadratic)
  )
  g = flat(grads)
  norm = np.sqrt(sum(np.sum(v**2) for v in g.values()))
  for k, scale in (("a", 1.0), ("b", 3.0)):
    w = WEIGHTS[k]["kernel"] + 0.2 * g[k] / norm
    np.testing.assert_allclose(
      updates[k]["kernel"], -RATE * scale * (w - 1), 1e-5, 1e-6
    )
  with pytest.raises(ValueError, match="grad_fn=jax.grad"):
    tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize(
  ("name", "field", "value"),
  [
    ("soft_movement", "penalty", -1.0),
    ("str", "threshold_rate", 0),
    ("sr_ste", "mask_decay", "much"),
    ("powerpropagation", "alpha", 0.0),
    ("wood_fisher", "window", 2.5),
    ("wood_fisher", "damping", float("inf")),
    ("cram", "rho", True),
  ],
)
def test_nonsense_is_refused(name, field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    jaxpruner.algorithm_class(name)(**{field: value})


def test_phases_alternate_and_end_sparse():
  schedule = schedules.AlternatingSchedule(3, 2, 10)
  due = [bool(schedule.is_mask_update_iter(t)) for t in range(12)]
  assert [t for t, d in enumerate(due) if d] == [2, 5, 8, 10]
  wanted = [float(schedule.get_sparsity_at_step(0.5, t)) for t in range(12)]
  assert wanted == [0, 0, *[0.5] * 3, *[0] * 3, *[0.5] * 4]
  with pytest.raises(ValueError, match="update_end_step=None"):
    schedules.AlternatingSchedule(3, 2)


@pytest.mark.parametrize("back", [0, 2])
def test_imp_prunes_a_fifth_and_rewinds_weights_and_moments(back):
  pruner = jaxpruner.IterativeMagnitudePruning(
    sparsity=0.3,
    rewind_step=back,
    scheduler=schedules.GeometricSchedule(2, 3, 5),
  )
  history = run(pruner, optax.sgd(RATE, momentum=0.5))
  w = flat(WEIGHTS)
  velocity = {k: np.zeros_like(v) for k, v in w.items()}
  early = dict(w), dict(velocity)
  mask = {k: np.ones(v.shape) for k, v in w.items()}
  for t in range(STEPS):
    if t in (3, 5):  # rounds at 20 and 30 %, instead of a step
      gone = {k: np.where(mask[k], abs(v), -1) for k, v in w.items()}
      mask = top_together(gone, 0.2 if t == 3 else 0.3)
      w = {k: v * mask[k] for k, v in early[0].items()}
      velocity = dict(early[1])
    else:
      for k, g in at(GRADS, t).items():
        velocity[k] = 0.5 * velocity[k] + g
        w[k] = mask[k] * (w[k] - RATE * velocity[k])
    if t + 1 == back:
      early = dict(w), dict(velocity)
    check_masks(history[t + 1][1], mask)
    check_params(history[t + 1][0], w)
  assert jaxpruner.algorithm_category("imp").trainings(0.9) == 12


@pytest.mark.parametrize("name", ["magnitude", "global_magnitude", "saliency"])
def test_instant_sparsify_selects_in_one_compiled_function(name):
  from jaxpruner.updater import at_once

  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  # Larger than the leaves of which the engine copies keys.
  params = {"a": draw(256, 160), "b": {"kernel": draw(5, 4), "bias": draw(4)}}
  grads = jax.tree.map(jnp.cos, params)
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": name, "sparsity": 0.6}
  )
  view = pruner.view(params)
  masks = at_once.select_at_once(pruner, view, grads)
  scores = pruner.calculate_scores(params, grads=grads)
  want = pruner.create_masks(scores, view.put(None, view.targets))
  jax.tree.map(np.testing.assert_array_equal, masks, want)
  # The scores are nowhere in the compiled function: no float array is written.
  program = at_once._selected.lower(pruner, params, grads).compile()
  entry = program.as_text().partition("ENTRY")[2]
  assert "f32[256,160]{1,0} fusion" not in entry
  assert program.memory_analysis().temp_size_in_bytes < params["a"].nbytes / 4
  with pytest.raises(ValueError, match="'a' hold 1 NaN"):
    pruner.instant_sparsify(
      {**params, "a": params["a"].at[0, 0].set(jnp.nan)}, grads
    )


def test_a_global_ranking_is_updated_whole_or_not_at_all():
  params = {
    "a": jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32),
    "b": jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), jnp.float32),
  }
  pruner = jaxpruner.create_updater_from_config(
    {
      "algorithm": "global_magnitude",
      "sparsity": 0.75,
      "update_start_step": 0,
      "schedule": "one_shot",
    }
  )
  state = pruner.init_state(params)
  bad = params | {"a": params["a"].at[0, 0].set(jnp.nan)}
  after = jax.jit(pruner.update_state)(state, bad, params)
  jax.tree.map(np.testing.assert_array_equal, after.masks, state.masks)
  assert after.skipped.tolist() == [1, 1]
  after = jax.jit(pruner.update_state)(state, params, params)
  assert sum(int(m.sum()) for m in after.masks.values()) == 32
