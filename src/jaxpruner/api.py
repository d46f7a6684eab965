"""The table of algorithms, and updaters from configuration."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from jaxpruner import _legacy, _tools, algorithms, base_updater
from jaxpruner._tools.registry import Registry as Registry
from jaxpruner.config import codec, distribution, schedule

_REGISTRY: Registry[type[base_updater.BaseUpdater]] = Registry(
  "algorithm",
  "jaxpruner.register_algorithm; jaxpruner.all_algorithm_names() lists all",
  {
    "no_prune": base_updater.NoPruning,
    "magnitude": algorithms.MagnitudePruning,
    "random": algorithms.RandomPruning,
    "saliency": algorithms.SaliencyPruning,
    "magnitude_ste": algorithms.SteMagnitudePruning,
    "random_ste": algorithms.SteRandomPruning,
    "global_magnitude": algorithms.GlobalMagnitudePruning,
    "global_saliency": algorithms.GlobalSaliencyPruning,
    "static_sparse": algorithms.StaticRandomSparse,
    "set": algorithms.SET,
    "rigl": algorithms.RigL,
    "signal_rigl": algorithms.SignalRigL,
    "snfs": algorithms.SNFS,
    "top_kast": algorithms.TopKAST,
    "itop": algorithms.ITOP,
    "mest": algorithms.MEST,
    "granet": algorithms.GraNet,
    "dsr": algorithms.DSR,
    "deep_r": algorithms.DeepR,
    "srigl": algorithms.SRigL,
    "acdc": algorithms.ACDC,
    "movement": algorithms.MovementPruning,
    "soft_movement": algorithms.SoftMovementPruning,
    "str": algorithms.SoftThresholdPruning,
    "saliency_ste": algorithms.SteSaliencyPruning,
    "sr_ste": algorithms.SrStePruning,
    "decaying_mask": algorithms.DecayingMaskPruning,
    "powerpropagation": algorithms.PowerPropagation,
    "fisher": algorithms.FisherPruning,
    "wood_fisher": algorithms.WoodFisherPruning,
    "cram": algorithms.CrAM,
    "snip": algorithms.SNIP,
    "grasp": algorithms.GraSP,
    "synflow": algorithms.SynFlow,
    "lamp": algorithms.LampPruning,
    "imp": algorithms.IterativeMagnitudePruning,
    "admm": algorithms.AdmmPruning,
    "s_ste": algorithms.SoftSte,
  },
)

_KEYS = ("algorithm", "dist_type", "sparsity", "sparsity_type", "schedule")


def all_algorithm_names() -> tuple[str, ...]:
  """Return the names of all registered algorithms, your own included.

  Returns:
    The names, in the order of registration.

  Example:
    >>> "rigl" in all_algorithm_names()
    True
  """
  return tuple(_REGISTRY)


def register_algorithm(
  name: str, algorithm: type[base_updater.BaseUpdater]
) -> None:
  """Give an algorithm a name in configuration.

  Afterwards `algorithm="name"` selects it, and `jaxpruner compare` includes it.

  Args:
    name: the name; a name that is taken is refused.
    algorithm: a subclass of `BaseUpdater`.

  Returns:
    None.

  Raises:
    ValueError: the name is taken, or the class is not a `BaseUpdater`.

  Example:
    >>> import dataclasses, jax, jaxpruner
    >>> @dataclasses.dataclass(eq=False)
    ... class Smallest(jaxpruner.BaseUpdater):
    ...   def calculate_scores(self, params, sparse_state=None, grads=None):
    ...     return jax.tree.map(lambda p: -abs(p), params)
    >>> jaxpruner.register_algorithm("smallest", Smallest)
    >>> jaxpruner.algorithm_class("smallest").__name__
    'Smallest'
  """
  if not (
    isinstance(algorithm, type)
    and issubclass(algorithm, base_updater.BaseUpdater)
  ):
    raise ValueError(
      f"algorithm={algorithm!r} must be a subclass of jaxpruner.BaseUpdater"
    )
  _REGISTRY.register(name, algorithm)


def algorithm_class(name: str) -> type[base_updater.BaseUpdater]:
  """Return the class that is registered under a name.

  Args:
    name: one of `all_algorithm_names()`.

  Returns:
    The subclass of `BaseUpdater`.

  Raises:
    ValueError: the name is unknown; the message shows the nearest one.

  Example:
    >>> algorithm_class("rigl").__name__
    'RigL'
  """
  return _REGISTRY.find(name)


def algorithm_category(name: str) -> base_updater.Category:
  """Return the category of a registered algorithm.

  Args:
    name: one of `all_algorithm_names()`.

  Returns:
    The `Category`: when the algorithm removes weights, whether it starts dense
    or sparse, and its needs and costs.

  Example:
    >>> algorithm_category("rigl").start
    'sparse-to-sparse'
  """
  return algorithm_class(name).category


def create_updater_from_config(
  sparsity_config: Mapping[str, Any],
) -> base_updater.BaseUpdater:
  """Return the updater that a configuration describes.

  Args:
    sparsity_config: any mapping (dict, `ml_collections.ConfigDict`, parsed
      YAML, TOML or JSON) with these keys:

      - `algorithm`: one of `all_algorithm_names()`.
      - `sparsity`: the fraction removed; not needed for N:M.
      - `dist_type`: "uniform", "erk" (with `erk_power_scale`), or a name given
        to `register_distribution`, with its arguments as further keys.
      - `filter_fn`: which leaves are pruned; `custom_sparsity_map`: the
        sparsity of single leaves.
      - `sparsity_type`: see `parse_sparsity_type`.
      - `update_freq`, `update_start_step`, `update_end_step`, `power`: the
        schedule. Without a start, masks are never updated. If start and end
        are equal, they are updated once. Otherwise the sparsity follows a
        ramp.
      - `total_steps`: the length of the training, from which missing steps
        are derived. Gradual pruners then work from 25 % to 75 % of the
        training; sparse trainers update until 75 %, every tenth of that
        time, at most 100 steps apart.
      - `schedule`: the schedule by name: "none", "one_shot", "periodic",
        "polynomial", "alternating", "geometric", or a name given to
        `register_schedule`, with its fields as further keys.
      - `drop`, `grow`: how a sparse trainer ranks weights: "magnitude",
        "gradient", "momentum", "random", "magnitude_gradient" or
        "signal_to_noise".
        `redistribute`: "momentum" or "survivors". Each may be a mapping
        `{"name": …, field: value}`.
      - `phases`: a list of configurations, each with the step `start` from
        which it applies (see `chain`); all other keys apply to every phase.
      - `storage`: "masked" (the default) or "kept": `static_sparse`, `set` and
        `rigl` at the size of what is kept, as a `kept.KeptUpdater`.
      - any further field of the algorithm, such as `drop_fraction`,
        `rng_seed`, `use_packed_masks`, `skip_gradients`.

  Returns:
    The updater; `config_from_updater` returns its configuration.

  Raises:
    ValueError: a key is missing or unknown, or a value is wrong.

  Example:
    >>> import jaxpruner
    >>> pruner = jaxpruner.create_updater_from_config(
    ...   {"algorithm": "rigl", "dist_type": "erk", "sparsity": 0.9,
    ...    "total_steps": 10_000})
    >>> pruner.scheduler.update_end_step
    7500
  """
  if not isinstance(sparsity_config, Mapping) and not hasattr(
    sparsity_config, "items"
  ):
    raise ValueError(
      f"sparsity_config={sparsity_config!r} must be a mapping, such as "
      '{"algorithm": "magnitude", "sparsity": 0.8}'
    )
  config = {
    key: value
    for key, value in _plain(sparsity_config).items()
    if value is not None
  }
  if "phases" in config:
    return _chain(config)
  if "algorithm" not in config:
    raise ValueError(
      "sparsity_config has no 'algorithm'; choose one of "
      f"{', '.join(_REGISTRY)}"
    )
  cls = algorithm_class(config["algorithm"])
  fields = {
    f.name
    for f in dataclasses.fields(cls)
    if f.name not in ("scheduler", "sparsity_distribution_fn")
  }
  if "storage" in config:
    return _stored(config)
  _check_keys(config, fields)
  if cls.category.start == "dense":
    return cls()
  kwargs = {
    key: codec.build_part(key, value) if key in codec.PARTS else value
    for key, value in config.items()
    if key in fields
  }
  kind = codec.parse_sparsity_type(
    config.get("sparsity_type", cls.sparsity_type)
  )
  kwargs["sparsity_type"] = kind
  kwargs.update(distribution.build(config, kind, fields))
  kwargs["scheduler"] = schedule.build(cls, config)
  return cls(**kwargs)


def _stored(config: dict[str, Any]) -> Any:
  """Return the updater in the storage that a configuration asks for."""
  storage = config.pop("storage")
  updater = create_updater_from_config(config)
  if storage == "masked":
    return updater
  if storage != "kept":
    raise ValueError(
      f'storage={storage!r} must be "masked" (dense arrays and masks) or '
      '"kept" (arrays of the size of what is kept)'
    )
  # By name: the storage stands above the core, and is loaded on use.
  return importlib.import_module("jaxpruner.kept").KeptUpdater(updater)


def _check_keys(config: Mapping[str, Any], fields: set[str]) -> None:
  known = {*fields, *_KEYS, *schedule.STEPS, *schedule.keys()}
  known |= distribution.keys()
  for key in config:
    if key not in known:
      raise ValueError(
        f"sparsity_config key {key!r} is unknown to {config['algorithm']!r}; "
        f"{_tools.nearest(key, known)}"
      )


def _chain(config: Mapping[str, Any]) -> algorithms.Chain:
  """Return the chain of the phases in a configuration."""
  phases, shared = [], {k: v for k, v in config.items() if k != "phases"}
  for entry in config["phases"]:
    phase = {**shared, **_plain(entry)}
    phases.append((phase.pop("start", 0), create_updater_from_config(phase)))
  return algorithms.chain(*phases)


def config_from_updater(updater: base_updater.BaseUpdater) -> dict[str, Any]:
  """Return the configuration of an updater, ready for JSON.

  `create_updater_from_config(config_from_updater(updater)) == updater`.

  Args:
    updater: an updater of a registered class, or a chain of such updaters.

  Returns:
    A dict of numbers, strings and booleans, and of nested dicts and lists.

  Raises:
    ValueError: the class is not registered, or a field holds a value that JSON
      cannot store, such as a function.

  Example:
    >>> import jaxpruner
    >>> config_from_updater(
    ...   jaxpruner.MagnitudePruning(sparsity_type=jaxpruner.NByM(2, 4)))
    {'algorithm': 'magnitude', 'sparsity_type': 'nm_2,4'}
  """
  if not isinstance(updater, base_updater.BaseUpdater):
    raise ValueError(f"updater={updater!r} must be a jaxpruner.BaseUpdater")
  if isinstance(updater, algorithms.Chain):
    return {
      "phases": [
        {"start": start, **config_from_updater(phase)}
        for start, phase in updater.phases
      ]
    }
  name = _REGISTRY.name_of(type(updater))
  if name is None:
    raise ValueError(
      f"{type(updater).__name__} is not registered; call "
      "jaxpruner.register_algorithm first"
    )
  config: dict[str, Any] = {"algorithm": name}
  if updater.category.start != "dense":
    for field in dataclasses.fields(updater):
      config.update(_spelled(updater, field))
  return config


def _spelled(
  updater: base_updater.BaseUpdater, field: dataclasses.Field
) -> dict[str, Any]:
  """Return the configuration keys of one field, with values."""
  name, value = field.name, vars(updater)[field.name]
  if name == "sparsity_type":
    return {name: codec.spell_type(value)}
  if name == "scheduler":
    return codec.spell_schedule(value)
  if name == "sparsity_distribution_fn":
    if value is not base_updater.UNSET:
      return codec.spell_distribution(value)
    implied = distribution.knows_sparsity(updater.sparsity_type)
    return {} if implied else {"sparsity": 0.0}
  if name in ("custom_sparsity_map", "stacked_axis") and hasattr(value, "keys"):
    return {name: codec.spell_map(value)} if value else {}
  if base_updater.frozen(value) == base_updater.frozen(field.default):
    return {}
  if name in codec.PARTS:
    return {name: codec.spell_part(name, value)}
  return {name: codec.spell_value(name, value)}


def _plain(value: Any) -> Any:
  # A ConfigDict has the methods of a Mapping, but is not one.
  if hasattr(value, "items"):
    return {key: _plain(entry) for key, entry in value.items()}
  return value


__getattr__ = _legacy.old_names(__name__)
