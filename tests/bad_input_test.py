"""Bad inputs: each is refused by our own words, none passes silently.

An entry names what the message must contain: the argument or path, and the
value. That a cure is offered is checked by its verb.
"""

import dataclasses
import functools
import math
import pathlib
import re
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import (
  algorithms,
  api,
  mask_calculator,
  sparsity_distributions,
  sparsity_schedules,
  sparsity_types,
)

NAN = math.nan
CURE = re.compile(
  r"\b(must|use|pass|choose|did you mean|leave|drop|give|gives|write|needs?|"
  r"register|register_algorithm|call|ask|say|find|compare|summarise|split|pad|"
  r"take|lower|change|return)\b"
)
PARAMS = {
  "enc": {"kernel": jnp.arange(48.0).reshape(6, 8), "bias": jnp.zeros(8)},
  "dec": {"kernel": jnp.arange(32.0).reshape(8, 4)},
}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
HALF = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
ONCE = sparsity_schedules.OneShotSchedule(0)
LATER = sparsity_schedules.OneShotSchedule(9)
MASKS = {
  "enc": {"kernel": jnp.ones((6, 8), jnp.uint8), "bias": None},
  "dec": {"kernel": jnp.ones((8, 4), jnp.uint8)},
}

CORPUS = {}


def bad(call, *fragments):
  """Add an entry; a fragment is text the message must contain."""
  name = f"{len(CORPUS):03d}-{'-'.join(map(str, fragments))}"
  CORPUS[re.sub(r"[^\w.=-]+", "_", name)[:60]] = call, fragments


def bad_arguments(build, **values):
  """Add one entry per value: the argument's name and value must be told."""
  for argument, wrong in values.items():
    for value in wrong:
      bad(functools.partial(build, **{argument: value}), argument, repr(value))


def partial(cls, **given):
  return lambda **more: cls(**{**given, **more})


# --- schedules ---------------------------------------------------------------

periodic = partial(
  sparsity_schedules.PeriodicSchedule,
  update_freq=1,
  update_start_step=2,
  update_end_step=4,
)
bad_arguments(
  periodic,
  update_freq=(0, -1, 1.5, "3", None, True),
  update_start_step=(-1, 0.5, "x", None, True),
  update_end_step=(-1, 2.5, "x", True, 1),
)
polynomial = partial(
  sparsity_schedules.PolynomialSchedule,
  update_freq=1,
  update_start_step=2,
  update_end_step=4,
)
bad_arguments(
  polynomial,
  update_freq=(0,),
  update_end_step=(None, 1, 3.5),
  power=(0, -1, NAN, math.inf, "3", True, None),
)
bad_arguments(
  sparsity_schedules.OneShotSchedule, target_step=(-1, 0.5, None, "1", True)
)

# --- sparsity types ----------------------------------------------------------

bad_arguments(
  partial(sparsity_types.NByM, n=2, m=4),
  n=(0, -1, 5, 2.0, "2", True, None),
  m=(0, 1, 4.0, "4"),
  axis=(1.5, "x", True),
  stride=(0, -1, 2.0, "2", None),
)
bad_arguments(
  sparsity_types.Block,
  block_shape=(
    (4,),
    (1, 2, 3),
    4,
    "4x4",
    "44",
    None,
    (4, -1),
    (2.5, 2),
    [0, 1],
  ),
  use_avg_pooling=(1, "yes", None),
)
bad_arguments(sparsity_types.Channel, axis=("x", 1.0, None, True))

SQUARE = jnp.ones((6, 6))
for kind in (
  sparsity_types.Unstructured(),
  sparsity_types.Block((2, 2)),
  sparsity_types.Channel(-1),
):
  for sparsity in (1.0, -0.1, NAN, "0.5", True):
    bad(
      functools.partial(kind.mask, SQUARE, sparsity), "sparsity", str(sparsity)
    )
  bad(functools.partial(kind.mask, jnp.ones((0, 3)), 0.5), "(0, 3)")
