"""Which distribution does a configuration mean?"""

import functools
from collections.abc import Mapping
from typing import Any

from jaxpruner import sparsity_distributions
from jaxpruner.sparsity_distributions import table

# Arguments of distributions that are checked before there are parameters.
_CHECKS = {
  "filter_fn": sparsity_distributions.check_filter,
  "custom_sparsity_map": sparsity_distributions.check_map,
  "erk_power_scale": sparsity_distributions.check_power_scale,
}


def keys() -> set[str]:
  """Return the keys that some distribution reads."""
  return {k for fn in table.DISTRIBUTIONS.values() for k in table.options(fn)}


def knows_sparsity(sparsity_type: Any) -> bool:
  """Tell whether some leaves need no sparsity, N:M says it all."""
  kinds = sparsity_type
  kinds = kinds.values() if isinstance(kinds, Mapping) else [kinds]
  return any(hasattr(kind, "sparsity") for kind in kinds)


def build(
  config: Mapping[str, Any], sparsity_type: Any, fields: set[str]
) -> dict[str, Any]:
  """Return the arguments of an updater that say how much each leaf gives.

  Args:
    config: the configuration.
    sparsity_type: its sparsity type, which may imply the sparsity.
    fields: the fields of the algorithm.
  """
  name = config.get("dist_type", "uniform")
  distribution = table.DISTRIBUTIONS.find(name)
  if "sparsity" in fields:  # a global ranking distributes by itself
    if "sparsity" not in config:
      raise ValueError(
        f"sparsity_config has no 'sparsity'; {config['algorithm']!r} needs the "
        "fraction to remove, such as 0.8"
      )
    return {}
  options = _options(config, name, distribution)
  for key in options:
    _CHECKS.get(key, lambda _: None)(options[key])
  sparsity = config.get("sparsity")
  if sparsity is None and knows_sparsity(sparsity_type):
    if not options and "dist_type" not in config:
      return {}
    sparsity = getattr(sparsity_type, "sparsity", None)
  if sparsity is None:
    raise ValueError(
      "sparsity_config has no 'sparsity': say what fraction to remove, such as "
      "0.8"
    )
  sparsity = sparsity_distributions.check_sparsity(sparsity)
  plain = not options and "dist_type" not in config
  if sparsity == 0 and plain and not knows_sparsity(sparsity_type):
    return {}  # unset: nothing is removed
  return {
    "sparsity_distribution_fn": functools.partial(
      distribution, sparsity=sparsity, **options
    )
  }


def _options(
  config: Mapping[str, Any], name: str, distribution: Any
) -> dict[str, Any]:
  """Return the distribution's arguments; refuse those of another one."""
  mine = [key for key in table.options(distribution) if key != "sparsity"]
  for other, fn in table.DISTRIBUTIONS.items():
    for key in table.options(fn):
      if key in config and key != "sparsity" and key not in mine:
        raise ValueError(
          f"{key}={config[key]!r} needs dist_type={other!r}, not {name!r}; "
          "drop it"
        )
  return {key: config[key] for key in mine if key in config}
