"""Updaters from plain configuration, and back to it."""

import dataclasses
import functools
import json
import tomllib
import unittest.mock

import hypothesis
import jax
import ml_collections
import numpy as np
import pytest
import yaml
from hypothesis import strategies as st

import jaxpruner
from jaxpruner import api
from jaxpruner.sparsity_distributions import erk, uniform
from jaxpruner.sparsity_schedules import (
  NoUpdateSchedule,
  OneShotSchedule,
  PeriodicSchedule,
  PolynomialSchedule,
)

create = jaxpruner.create_updater_from_config

# --- every documented form ----------------------------------------------------

RIGL = {
  "algorithm": "rigl",
  "dist_type": "erk",
  "sparsity": 0.9,
  "update_freq": 10,
  "update_start_step": 20,
  "update_end_step": 80,
  "drop_fraction": 0.2,
  "custom_sparsity_map": {"head/kernel": 0.5, "*/first": None},
  "use_packed_masks": True,
  "rng_seed": 7,
}
RIGL_UPDATER = jaxpruner.RigL(
  scheduler=PeriodicSchedule(10, 20, 80),
  sparsity_distribution_fn=functools.partial(
    erk,
    sparsity=0.9,
    custom_sparsity_map={"head/kernel": 0.5, "*/first": None},
  ),
  drop_fraction=0.2,
  use_packed_masks=True,
  rng_seed=7,
)

YAML = """
algorithm: rigl
dist_type: erk
sparsity: 0.9
update_freq: 10
update_start_step: 20
update_end_step: 80
drop_fraction: 0.2
custom_sparsity_map: {head/kernel: 0.5, "*/first": null}
use_packed_masks: true
rng_seed: 7
"""

# TOML has no null, so nothing is kept dense here.
TOML = """
algorithm = "rigl"
dist_type = "erk"
sparsity = 0.9
update_freq = 10
update_start_step = 20
update_end_step = 80
drop_fraction = 0.2
use_packed_masks = true
rng_seed = 7

[custom_sparsity_map]
"head/kernel" = 0.5
"""


@pytest.mark.quick
@pytest.mark.parametrize(
  "read",
  [
    lambda: RIGL,
    lambda: ml_collections.ConfigDict(RIGL),
    lambda: ml_collections.FrozenConfigDict(RIGL),
    lambda: json.loads(json.dumps(RIGL)),
    lambda: yaml.safe_load(YAML),
  ],
  ids=["dict", "ConfigDict", "FrozenConfigDict", "json", "yaml"],
)
def test_any_mapping_describes_the_same_updater(read):
  assert create(read()) == RIGL_UPDATER


def test_toml_describes_the_same_updater():
  config = tomllib.loads(TOML)
  assert create(config) == create(
    RIGL | {"custom_sparsity_map": {"head/kernel": 0.5}}
  )


@pytest.mark.parametrize(
  "spec, kind",
  [
    ("unstructured", jaxpruner.Unstructured()),
    ("nm_2,4", jaxpruner.NByM(2, 4)),
    ("nm_2, 4", jaxpruner.NByM(2, 4)),
    ("nm_1,4,-1", jaxpruner.NByM(1, 4, axis=-1)),
    ("2:4", jaxpruner.NByM(2, 4)),
    ("block_4,8", jaxpruner.Block((4, 8))),
    ("maxblock_4,8", jaxpruner.Block((4, 8), use_avg_pooling=False)),
    ("4x8", jaxpruner.Block((4, 8))),
    ("channel_0", jaxpruner.Channel(0)),
    ("channel_-1", jaxpruner.Channel(-1)),
    (jaxpruner.Channel(1), jaxpruner.Channel(1)),
    (None, jaxpruner.Unstructured()),
    (
      {"a/kernel": "2:4", "*": "4x4"},
      {"a/kernel": jaxpruner.NByM(2, 4), "*": jaxpruner.Block((4, 4))},
    ),
  ],
)
def test_sparsity_types_are_spelled(spec, kind):
  assert jaxpruner.parse_sparsity_type(spec) == kind
  config = {"algorithm": "magnitude", "sparsity": 0.5, "sparsity_type": spec}
  assert create(config).sparsity_type == kind


