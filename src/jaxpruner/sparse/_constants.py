"""Slices of a program's arrays that are constant for every input.

For each dim of each array: the indices at which the slice is one known number,
and the number. Masked channels are zero; a bias and an activation turn the zero
into another constant; a mask of the next layer makes it zero again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner import program as _program
from jaxpruner.program import Node, Program, Var
from jaxpruner.program.primitives import ELEMENTWISE, PRODUCTS, RESHAPES
from jaxpruner.sparse._dims import Dim, Dims, outer_axes, resolve

# Operations whose result is the same array, reordered or cast.
RELAID = RESHAPES | {"convert_element_type"}


class Known(NamedTuple):
  """The indices of a dim whose slices are one known number, and the numbers."""

  where: np.ndarray
  value: np.ndarray

  @property
  def zero(self) -> np.ndarray:
    return self.where & (self.value == 0)


def _nothing(size: int) -> Known:
  return Known(np.zeros(size, np.bool_), np.zeros(size))


class Constants:
  """The known slices of every array.

  Args:
    program: the operations.
    dims: the dims of its arrays.
    values: the arrays that are known whole: parameters and constants.
  """

  def __init__(
    self, program: Program, dims: Dims, values: Mapping[Var, np.ndarray]
  ):
    self._dims = dims
    self._known: dict[Var, dict[Dim, Known]] = {}
    self._uniform: dict[Var, np.ndarray] = {}
    self._values = dict(values)
    self._maker = program.makers()
    for var, value in values.items():
      self._start(var, value)
    for node in program.nodes:
      for var in node.inputs:
        if var.value is not None and var not in self._values:
          self._values[var] = var.array
          self._start(var, self._values[var])
      layer = self.value(node.outputs[0]) if node.name == "slice" else None
      if layer is not None:
        # One layer of a stack: more is known of it than of the stack.
        self._start(node.outputs[0], layer)
      elif node.name in ELEMENTWISE:
        self._elementwise(node)
      else:
        self._move(node)

  def value(self, var: Var) -> np.ndarray | None:
    """Return an array that is a parameter in another shape, else None."""
    if var not in self._values:
      node = self._maker.get(var)
      if node is not None and node.name == "concatenate":
        # Not kept: a recurrent cell joins its kernels in every step.
        parts = [self.value(v) for v in node.inputs]
        if any(part is None for part in parts):
          return None
        return np.concatenate(parts, node.params["dimension"])  # pyright: ignore
      if node is None or node.name not in RELAID | {"slice"}:
        return None
      value = self.value(node.inputs[0])
      if value is None:
        return None
      self._values[var] = np.asarray(_program.bind(node, [value])[0])
    return self._values[var]

  def zero(self, var: Var, axes: Sequence[int], dim: Dim) -> np.ndarray:
    """Tell where an array is zero along a dim that lies in these axes.

    A square weight may have one dim on both its sides; only the side asked
    for counts.
    """
    flat: list[Dim] = []
    places = []
    for i, axis in enumerate(self._dims.of(var)):
      for part in resolve(axis):
        if part is dim and i in axes:
          places.append(len(flat))
        flat.append(part)
    value = self.value(var)
    if len(places) != 1:
      return np.zeros(dim.size, np.bool_)
    if value is None:
      if flat.count(dim) > 1:
        return np.zeros(dim.size, np.bool_)
      return self.at(var, dim).zero
    units = value.reshape([d.size for d in flat])
    rows = np.moveaxis(units, places[0], 0).reshape(dim.size, -1)
    return (rows == 0).all(1)

  def at(self, var: Var, dim: Dim) -> Known:
    """Return the known slices of an array along a dim."""
    if var in self._uniform:
      value = np.full(dim.size, self._uniform[var])
      return Known(np.ones(dim.size, np.bool_), value)
    return self._known.get(var, {}).get(dim) or _nothing(dim.size)

  def _free(self, var: Var) -> list[Dim]:
    """Return the dims worth following: once in the array, nowhere blocked."""
    if not isinstance(var.dtype, np.dtype):  # PRNG keys
      return []
    flat = self._dims.flat(var)
    return [d for d in flat if not d.blocked and flat.count(d) == 1]

  def _start(self, var: Var, value: np.ndarray) -> None:
    if not value.shape:
      self._uniform[var] = value
      return
    flat = self._dims.flat(var)
    units = value.reshape([d.size for d in flat])
    for dim in self._free(var):
      rows = np.moveaxis(units, flat.index(dim), 0).reshape(dim.size, -1)
      known = Known((rows == rows[:, :1]).all(1), rows[:, 0])
      self._known.setdefault(var, {})[dim] = known

  def _elementwise(self, node: Node) -> None:
    out = node.outputs[0]
    if all(v in self._uniform for v in node.inputs):
      scalars = [self._uniform[v] for v in node.inputs]
      self._uniform[out] = _apply(node, scalars)
      return
    for dim in self._free(out):
      known = [self.at(v, dim) for v in node.inputs]
      if not any(k.where.any() for k in known):
        continue
      where = np.logical_and.reduce([k.where for k in known])
      value = np.zeros(dim.size, out.dtype)
      if where.any():
        value = _apply(node, [k.value for k in known])
      sure = _short_circuit(node, known)
      value = np.where(sure.where, sure.value.astype(value.dtype), value)
      where = where | sure.where
      if jnp.issubdtype(value.dtype, jnp.inexact):
        where &= np.isfinite(value)
      self._known.setdefault(out, {})[dim] = Known(where, value)

  def _move(self, node: Node) -> None:
    """Follow slices through operations that move, repeat or add them."""
    if not node.inputs:
      return
    first = node.inputs[0]
    if node.name in ("concatenate", "split"):
      self._joined(node)
    for out in node.outputs:
      if node.name in _MOVES and first in self._uniform:
        self._uniform[out] = self._uniform[first]
      for dim in self._free(out):
        result = self._moved(node, dim)
        if result is not None and dim not in self._known.get(out, {}):
          self._known.setdefault(out, {})[dim] = result

  def _joined(self, node: Node) -> None:
    """Follow slices into a joined axis, and out of it."""
    join = node.name == "concatenate"
    (whole,) = node.outputs if join else node.inputs
    parts = node.inputs if join else node.outputs
    axis = node.params["dimension" if join else "axis"]
    dims = [resolve(self._dims.of(v)[axis]) for v in (whole, *parts)]
    if any(len(d) != 1 for d in dims):
      return
    (total,), *pieces = dims
    if total.blocked or sum(d.size for (d,) in pieces) != total.size:
      return
    if join:
      known = [self.at(v, d) for v, (d,) in zip(parts, pieces, strict=True)]
      where = np.concatenate([k.where for k in known])
      value = np.concatenate([k.value for k in known])
      self._known.setdefault(whole, {})[total] = Known(where, value)
      return
    known, start = self.at(whole, total), 0
    for var, (dim,) in zip(parts, pieces, strict=True):
      mine = slice(start, start := start + dim.size)
      if not dim.blocked:
        part = Known(known.where[mine], known.value[mine])
        self._known.setdefault(var, {})[dim] = part

  def _moved(self, node: Node, dim: Dim) -> Known | None:
    """Return the known slices of an operation's results along a dim."""
    if node.name in PRODUCTS:
      sides = zip(node.inputs, outer_axes(node), strict=True)
      zero = [self.zero(v, axes, dim) for v, axes in sides]
      return Known(np.logical_or.reduce(zero), np.zeros(dim.size))
    known = [self.at(v, dim) for v in node.inputs]
    if node.name in _MOVES or node.name in _KEEPS:
      return known[0]
    if node.name in _SUMS:
      terms = _terms(node)
      where = known[0].zero if terms is None else known[0].where
      return Known(where, known[0].value * (terms or 0))
    if node.name in ("concatenate", "stack"):
      return _agreed(known)
    if node.name in ("pad", "dynamic_update_slice"):
      return _agreed(known[:2])
    return None