bad(lambda: sparsity_types.NByM(2, 4).mask(SQUARE, 0.5), "axis -2", "6", "m=4")
bad(lambda: sparsity_types.NByM(2, 3).mask(SQUARE, 0.9), "0.9", "2:3")
bad(lambda: sparsity_types.NByM(2, 3).mask(jnp.ones(6), 1 / 3), "(6,)", "-2")
bad(lambda: sparsity_types.NByM(1, 2, axis=5).mask(SQUARE, 0.5), "axis 5")
bad(lambda: sparsity_types.Channel(2).mask(SQUARE, 0.5), "axis 2", "(6, 6)")
bad(lambda: sparsity_types.Channel(-1).mask(jnp.ones(()), 0.5), "()", "axis")
bad(lambda: sparsity_types.Block().mask(jnp.ones(()), 0.5), "scalar")

# --- distributions -----------------------------------------------------------

for fn in (sparsity_distributions.uniform, sparsity_distributions.erk):
  call = partial(fn, params=PARAMS, sparsity=0.5)
  bad_arguments(
    call,
    sparsity=(1, 1.0, 1.5, -0.1, NAN, math.inf, "0.8", None, True, [0.5]),
    filter_fn=(None, "kernel", 3),
    custom_sparsity_map=([("a", 0.5)], "dec/kernel", 0.5),
  )
  bad(
    functools.partial(call, custom_sparsity_map={"dec/kernl": 0.5}),
    "custom_sparsity_map",
    "dec/kernl",
    "did you mean 'dec/kernel'",
  )
  bad(
    functools.partial(call, custom_sparsity_map={("dec", "krnel"): 0.5}),
    "custom_sparsity_map",
    "dec/krnel",
    "did you mean 'dec/kernel'",
  )
  bad(
    functools.partial(call, custom_sparsity_map={"zzz*": 0.5}),
    "custom_sparsity_map",
    "zzz*",
    "choose from",
  )
  for value in (1.0, -1, "x", True, NAN):
    bad(
      functools.partial(call, custom_sparsity_map={"*/kernel": value}),
      "custom_sparsity_map['*/kernel']",
      repr(value),
    )
  bad(
    functools.partial(call, filter_fn=lambda _names, _p: False),
    "filter_fn",
    "enc/kernel",
  )
  for leaf, told in (
    (jnp.arange(4), "int32[4]"),
    (jnp.ones((0, 3)), "float32[0, 3]"),
    (2.5, "2.5"),
    ("text", "text"),
    (jnp.ones((2, 2), jnp.complex64), "complex64[2, 2]"),
  ):
    bad(
      functools.partial(
        fn, {"a": {"odd": leaf}}, 0.5, filter_fn=lambda _names, _p: True
      ),
      "a/odd",
      told,
      "filter_fn",
    )
bad_arguments(
  partial(sparsity_distributions.erk, params=PARAMS, sparsity=0.5),
  erk_power_scale=(-1, NAN, math.inf, "1", None, True),
)

# --- constructors ------------------------------------------------------------

magnitude = partial(algorithms.MagnitudePruning)
bad_arguments(
  magnitude,
  scheduler=(
    None,
    "polynomial",
    7,
    sparsity_schedules.OneShotSchedule,
    {"update_freq": 1},
  ),
  skip_gradients=(None, 1, "yes"),
  is_sparse_gradients=(None, 0),
  use_packed_masks=("no", 1),
  sparsity_distribution_fn=(0.8, "erk", {"a": 0.5}),
  topk_fn=("topk", 3),
  sparsity_type=("2:4", None, 3, sparsity_types.NByM),
  rng_seed=(1.5, "0", True, [0, 1]),
)
bad(lambda: magnitude(sparsity_type={"*": "2:4"}), "sparsity_type", "2:4")
bad(lambda: magnitude(rng_seed=np.ones(2)), "rng_seed")
for cls in (algorithms.SET, algorithms.RigL):
  bad_arguments(
    cls,
    drop_fraction=(-0.1, 1.5, NAN, "0.3", True, None),
    drop_fraction_fn=(0.3, "cosine"),
  )
for cls in (
  algorithms.GlobalMagnitudePruning,
  algorithms.GlobalSaliencyPruning,
):
  bad_arguments(
    cls,
    sparsity=(1.0, -0.5, "x", None, True),
    sparsity_type=(sparsity_types.NByM(2, 4), sparsity_types.Block()),
    filter_fn=(None, "kernel"),
    custom_sparsity_map=([0.5], "a"),
    use_normalization=("yes", None, 1),
  )
  bad(
    functools.partial(cls, sparsity_distribution_fn=HALF),
    "sparsity_distribution_fn",
    "sparsity=",
  )
  bad(functools.partial(cls, topk_fn=len), "topk_fn", "len")

