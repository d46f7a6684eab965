"""Find the indices that a program does not need."""

from collections.abc import Sequence

import numpy as np

from jaxpruner.program import Node, Program, Var
from jaxpruner.sparse import _fold
from jaxpruner.sparse._constants import Constants
from jaxpruner.sparse._dims import Axis, Dim, Dims, Segment, Sum, resolve


class Removal:
  """Which indices of which dims stay, and what the constants become.

  Args:
    program: the operations.
    dims: the dims of its arrays.
    values: the parameters, masked.

  Attributes:
    keep: the indices that stay, for the dims that lose some.
    values: the parameters, with the constants of removed indices in biases.
    baked: constants to add to the results of operations without a bias.
  """

  def __init__(
    self, program: Program, dims: Dims, values: dict[Var, np.ndarray]
  ):
    self._known = Constants(program, dims, values)
    self._folding = _fold.BiasFolding(program, dims, self._known, set(values))
    self.values = dict(values)
    self.keep: dict[Dim, np.ndarray] = {}
    self.baked: dict[Node, np.ndarray] = {}
    self._reasons: dict[Dim, str] = {}
    owned = {d for v in values for d in dims.flat(v) if not d.blocked}
    sums = [(s, d) for s in dims.sums for d in resolve(s.axis) if d in owned]
    useless, folded = self._without_effect(sums)
    self._drop(useless, dims.segments)
    for total, dim in sums:
      if folded.get(total.node) is dim and dim in self.keep:
        self._fold(total, dim, useless[dim])

  def _without_effect(
    self, sums: Sequence[tuple[Sum, Dim]]
  ) -> tuple[dict[Dim, np.ndarray], dict[Node, Dim]]:
    """Find the indices that no sum needs.

    Returns:
      For each dim that is summed over, where all sums gain zero or a constant;
      and for each operation, the dim whose constants it would have to keep.
    """
    useless: dict[Dim, np.ndarray] = {}
    folded: dict[Node, Dim] = {}
    for total, dim in sums:
      zeros = [self._known.zero(v, [i], dim) for v, i in total.operands]
      zero = np.logical_or.reduce(zeros)
      constant = self._folding.constant(total, dim) & ~zero
      # Two dims of one sum folded at once would count their overlap twice.
      if constant.any() and folded.setdefault(total.node, dim) is not dim:
        constant[:] = False
      gone = zero | constant
      if not gone.all():
        self._reasons.setdefault(
          dim, f"{total.node} adds up values there that are not known"
        )
      useless[dim] = useless[dim] & gone if dim in useless else gone
    return useless, folded

  def _drop(
    self, useless: dict[Dim, np.ndarray], segments: Sequence[Segment]
  ) -> None:
    """Note what stays of each dim: at least one index.

    An index of a part stays with that of the dim it is joined into.
    """
    for dim in dict.fromkeys(d for s in segments for d in (s.whole, s.part)):
      if dim.blocked:
        useless[dim] = np.zeros(dim.size, np.bool_)
      useless.setdefault(dim, np.ones(dim.size, np.bool_))
    _agree(useless, segments)
    for gone in useless.values():
      if gone.all():
        gone[0] = False  # an axis of length 0 is nobody's idea of a layer
    _agree(useless, segments)
    for dim, gone in useless.items():
      if gone.any():
        self.keep[dim] = np.flatnonzero(~gone)

  def _fold(self, total: Sum, dim: Dim, gone: np.ndarray) -> None:
    delta = self._folding.delta(total, dim, gone)
    if not delta.any():
      return
    target = self._folding.bias(total.node, delta)
    if target is None:
      self.baked[total.node] = delta
      return
    var, sign = target
    value = self.values[var]
    moved = value.astype(np.float64) + sign * delta.reshape(value.shape)
    self.values[var] = moved.astype(value.dtype)

  def reason(self, axis: Axis) -> str:
    """Say why indices of an axis stay."""
    parts = resolve(axis)
    reasons = [
      d.blocked or self._reasons.get(d, "its parts are not empty together")
      for d in parts
    ]
    text = "; ".join(dict.fromkeys(reasons))
    if len(parts) > 1:
      sizes = "x".join(str(d.size) for d in parts)
      text = f"as {sizes}: {text}"
    return text


def _agree(useless: dict[Dim, np.ndarray], segments: Sequence[Segment]) -> None:
  """Keep an index of a joined dim with that of its part, and the reverse."""
  before, now = -1, 0
  while before != now:
    before = now
    for whole, start, part in segments:
      mine = useless[whole][start : start + part.size]
      mine &= useless[part]
      useless[part] &= mine
    now = sum(int(gone.sum()) for gone in useless.values())
