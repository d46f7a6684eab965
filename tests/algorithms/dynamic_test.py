"""Each dynamic method against its paper's formula, in slow NumPy."""

import fractions
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jaxpruner
from jaxpruner.algorithms import redistribution

SHAPES = {"a": (8, 6), "b": (6, 4)}
SPARSITY, STEP, END = 0.5, 4, 16
FRACTION = np.float32(0.4)


def tree(seed):
  rng = np.random.default_rng(seed)
  return {
    name: {"kernel": rng.normal(size=shape).astype(np.float32)}
    for name, shape in SHAPES.items()
  }


def make(name, **options):
  return jaxpruner.create_updater_from_config(
    {
      "algorithm": name,
      "sparsity": SPARSITY,
      "update_freq": 4,
      "update_start_step": 0,
      "update_end_step": END,
      **options,
    }
  )


def cosine(step):
  cos = np.cos(np.float32(np.pi) * np.float32(step / END))
  return FRACTION * (1 + cos) / 2


@functools.cache
def rewired(name, looks=0, **options):
  """One mask update at `STEP`, after some looks at gradients."""
  pruner = make(name, **options)

  def run(params, grads):
    state = pruner.init_state(params)
    params = pruner.post_gradient_update(params, state)
    for i in range(looks):
      look = jax.tree.map(lambda g, i=i: g[i], grads)
      state = pruner.on_gradients(state, params, look)
    if looks:
      grads = jax.tree.map(lambda g: g[-1], grads)
    state = state._replace(count=state.count + STEP)
    draws = pruner.random_scores(params, state, STEP + 1)
    return state, params, draws, pruner.update_state(state, params, grads)

  return jax.jit(run)


def leaves(*trees):
  """Rows of NumPy kernels, one per leaf."""
  return [[np.asarray(t[name]["kernel"]) for t in trees] for name in SHAPES]


def shared_out(total, shares):
  """Largest remainder, in fractions; nobody is full here."""
  whole = sum(map(fractions.Fraction, map(float, shares)))
  quotas = [fractions.Fraction(float(s)) * total / whole for s in shares]
  given = [int(q) for q in quotas]
  order = sorted(range(len(quotas)), key=lambda i: (given[i] - quotas[i], i))
  for i in order[: total - sum(given)]:
    given[i] += 1
  return given


def drop_then_grow(mask, drop, grow, kept, goal):
  """Keep the best of the mask by one score, fill up by another."""
  active = set(np.flatnonzero(mask.ravel()))
  stay = [i for i in reference.ranking(drop) if i in active][:kept]
  rest = [i for i in reference.ranking(grow) if i not in set(stay)]
  new = np.zeros(mask.size, np.uint8)
  new[stay + rest[: goal - kept]] = 1
  return new.reshape(mask.shape)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_set_with_gradient_growth_is_rigl(seed):
  run = rewired("set", grow="gradient", drop_fraction=0.4)
  same = rewired("rigl", drop_fraction=0.4)
  one, two = run(tree(seed), tree(9)), same(tree(seed), tree(9))
  jax.tree.map(np.testing.assert_array_equal, one[3].masks, two[3].masks)