# --- wrap, init, update ------------------------------------------------------


def pruner(**kwargs):
  return algorithms.MagnitudePruning(
    **{"sparsity_distribution_fn": HALF, "scheduler": ONCE, **kwargs}
  )


def wrapped(**kwargs):
  return pruner(**kwargs).wrap_optax(optax.sgd(0.1))


class NoScores(jaxpruner.BaseUpdater):
  pass


@dataclasses.dataclass
class Scores(jaxpruner.BaseUpdater):
  """Return scores of whatever form the test asks for."""

  form: str = "abs"

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return {
      "scalars": jax.tree.map(jnp.sum, params),
      "nothing": None,
      "leaf": jnp.zeros(3),
      "less": {"enc": params["enc"]},
      "complex": jax.tree.map(lambda p: p + 1j, params),
    }[self.form]


@dataclasses.dataclass
class Forgetful(jaxpruner.BaseUpdater):
  """Return a state without masks."""

  def update_state(self, sparse_state, params, grads):
    return sparse_state._replace(masks=None)


def nan_at(path):
  return jax.tree_util.tree_map_with_path(
    lambda p, x: (
      x.at[0, 1].set(NAN)
      if jax.tree_util.keystr(p, simple=True, separator="/") == path
      else x
    ),
    PARAMS,
  )


for inner in (None, "adam", optax.adam, 0.1):
  bad(
    functools.partial(pruner().wrap_optax, inner),
    "inner",
    repr(inner)[:20],
    "optax.adam(1e-3)",
  )
bad(
  lambda: wrapped().update(GRADS, wrapped().init(PARAMS)),
  "params",
  "tx.update(grads, opt_state, params)",
)
bad(
  lambda: wrapped().init({"enc": {"bias": jnp.zeros(8)}}),
  "filter_fn",
  "enc/bias",
)
bad(
  lambda: wrapped(scheduler=LATER).update(
    GRADS["enc"], wrapped().init(PARAMS), PARAMS
  ),
  "updates",
  "dec/kernel",
)
bad(
  lambda: wrapped().update(GRADS, wrapped().init(PARAMS["enc"]), PARAMS),
  "dec/kernel",
)
bad(
  lambda: wrapped().update(
    GRADS,
    wrapped().init(PARAMS),
    PARAMS | {"dec": {"kernel": jnp.ones((4, 4))}},
  ),
  "dec/kernel",
  "(4, 4)",
  "(8, 4)",
)
for state in (None, (), optax.adam(0.1).init(PARAMS), PARAMS, "state"):
  bad(
    functools.partial(pruner().post_gradient_update, PARAMS, state),
    "opt_state",
    "0 sparse states",
  )
  bad(
    functools.partial(
      algorithms.SteMagnitudePruning().pre_forward_update, PARAMS, state
    ),
    "opt_state",
    "0 sparse states",
  )
two = [jaxpruner.SparseState(masks=None)] * 2
bad(lambda: jaxpruner.find_state(two), "opt_state", "2 sparse states")
bad(
  lambda: jaxpruner.apply_mask(jnp.ones(4), jnp.ones(3, jnp.uint8)),
  "(3,)",
  "(4,)",
  "is_packed",
)
bad(
  lambda: jaxpruner.apply_mask(
    jnp.ones(40), jnp.ones(3, jnp.uint8), is_packed=True
  ),
  "(3,)",
  "(40,)",
)
bad(
  lambda: pruner().apply_masks(
    PARAMS, MASKS | {"dec": {"kernel": jnp.ones((4, 8), jnp.uint8)}}
  ),
  "dec/kernel",
  "(4, 8)",
  "(8, 4)",
)
bad(
  lambda: pruner().apply_masks(
    PARAMS, jax.tree.map(mask_calculator.pack_mask, MASKS), False
  ),
  "dec/kernel",
  "is_packed=True",
)
bad(
  lambda: pruner().apply_masks(PARAMS, MASKS, is_packed=True),
  "dec/kernel",
  "is_packed",
)
bad(
  lambda: pruner().apply_masks(PARAMS, {"enc": MASKS["enc"]}),
  "masks",
  "dec/kernel",
)
bad(lambda: pruner().apply_masks(PARAMS, [MASKS]), "masks", "kernel")
bad(
  lambda: pruner().apply_masks(PARAMS, jnp.ones(3, jnp.uint8)),
  "masks",
  "kernel",
)
for tree, told in (
  ({"enc": 0.5}, "dec/kernel"),
  (0.5, "dec/kernel"),
  (jax.tree.map(lambda _: 1.5, PARAMS), "1.5"),
  (jax.tree.map(lambda _: "x", PARAMS), "'x'"),
  (jax.tree.map(lambda _: NAN, PARAMS), "nan"),
):
  bad(
    lambda tree=tree: wrapped(sparsity_distribution_fn=lambda _: tree).init(
      PARAMS
    ),
    "dec/kernel",
    told,
  )