# Every slice of the result is a slice of the first operand.
_MOVES = RESHAPES | frozenset("dynamic_slice rev slice tile".split())
# So is what is left of equal slices.
_KEEPS = frozenset(
  """gather split unstack reduce_max reduce_min reduce_window_max
  reduce_window_min cummax cummin""".split()
)
# Equal numbers add up to a multiple, zeros to zero.
_SUMS = frozenset(("reduce_sum", "reduce_window_sum", "cumsum"))


def _agreed(parts: list[Known]) -> Known:
  """Return the slices that are known and equal in all parts."""
  same = [k.where & (k.value == parts[0].value) for k in parts]
  return Known(np.logical_and.reduce(same), parts[0].value)


def _short_circuit(node: Node, known: list[Known]) -> Known:
  """Return the slices known from some operands alone: 0·x, 0/x, equal cases."""
  size = known[0].where.size
  if node.name == "mul":
    return Known(known[0].zero | known[1].zero, np.zeros(size))
  if node.name == "div":
    return Known(known[0].zero & ~known[1].zero, np.zeros(size))
  if node.name == "select_n":
    return _agreed(known[1:])
  return _nothing(size)


def _terms(node: Node) -> int | None:
  """Return how many equal numbers a sum adds; None if the count varies."""
  if node.name == "reduce_sum":
    shape = node.inputs[0].shape
    return math.prod(shape[i] for i in node.params["axes"])
  if node.name == "reduce_window_sum" and not np.any(node.params["padding"]):
    return math.prod(node.params["window_dimensions"])
  return None


def _apply(node: Node, values: list[Any]) -> np.ndarray:
  arrays = [
    np.asarray(x, v.dtype) for x, v in zip(values, node.inputs, strict=True)
  ]
  return np.asarray(_program.bind(node, arrays)[0])
