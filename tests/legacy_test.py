"""Lines written for the paper's library that have another form here.

Each runs and names the new way, or is refused with the reason.
`docs/migrating.md` lists them.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jaxpruner
from jaxpruner import (
  api,
  mask_calculator,
  sparsity_distributions,
  sparsity_schedules,
  sparsity_types,
  utils,
)
from jaxpruner._tools import deprecation, registry
from jaxpruner.algorithms import pruners, sparse_trainers

SCORES = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


@contextlib.contextmanager
def told(*words):
  """Expect one deprecation note that holds these words."""
  with pytest.warns(deprecation.JaxprunerDeprecationWarning) as caught:
    yield
  notes = [str(w.message) for w in caught]
  assert any(all(word in note for word in words) for note in notes), notes
  assert caught[0].filename == __file__


def test_the_table_of_algorithms_is_a_mapping_of_names():
  with told("jaxpruner.ALGORITHM_REGISTRY", "register_algorithm"):
    table = jaxpruner.ALGORITHM_REGISTRY
  assert table["rigl"] is jaxpruner.RigL and "set" in table
  with told("jaxpruner.api.ALGORITHM_REGISTRY"):
    assert api.ALGORITHM_REGISTRY is table
  with told("all_algorithm_names()"):
    assert jaxpruner.all_algorithm_names() == api.ALGORITHMS
  with registry.restored():
    table["mine"] = jaxpruner.MagnitudePruning
    assert "mine" in jaxpruner.all_algorithm_names()


@pytest.mark.parametrize(
  "name",
  ["NoUpdateSchedule", "OneShotSchedule", "PolynomialSchedule"],
)
def test_schedules_are_found_at_the_top(name):
  with told(f"jaxpruner.sparsity_schedules.{name}"):
    assert getattr(jaxpruner, name) is getattr(sparsity_schedules, name)


def test_the_base_of_sparsity_types_is_found_at_the_top():
  with told("jaxpruner.sparsity_types.SparsityType"):
    assert jaxpruner.SparsityType is sparsity_types.SparsityType


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_erk_by_shapes_is_erk_before_rounding(scale):
  shapes = {"a": (2, 40), "b": (3, 60), "c": (5, 4, 60)}
  with told("sparsity_distributions.erk"):
    by_shape = sparsity_distributions.get_sparsities_erdos_renyi
  found = by_shape(shapes, 0.5, erk_power_scale=scale)
  wanted = reference.erk_densities(list(shapes.values()), 0.5, scale)
  for name, density in zip(shapes, wanted, strict=True):
    assert 1 - found[name] == pytest.approx(float(density), abs=1e-9)
  # Only the last two dimensions count, and no power applies.
  flat = by_shape(shapes, 0.5, include_kernel=False, erk_power_scale=scale)
  ratios = {"a": 42 / 80, "b": 63 / 180, "c": 64 / 240}
  size = {"a": 80, "b": 180, "c": 1200}
  unit = (1 - flat["b"]) / ratios["b"]
  for name, ratio in ratios.items():
    assert 1 - flat[name] == pytest.approx(ratio * unit)
  assert sum((1 - flat[n]) * size[n] for n in size) == pytest.approx(730)
  assert by_shape(shapes, 0.5, {"a": 0.1})["a"] == 0.1
  with pytest.raises(ValueError, match="is empty"):
    by_shape({}, 0.5)


def test_the_old_mask_functions_are_those_of_the_types():
  with told("sparsity_types.Block"):
    block = mask_calculator.topk_block_mask_calculator
  found = block(SCORES, 0.5, 2, 3, use_avg_pooling=True)
  np.testing.assert_array_equal(
    found, reference.block(SCORES, 0.5, (2, 3), True)
  )
  with told("sparsity_types.Channel"):
    channel = mask_calculator.topk_channel_mask_calculator
  found = channel(SCORES, 0.5, sparsity_types.Channel(0))
  np.testing.assert_array_equal(found, reference.channel(SCORES, 0.5, 0))
  with told("sparsity_types.NByM"):
    n_by_m = mask_calculator.topk_n_by_m_mask_calculator
  kind = sparsity_types.NByM(2, 4)
  found = n_by_m(SCORES, 0.5, kind)
  np.testing.assert_array_equal(found, reference.n_by_m(SCORES, 2, 4, -2))
  assert n_by_m(SCORES, 0, kind).all()
  # The class stands for its default instance.
  plain = mask_calculator.get_topk_fn(sparsity_types.Unstructured)
  found = plain(jnp.asarray(SCORES), 0.5)
  np.testing.assert_array_equal(found, reference.unstructured(SCORES, 0.5))


@pytest.mark.parametrize(
  "cls", [jaxpruner.GlobalMagnitudePruning, jaxpruner.GlobalSaliencyPruning]
)
def test_a_global_pruner_takes_one_target_by_its_old_name(cls):
  scores = {"u": jnp.array([[0.1, 0.9, -0.2]]), "v": jnp.array([[0.7, 0.8]])}
  with told("create_masks(target_sparsity=)", "sparsities="):
    masks = cls().create_masks(scores, target_sparsity=0.4)
  assert masks["u"].tolist() == [[0, 1, 0]] and masks["v"].tolist() == [[1, 1]]


def test_the_state_is_taken_by_its_old_name():
  pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
  params = jnp.array([[3.0, -1, 2, -4]])
  state = pruner.update_state(pruner.init_state(params), params, None)
  with told("post_gradient_update(sparse_state=)", "opt_state="):
    found = pruner.post_gradient_update(params, sparse_state=state)
  assert found.tolist() == [[3, 0, 0, -4]]


def test_random_scores_are_drawn_from_a_key():
  params = {"a": jnp.ones((40, 40)), "b": jnp.ones(7)}
  with told("random_scores"):
    draw = pruners.generate_random_scores
  one, two = draw(params, jax.random.key(0)), draw(params, jax.random.key(1))
  again = draw(params, jax.random.key(0))
  jax.tree.map(np.testing.assert_array_equal, one, again)
  assert not np.array_equal(one["a"], two["a"])
  assert 0 <= one["a"].min() and one["a"].max() < 1
  assert abs(one["a"].mean() - 0.5) < 0.05 and one["b"].shape == (7,)


@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.sgd(0.1, 0.9)])
def test_moments_of_grown_weights_are_restarted_by_hand(inner):
  params = {"w": jnp.ones(4), "b": jnp.ones(2)}
  tx = optax.chain(optax.masked(inner, {"w": True, "b": False}))
  _, state = tx.update(params, tx.init(params), params)
  with told("wrap_optax"):
    restart = sparse_trainers.restart_inner_state
  grown = {"w": jnp.array([True, False, False, True]), "b": None}
  before = [x for x in jax.tree.leaves(state) if np.shape(x) == (4,)]
  after = restart(state, grown)
  assert jax.tree.structure(after) == jax.tree.structure(state)
  moments = [x for x in jax.tree.leaves(after) if np.shape(x) == (4,)]
  assert moments
  for old, new in zip(before, moments, strict=True):
    np.testing.assert_array_equal(new, np.where(grown["w"], 0, old))


@pytest.mark.parametrize(
  "schedule, at_two",
  [
    (sparsity_schedules.PolynomialSchedule(1, 0, 4, power=1), 0.5),
    (sparsity_schedules.AlternatingSchedule(2, 2, 8), 1),
    (sparsity_schedules.GeometricSchedule(1, 2, 8, fraction=0.5), None),
    (sparsity_schedules.OneShotSchedule(2), 1),
    (sparsity_schedules.PeriodicSchedule(2), 1),
  ],
)
def test_schedules_take_a_tree_of_targets(schedule, at_two):
  targets = {"a": 0.5, "b": {"c": None, "d": 0.75}}
  for at in (schedule.get_sparsity_at_step, jax.jit(
    schedule.get_sparsity_at_step
  )):  # fmt: skip
    found = at(targets, 2)
    assert found["b"]["c"] is None
    if at_two is not None:
      assert float(found["a"]) == 0.5 * at_two
      assert float(found["b"]["d"]) == 0.75 * at_two
    alone = schedule.get_sparsity_at_step(0.75, 2)
    assert float(found["b"]["d"]) == float(alone)


def test_no_step_is_no_update():
  schedule = sparsity_schedules.PeriodicSchedule(5, 0, 20)
  assert schedule.is_mask_update_iter(None) is False


half = functools.partial(jaxpruner.sparsity_distributions.uniform, sparsity=0.5)
PERIODIC = sparsity_schedules.PeriodicSchedule(2, 1, 9)
PARAMS = {"w": jnp.asarray(SCORES)}
GRADS = {"w": jnp.asarray(SCORES[::-1] + 0.25)}


def updated(cls, step=3):
  """Return masks before and after one update of a pruner, and the pruner."""
  pruner = cls(
    sparsity_distribution_fn=half,
    scheduler=PERIODIC,
    drop_fraction_fn=lambda _: 0.25,
    rng_seed=0,
    is_debug=True,
  )
  tx = pruner.wrap_optax(optax.sgd(0.1))
  state = tx.init(PARAMS)._replace(count=jnp.int32(step))
  _, new = jax.jit(tx.update)(GRADS, state, PARAMS)
  return np.asarray(state.masks["w"]), np.asarray(new.masks["w"]), pruner


def test_an_override_of_the_drop_scores_is_honoured():
  with told("DropByGradient._get_drop_scores", "use drop_scores"):

    @dataclasses.dataclass
    class DropByGradient(sparse_trainers.RigL):
      def _get_drop_scores(self, sparse_state, params, grads):
        assert sparse_state.masks["w"].shape == params["w"].shape
        return jax.tree.map(jnp.abs, grads)

  before, after, _ = updated(DropByGradient)
  grads = np.abs(np.asarray(GRADS["w"]))
  wanted = reference.drop_and_grow(before, grads, grads, before.sum() // 4)
  np.testing.assert_array_equal(after, wanted)


def test_an_override_of_the_grow_scores_may_ask_its_parent():
  with told("GrowSmallest._get_grow_scores", "use grow_scores"):

    @dataclasses.dataclass
    class GrowSmallest(sparse_trainers.RigL):
      def _get_grow_scores(self, sparse_state, params, grads):
        scores = super()._get_grow_scores(sparse_state, params, grads)
        return jax.tree.map(jnp.negative, scores)

  before, after, _ = updated(GrowSmallest)
  wanted = reference.drop_and_grow(
    before,
    np.abs(SCORES),
    -np.abs(np.asarray(GRADS["w"])),
    before.sum() // 4,
  )
  np.testing.assert_array_equal(after, wanted)


def test_an_override_of_the_mask_update_gets_each_leaf():
  with told("Flipped._update_masks", "use update_state"):

    @dataclasses.dataclass
    class Flipped(sparse_trainers.SET):
      def _update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
        assert old_mask.shape == drop_score.shape == grow_score.shape
        return 1 - old_mask

  before, after, _ = updated(Flipped)
  np.testing.assert_array_equal(after, 1 - before)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_the_mask_update_of_one_leaf_drops_and_grows(fraction):
  pruner = sparse_trainers.RigL(sparsity_distribution_fn=half)
  mask = reference.unstructured(SCORES[::-1], 0.5)
  found = pruner._update_masks(
    jnp.asarray(mask),
    jnp.abs(PARAMS["w"]),
    jnp.abs(GRADS["w"]),
    drop_fraction=fraction,
  )
  wanted = reference.drop_and_grow(
    mask,
    np.abs(SCORES),
    np.abs(np.asarray(GRADS["w"])),
    int(fraction * mask.sum()),
  )
  np.testing.assert_array_equal(found, wanted)


def test_a_trainer_written_from_the_old_parts_runs():
  @dataclasses.dataclass
  class ByHand(sparse_trainers.SET):
    def update_state(self, sparse_state, params, grads):
      drop = self._get_drop_scores(sparse_state, params, grads)
      grow = self._get_grow_scores(sparse_state, params, grads)
      update = functools.partial(
        self._update_masks, drop_fraction=self.drop_fraction_fn(0)
      )
      masks = jax.tree.map(update, sparse_state.masks, drop, grow)
      grown = jax.tree.map(
        lambda old, new: (old == 0) & (new == 1), sparse_state.masks, masks
      )
      with told("restart_inner_state"):
        restart = sparse_trainers.restart_inner_state
      inner = restart(sparse_state.inner_state, grown)
      return sparse_state._replace(masks=masks, inner_state=inner)

  before, after, pruner = updated(ByHand)
  draws = pruner.random_scores(PARAMS, pruner.init_state(PARAMS), jnp.int32(4))[
    "w"
  ]
  wanted = reference.drop_and_grow(
    before, np.abs(SCORES), np.asarray(draws), before.sum() // 4
  )
  np.testing.assert_array_equal(after, wanted)


def test_an_override_may_choose_between_updates_inside_the_step():
  ramp = sparsity_schedules.PolynomialSchedule(1, 0, 4)

  @dataclasses.dataclass
  class PruneThenRewire(sparse_trainers.RigL):
    def get_initial_masks(self, params, target_sparsities):
      return jax.tree.map(
        lambda p, _: jnp.ones(p.shape, mask_calculator.MASK_DTYPE),
        params,
        target_sparsities,
      )

    def prune(self, sparse_state, params, grads):
      sparsities = self.scheduler.get_sparsity_at_step(
        sparse_state.target_sparsities, sparse_state.count
      )
      scores = jax.tree.map(jnp.abs, params)
      return sparse_state._replace(masks=self.create_masks(scores, sparsities))

    def rewire(self, sparse_state, params, grads):
      drop = self._get_drop_scores(sparse_state, params, grads)
      grow = self._get_grow_scores(sparse_state, params, grads)
      update = functools.partial(
        self._update_masks, drop_fraction=self.drop_fraction_fn(0)
      )
      masks = jax.tree.map(update, sparse_state.masks, drop, grow)
      return sparse_state._replace(masks=masks)

    def update_state(self, sparse_state, params, grads):
      done = sparse_state.count >= 4
      return jax.lax.cond(
        done, self.rewire, self.prune, sparse_state, params, grads
      )

  pruner = PruneThenRewire(
    sparsity_distribution_fn=half,
    scheduler=ramp,
    drop_fraction_fn=lambda _: 0.25,
  )
  tx = pruner.wrap_optax(optax.adam(0.1))
  state, kept = tx.init(PARAMS), []
  for _ in range(5):
    _, state = jax.jit(tx.update)(GRADS, state, PARAMS)
    kept.append(int(state.masks["w"].sum()))
  wanted = [
    reference.num_ones(48, float(reference.zhu_gupta(0.5, t, 0, 4)))
    for t in range(4)
  ]
  assert kept == [*wanted, wanted[-1]]


def test_summaries_of_utils_name_dense_leaves_too():
  masks = {"a": jnp.array([1, 0]), "b": {"c": None, "d": jnp.array([1, 1])}}
  found = utils.summarize_sparsity(masks)
  assert found["b/c"] is None and found["a"] == 0.5
  assert set(found) - {"b/c"} == set(jaxpruner.summarize_sparsity(masks))
  assert "b/c" not in utils.summarize_sparsity(masks, only_total_sparsity=True)
  assert "b/c" not in utils.summarize_sparsity(masks, True)
  shared = utils.summarize_intersection(masks, masks)
  assert shared["b/c"] is None and shared["_total_intersection"] == 1


def test_saliency_scores_leaves_that_would_not_be_pruned():
  params, grads = {"w": jnp.array([1.0, -2])}, {"w": jnp.array([3.0, 4])}
  scores = jaxpruner.SaliencyPruning().calculate_scores(params, grads=grads)
  assert scores["w"].tolist() == [3, 8]


@pytest.mark.parametrize(
  "module, name",
  [
    (jaxpruner, "no_such_name"),
    (mask_calculator, "topk_mask"),
    (sparsity_distributions, "get_sparsities"),
  ],
)
def test_other_names_are_still_unknown(module, name):
  with pytest.raises(AttributeError, match=name):
    getattr(module, name)


def test_topk_fn_is_that_of_the_sparsity_type_unless_given():
  kind = sparsity_types.NByM(1, 2, axis=0)
  pruner = jaxpruner.MagnitudePruning(sparsity_type=kind)
  assert np.array_equal(pruner.topk_fn(SCORES, 0.5), kind.mask(SCORES, 0.5))
  other = dataclasses.replace(pruner, sparsity_type=sparsity_types.Channel())
  assert other.topk_fn.sparsity_type == sparsity_types.Channel()
  assert pruner == dataclasses.replace(pruner) != other
  assert hash(pruner) == hash(dataclasses.replace(pruner))
  by_path = jaxpruner.MagnitudePruning(sparsity_type={"a": kind})
  assert by_path.topk_fn is None  # it depends on the leaf
  given = mask_calculator.topk_mask_calculator
  own = dataclasses.replace(pruner, topk_fn=given)
  assert own.topk_fn is given and own != pruner
  assert "topk_fn" not in jaxpruner.config_from_updater(
    jaxpruner.create_updater_from_config(
      {"algorithm": "magnitude", "sparsity": 0.5}
    )
  )


def test_overrides_that_call_topk_fn_choose_masks():
  @dataclasses.dataclass
  class Mine(jaxpruner.MagnitudePruning):
    def create_masks(self, scores, sparsities):
      return jax.tree.map(self.topk_fn, scores, sparsities)

  uniform = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
  params = {"w": jnp.asarray(SCORES)}
  found = Mine(sparsity_distribution_fn=uniform).instant_sparsify(params)
  wanted = jaxpruner.MagnitudePruning(
    sparsity_distribution_fn=uniform
  ).instant_sparsify(params)
  assert np.array_equal(found[1]["w"], wanted[1]["w"])
