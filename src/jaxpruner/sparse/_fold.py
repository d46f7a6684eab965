"""Add the constant of a removed index to a following bias."""

from collections.abc import Collection
from typing import Any

import numpy as np

from jaxpruner import program as _program
from jaxpruner.program import Node, Program, Var
from jaxpruner.sparse._constants import RELAID, Constants
from jaxpruner.sparse._dims import Dim, Dims, Sum, dot_axes, resolve


class BiasFolding:
  """Constant contributions to sums, and the biases that can take them over."""

  def __init__(
    self,
    program: Program,
    dims: Dims,
    known: Constants,
    params: Collection[Var],
  ):
    self._dims, self._known, self._params = dims, known, params
    self._maker = program.makers()
    self._users: dict[Var, list[Node | None]] = {
      v: [*nodes] for v, nodes in program.users().items()
    }
    for v in program.outputs:
      self._users.setdefault(v, []).append(None)

  def _sides(self, total: Sum) -> tuple[int, int] | None:
    """Return which operand is the activation, which the weight."""
    node = total.node
    if len(total.operands) < 2:
      return None
    if node.name == "dot_general" and node.params["dimension_numbers"][1][0]:
      return None
    fixed = [self._known.value(v) is not None for v in node.inputs[:2]]
    if fixed == [False, True]:
      return 0, 1
    if fixed == [True, False] and node.name == "dot_general":
      return 1, 0
    return None

  def constant(self, total: Sum, dim: Dim) -> np.ndarray:
    """Return the indices whose term in a sum is a computable constant."""
    sides = self._sides(total)
    if sides is None:
      return np.zeros(dim.size, np.bool_)
    return self._known.at(total.node.inputs[sides[0]], dim).where.copy()

  def delta(self, total: Sum, dim: Dim, gone: np.ndarray) -> np.ndarray:
    """Return the sum over the removed indices, with the output's rank."""
    node = total.node
    sides = self._sides(total)
    assert sides is not None
    x, w = (node.inputs[side] for side in sides)
    weight = self._known.value(w)
    assert weight is not None
    known = self._known.at(x, dim)
    values = np.where(gone & known.where, known.value, 0).astype(np.float64)
    if node.name == "dot_general":
      return self._dot(node, sides, dim, values, weight)
    return self._conv(node, dim, values, weight)

  def _spread(self, shape: tuple[int, ...], axis: Any, dim: Dim, values: Any):
    """Lay the dim's values out along one axis of length `shape`."""
    dims = resolve(axis)
    units = values.reshape([-1 if d is dim else 1 for d in dims])
    return np.broadcast_to(units, [d.size for d in dims]).reshape(shape)

  def _dot(self, node, sides, dim, values, weight) -> np.ndarray:
    contract = node.params["dimension_numbers"][0]
    x = node.inputs[sides[0]]
    vector = np.zeros(())
    # The constant stands at every position of the other contracted axes.
    for i in contract[sides[0]]:
      axis = self._dims.of(x)[i]
      if dim in resolve(axis):
        part = self._spread((x.shape[i],), axis, dim, values)
      else:
        part = np.ones(x.shape[i])
      vector = part if not vector.shape else np.multiply.outer(vector, part)
    delta = np.tensordot(
      vector,
      weight.astype(np.float64),
      (range(vector.ndim), contract[sides[1]]),
    )
    shape = [1] * len(node.outputs[0].shape)
    for size, place in zip(
      delta.shape, dot_axes(node)[1][sides[1]], strict=True
    ):
      shape[place] = size
    return delta.reshape(shape)

  def _conv(self, node, dim, values, weight) -> np.ndarray:
    x = node.inputs[0]
    batch, features, *_ = node.params["dimension_numbers"].lhs_spec
    shape = list(x.shape)
    shape[batch] = 1
    channel = self._spread(
      (x.shape[features],), self._dims.of(x)[features], dim, values
    )
    line = [1] * len(shape)
    line[features] = x.shape[features]
    planes = np.broadcast_to(channel.reshape(line), shape).astype(x.dtype)
    out = np.asarray(_program.bind(node, [planes, weight])[0])
    space = tuple(node.params["dimension_numbers"].out_spec[2:])
    if (out == out.max(space, keepdims=True)).all():
      out = out.max(space, keepdims=True)
    return out.astype(np.float64)

  def bias(self, node: Node, delta: np.ndarray) -> tuple[Var, int] | None:
    """Return the parameter added (1) or subtracted (-1) next, if it fits."""
    var = node.outputs[0]
    wanted = resolve(
      [
        dim
        for axis, size in zip(self._dims.of(var), delta.shape, strict=True)
        if size > 1
        for dim in axis
      ]
    )
    user = self._adder(node.outputs[0])
    if user is None:
      return None
    adder, term = user
    parameter = self._parameter(adder.inputs[1 - term])
    if parameter is None or self._dims.flat(parameter) != wanted:
      return None
    return parameter, -1 if adder.name == "sub" else 1

  def _adder(self, var: Var) -> tuple[Node, int] | None:
    """Return the addition that alone uses a result, and which operand it is."""
    while len(users := self._users.get(var, [])) == 1:
      (user,) = users
      if user is None:
        return None
      if user.name in ("add", "add_any", "sub"):
        return user, 0 if user.inputs[0] is var else 1
      if user.name not in RELAID:
        return None
      var = user.outputs[0]
    return None

  def _parameter(self, var: Var) -> Var | None:
    """Return the parameter that a variable is, if nothing else uses it."""
    while len(self._users[var]) == 1:
      maker = self._maker.get(var)
      if var in self._params:
        return var
      if maker is None or maker.name not in RELAID:
        return None
      var = maker.inputs[0]
    return None