bad(
  lambda: wrapped(sparsity_type=sparsity_types.NByM(1, 4)).init(PARAMS),
  "dec/kernel",
  "0.5",
  "1:4",
)
bad(
  lambda: wrapped(sparsity_type=sparsity_types.NByM(2, 4)).init(PARAMS),
  "enc/kernel",
  "length 6",
  "m=4",
)
bad(
  lambda: wrapped(sparsity_type=sparsity_types.Channel(2)).init(PARAMS),
  "dec/kernel",
  "axis 2",
)
bad(
  lambda: wrapped(sparsity_type={"dec/kernl": sparsity_types.Channel(0)}).init(
    PARAMS
  ),
  "sparsity_type",
  "dec/kernl",
  "did you mean 'dec/kernel'",
)
bad(
  lambda: wrapped(sparsity_type=lambda _names, _p: "2:4").init(PARAMS),
  "sparsity_type",
  "2:4",
  "kernel",
)
bad(
  lambda: wrapped(sparsity_type=lambda _names, _p: None).init(PARAMS),
  "sparsity_type",
  "None",
  "kernel",
)
for cls in (algorithms.SaliencyPruning, algorithms.GlobalSaliencyPruning):
  how = (
    {"sparsity": 0.5}
    if cls is algorithms.GlobalSaliencyPruning
    else {"sparsity_distribution_fn": HALF}
  )
  bad(
    lambda cls=cls, how=how: cls(**how).instant_sparsify(PARAMS),
    "grads",
    cls.__name__,
  )
  bad(
    lambda cls=cls, how=how: cls(**how).calculate_scores(PARAMS),
    "grads=None",
    cls.__name__,
  )
  bad(
    lambda cls=cls, how=how: cls(**how).instant_sparsify(
      PARAMS, {"enc": GRADS["enc"]}
    ),
    "grads",
    "dec/kernel",
  )
  bad(
    lambda cls=cls, how=how: cls(**how).instant_sparsify(
      PARAMS, nan_at("dec/kernel")
    ),
    "dec/kernel",
    "1 NaN of 32",
  )
bad(
  lambda: pruner(sparsity_distribution_fn=None).instant_sparsify(PARAMS),
  "sparsity_distribution_fn=None",
)
for cls in (
  algorithms.StaticRandomSparse,
  algorithms.SET,
  algorithms.RigL,
):
  bad(
    lambda cls=cls: cls(sparsity_distribution_fn=HALF).instant_sparsify(PARAMS),
    cls.__name__,
    "wrap_optax",
  )
bad(
  lambda: pruner().instant_sparsify(nan_at("enc/kernel")),
  "enc/kernel",
  "1 NaN of 48",
)
bad(
  lambda: wrapped().update(GRADS, wrapped().init(PARAMS), nan_at("enc/kernel")),
  "enc/kernel",
  "1 NaN of 48",
)


def rewire(grads):
  tx = algorithms.RigL(
    sparsity_distribution_fn=HALF,
    scheduler=sparsity_schedules.PeriodicSchedule(1, 0),
  ).wrap_optax(optax.sgd(0.1))
  state = jaxpruner.SparseState(
    masks=MASKS,
    inner_state=optax.sgd(0.1).init(PARAMS),
    target_sparsities=jax.tree.map(lambda _m: jnp.float32(0.5), MASKS),
    count=jnp.array(1),
    key=jnp.zeros(2, jnp.uint32),
    skipped=jnp.zeros(2, jnp.int32),
  )
  return tx.update(grads, state, PARAMS)


