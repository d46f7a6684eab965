"""Laws of configuration: updaters compare, hash, print, and round-trip."""

import dataclasses
import functools
import json
import re

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_schedules

NAMES = [n for n in jaxpruner.all_algorithm_names() if n != "no_prune"]
LOCAL = [
  n
  for n in NAMES
  if not hasattr(jaxpruner.algorithm_class(n), "use_normalization")
]
REWIRING = ["set", "rigl"]

small = st.integers(1, 9)
axes = st.integers(-3, 3)
types = st.one_of(
  st.just(jaxpruner.Unstructured()),
  st.builds(
    lambda n, extra, axis: jaxpruner.NByM(n, n + extra, axis),
    small,
    small,
    axes,
  ),
  st.builds(
    lambda h, w, mean: jaxpruner.Block((h, w), mean),
    small,
    small,
    st.booleans(),
  ),
  st.builds(jaxpruner.Channel, axes),
)
maybe_types = types | st.dictionaries(
  st.sampled_from(["*/kernel", "head/kernel", "*"]), types, min_size=1
)
sparsities = st.floats(0, 1, exclude_max=True)
custom_maps = st.none() | st.dictionaries(
  st.sampled_from(["a/kernel", "b/*"]), st.none() | sparsities, min_size=1
)


@st.composite
def schedules(draw):
  start = draw(st.integers(0, 1000))
  end = start + draw(st.integers(0, 1000))
  freq = draw(st.integers(1, 300))
  return draw(
    st.sampled_from(
      [
        sparsity_schedules.NoUpdateSchedule(),
        sparsity_schedules.OneShotSchedule(start),
        sparsity_schedules.PeriodicSchedule(freq, start),
        sparsity_schedules.PeriodicSchedule(freq, start, end),
        sparsity_schedules.PolynomialSchedule(
          freq, start, end, draw(st.sampled_from([1, 3, 2.5]))
        ),
      ]
    )
  )


@st.composite
def updaters(draw):
  name = draw(st.sampled_from(NAMES))
  fields = dict(
    scheduler=draw(schedules()),
    skip_gradients=draw(st.booleans()),
    is_sparse_gradients=draw(st.booleans()),
    rng_seed=draw(st.none() | st.integers(0, 2**31)),
    use_packed_masks=draw(st.booleans()),
  )
  if name in REWIRING:
    fields["drop_fraction"] = draw(st.floats(0, 1))
  custom = draw(custom_maps)
  if name not in LOCAL:
    fields.update(
      sparsity=draw(sparsities),
      custom_sparsity_map=custom,
      use_normalization=draw(st.booleans()),
    )
  else:
    fields["sparsity_type"] = draw(maybe_types)
    options = {} if custom is None else {"custom_sparsity_map": custom}
    distribution = draw(st.sampled_from(["unset", "uniform", "erk"]))
    if distribution == "erk" and draw(st.booleans()):
      options["erk_power_scale"] = draw(st.floats(0, 4))
    if distribution != "unset":
      fields["sparsity_distribution_fn"] = functools.partial(
        getattr(sparsity_distributions, distribution),
        sparsity=draw(sparsities),
        **options,
      )
  return jaxpruner.algorithm_class(name)(**fields)


def through_json(updater):
  return jaxpruner.create_updater_from_config(
    json.loads(json.dumps(jaxpruner.config_from_updater(updater)))
  )


@pytest.mark.quick
@hypothesis.given(updaters())
def test_an_updater_survives_json(updater):
  again = through_json(updater)
  assert again == updater
  assert hash(again) == hash(updater)
  assert repr(again) == repr(updater)


@hypothesis.given(updaters(), updaters())
def test_updaters_are_equal_iff_their_configurations_are(one, two):
  same = jaxpruner.config_from_updater(one) == jaxpruner.config_from_updater(
    two
  )
  assert (one == two) == same
  assert one == one and one != "magnitude"
  if same:
    assert hash(one) == hash(two)


@hypothesis.given(updaters(), st.integers(0, 2**31), st.integers(0, 2**31))
def test_changing_one_field_changes_the_updater(updater, seed, other):
  hypothesis.assume(seed != other)
  kind = type(updater)
  fields = {
    field.name: getattr(updater, field.name)
    for field in dataclasses.fields(updater)
  }
  one = kind(**{**fields, "rng_seed": seed})
  assert one != kind(**{**fields, "rng_seed": other})
  assert one == kind(**{**fields, "rng_seed": seed})
  assert f"rng_seed={seed}" in repr(one)


