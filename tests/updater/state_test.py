"""Laws of the state and its small parts: equality, copies, counts, keys."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_schedules
from jaxpruner.updater import masks, prunable, selecting
from jaxpruner.updater.state import SparseState, check_fit, frozen, seed_data

HALF = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
ALWAYS = sparsity_schedules.PeriodicSchedule(1, 0)


def made(kind=jaxpruner.MagnitudePruning, **options):
  fields = {"sparsity_distribution_fn": HALF, "scheduler": ALWAYS}
  return kind(**(fields | options))


def test_updaters_are_equal_if_class_and_fields_are():
  assert made() == made() and hash(made()) == hash(made())
  assert made() != made(skip_gradients=True)
  # Subclasses with the same fields are other algorithms.
  assert made() != made(jaxpruner.RandomPruning)
  assert made(jaxpruner.RandomPruning) != made()
  assert made() != "an updater"


def test_a_state_is_a_plain_tuple_without_a_dict():
  state = made().init_state({"w": jnp.ones((2, 2))})
  assert type(state).__bases__ == (tuple,)
  assert not hasattr(state, "__dict__")
  assert state._replace(count=3).count == 3
  assert SparseState(stored_masks="m").stored_masks == "m"
  swapped = state._replace(masks={"w": None})
  assert swapped.stored_masks == {"w": optax.MaskedNode()}
  assert swapped.masks == {"w": None}


def test_nothing_is_written_in_the_place_of_what_a_user_left_out():
  found = SparseState(masks={"w": None}, stats=None, inner_state=(None,))
  clean = found.without_none()
  assert clean.stats == optax.MaskedNode()
  assert clean.stored_masks == {"w": optax.MaskedNode()}
  assert clean.inner_state == (None,)  # the optimizer's own affair


@pytest.mark.parametrize(
  "mask, shape, packed, fits",
  [
    ((4,), (4,), False, True),
    ((4,), (2, 2), False, False),
    ((1,), (4,), True, True),
    ((1,), (8,), True, True),
    ((1,), (9,), True, False),
    ((2,), (9,), True, True),
    ((2,), (8,), True, False),
  ],
)
def test_a_mask_fits_by_shape_a_packed_one_by_bytes(mask, shape, packed, fits):
  mask = np.ones(mask, np.uint8)
  if fits:
    check_fit(mask, shape, packed)
  else:
    with pytest.raises(ValueError, match="leaf 'a'.*does not fit"):
      check_fit(mask, shape, packed, "a")


def test_seeds_keys_and_key_data_give_the_same_data():
  key = jax.random.key(3)
  expected = np.asarray(jax.random.key_data(key))
  for seed in (3, key, expected):
    np.testing.assert_array_equal(seed_data(seed), expected)
  assert seed_data(expected).dtype == jnp.uint32


def test_what_is_frozen_is_equal_exactly_if_the_values_are():
  values = [
    [1, 2], [2, 1], {"a": 1}, {"a": 2}, {"a": [1]},
    functools.partial(max, 1), functools.partial(max, 2),
    functools.partial(min, 1), functools.partial(max, key=1),
    np.arange(3), np.arange(3.0), np.arange(3)[None], jnp.arange(1, 4),
    jax.random.key(0), jax.random.key(1), "a", None,
  ]  # fmt: skip
  texts = [frozen(v) for v in values]
  for i, one in enumerate(texts):
    for j, other in enumerate(texts):
      assert (one == other) == (i == j)
    assert hash(one) == hash(frozen(values[i]))
  assert frozen((1, 2)) == frozen([1, 2])
  assert copy.deepcopy(prunable.UNSET) is prunable.UNSET


def test_exactly_one_state_is_found():
  state = made().init_state({"w": jnp.ones((2, 2))})
  assert jaxpruner.find_state((1, {"a": state})) is state
  for wrong in ((), (state, state)):
    with pytest.raises(ValueError, match=f"holds {len(wrong)} sparse states"):
      jaxpruner.find_state(wrong)


def test_ones_are_counted_per_layer_along_any_axis():
  mask = np.random.default_rng(0).integers(0, 2, (3, 4, 5)).astype(np.uint8)
  assert int(masks.count_ones(jnp.asarray(mask))) == mask.sum()
  for axis in range(3):
    others = tuple(i for i in range(3) if i != axis)
    np.testing.assert_array_equal(
      masks.count_ones(jnp.asarray(mask), axis), mask.sum(others)
    )
  assert masks.count_ones(jnp.asarray(mask), 0).dtype == jnp.uint32


def test_arguments_go_to_the_methods_that_name_them():
  class Any:
    def named(self, a, *, b=1):
      del a, b

    def all(self, a, **extra):
      del a, extra

    def place(self, a, /):
      del a

  extra = {"a": 1, "b": 2, "c": 3}
  assert selecting.accepted(Any().named, extra) == {"a": 1, "b": 2}
  assert selecting.accepted(Any().all, extra) == extra
  assert selecting.accepted(Any().place, extra) == {}
  assert selecting.accepted(Any().named, {}) == {}


@dataclasses.dataclass(eq=False)
class Outer(jaxpruner.BaseUpdater):
  """Scores by an argument of `tx.update`."""

  def calculate_scores(self, params, sparse_state=None, grads=None, loss=None):
    return jax.tree.map(lambda w: w * (1 if loss is None else loss), params)


def test_an_argument_of_the_step_reaches_the_scores_and_only_theirs():
  params = {"w": jnp.arange(1.0, 9).reshape(2, 4)}
  tx = made(Outer).wrap_optax(optax.sgd(0.0))
  for loss, kept in (
    (1.0, [0, 0, 0, 0, 1, 1, 1, 1]),
    (-1.0, [1] * 4 + [0] * 4),
  ):
    _, state = tx.update(params, tx.init(params), params, loss=loss, other=3)
    assert state.masks["w"].ravel().tolist() == kept
  masks_ = made(Outer).instant_sparsify(params, loss=-1.0)[1]
  assert masks_["w"].ravel().tolist() == [1] * 4 + [0] * 4
  with pytest.raises(TypeError, match="takes no other"):
    made(Outer).instant_sparsify(params, other=3)


def test_pruning_at_once_needs_what_the_scores_need():
  params = {"w": jnp.ones((2, 4))}
  with pytest.raises(ValueError, match="by their gradients; pass grads="):
    made(jaxpruner.SaliencyPruning).instant_sparsify(params)
  with pytest.raises(ValueError, match="says nothing about how much"):
    made(sparsity_distribution_fn=None).instant_sparsify(params)


def test_views_are_kept_for_few_trees_only():
  for size in range(1, 80):
    made().view({"w": jax.ShapeDtypeStruct((size, 2), jnp.float32)})
  assert len(prunable._VIEWS) == prunable._MAX_VIEWS == 64
  # Targets that are given are not those of a view that was kept.
  params = {"w": jnp.ones((4, 2))}
  assert made().view(params).targets == (0.5,)
  assert made().view(params, {"w": 0.25}).targets == (0.25,)
  assert made().view(params).targets == (0.5,)


def test_no_prunable_leaf_is_no_sparsity_and_no_mask():
  params = {"b": jnp.ones(3)}
  updater = made(sparsity_distribution_fn=lambda _: {"b": None})
  state = updater.init_state(params)
  assert updater.sparsities_at(updater.view(params), state, 0) == []
  assert updater.update_state(state, params, params) is state
  assert state.masks == {"b": None}