bad(lambda: rewire(nan_at("dec/kernel")), "dec/kernel", "1 NaN of 32")
bad(
  lambda: algorithms.RigL(
    sparsity_distribution_fn=HALF,
    scheduler=sparsity_schedules.PeriodicSchedule(1, 0),
    topk_fn=mask_calculator.topk_mask_calculator,
  ).update_state(
    jaxpruner.SparseState(MASKS, count=jnp.array(1)), PARAMS, GRADS
  ),
  "kernel",
  "RigL",
  "topk_mask_calculator",
)
bad(
  lambda: NoScores(sparsity_distribution_fn=HALF).instant_sparsify(PARAMS),
  "NoScores",
  "calculate_scores",
)
for form, told in (
  ("scalars", "dec/kernel"),
  ("nothing", "scores"),
  ("leaf", "dec/kernel"),
  ("less", "dec/kernel"),
  ("complex", "complex64"),
):
  bad(
    lambda form=form: Scores(
      sparsity_distribution_fn=HALF, form=form
    ).instant_sparsify(PARAMS),
    "scores",
    told,
  )
bad(
  lambda: jax.jit(
    Forgetful(sparsity_distribution_fn=HALF, scheduler=ONCE)
    .wrap_optax(optax.sgd(0.1))
    .update
  )(GRADS, wrapped().init(PARAMS), PARAMS),
  "Forgetful.update_state",
  "structure",
)
bad(
  lambda: (
    Forgetful(sparsity_distribution_fn=HALF, scheduler=ONCE)
    .wrap_optax(optax.sgd(0.1))
    .update(GRADS, wrapped().init(PARAMS), PARAMS)
  ),
  "Forgetful.update_state",
  "structure",
)
bad(
  lambda: pruner(
    topk_fn=lambda _scores, _sparsity: jnp.ones(3)
  ).instant_sparsify(PARAMS),
  "dec/kernel",
  "(3,)",
)

# --- configuration -----------------------------------------------------------


def config(**kwargs):
  given = {"algorithm": "magnitude", "sparsity": 0.5, "total_steps": 100}
  return jaxpruner.create_updater_from_config({**given, **kwargs})


for value in (None, [], "magnitude", 3, ("algorithm", "rigl")):
  bad(
    functools.partial(jaxpruner.create_updater_from_config, value),
    "sparsity_config",
    repr(value),
  )
bad(lambda: jaxpruner.create_updater_from_config({}), "algorithm")
bad(lambda: config(algorithm=None), "algorithm")
for name, hint in (
  ("magntude", "did you mean 'magnitude'"),
  ("RigL", "did you mean 'rigl'"),
  ("zzzz", "choose from"),
  (3, "choose from"),
  (["rigl"], "rigl"),
):
  bad(lambda name=name: config(algorithm=name), "algorithm", repr(name), hint)
for key, hint in (
  ("sparsty", "did you mean 'sparsity'"),
  ("udpate_freq", "did you mean 'update_freq'"),
  ("update_begin_step", "did you mean 'update_"),
  ("drop_fraction", "magnitude"),
  ("scheduler", "did you mean 'schedule'"),
  ("sparsity_distribution_fn", "did you mean 'sparsity_"),
  ("qqqq", "choose from"),
  (3, "choose from"),
):
  bad(lambda key=key: config(**{}) and config_with(key, 1), repr(key), hint)


def config_with(key, value):
  return jaxpruner.create_updater_from_config(
    {"algorithm": "magnitude", "sparsity": 0.5, key: value}
  )


bad(
  lambda: jaxpruner.create_updater_from_config(
    {"algorithm": "no_prune", "sparsty": 0.5}
  ),
  "sparsty",
  "did you mean 'sparsity'",
)
for name in ("erdos", "ERK", 3, ["erk"]):
  bad(lambda name=name: config(dist_type=name), "dist_type", repr(name))
for value in (1.0, 80, -0.1, "0.8", True, NAN):
  bad(lambda value=value: config(sparsity=value), "sparsity", repr(value))
  bad(
    lambda value=value: config(algorithm="global_magnitude", sparsity=value),
    "sparsity",
    repr(value),
  )
for name in ("magnitude", "global_magnitude", "rigl"):
  bad(
    lambda name=name: config(algorithm=name, sparsity=None), "sparsity", "0.8"
  )