@pytest.mark.parametrize(
  "config, scheduler",
  [
    ({}, NoUpdateSchedule()),
    ({"schedule": "none"}, NoUpdateSchedule()),
    ({"total_steps": 1000}, PolynomialSchedule(75, 250, 750, 3)),
    ({"total_steps": 10_000}, PolynomialSchedule(100, 2500, 7500, 3)),
    ({"total_steps": 1000, "algorithm": "set"}, PeriodicSchedule(75, 75, 750)),
    (
      {"total_steps": 1000, "update_freq": 5, "power": 1},
      PolynomialSchedule(5, 250, 750, 1),
    ),
    (
      {"update_freq": 5, "update_start_step": 10, "update_end_step": 30},
      PolynomialSchedule(5, 10, 30, 3),
    ),
    (
      {"update_freq": 5, "update_start_step": 10, "update_end_step": 10},
      OneShotSchedule(10),
    ),
    ({"schedule": "one_shot", "update_start_step": 4}, OneShotSchedule(4)),
    (
      {"schedule": "periodic", "update_start_step": 4, "update_freq": 2},
      PeriodicSchedule(2, 4, None),
    ),
  ],
)
def test_schedules_follow_the_documented_rule(config, scheduler):
  assert (
    create({"algorithm": "magnitude", "sparsity": 0.5, **config}).scheduler
    == scheduler
  )


def test_distributions_and_filters_are_passed_on():
  takes_heads = lambda names, _param: names[-1] == "head"
  made = create(
    {
      "algorithm": "magnitude",
      "dist_type": "erk",
      "erk_power_scale": 0.5,
      "sparsity": 0.5,
      "filter_fn": takes_heads,
      "custom_sparsity_map": {("a", "kernel"): 0.3},
    }
  )
  assert made.sparsity_distribution_fn.func is erk
  assert made.sparsity_distribution_fn.keywords == {
    "sparsity": 0.5,
    "filter_fn": takes_heads,
    "custom_sparsity_map": {("a", "kernel"): 0.3},
    "erk_power_scale": 0.5,
  }
  plain = create({"algorithm": "magnitude", "sparsity": 0.5})
  assert plain.sparsity_distribution_fn.func is uniform
  ranked = create(
    {
      "algorithm": "global_magnitude",
      "sparsity": 0.5,
      "filter_fn": takes_heads,
      "use_normalization": True,
    }
  )
  assert ranked.filter_fn is takes_heads and ranked.use_normalization


@pytest.mark.parametrize("name", jaxpruner.all_algorithm_names())
def test_every_algorithm_takes_the_papers_configuration(name):
  config = {
    "algorithm": name,
    "dist_type": "uniform",
    "sparsity": 0.8,
    "update_freq": 10,
    "update_start_step": 20,
    "update_end_step": 100,
    "skip_gradients": True,
    "rng_seed": 8,
    "use_packed_masks": False,
  }
  updater = create(config)
  assert type(updater) is jaxpruner.algorithm_class(name)
  if name != "no_prune":
    assert updater.rng_seed == 8 and updater.skip_gradients


def test_none_means_not_given():
  config = {"algorithm": "magnitude", "sparsity": 0.5}
  empty = dict.fromkeys(
    ("update_freq", "filter_fn", "custom_sparsity_map", "sparsity_type")
  )
  assert create(config | empty) == create(config)


# --- there and back -----------------------------------------------------------

paths = st.text("abk/*_", min_size=1, max_size=8)
sparsities = st.floats(0, 1, exclude_max=True)
types = st.one_of(
  st.builds(jaxpruner.Unstructured),
  st.integers(1, 4).flatmap(
    lambda n: st.builds(
      jaxpruner.NByM, st.just(n), st.integers(n, 8), st.integers(-3, 3)
    )
  ),
  st.builds(
    jaxpruner.Block,
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.booleans(),
  ),
  st.builds(jaxpruner.Channel, st.integers(-3, 3)),
)
spans = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(
  lambda pair: (pair[0], pair[0] + pair[1])
)
schedulers = st.one_of(
  st.builds(NoUpdateSchedule),
  st.builds(OneShotSchedule, st.integers(0, 100)),
  st.builds(
    lambda freq, span: PeriodicSchedule(freq, *span),
    st.integers(1, 20),
    spans,
  ),
  st.builds(PeriodicSchedule, st.integers(1, 20), st.integers(0, 20)),
  st.builds(
    lambda freq, span, power: PolynomialSchedule(freq, *span, power),
    st.integers(1, 20),
    spans,
    st.floats(0.1, 5) | st.integers(1, 5),
  ),
)
maps = st.none() | st.dictionaries(
  paths, st.none() | sparsities, min_size=1, max_size=3
)


