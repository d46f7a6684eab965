"""The registry of algorithms, and updaters from plain configuration."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxpruner import (
  _leaves,
  algorithms,
  base_updater,
  sparsity_distributions,
  sparsity_schedules,
)
from jaxpruner.config import codec as spelling

_REGISTRY: dict[str, type[base_updater.BaseUpdater]] = {
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
}

_KEYS = (
  "algorithm",
  "dist_type",
  "sparsity",
  "update_freq",
  "update_start_step",
  "update_end_step",
  "power",
  "fraction",
  "total_steps",
  "sparsity_type",
  "filter_fn",
  "custom_sparsity_map",
  "erk_power_scale",
  "schedule",
)

# Key -> the least it may be.
_STEPS = {
  "update_freq": 1,
  "update_start_step": 0,
  "update_end_step": 0,
  "total_steps": 1,
}


def all_algorithm_names() -> tuple[str, ...]:
  """Return the names of all registered algorithms."""
  return tuple(_REGISTRY)


def register_algorithm(
  name: str, algorithm: type[base_updater.BaseUpdater]
) -> None:
  """Register an algorithm: configuration, `compare` and docs then know it."""
  if not isinstance(name, str) or not name:
    raise ValueError(f"name={name!r} must be a non-empty string")
  if not (
    isinstance(algorithm, type)
    and issubclass(algorithm, base_updater.BaseUpdater)
  ):
    raise ValueError(
      f"algorithm={algorithm!r} must be a subclass of jaxpruner.BaseUpdater"
    )
  old = _REGISTRY.get(name, algorithm)
  # The same class defined anew, as by running a notebook's cell again, may.
  if old.__qualname__ != algorithm.__qualname__:
    raise ValueError(
      f"name={name!r} already stands for {old.__name__}; choose another for "
      f"{algorithm.__name__}"
    )
  _REGISTRY[name] = algorithm


def algorithm_class(name: str) -> type[base_updater.BaseUpdater]:
  """Return the class registered under a name."""
  if not isinstance(name, str) or name not in _REGISTRY:
    raise ValueError(
      f"algorithm={name!r} is not registered; "
      f"{_leaves.nearest(name, _REGISTRY)} (register your own with "
      "jaxpruner.register_algorithm)"
    )
  return _REGISTRY[name]


def algorithm_category(name: str) -> base_updater.Category:
  """Return where a registered algorithm stands on the map."""
  return algorithm_class(name).category


def create_updater_from_config(
  sparsity_config: Mapping[str, Any],
) -> base_updater.BaseUpdater:
  """Return the updater a configuration describes.

  Args:
    sparsity_config: any mapping (dict, `ml_collections.ConfigDict`, parsed
      YAML, TOML or JSON) with

      - `algorithm`: one of `all_algorithm_names()`,
      - `sparsity`: fraction removed; N:M types know their own,
      - `dist_type`: "uniform" or "erk" (with `erk_power_scale`),
      - `filter_fn`, `custom_sparsity_map`: which leaves, how much,
      - `sparsity_type`: see `parse_sparsity_type`,
      - `update_freq`, `update_start_step`, `update_end_step`, `power`: the
        schedule. Without a start nothing is updated; start = end prunes once;
        otherwise a ramp. `total_steps` fills in what is missing: gradual
        pruners work from 25 % to 75 % of training, sparse trainers rewire every
        100 steps until 75 %. `schedule` ("none", "one_shot", "periodic",
        "polynomial", "alternating", "geometric") overrides the choice,
      - `drop`, `grow`: "magnitude", "gradient", "momentum", "random" or
        "magnitude_gradient"; `redistribute`: "momentum" or "survivors": the
        parts of dynamic sparse training, or `{"name": …, field: value}`,
      - `phases`: a list of such configurations, each with the `start` step it
        is in force from (see `chain`); other keys hold for all of them,
      - any further field of the algorithm, such as `drop_fraction`,
        `rng_seed`, `use_packed_masks`, `skip_gradients`.

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
  for key in config:
    if key not in fields and key not in _KEYS:
      raise ValueError(
        f"sparsity_config key {key!r} is unknown to {config['algorithm']!r}; "
        f"{_leaves.nearest(key, fields | set(_KEYS))}"
      )
  if cls.category.start == "dense":
    return cls()
  kwargs = {
    key: spelling.build_part(key, value) if key in spelling.PARTS else value
    for key, value in config.items()
    if key in fields
  }
  kwargs["sparsity_type"] = spelling.parse_sparsity_type(
    config.get("sparsity_type", cls.sparsity_type)
  )
  kwargs.update(_distribution(cls, config, kwargs["sparsity_type"], fields))
  kwargs["scheduler"] = _schedule(cls, config)
  return cls(**kwargs)