@pytest.mark.parametrize("name, alpha", [("itop", 0.5), ("rigl", 0.3)])
def test_the_number_of_replaced_weights_is_exact(name, alpha):
  # α/2 · (1 + cos(πt/T)) is α, 3/4 α, α/2, 1/4 α and 0 at these steps; float32
  # misses some of the products by a last bit.
  pruner = make(name, drop_fraction=alpha, update_end_step=120)
  totals = np.arange(20, 4020, 40)
  for step, share in ((1, None), (40, 3), (60, 2), (80, 1), (120, 0)):
    state = jaxpruner.SparseState(None, count=jnp.int32(step))
    left = pruner.survivors(state, jnp.asarray(totals, jnp.int32), None, None)
    dropped = totals - np.asarray(left)
    if share is None:
      cosine_ = alpha / 2 * (1 + np.cos(np.pi * step / 120))
      exact = np.floor(cosine_ * totals)
    else:
      whole = fractions.Fraction(str(alpha)) * fractions.Fraction(share, 4)
      exact = [int(whole * int(n)) for n in totals]
    np.testing.assert_array_equal(dropped, exact)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_momentum_grows_where_the_mean_gradient_is_large(seed):
  grads = jax.tree.map(
    lambda *g: np.stack(g), *(tree(seed + i) for i in (5, 6))
  )
  run = rewired("snfs", looks=2, drop_fraction=0.4)
  state, params, _, new = run(tree(seed), grads)
  mean = jax.tree.map(lambda g: 0.9 * (0.1 * g[0]) + 0.1 * g[1], grads)
  rows = leaves(state.masks, params, mean, new.masks)
  kept, shares = [], []
  for mask, _, momentum, _ in rows:
    kept.append(int(mask.sum() - np.floor(cosine(STEP) * mask.sum())))
    # The paper shares growth by the weights of before dropping.
    shares.append(np.abs(momentum)[mask == 1].mean())
  total = sum(int(row[0].sum()) for row in rows)
  grown = shared_out(total - sum(kept), shares)
  for (mask, param, momentum, found), k, g in zip(
    rows, kept, grown, strict=True
  ):
    wanted = drop_then_grow(mask, abs(param), abs(momentum), k, k + g)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mest_drops_by_weight_and_gradient_and_less_each_time(seed):
  part = {"name": "magnitude_gradient", "weight": 0.5}
  pruner = make("mest", drop=part, drop_fraction=0.4)
  assert pruner.drop == jaxpruner.criteria.MagnitudeGradient(0.5)
  fractions_ = [float(pruner.drop_fraction_at(t)) for t in (0, 4, 8, 16)]
  np.testing.assert_allclose(fractions_, [0.4, 0.3, 0.2, 0], atol=1e-7)
  run = rewired("mest", drop_fraction=0.4)
  state, params, draws, new = run(tree(seed), tree(9))
  for mask, param, grad, draw, found in leaves(
    state.masks, params, tree(9), draws, new.masks
  ):
    score = np.abs(param) + np.abs(grad)
    dropped = int(np.floor(np.float32(0.3) * mask.sum()))
    wanted = reference.drop_and_grow(mask, score, draw, dropped)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_granet_prunes_to_the_ramp_and_regenerates(share):
  run = rewired("granet", start_share=share, drop_fraction=0.4)
  state, params, _, new = run(tree(0), tree(9))
  for mask, param, grad, found in leaves(
    state.masks, params, tree(9), new.masks
  ):
    assert mask.sum() == reference.num_ones(mask.size, share * SPARSITY)
    ramp = reference.zhu_gupta(SPARSITY, STEP, 0, END)
    now = float(ramp + fractions.Fraction(share) * (SPARSITY - ramp))
    goal = reference.num_ones(mask.size, np.float32(now))
    kept = int(goal - np.floor(cosine(STEP) * goal))
    wanted = drop_then_grow(mask, abs(param), abs(grad), kept, goal)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("threshold, factor", [(0.02, 2), (0.9, 0.5)])
