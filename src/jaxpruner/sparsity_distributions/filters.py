"""Filters: which leaves may a distribution prune?"""

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
  """Take floating leaves of 2 or more dims but biases and norm scales.

  Names matter because the scale of a layer norm in a scanned stack is 2-D.
  """
  if getattr(param, "ndim", 0) < 2 or not is_floating(param):
    return False
  last = names[-1].lower()
  if last in _NOT_WEIGHTS:
    return False
  in_norm = any(norm in name.lower() for name in names[:-1] for norm in _NORMS)
  return not (in_norm and last in ("weight", "w"))


# The names the paper's library gave to its filters.
NOT_DIM_ONE_FILTER_FN = default_filter


def KERNEL_FILTER_FN(names: _leaves.Names, param: Any) -> bool:
  """Take the leaves called `kernel`."""
  del param
  return names[-1] == "kernel"


def is_floating(param: Any) -> bool:
  """Tell whether a leaf is an array of floats."""
  dtype = getattr(param, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def check_filter(filter_fn: Any) -> None:
  """Raise if a filter is no function."""
  if not callable(filter_fn):
    raise ValueError(
      f"filter_fn={filter_fn!r} must be a function (names, param) -> bool"
    )
