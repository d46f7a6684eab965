"""Laws of sparse training that no single paper states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner.algorithms import sparse_trainers


def make(name="rigl", **options):
  made = {"algorithm": name, "sparsity": 0.5}
  return jaxpruner.create_updater_from_config({**made, **options})


def test_an_untrained_network_is_not_rewired():
  params = {"a": jnp.asarray(np.arange(16.0).reshape(4, 4) - 7.5)}
  grads = {"a": params["a"][::-1]}
  pruner = make(drop_fraction=0.5)
  state = pruner.init_state(params)
  same = pruner.update_state(state, params, grads).masks["a"]
  np.testing.assert_array_equal(same, state.masks["a"])
  other = pruner.update_state(state._replace(count=1), params, grads)
  assert not np.array_equal(other.masks["a"], state.masks["a"])
  assert int(other.masks["a"].sum()) == 8


@pytest.mark.parametrize("count", [0, 1])
def test_a_fraction_of_ones_own_replaces_the_cosine(count):
  pruner = jaxpruner.SET(drop_fraction_fn=lambda step: 0.25 + 0 * step)
  state = jaxpruner.SparseState(None, count=jnp.int32(count))
  left = pruner.survivors(state, jnp.asarray([8, 40]), None, None)
  assert left.tolist() == ([8, 40] if count == 0 else [6, 30])


W = np.random.default_rng(0).permutation(32).astype(np.float32) - 15.5
PARAMS = {
  "a": jnp.asarray(W[:16].reshape(4, 4)),
  "b": jnp.asarray(W[16:].reshape(4, 4)),
}
GRADS = {"a": PARAMS["b"], "b": PARAMS["a"]}


def moved(mask, drop, grow, dropped):
  """By hand: drop the lowest of the kept, grow the highest of all others."""
  mask, drop, grow = (np.asarray(x).ravel() for x in (mask, drop, grow))
  kept = sorted(np.flatnonzero(mask), key=lambda i: -drop[i])
  stay = kept[: len(kept) - dropped]
  rest = sorted(set(range(mask.size)) - set(stay), key=lambda i: -grow[i])
  new = np.zeros(mask.size, np.uint8)
  new[[*stay, *rest[: len(kept) - len(stay)]]] = 1
  return new.reshape(4, 4)


@pytest.mark.parametrize("jitted", [False, True])
def test_an_update_drops_the_smallest_and_grows_the_steepest(jitted):
  pruner = make(drop_fraction=0.5)
  state = pruner.init_state(PARAMS)._replace(count=jnp.int32(3))
  update = jax.jit(pruner.update_state) if jitted else pruner.update_state
  found = update(state, PARAMS, GRADS).masks
  for name in PARAMS:
    expected = moved(state.masks[name], abs(PARAMS[name]), abs(GRADS[name]), 4)
    np.testing.assert_array_equal(found[name], expected)


def test_a_leaf_with_a_non_finite_score_keeps_its_mask_alone():
  bad = {**GRADS, "a": GRADS["a"].at[0, 0].set(jnp.inf)}
  for options, stays in (({}, "a"), ({"redistribute": "momentum"}, "ab")):
    pruner = make(drop_fraction=0.5, **options)
    state = pruner.init_state(PARAMS)._replace(count=jnp.int32(3))
    state = pruner.on_gradients(state, PARAMS, GRADS)
    new = pruner.update_state(state, PARAMS, bad)
    for name, skipped in zip("ab", new.skipped, strict=True):
      same = np.array_equal(new.masks[name], state.masks[name])
      assert same == (name in stays) == bool(skipped)
  # Random growth reads no gradient.
  pruner = make("set", drop_fraction=0.5)
  state = pruner.init_state(PARAMS)._replace(count=jnp.int32(3))
  assert not pruner.update_state(state, PARAMS, bad).skipped.any()


def test_the_fraction_falls_along_a_cosine_or_stays():
  ends = make(
    drop_fraction=0.4, update_freq=2, update_start_step=0, update_end_step=12
  )
  found = [float(ends.drop_fraction_at(t)) for t in (0, 4, 6, 8, 12, 99)]
  np.testing.assert_allclose(found, [0.4, 0.3, 0.2, 0.1, 0, 0], atol=1e-7)
  endless = jaxpruner.RigL(drop_fraction=0.4)
  assert endless.drop_fraction_at(99) == 0.4


def test_rounding_down_forgives_float32_alone():
  numbers = jnp.asarray([5.9999995, 5.999, 6.0, 6.9, 0.0, 0.5, 6.000001])
  assert sparse_trainers._floor(numbers).tolist() == [6, 5, 6, 6, 0, 0, 6]


def test_kept_units_rank_among_themselves_or_above_all_others():
  drop, grow = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([9.0, 8.0, 7.0])
  kept = jnp.asarray([1, 0, 1], jnp.uint8)
  rank = lambda growing: sparse_trainers._rank(drop, grow, kept, growing)
  assert rank(False).tolist() == [1, -np.inf, 3]
  assert rank(True).tolist() == [np.inf, 8, np.inf]


def test_a_running_mean_of_gradients_skips_what_is_not_finite():
  pruner = make(grow="momentum", momentum_decay=0.75)
  state = pruner.init_state(PARAMS)
  assert set(state.stats) == {"momentum"}
  assert not state.stats["momentum"]["a"].any()
  state = pruner.on_gradients(state, PARAMS, GRADS)
  bad = {**GRADS, "a": (2 * GRADS["a"]).at[0, 0].set(jnp.nan)}
  state = pruner.on_gradients(state, PARAMS, bad)
  g = np.asarray(GRADS["a"])
  expected = 0.75 * 0.25 * g + 0.25 * 2 * g
  expected[0, 0] = 0.25 * g[0, 0]
  np.testing.assert_allclose(state.stats["momentum"]["a"], expected, rtol=1e-6)
  plain = make()
  first = plain.init_state(PARAMS)
  assert plain.on_gradients(first, PARAMS, GRADS) is first
  assert first.stats == optax.MaskedNode()


@dataclasses.dataclass(frozen=True)
class Recent:
  """A criterion of the user's: the mean gradient before an update."""

  needs = frozenset({"gradients", "sums"})
  window = 2

  def __call__(self, seen):
    return jax.tree.map(jnp.abs, seen.sums[0])


