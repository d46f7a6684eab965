"""Filters: which leaves are prunable?"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp

from jaxpruner import _leaves

FilterFn: TypeAlias = Callable[[_leaves.Names, Any], bool]

_NOT_WEIGHTS = frozenset(
  "b bias biases scale offset beta gamma mean var count alpha".split()
)
_NORMS = ("norm", "ln_", "bn_")


def default_filter(names: _leaves.Names, param: Any) -> bool:
  """Accept floating-point leaves of 2 or more dimensions, by shape and name.

  Biases and the scales of normalisation layers are rejected by name, because
  the scale of a layer norm in a scanned stack has two dimensions.

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
  if getattr(param, "ndim", 0) < 2 or not is_floating(param):
    return False
  last = names[-1].lower()
  if last in _NOT_WEIGHTS:
    return False
  in_norm = any(norm in name.lower() for name in names[:-1] for norm in _NORMS)
  return not (in_norm and last in ("weight", "w"))


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


def is_floating(param: Any) -> bool:
  """Return whether a leaf is an array of floating-point numbers.

  Args:
    param: the leaf: an array, a shape with a dtype, or anything else.

  Returns:
    True for floating-point arrays, False for all others.

  Example:
    >>> is_floating(jnp.ones(2)), is_floating(jnp.arange(2)), is_floating("w")
    (True, False, False)
  """
  dtype = getattr(param, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


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