def _chain(config: Mapping[str, Any]) -> algorithms.Chain:
  """Return the chain of the phases a configuration lists."""
  phases, shared = [], {k: v for k, v in config.items() if k != "phases"}
  for entry in config["phases"]:
    phase = {**shared, **_plain(entry)}
    phases.append((phase.pop("start", 0), create_updater_from_config(phase)))
  return algorithms.chain(*phases)


def _distribution(cls, config, sparsity_type, fields) -> dict[str, Any]:
  """Return the arguments that say how much each leaf gives."""
  name = config.get("dist_type", "uniform")
  if not isinstance(name, str) or name not in spelling.DISTRIBUTIONS:
    raise ValueError(
      f"dist_type={name!r} is unknown; "
      f"{_leaves.nearest(name, spelling.DISTRIBUTIONS)}"
    )
  if "sparsity" in fields:  # a global ranking distributes by itself
    if "sparsity" not in config:
      raise ValueError(
        f"sparsity_config has no 'sparsity'; {config['algorithm']!r} needs the "
        "fraction to remove, such as 0.8"
      )
    return {}
  options = {
    key: config[key]
    for key in ("filter_fn", "custom_sparsity_map")
    if key in config
  }
  if "filter_fn" in options:
    sparsity_distributions.check_filter(options["filter_fn"])
  sparsity_distributions.check_map(options.get("custom_sparsity_map"))
  if "erk_power_scale" in config:
    if name != "erk":
      raise ValueError(
        f"erk_power_scale={config['erk_power_scale']!r} needs dist_type='erk', "
        f"not {name!r}"
      )
    sparsity_distributions.check_power_scale(config["erk_power_scale"])
    options["erk_power_scale"] = config["erk_power_scale"]
  sparsity = config.get("sparsity")
  if sparsity is None and _knows_sparsity(sparsity_type):
    if not options and "dist_type" not in config:
      return {}
    if hasattr(sparsity_type, "sparsity"):
      sparsity = sparsity_type.sparsity
  if sparsity is None:
    raise ValueError(
      "sparsity_config has no 'sparsity': say what fraction to remove, such as "
      "0.8"
    )
  sparsity = sparsity_distributions.check_sparsity(sparsity)
  if sparsity == 0 and not options and "dist_type" not in config:
    if not _knows_sparsity(sparsity_type):
      return {}  # unset: nothing is removed
  return {
    "sparsity_distribution_fn": functools.partial(
      spelling.DISTRIBUTIONS[name], sparsity=sparsity, **options
    )
  }


def _knows_sparsity(sparsity_type) -> bool:
  """Tell whether some leaves need no sparsity, N:M says it all."""
  kinds = sparsity_type
  kinds = kinds.values() if isinstance(kinds, Mapping) else [kinds]
  return any(hasattr(kind, "sparsity") for kind in kinds)


def _rewires(cls) -> bool:
  """Tell whether the masks change at a sparsity that does not."""
  return cls.category.dynamic and cls.category.start == "sparse-to-sparse"