def test_sums_hold_the_steps_of_a_window_before_an_update():
  pruner = jaxpruner.Rewiring(
    grow=Recent(),
    scheduler=jaxpruner.sparsity_schedules.PeriodicSchedule(4, 4),
    sparsity_distribution_fn=functools.partial(
      jaxpruner.sparsity_distributions.uniform, sparsity=0.5
    ),
  )
  state = pruner.init_state(PARAMS)
  sums, squares = [], []
  for step in range(10):
    state = state._replace(count=jnp.int32(step))
    grads = jax.tree.map(lambda g, t=step: jnp.full_like(g, 2.0**t), GRADS)
    state = pruner.on_gradients(state, PARAMS, grads)
    sums.append(float(state.stats["sum"]["a"][0, 0]))
    squares.append(float(state.stats["squares"]["b"][1, 1]))
  # Masks change at steps 4 and 8; the two steps up to each are counted.
  assert sums == [0, 0, 0, 8, 24, 0, 0, 128, 384, 0]
  assert squares[3:5] == [64, 320] and squares[8] == 128**2 + 256**2


@pytest.mark.parametrize(
  "field, value",
  [
    ("drop_fraction", 1.5),
    ("drop_fraction", -0.1),
    ("momentum_decay", 2),
    ("drop_fraction_fn", 0.3),
    ("grow", "gradient"),
    ("drop", jaxpruner.criteria.Magnitude),
    ("redistribute", 3),
  ],
)
def test_parts_of_the_wrong_kind_are_refused(field, value):
  with pytest.raises(ValueError, match=f"SET: {field}="):
    jaxpruner.SET(**{field: value})
  jaxpruner.SET(drop_fraction=1.0, momentum_decay=0, redistribute=None)


def test_structured_types_move_whole_units_and_keep_their_groups():
  pruner = make(drop_fraction=0.5, sparsity_type=jaxpruner.NByM(2, 4))
  state = pruner.init_state(PARAMS)._replace(count=jnp.int32(3))
  new = pruner.update_state(state, PARAMS, GRADS)
  for name in PARAMS:
    assert (np.asarray(new.masks[name]).sum(-2) == 2).all()
    assert not np.array_equal(new.masks[name], state.masks[name])
  with pytest.raises(ValueError, match="'a'.*moves single weights"):
    made = make(redistribute="momentum", sparsity_type=jaxpruner.Block((2, 2)))
    made.update_state(made.init_state(PARAMS), PARAMS, GRADS)
  with pytest.raises(ValueError, match="'a'.*cannot drop and grow under"):
    made = make(topk_fn=lambda scores, _: scores > 0)
    made.update_state(state, PARAMS, GRADS)


def test_a_random_mask_is_that_of_its_seed():
  one, same, other = (
    make("static_sparse", rng_seed=s).init_state(PARAMS) for s in (0, 0, 1)
  )
  jax.tree.map(np.testing.assert_array_equal, one.masks, same.masks)
  assert any((one.masks[k] != other.masks[k]).any() for k in PARAMS)
  assert [int(one.masks[k].sum()) for k in PARAMS] == [8, 8]
  # Growth draws anew at every step.
  pruner = make("set", drop_fraction=0.5, rng_seed=0)
  state = pruner.init_state(PARAMS)
  at = lambda t: pruner.update_state(
    state._replace(count=jnp.int32(t)), PARAMS, GRADS
  ).masks["a"]
  assert not np.array_equal(at(1), at(2))


@dataclasses.dataclass(frozen=True)
class ToLast(jaxpruner.redistribution.Redistribution):
  """All that is dropped grows in the last leaf."""

  def __call__(self, masks, momentum):
    del momentum
    return jnp.arange(len(masks)) == len(masks) - 1.0


def test_what_is_dropped_grows_where_its_share_says():
  pruner = jaxpruner.Rewiring(
    redistribute=ToLast(),
    drop_fraction=0.5,
    sparsity_distribution_fn=functools.partial(
      jaxpruner.sparsity_distributions.uniform, sparsity=0.5
    ),
  )
  state = pruner.init_state(PARAMS)._replace(count=jnp.int32(3))
  new = pruner.update_state(state, PARAMS, GRADS)
  assert [int(m.sum()) for m in new.masks.values()] == [4, 12]


def test_a_name_of_the_papers_library_is_found_with_a_warning():
  with pytest.warns(Warning, match="restart_inner_state"):
    assert callable(sparse_trainers.restart_inner_state)