def test_dsr_drops_below_one_threshold_that_adapts(threshold, factor):
  run = rewired("dsr", threshold=threshold, drop_fraction=0.4)
  state, params, draws, new = run(tree(0), tree(9))
  rows = leaves(state.masks, params, draws, new.masks)
  kept = [
    max(1, int(((np.abs(p) >= np.float32(threshold)) & (m == 1)).sum()))
    for m, p, *_ in rows
  ]
  total = sum(int(row[0].sum()) for row in rows)
  grown = shared_out(total - sum(kept), kept)
  for (mask, param, draw, found), k, g in zip(rows, kept, grown, strict=True):
    wanted = drop_then_grow(mask, abs(param), draw, k, k + g)
    np.testing.assert_array_equal(found, wanted)
  assert float(new.stats["threshold"]) == pytest.approx(threshold * factor)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_srigl_keeps_the_fan_in_of_every_neuron(seed):
  run = rewired("srigl", drop_fraction=0.4)
  state, params, _, new = run(tree(seed), tree(9))
  for mask, param, grad, found in leaves(
    state.masks, params, tree(9), new.masks
  ):
    assert set(mask.sum(0)) == set(found.sum(0)) == {mask.shape[0] // 2}
    dropped = int(np.floor(cosine(STEP) * mask.sum()))
    wanted = reference.drop_and_grow_n_by_m(
      mask, abs(param), abs(grad), dropped, mask.shape[0], 0
    )
    np.testing.assert_array_equal(found, wanted)


def test_constant_fan_in_of_a_convolution_counts_all_inputs():
  scores = np.random.default_rng(0).normal(size=(3, 3, 2, 5))
  mask = jaxpruner.ConstantFanIn().mask(jnp.asarray(scores), 0.5)
  for neuron in range(5):
    wanted = reference.unstructured(scores[..., neuron], 0.5)
    np.testing.assert_array_equal(mask[..., neuron], wanted)


def test_deep_r_stops_weights_at_zero_and_replaces_them():
  pruner = make("deep_r", penalty=0.01, noise=0.0)
  params, tx = tree(0), pruner.wrap_optax(optax.sgd(1.0))
  signs = jax.tree.map(lambda p: np.where(p >= 0, 1, -1), params)
  state = tx.init(params)
  params = pruner.post_gradient_update(params, state)
  grads = jax.tree.map(lambda g: g * 2.0, tree(9))
  updates, stepped = jax.jit(tx.update)(grads, state, params)
  moved = optax.apply_updates(params, updates)
  stopped = 0
  for mask, param, grad, sign, new in leaves(
    state.masks, params, grads, signs, moved
  ):
    # θ ← θ - η ∂E/∂θ - ηα for w = sign · θ, dormant below zero.
    theta = sign * param - sign * grad - np.float32(0.01)
    wanted = np.where((mask == 1) & (theta > 0), sign * theta, 0)
    np.testing.assert_allclose(new, wanted, atol=1e-6)
    stopped += int(((mask == 1) & (theta <= 0)).sum())
  assert stopped > 3
  draws = pruner.random_scores(moved, stepped, 2)
  after = jax.jit(pruner.update_state)(stepped, moved, grads)
  for mask, new, draw, found in leaves(
    stepped.masks, moved, draws, after.masks
  ):
    kept = int(((mask == 1) & (new != 0)).sum())
    wanted = drop_then_grow(mask, abs(new), draw, kept, int(mask.sum()))
    np.testing.assert_array_equal(found, wanted)


def test_deep_r_wanders_by_the_noise_asked_for():
  pruner = make("deep_r", penalty=0.0, noise=0.25, sparsity=0.0)
  params = {"kernel": jnp.full((80, 80), 9.0)}
  with pytest.warns(UserWarning, match="never prune"):
    state = pruner.init_state(params)
  still = jax.tree.map(jnp.zeros_like, params)
  moved = np.asarray(pruner.hold_zeros(still, state, params)["kernel"])
  assert abs(moved.mean()) < 0.02 and moved.std() == pytest.approx(0.25, 0.05)


def test_top_kast_looks_through_one_mask_and_trains_through_another():
  pruner = make("top_kast", sparsity=0.75, regularization=0.125)
  tx, params = pruner.wrap_optax(optax.sgd(1.0)), tree(0)
  state = tx.init(params)
  seen = pruner.post_gradient_update(params, state)
  grads = jax.tree.map(lambda x: jnp.full_like(x, 3), params)
  updates, new = jax.jit(tx.update)(grads, state, seen)
  moved = pruner.dense_params(optax.apply_updates(seen, updates), new)
  for param, mask, wide, shown, after in leaves(
    params, state.masks, state.stats["backward"], seen, moved
  ):
    forward = reference.unstructured(abs(param), 0.75)
    backward = reference.unstructured(abs(param), 0.5)
    np.testing.assert_array_equal(mask, forward)
    np.testing.assert_array_equal(wide, backward)
    np.testing.assert_array_equal(shown, np.where(forward, param, 0))
    # L2: λ on the forward set, λ / density beyond it.
    rate = np.where(forward == 1, 0.125, 0.125 / 0.25)
    wanted = np.where(backward == 1, -(3 + rate * param), 0)
    np.testing.assert_allclose(after - param, wanted, atol=1e-6)


@functools.cache
def allocator(n):
  return jax.jit(redistribution.allocate)


@hypothesis.given(
  st.lists(
    st.tuples(st.floats(0, 100, width=32), st.integers(0, 50)),
    min_size=4,
    max_size=4,
  ),
  st.floats(0, 1),
)
def test_an_allocation_is_exact_and_never_beyond_the_room(rows, filled):
  shares, room = map(np.array, zip(*rows, strict=True))
  total = int(filled * room.sum())
  shares = shares.astype(np.float32)
  given = np.asarray(allocator(4)(shares, total, room.astype(np.int32)))
  assert given.sum() == total
  assert (given >= 0).all() and (given <= room).all()
  if shares.min() > 1e-3 * shares.max() > 0:
    quota = total * shares.astype(np.float64) / shares.sum(dtype=np.float64)
    if (quota + 1 < room).all():
      assert (np.abs(given - quota) < 1.001).all()


def test_weights_only_move_between_leaves_of_single_weights():
  pruner = make("snfs", sparsity_type="block_2,2")
  params = tree(0)
  state = pruner.init_state(params)
  with pytest.raises(ValueError, match=r"'a/kernel'.*redistribute=None"):
    pruner.update_state(state, params, params)


@pytest.mark.parametrize(
  "options, reason",
  [
    ({"grow": "gradeint"}, "did you mean 'gradient'"),
    ({"grow": {"name": "momentum", "weight": 1}}, "has no 'weight'"),
    ({"drop": 0.1}, "name one of magnitude, .*drop_fraction=0.1"),
    ({"redistribute": "survivor"}, "did you mean 'survivors'"),
    ({"momentum_decay": 2}, "between 0 and 1"),
  ],
)
def test_unknown_parts_are_refused_with_the_nearest(options, reason):
  with pytest.raises(ValueError, match=reason):
    make("set", **options)


def test_parts_survive_a_configuration():
  pruner = make(
    "set", drop={"name": "magnitude_gradient", "weight": 2.0}, grow="momentum"
  )
  config = jaxpruner.config_from_updater(pruner)
  assert config["grow"] == "momentum" and config["drop"]["weight"] == 2.0
  assert jaxpruner.create_updater_from_config(config) == pruner
  with pytest.raises(ValueError, match=r"jaxpruner\.criteria"):
    jaxpruner.SET(grow="momentum")