for key, wrong in {
  "update_freq": (0, -3, 1.5, "10"),
  "update_start_step": (-1, 2.5, "1"),
  "update_end_step": (-1, 1e3, "9"),
  "total_steps": (0, -5, 1.5, "100", True),
  "power": (0, "3", NAN),
  "schedule": ("cosine", "Polynomial", 3),
  "rng_seed": (0.5, "0"),
  "use_packed_masks": ("no", 1),
  "skip_gradients": ("no", 0),
  "filter_fn": ("kernel", 3),
  "custom_sparsity_map": ([("a", 0.5)], "a"),
}.items():
  for value in wrong:
    bad(lambda key=key, value=value: config(**{key: value}), key, repr(value))
for key in ("update_freq", "update_end_step", "power", "schedule"):
  value = "periodic" if key == "schedule" else 5
  bad(
    lambda key=key, value=value: config(total_steps=None, **{key: value}),
    key,
    "update_start_step",
  )
bad(
  lambda: config(total_steps=None, update_start_step=1, update_end_step=9),
  "update_freq",
)
bad(
  lambda: config(total_steps=None, update_start_step=1, update_freq=2),
  "update_end_step",
)
bad(lambda: config(erk_power_scale=0.5), "erk_power_scale", "0.5", "erk")
bad(
  lambda: config(dist_type="erk", erk_power_scale=-1), "erk_power_scale", "-1"
)
bad(lambda: config(algorithm="rigl", power=2), "power", "rigl", "polynomial")
bad(lambda: config(algorithm="rigl", drop_fraction=2), "drop_fraction", "2")
for spec in (
  "2:",
  "nm_2",
  "nm_2;4",
  "block_4",
  "channel",
  "4x",
  "x",
  "",
  "5:4",
):
  bad(
    lambda spec=spec: config(sparsity_type=spec),
    "n=5" if ":4" in spec else repr(spec),
  )
  bad(
    functools.partial(jaxpruner.parse_sparsity_type, {"*": spec}),
    "n=5" if ":4" in spec else repr(spec),
  )
bad(lambda: config(sparsity_type=3), "sparsity_type", "3")
bad(
  lambda: config(algorithm="global_magnitude", sparsity_type="2:4"),
  "sparsity_type",
  "NByM",
)

# --- registry ----------------------------------------------------------------

for name in ("", None, 3):
  bad(
    functools.partial(jaxpruner.register_algorithm, name, NoScores),
    "name",
    repr(name),
  )
for cls in (object, None, "NoScores", optax.adam, algorithms.SET()):
  bad(
    functools.partial(jaxpruner.register_algorithm, "new", cls),
    "algorithm",
    repr(cls)[:20],
  )
bad(
  lambda: jaxpruner.register_algorithm("magnitude", NoScores),
  "magnitude",
  "NoScores",
  "MagnitudePruning",
)
bad(
  lambda: jaxpruner.algorithm_class("magntude"),
  "magntude",
  "did you mean 'magnitude'",
)
bad(lambda: jaxpruner.algorithm_category(None), "None", "choose from")
bad(
  lambda: jaxpruner.config_from_updater(NoScores()),
  "NoScores",
  "register_algorithm",
)
for value in ("magnitude", None, algorithms.MagnitudePruning):
  bad(
    functools.partial(jaxpruner.config_from_updater, value),
    "updater",
    repr(value)[:20],
  )
for field, value in (
  ("sparsity_distribution_fn", lambda _params: None),
  ("sparsity_distribution_fn", None),
  ("topk_fn", mask_calculator.topk_mask_calculator),
  ("rng_seed", np.zeros(2, np.uint32)),
  ("sparsity_type", lambda _names, _p: sparsity_types.Unstructured()),
):
  bad(
    lambda field=field, value=value: jaxpruner.config_from_updater(
      pruner(**{field: value})
    ),
    field,
    "JSON",
  )


@dataclasses.dataclass(frozen=True)
class OwnSchedule(sparsity_schedules.BaseSchedule):
  pass


bad(
  lambda: jaxpruner.config_from_updater(pruner(scheduler=OwnSchedule())),
  "scheduler",
  "OwnSchedule",
  "JSON",
)

# --- leaves that no mask fits -------------------------------------------------


def made(name):
  return jaxpruner.create_updater_from_config(
    {"algorithm": name, "sparsity": 0.5}
  )


