"""Roles: is a leaf a weight, a bias, or the scale of a norm?

The role follows from the last name of a leaf as a whole word, from its number
of dimensions, and from the leaves beside it. A part of a word says nothing:
`normal_dense` is no norm.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from jaxpruner import _leaves, _tools

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

# Names of biases, whatever their shape: attention has 2-D ones.
_BIASES = frozenset({"bias", "biases"})
# Names that a bias or a scale may have, and a matrix too.
_EITHER = frozenset("b offset beta scale gamma alpha mean var count g".split())
_IN_NORMS = _BIASES | _EITHER | {"weight", "w"}
_NORMS = frozenset(
  "norm norms layernorm batchnorm groupnorm instancenorm rmsnorm ln bn gn "
  "rms".split()
)
_STATISTICS = ({"mean", "var"}, {"running_mean", "running_var"})


class Role(NamedTuple):
  """What a leaf is for.

  Attributes:
    prunable: whether it is a weight.
    reason: why, in words for a table.
  """

  prunable: bool
  reason: str


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


def role_of(names: _leaves.Names, param: Any, beside: Shapes) -> Role:
  """Return the role of a leaf.

  Args:
    names: its path.
    param: the leaf, or its shape and dtype.
    beside: name -> shape of the other leaves of the same module.

  Returns:
    A `Role`.
  """
  if not is_floating(param):
    dtype = getattr(param, "dtype", None)
    kind = type(param).__name__ if dtype is None else dtype
    return Role(False, f"not floating point: {kind}")
  shape = tuple(param.shape)
  if len(shape) < 2:
    return Role(False, "a vector" if shape else "a scalar")
  dense = _dense_reason(names, shape, beside)
  return Role(dense is None, dense or f"a weight of {len(shape)} dimensions")


def _dense_reason(
  names: _leaves.Names, shape: tuple[int, ...], beside: Shapes
) -> str | None:
  """Return why a leaf of two or more dimensions is no weight, or None."""
  *parents, last = "/".join(names).split("/")
  word = last if len(last) == 1 else last.lower()  # S5's `B` is a matrix
  if word in _BIASES:
    return "a bias"
  parent = next((p for p in reversed(parents) if not p.isdigit()), "")
  if word in _IN_NORMS and _NORMS & {w.lower() for w in _tools.words(parent)}:
    return f"part of a norm, {parent!r}"
  if _is_logarithm(last):
    return "a logarithm: zero would stand for one"
  for name in _BIASES & beside.keys():
    if beside[name] == shape:
      return f"a scale: {name!r} beside it has the same shape"
  return _beside_reason(word, shape, beside) if word in _EITHER else None


def _beside_reason(
  word: str, shape: tuple[int, ...], beside: Shapes
) -> str | None:
  """Return why a leaf that is often a scale is none of the weights, or None."""
  if any(word in both and both <= {word, *beside} for both in _STATISTICS):
    return "statistics of a norm"
  if sum(size > 1 for size in shape) < 2:
    return "a vector, with axes of length 1"
  for name, other in beside.items():
    if name not in _EITHER | _BIASES and len(other) > len(shape):
      return f"goes with {name!r}, which has more dimensions"
  return None


def _is_logarithm(name: str) -> bool:
  parts = [word.lower() for word in _tools.words(name)]
  return "log" in (parts[:1] + parts[-1:]) and len(parts) > 1


def roles(leaves: Iterable[tuple[_leaves.Names, Any]]) -> list[Role]:
  """Return the role of every leaf of a tree, with the leaves beside it.

  Args:
    leaves: `(names, leaf)` of the whole tree.

  Returns:
    A list of roles in the same order.
  """
  leaves = list(leaves)
  modules: dict[Any, dict[str, tuple[int, ...]]] = {}
  for names, leaf in leaves:
    shape = tuple(getattr(leaf, "shape", ()))
    modules.setdefault(names[:-1], {})[str(names[-1])] = shape
  found = []
  for names, leaf in leaves:
    beside = dict(modules[names[:-1]])
    beside.pop(str(names[-1]), None)
    found.append(role_of(names, leaf, beside))
  return found