@hypothesis.given(types)
def test_a_sparsity_type_is_parsed_from_its_spelling(kind):
  pruner = jaxpruner.MagnitudePruning(sparsity_type=kind)
  spelled = jaxpruner.config_from_updater(pruner)["sparsity_type"]
  assert jaxpruner.parse_sparsity_type(spelled) == kind


@hypothesis.given(small, small, axes, st.sampled_from(["", " "]))
def test_every_documented_spelling_is_understood(a, b, axis, space):
  parse = jaxpruner.parse_sparsity_type
  n, m = min(a, b), max(a, b)
  wanted = jaxpruner.NByM(n, m)
  assert parse(f"nm_{n},{space}{m}") == parse(f"{n}:{m}") == wanted
  assert parse(f"nm_{n},{m},{axis}") == jaxpruner.NByM(n, m, axis)
  blocks = jaxpruner.Block((a, b))
  assert parse(f"block_{a},{space}{b}") == parse(f"{a}x{b}") == blocks
  assert parse(f"channel_{axis}") == jaxpruner.Channel(axis)


@hypothesis.given(st.text(max_size=12))
def test_any_other_spelling_is_refused(text):
  known = r"unstructured|nm_.*|\d+:\d+|\d+x\d+|(max)?block_.*|channel_.*"
  hypothesis.assume(not re.fullmatch(known, text.replace(" ", "")))
  with pytest.raises(ValueError, match="sparsity_type="):
    jaxpruner.parse_sparsity_type(text)


@hypothesis.given(
  st.data(),
  st.sampled_from(NAMES),
  st.sampled_from(
    ["sparsity", "update_freq", "update_start_step", "rng_seed", "power"]
  ),
)
def test_an_unknown_key_is_refused_with_the_nearest_one(data, name, key):
  at = data.draw(st.integers(1, len(key) - 1))
  typo = key[:at] + "_" + key[at:]
  hypothesis.assume(typo != key and "__" not in typo)
  with pytest.raises(ValueError, match=f"'{typo}'") as error:
    jaxpruner.create_updater_from_config(
      {"algorithm": name, "sparsity": 0.5, typo: 1}
    )
  assert f"did you mean '{key}'?" in str(error.value)


@hypothesis.given(st.text(max_size=10))
def test_an_unknown_algorithm_is_refused(name):
  hypothesis.assume(name not in jaxpruner.all_algorithm_names())
  with pytest.raises(ValueError, match="not registered"):
    jaxpruner.create_updater_from_config({"algorithm": name, "sparsity": 0.5})


@hypothesis.given(st.sampled_from(NAMES), st.integers(1, 10**6))
def test_total_steps_give_a_schedule_that_ends_in_time(name, total):
  updater = jaxpruner.create_updater_from_config(
    {"algorithm": name, "sparsity": 0.5, "total_steps": total}
  )
  schedule = updater.scheduler
  if isinstance(schedule, sparsity_schedules.OneShotSchedule):
    assert schedule.target_step <= total * 3 // 4
  else:
    assert schedule.update_end_step == total * 3 // 4
    assert schedule.update_start_step <= schedule.update_end_step
  cls = jaxpruner.algorithm_class(name)
  rewires = cls.category.start == "sparse-to-sparse" and cls.category.dynamic
  kind = {
    "alternating": sparsity_schedules.AlternatingSchedule,
    "geometric": sparsity_schedules.GeometricSchedule,
    None: sparsity_schedules.PeriodicSchedule
    if rewires
    else sparsity_schedules.PolynomialSchedule,
  }[cls.category.default_schedule]
  assert type(schedule) in (kind, sparsity_schedules.OneShotSchedule)


@hypothesis.given(st.integers(0, 2**31 - 1))
def test_a_key_and_its_bits_are_one_seed(seed):
  key = jax.random.key(seed)
  by_key = jaxpruner.RandomPruning(rng_seed=key)
  assert by_key == jaxpruner.RandomPruning(rng_seed=jax.random.key(seed))
  assert hash(by_key) == hash(
    jaxpruner.RandomPruning(rng_seed=jax.random.key_data(key))
  )


def test_what_json_cannot_hold_is_refused():
  updater = jaxpruner.MagnitudePruning(
    sparsity_distribution_fn=lambda _params: None
  )
  with pytest.raises(ValueError, match="JSON"):
    jaxpruner.config_from_updater(updater)