KEYED = {"w": jnp.ones((4, 4)), "rngs": {"dropout": jax.random.key(0)}}
bad(
  lambda: made("magnitude").instant_sparsify(KEYED),
  "rngs/dropout",
  "PRNG key",
  "nnx.split",
)
bad(
  lambda: made("magnitude_ste").init_state(KEYED),
  "rngs/dropout",
  "eqx.partition",
)
bad(
  lambda: jaxpruner.summarize_sparsity(KEYED),
  "rngs/dropout",
  "jax.random.key_data",
)
HUGE = {"a": {"kernel": jax.ShapeDtypeStruct((1 << 16, 1 << 16), jnp.bfloat16)}}
bad(
  lambda: jax.eval_shape(made("magnitude").init_state, HUGE),
  "a/kernel",
  "4,294,967,296",
  "stacked_axis",
)
HALVES = {
  name: jax.ShapeDtypeStruct((1 << 15, 1 << 16), jnp.bfloat16) for name in "ab"
}
bad(
  lambda: jax.eval_shape(made("global_magnitude").instant_sparsify, HALVES),
  "GlobalMagnitudePruning",
  "4,294,967,296",
  "'a'",
  "filter_fn",
)

# --- summaries ---------------------------------------------------------------

bad(
  lambda: jaxpruner.summarize_sparsity(jax.eval_shape(lambda: PARAMS)),
  "dec/kernel",
  "ShapeDtypeStruct",
)
bad(lambda: jaxpruner.summarize_sparsity({"a": "text"}), "a", "text")
bad(
  lambda: jaxpruner.summarize_sparsity({"enc": MASKS["enc"]}, params=PARAMS),
  "masks",
  "dec/kernel",
)
bad(
  lambda: jaxpruner.summarize_sparsity(
    MASKS | {"dec": {"kernel": jnp.ones(3, jnp.uint8)}}, params=PARAMS
  ),
  "dec/kernel",
  "(3,)",
  "(8, 4)",
)
bad(
  lambda: jaxpruner.summarize_intersection(MASKS, {"enc": MASKS["enc"]}),
  "dec/kernel",
)
bad(
  lambda: jaxpruner.summarize_intersection(
    MASKS, MASKS | {"dec": {"kernel": jnp.ones((4, 8), jnp.uint8)}}
  ),
  "dec/kernel",
  "(4, 8)",
  "(8, 4)",
)
bad(
  lambda: jaxpruner.summarize_intersection(PARAMS, PARAMS),
  "dec/kernel",
  "float32",
)
bad(
  lambda: jax.jit(lambda m: jaxpruner.summarize_intersection(m, m))(MASKS),
  "dec/kernel",
  "outside jit",
)
bad(
  lambda: jaxpruner.sparsity_table(PARAMS, {"enc": MASKS["enc"]}),
  "masks",
  "dec/kernel",
)
bad(
  lambda: jaxpruner.sparsity_table(PARAMS, opt_state=()),
  "opt_state",
  "0 sparse states",
)

# --- engine ------------------------------------------------------------------

bad(lambda: mask_calculator.num_ones(-1, 0.5), "size", "-1")
bad(lambda: mask_calculator.num_ones(10, 1.0), "sparsity", "1.0")
bad(lambda: mask_calculator.n_by_m_mask(jnp.ones((4, 4)), 3, 2), "n=3", "m=2")
bad(lambda: mask_calculator.n_by_m_mask(jnp.ones((6, 4)), 2, 4), "6", "m=4")
bad(lambda: mask_calculator.topk_masks([SQUARE], [1, 2]), "ones", "2", "1")


HOME = pathlib.Path(jaxpruner.__file__).parent


@pytest.mark.parametrize("name", CORPUS)
def test_bad_input_is_refused_with_argument_value_and_cure(name):
  call, fragments = CORPUS[name]
  with unittest.mock.patch.dict(api._REGISTRY):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
      call()
  message = str(caught.value)
  raised_in = pathlib.Path(str(caught.traceback[-1].path))
  assert HOME in raised_in.parents, f"not our own error: {message}"
  for fragment in fragments:
    assert fragment in message, message
  assert CURE.search(message), f"offers no cure: {message}"


def test_corpus_holds_at_least_150_inputs():
  assert len(CORPUS) >= 150