def _schedule(cls, config) -> sparsity_schedules.BaseSchedule:
  """Return the schedule, its gaps filled from `total_steps`."""
  for key, least in _STEPS.items():
    value = config.get(key, least)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
      raise ValueError(
        f"sparsity_config: {key}={value!r} must be an integer of at least "
        f"{least}"
      )
  start, end = config.get("update_start_step"), config.get("update_end_step")
  freq = config.get("update_freq")
  total = config.get("total_steps")
  if total is not None:
    if end is None:
      end = total * 3 // 4
    if freq is None:
      # At least ten updates, however short the training.
      freq = cls.category.update_every or max(1, min(100, end // 10))
    if start is None:
      start = min(freq, end) if _rewires(cls) else min(total // 4, end)
  kind = config.get("schedule")
  if kind == "none":
    return sparsity_schedules.NoUpdateSchedule()
  if start is None:
    for key in ("update_end_step", "update_freq", "power", "schedule"):
      if key in config:
        raise ValueError(
          f"sparsity_config has {key!r} but no 'update_start_step': nothing "
          "would be updated; give the first step, or 'total_steps'"
        )
    return sparsity_schedules.NoUpdateSchedule()
  if kind is None:
    kind = (
      "one_shot"
      if start == end
      else cls.category.default_schedule
      or ("periodic" if _rewires(cls) else "polynomial")
    )
  if not isinstance(kind, str) or kind not in spelling.SCHEDULES:
    raise ValueError(
      f"schedule={kind!r} is unknown; "
      f"{_leaves.nearest(kind, spelling.SCHEDULES)}"
    )
  if kind == "one_shot":
    return sparsity_schedules.OneShotSchedule(target_step=start)
  if freq is None:
    raise ValueError(
      "sparsity_config has no 'update_freq'; give the number of steps between "
      "updates, or 'total_steps'"
    )
  if kind != "polynomial":
    if "power" in config:
      raise ValueError(
        f"sparsity_config: power={config['power']!r} needs "
        f"schedule='polynomial'; {config['algorithm']!r} updates periodically: "
        "drop it"
      )
    own = {"fraction": config["fraction"]} if "fraction" in config else {}
    if own and kind != "geometric":
      raise ValueError(
        f"sparsity_config: fraction={own['fraction']!r} needs "
        f"schedule='geometric', not {kind!r}; drop it"
      )
    return spelling.SCHEDULES[kind](freq, start, end, **own)
  if end is None:
    raise ValueError(
      f"sparsity_config has update_start_step={start!r} but no "
      "'update_end_step'; give the last step, or 'total_steps'"
    )
  return sparsity_schedules.PolynomialSchedule(
    freq, start, end, config.get("power", 3)
  )


def config_from_updater(updater: base_updater.BaseUpdater) -> dict[str, Any]:
  """Return the configuration of an updater, ready for JSON.

  `create_updater_from_config(config_from_updater(updater)) == updater`. What
  JSON cannot hold (a function of your own) is refused.
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
  names = [name for name, cls in _REGISTRY.items() if cls is type(updater)]
  if not names:
    raise ValueError(
      f"{type(updater).__name__} is not registered; call "
      "jaxpruner.register_algorithm first"
    )
  config: dict[str, Any] = {"algorithm": names[0]}
  if updater.category.start == "dense":
    return config
  for field in dataclasses.fields(updater):
    value = getattr(updater, field.name)
    if field.name == "sparsity_type":
      config["sparsity_type"] = spelling.spell_type(value)
    elif field.name == "scheduler":
      config.update(spelling.spell_schedule(value))
    elif field.name == "sparsity_distribution_fn":
      if value is not base_updater.UNSET:
        config.update(spelling.spell_distribution(value))
      elif not _knows_sparsity(updater.sparsity_type):
        config["sparsity"] = 0.0
    elif field.name == "custom_sparsity_map":
      if value:
        config[field.name] = spelling.spell_map(value)
    elif base_updater.frozen(value) == base_updater.frozen(field.default):
      continue
    elif field.name in spelling.PARTS:
      config[field.name] = spelling.spell_part(field.name, value)
    else:
      config[field.name] = spelling.spell_value(field.name, value)
  return config


def _plain(value: Any) -> Any:
  # A ConfigDict is not a Mapping, but has its methods.
  if hasattr(value, "items"):
    return {key: _plain(entry) for key, entry in value.items()}
  return value
