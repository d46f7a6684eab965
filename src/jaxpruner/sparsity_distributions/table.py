"""The table of distributions that `dist_type` names."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jaxpruner._tools import registry
from jaxpruner.sparsity_distributions.erk import erk
from jaxpruner.sparsity_distributions.uniform import uniform

F = TypeVar("F", bound=Callable[..., Any])

DISTRIBUTIONS: registry.Registry[Callable[..., Any]] = registry.Registry(
  "dist_type",
  "jaxpruner.register_distribution",
  {"uniform": uniform, "erk": erk},
)


def options(distribution: Callable[..., Any]) -> tuple[str, ...]:
  """Return the arguments of a distribution that configuration may set."""
  first, *rest = inspect.signature(distribution).parameters
  del first
  return tuple(rest)


def register_distribution(name: str) -> Callable[[F], F]:
  """Give a distribution a name in configuration: a function decorator.

  Afterwards `dist_type="name"` selects the distribution. Its further arguments
  are keys of the configuration; those without a default are required there.

  Args:
    name: the name; a name that is taken is refused.

  Returns:
    A function that registers `(params, sparsity, …) -> tree of float or None`
    and returns it.

  Example:
    >>> import jax, jaxpruner
    >>> @jaxpruner.register_distribution("all_alike")
    ... def all_alike(params, sparsity):
    ...   return jax.tree.map(lambda p: sparsity, params)
    >>> pruner = jaxpruner.create_updater_from_config(
    ...   {"algorithm": "magnitude", "dist_type": "all_alike", "sparsity": 0.5})
    >>> jaxpruner.config_from_updater(pruner)["dist_type"]
    'all_alike'
  """

  def register(distribution: F) -> F:
    if not callable(distribution) or "sparsity" not in options(distribution):
      raise ValueError(
        f"distribution={distribution!r} must be a function (params, sparsity, "
        "…) -> tree of sparsities"
      )
    DISTRIBUTIONS.register(name, distribution)
    return distribution

  return register
