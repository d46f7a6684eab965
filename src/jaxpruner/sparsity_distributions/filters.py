"""Filters: which leaves are prunable?"""

from collections.abc import Callable
from typing import Any, TypeAlias

from jaxpruner import _leaves
from jaxpruner.sparsity_distributions import roles
from jaxpruner.sparsity_distributions.roles import is_floating as is_floating

FilterFn: TypeAlias = Callable[[_leaves.Names, Any], bool]


def default_filter(names: _leaves.Names, param: Any) -> bool:
  """Accept weights: floating-point leaves of 2 or more dimensions, by role.

  Biases, scales and statistics of norms, and logarithms are not weights. The
  role follows from the last name as a whole word, and from the shape. A
  distribution also looks at the leaves beside it: a 2-D `b` beside a 3-D `w` is
  a bias.

  Args:
    names: the path of the leaf, such as `("encoder", "kernel")`.
    param: the leaf.

  Returns:
    Whether the leaf is prunable.

  Example:
    >>> import jax.numpy as jnp
    >>> default_filter(("dense", "kernel"), jnp.ones((4, 4)))
    True
    >>> default_filter(("dense", "bias"), jnp.ones(4))
    False
  """
  return roles.role_of(names, param, {}).prunable


# The names of the filters in the paper's library.
NOT_DIM_ONE_FILTER_FN = default_filter


def KERNEL_FILTER_FN(names: _leaves.Names, param: Any) -> bool:
  """Accept the leaves whose name is `kernel`.

  Args:
    names: the path of the leaf.
    param: the leaf; not used.

  Returns:
    Whether the leaf is prunable.

  Example:
    >>> KERNEL_FILTER_FN(("dense", "kernel"), None)
    True
  """
  del param
  return names[-1] == "kernel"


def check_filter(filter_fn: Any) -> None:
  """Raise if a filter is not a function.

  Args:
    filter_fn: the value passed as a filter.

  Raises:
    ValueError: the value cannot be called.

  Example:
    >>> check_filter(KERNEL_FILTER_FN)
    >>> check_filter("kernel")
    Traceback (most recent call last):
    ValueError: filter_fn='kernel' must be a function (names, param) -> bool
  """
  if not callable(filter_fn):
    raise ValueError(
      f"filter_fn={filter_fn!r} must be a function (names, param) -> bool"
    )


def judge(
  filter_fn: FilterFn, leaves: list[tuple[_leaves.Names, Any]]
) -> list[roles.Role]:
  """Return, per leaf, whether a filter takes it and why."""
  if filter_fn is default_filter:
    return roles.roles(leaves)
  name = getattr(filter_fn, "__name__", "filter_fn")
  name = "filter_fn" if name == "<lambda>" else name
  return [
    roles.Role(True, f"chosen by {name}")
    if filter_fn(names, leaf)
    else roles.Role(False, f"left out by {name}")
    for names, leaf in leaves
  ]