@st.composite
def updaters(draw):
  name = draw(st.sampled_from(jaxpruner.all_algorithm_names()))
  cls = jaxpruner.algorithm_class(name)
  if cls is jaxpruner.NoPruning:
    return cls()
  fields = {f.name for f in dataclasses.fields(cls)}
  given_map = draw(maps)
  kwargs = {
    "scheduler": draw(schedulers),
    "use_packed_masks": draw(st.booleans()),
    "skip_gradients": draw(st.booleans()),
    "is_sparse_gradients": draw(st.booleans()),
    "rng_seed": draw(st.none() | st.integers(0, 2**31 - 1)),
  }
  if "drop_fraction" in fields:
    kwargs["drop_fraction"] = draw(st.floats(0, 1))
  if "sparsity" in fields:
    kwargs["sparsity"] = draw(sparsities)
    kwargs["custom_sparsity_map"] = given_map
    kwargs["use_normalization"] = draw(st.booleans())
    return cls(**kwargs)
  options = {"sparsity": draw(sparsities)}
  if given_map is not None:
    options["custom_sparsity_map"] = given_map
  fn = draw(st.sampled_from([uniform, erk]))
  if fn is erk and draw(st.booleans()):
    options["erk_power_scale"] = draw(st.floats(0, 2))
  kwargs["sparsity_distribution_fn"] = functools.partial(fn, **options)
  kwargs["sparsity_type"] = draw(
    types | st.dictionaries(paths, types, min_size=1, max_size=3)
  )
  return cls(**kwargs)


@hypothesis.given(updaters())
def test_json_round_trip_gives_an_equal_updater(updater):
  text = json.dumps(jaxpruner.config_from_updater(updater), allow_nan=False)
  again = create(json.loads(text))
  assert again == updater and hash(again) == hash(updater)
  assert json.dumps(jaxpruner.config_from_updater(again)) == text


@hypothesis.given(updaters(), updaters())
def test_updaters_are_equal_iff_they_print_alike(a, b):
  assert (a == b) == (repr(a) == repr(b))
  if a == b:
    assert hash(a) == hash(b)
  copy = dataclasses.replace(a)
  assert copy == a and hash(copy) == hash(a) and repr(copy) == repr(a)
  assert a != "an updater" and type(a).__name__ in repr(a)


@pytest.mark.parametrize("name", jaxpruner.all_algorithm_names())
def test_default_updaters_round_trip(name):
  updater = jaxpruner.algorithm_class(name)()
  config = jaxpruner.config_from_updater(updater)
  assert create(json.loads(json.dumps(config))) == updater


# --- equality, hash, subclasses -----------------------------------------------


def test_seeds_that_are_keys_compare_by_value():
  make = lambda seed: jaxpruner.RandomPruning(rng_seed=seed)
  assert make(jax.random.key(1)) == make(jax.random.key(1))
  assert make(jax.random.key(1)) != make(jax.random.key(2))
  assert hash(make(jax.random.key(1))) == hash(make(jax.random.key(1)))
  raw = np.array([0, 1], np.uint32)
  assert make(raw) == make(raw.copy())


@dataclasses.dataclass
class Smallest(jaxpruner.BaseUpdater):
  """Keep the smallest |w|: what a user would write."""

  temperature: float = 1.0

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return jax.tree.map(lambda p: -abs(p) * self.temperature, params)


def test_a_plain_dataclass_subclass_compares_hashes_and_prints():
  assert Smallest(temperature=2.0) == Smallest(temperature=2.0)
  assert Smallest(temperature=2.0) != Smallest(temperature=3.0)
  assert len({Smallest(), Smallest(), Smallest(temperature=2.0)}) == 2
  assert "temperature=2.0" in repr(Smallest(temperature=2.0))
  assert Smallest() != jaxpruner.MagnitudePruning()
  half = functools.partial(uniform, sparsity=0.5)
  pruner = Smallest(sparsity_distribution_fn=half)
  _, mask = pruner.instant_sparsify(np.array([[1.0, -4.0, 2.0, 3.0]]))
  assert mask.tolist() == [[1, 0, 1, 0]]


def test_registering_makes_an_algorithm_configurable():
  with unittest.mock.patch.dict(api._REGISTRY):
    jaxpruner.register_algorithm("smallest", Smallest)
    jaxpruner.register_algorithm("smallest", Smallest)
    assert jaxpruner.all_algorithm_names()[-1] == "smallest"
    assert jaxpruner.algorithm_category("smallest") == Smallest.category
    updater = create(
      {"algorithm": "smallest", "sparsity": 0.5, "temperature": 2.0}
    )
    assert updater.temperature == 2.0
    config = jaxpruner.config_from_updater(updater)
    assert create(json.loads(json.dumps(config))) == updater
  assert "smallest" not in jaxpruner.all_algorithm_names()
