"""Which axes of a program are one and the same dimension.

Every axis of every array is a product of *dims*, written major to minor: heads
and head width share one axis before a reshape and have one each after it. An
operation that pairs axes unites their dims; one that needs to see an axis whole
(a softmax, a sort, the program's input or output) blocks it. What remains are
the dims along which an index can be taken out of every array at once.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxpruner.program import Node, Program, Var, describe, primitives


@dataclasses.dataclass(eq=False, slots=True)
class Dim:
  """A dimension: an alias of another, a product of parts, or itself."""

  size: int
  alias: "Dim | None" = None
  parts: "tuple[Dim, Dim] | None" = None
  blocked: str = ""


Axis = list[Dim]  # major to minor; an axis of length 1 has no dims


# The operation that takes the indices that stay, see `_experts`.
CUT = "jaxpruner_cut"


class Sum(NamedTuple):
  """An axis that an operation adds up: `sum(a)` or `sum(a * b)`."""

  node: Node
  axis: Axis
  operands: tuple[tuple[Var, int], ...]  # an array and the axis of it


class Join(NamedTuple):
  """An axis of parts of unequal length: what goes from one goes from both."""

  whole: Axis
  parts: list[Axis]


class Segment(NamedTuple):
  """A part of a dim: its first index, and the dim that the part is."""

  whole: Dim
  start: int
  part: Dim


def resolve(axis: Sequence[Dim]) -> Axis:
  """Return the dims an axis consists of by now."""
  out: Axis = []
  for dim in axis:
    while dim.alias is not None:
      dim = dim.alias
    out += resolve(dim.parts) if dim.parts else [dim]
  return out


def block(axis: Sequence[Dim], reason: str) -> None:
  for dim in resolve(axis):
    dim.blocked = dim.blocked or reason


def _split(dim: Dim, major: int) -> None:
  minor = dim.size // major
  dim.parts = (Dim(major, blocked=dim.blocked), Dim(minor, blocked=dim.blocked))


def unite(a: Sequence[Dim], b: Sequence[Dim], reason: str) -> None:
  """Make two axes of equal length one; block both if they split unlike."""
  left, right = resolve(a), resolve(b)
  while left and right:
    x, y = left[0], right[0]
    if x.size == y.size:
      if x is not y:
        y.alias = x
        x.blocked = x.blocked or y.blocked
      left, right = resolve(left[1:]), resolve(right[1:])
    elif x.size > y.size and x.size % y.size == 0:
      _split(x, y.size)
      left, right = resolve(left), resolve(right)
    elif y.size > x.size and y.size % x.size == 0:
      _split(y, x.size)
      left, right = resolve(left), resolve(right)
    else:
      block([*left, *right], reason)
      return


class Dims:
  """The dims of every array of a program, and the sums over them.

  Args:
    program: the operations.
    parameters: how many of its inputs are parameters.
    apart: operations whose operands and results share no dims.
  """

  def __init__(
    self, program: Program, parameters: int, apart: Collection[Node] = ()
  ):
    self.axes: dict[Var, list[Axis]] = {}
    self.sums: list[Sum] = []
    self._joins: list[Join] = []
    for var in program.inputs[parameters:]:
      for axis in self.of(var):
        block(axis, "it is an axis of the function's input")
    for node in program.nodes:
      if node not in apart:
        _RULES.get(node.name, _opaque)(self, node)
    for var in program.outputs:
      for axis in self.of(var):
        block(axis, "it is an axis of the function's output")
    self.segments = self._segments()

  def join(self, whole: Axis, parts: list[Axis]) -> None:
    """Note that an axis consists of others, one after the other."""
    self._joins.append(Join(whole, parts))

  def _segments(self) -> list[Segment]:
    """Return the parts of joined dims; what is blocked blocks its parts.

    Axes joined to one and cut at the same places are the same parts. Cut at
    other places, or split further, they are blocked.
    """
    cuts: dict[Dim, list[Axis]] = {}
    for whole, parts in self._joins:
      axes = [resolve(axis) for axis in (whole, *parts)]
      known = cuts.get(axes[0][0]) if len(axes[0]) == 1 else None
      sizes = [axis[0].size for axis in axes[1:] if len(axis) == 1]
      if len(sizes) < len(parts) or len(axes[0]) != 1:
        reason = "it is joined from parts and split in another way"
        block([d for axis in axes for d in axis], reason)
      elif known is None:
        cuts[axes[0][0]] = axes[1:]
      elif sizes != [resolve(axis)[0].size for axis in known]:
        reason = "it is joined from parts and cut at other places"
        block([d for axis in (*axes, *known) for d in axis], reason)
      else:
        for one, other in zip(known, axes[1:], strict=True):
          unite(one, other, "its parts are split in different ways")
    found: list[Segment] = []
    for whole, parts in cuts.items():
      start = 0
      for axis in parts:
        (part,) = resolve(axis)
        found.append(Segment(resolve([whole])[0], start, part))
        start += part.size
    changed = True
    while changed:
      changed = False
      for whole, _, part in found:
        if whole.blocked and not part.blocked:
          part.blocked, changed = whole.blocked, True
    return found

  def of(self, var: Var) -> list[Axis]:
    """Return the axes of a variable."""
    if var not in self.axes:
      self.axes[var] = [[Dim(n)] if n != 1 else [] for n in var.shape]
    return self.axes[var]

  def flat(self, var: Var) -> Axis:
    """Return the dims of all axes of a variable, in order."""
    return resolve([dim for axis in self.of(var) for dim in axis])

  def pair(self, node: Node, a: Var, i: int, b: Var, j: int) -> None:
    """Unite axis `i` of `a` with axis `j` of `b`."""
    if a.shape[i] == b.shape[j]:
      unite(self.of(a)[i], self.of(b)[j], f"{node} splits it in another way")
    elif 1 not in (a.shape[i], b.shape[j]):
      self.block(node, a, i)
      self.block(node, b, j)

  def block(self, node: Node, var: Var, i: int) -> None:
    """Keep an axis whole, because of an operation."""
    known = node.name in primitives.KNOWN
    why = f"{node} needs it whole"
    block(self.of(var)[i], why if known else f"{why}: {describe(node.name)}")

  def add(self, node: Node, *operands: tuple[Var, int]) -> None:
    """Note a sum over these axes, which are one."""
    var, i = operands[0]
    self.sums.append(Sum(node, self.of(var)[i], operands))


def complete(
  segments: Sequence[Segment], keep: dict[Dim, np.ndarray]
) -> dict[Dim, np.ndarray]:
  """Add what is kept of joined dims, as booleans, from what is of their parts.

  Args:
    segments: the parts of joined dims, inner joins first.
    keep: which indices of other dims are kept.

  Returns:
    The same for all dims of which something is known.
  """
  result = dict(keep)
  for whole, start, part in segments:
    if part in result:
      if whole not in result:
        result[whole] = np.ones(whole.size, bool)
      result[whole][start : start + part.size] &= result[part]
  return result


def _opaque(dims: Dims, node: Node) -> None:
  for var in (*node.inputs, *node.outputs):
    for i in range(len(var.shape)):
      dims.block(node, var, i)


def _elementwise(dims: Dims, node: Node) -> None:
  for out in node.outputs:
    for var in node.inputs:
      for i in range(len(var.shape)):
        dims.pair(node, out, i, var, i)


def _along(
  whole: Callable[[Node, int], bool], inputs: int | None = None
) -> Callable[[Dims, Node], None]:
  """Make a rule: elementwise along all axes but those needed whole."""

  def rule(dims: Dims, node: Node) -> None:
    for out in node.outputs:
      for var in node.inputs[:inputs]:
        for i in range(len(var.shape)):
          if whole(node, i):
            dims.block(node, var, i)
            dims.block(node, out, i)
          else:
            dims.pair(node, out, i, var, i)

  return rule


def _broadcast(dims: Dims, node: Node) -> None:
  for i, j in enumerate(node.params["broadcast_dimensions"]):
    dims.pair(node, node.outputs[0], j, node.inputs[0], i)


def _transpose(dims: Dims, node: Node) -> None:
  for j, i in enumerate(node.params["permutation"]):
    dims.pair(node, node.outputs[0], j, node.inputs[0], i)


def _kept(dims: Dims, node: Node, gone: Sequence[int]) -> None:
  """Pair the axes that remain when `gone` disappear."""
  left = [i for i in range(len(node.inputs[0].shape)) if i not in gone]
  for out in node.outputs:
    for j, i in enumerate(left):
      dims.pair(node, out, j, node.inputs[0], i)


def _squeeze(dims: Dims, node: Node) -> None:
  _kept(dims, node, node.params["dimensions"])


def _reduce_sum(dims: Dims, node: Node) -> None:
  _kept(dims, node, node.params["axes"])
  for i in node.params["axes"]:
    dims.add(node, (node.inputs[0], i))


def _reduce(dims: Dims, node: Node) -> None:
  _kept(dims, node, node.params["axes"])
  for i in node.params["axes"]:
    dims.block(node, node.inputs[0], i)


def _reshape(dims: Dims, node: Node) -> None:
  source, target = node.inputs[0], node.outputs[0]
  if 0 in source.shape or node.params.get("dimensions") is not None:
    return _opaque(dims, node)
  left = dims.flat(source)
  axes: list[Axis] = []
  for size in target.shape:
    axis: Axis = []
    while math.prod(d.size for d in axis) < size:
      missing = size // math.prod(d.size for d in axis)
      dim = left[0]
      if dim.size > missing and dim.size % missing == 0:
        _split(dim, missing)
      elif missing % dim.size:
        return _opaque(dims, node)
      left = resolve(left)
      axis.append(left.pop(0))
    axes.append(axis)
  dims.axes[target] = axes


def _segments(
  dims: Dims, node: Node, whole: Var, parts: Sequence[Var], i: int
) -> None:
  """Read an axis of equal parts (fused projections) as parts x position.

  The positions of all parts become one dim: an index is removed from all parts.
  """
  sizes = {part.shape[i] for part in parts}
  total = sum(part.shape[i] for part in parts)
  if len(sizes) > 1 and 0 not in sizes and total == whole.shape[i]:
    dims.join(dims.of(whole)[i], [dims.of(part)[i] for part in parts])
    return
  if len(sizes) > 1 or whole.shape[i] % max(*sizes, 1):
    for var in (whole, *parts):
      dims.block(node, var, i)
    return
  reason = f"{node} needs it whole"
  for part in parts:
    count = Dim(whole.shape[i] // part.shape[i], blocked=reason)
    unite(dims.of(whole)[i], [count, *dims.of(part)[i]], reason)


def _slice(dims: Dims, node: Node) -> None:
  source, target = node.inputs[0], node.outputs[0]
  for i, size in enumerate(source.shape):
    part = target.shape[i]
    if size == part:
      dims.pair(node, target, i, source, i)
    elif part and is_segment(node, i):
      _segments(dims, node, source, [target], i)
    else:
      dims.block(node, source, i)
      dims.block(node, target, i)


def is_segment(node: Node, i: int) -> bool:
  """Tell whether a slice takes one of several equal parts of an axis."""
  start = node.params.get("start_indices")
  strides = node.params.get("strides") or [1] * (i + 1)
  size, part = node.inputs[0].shape[i], node.outputs[0].shape[i]
  return (
    start is not None
    and strides[i] == 1
    and size % part == 0
    and start[i] % part == 0
  )


def _concatenate(dims: Dims, node: Node) -> None:
  (out,) = node.outputs
  axis = node.params["dimension"]
  _segments(dims, node, out, node.inputs, axis)
  for var in node.inputs:
    for i in range(len(out.shape)):
      if i != axis:
        dims.pair(node, out, i, var, i)


def _split_rule(dims: Dims, node: Node) -> None:
  (source,) = node.inputs
  axis = node.params["axis"]
  _segments(dims, node, source, node.outputs, axis)
  for var in node.outputs:
    for i in range(len(source.shape)):
      if i != axis:
        dims.pair(node, source, i, var, i)


def _stack(dims: Dims, node: Node) -> None:
  (out,) = node.outputs
  axis = node.params["axis"]
  dims.block(node, out, axis)
  for var in node.inputs:
    for i in range(len(var.shape)):
      dims.pair(node, out, i + (i >= axis), var, i)


def _unstack(dims: Dims, node: Node) -> None:
  axis = node.params["axis"]
  dims.block(node, node.inputs[0], axis)
  _kept(dims, node, [axis])


def _tile(dims: Dims, node: Node) -> None:
  (source,), (out,) = node.inputs, node.outputs
  for i in range(len(source.shape)):
    _segments(dims, node, out, [source], i)


def _copies(dims: Dims, node: Node) -> None:
  for out, var in zip(node.outputs, node.inputs, strict=True):
    for i in range(len(var.shape)):
      dims.pair(node, out, i, var, i)


def _cut(dims: Dims, node: Node) -> None:
  for i in range(len(node.inputs[0].shape)):
    if i != node.params["axis"]:
      dims.pair(node, node.outputs[0], i, node.inputs[0], i)


def _iota(dims: Dims, node: Node) -> None:
  dims.block(node, node.outputs[0], node.params["dimension"])


def dot_axes(node: Node) -> tuple[list[list[int]], list[list[int]]]:
  """Return the free axes of both operands, and the axis each has outside."""
  (contract, batch) = node.params["dimension_numbers"]
  free, position = [], []
  start = len(batch[0])
  for side in (0, 1):
    used = (*contract[side], *batch[side])
    axes = [i for i in range(len(node.inputs[side].shape)) if i not in used]
    free.append(axes)
    position.append(list(range(start, start + len(axes))))
    start += len(axes)
  return free, position


def _dot_general(dims: Dims, node: Node) -> None:
  lhs, rhs, *_ = node.inputs
  out = node.outputs[0]
  (contract, batch) = node.params["dimension_numbers"]
  for k, (i, j) in enumerate(zip(*batch, strict=True)):
    dims.pair(node, lhs, i, rhs, j)
    dims.pair(node, out, k, lhs, i)
  for i, j in zip(*contract, strict=True):
    dims.pair(node, lhs, i, rhs, j)
    dims.add(node, (lhs, i), (rhs, j))
  for var, axes, places in zip((lhs, rhs), *dot_axes(node), strict=True):
    for i, j in zip(axes, places, strict=True):
      dims.pair(node, out, j, var, i)


def is_depthwise(node: Node) -> bool:
  """Tell whether each channel of a convolution has its own window."""
  spec = node.params["dimension_numbers"]
  lhs, rhs = node.inputs
  groups = node.params["feature_group_count"]
  return (
    groups > 1
    and groups == lhs.shape[spec.lhs_spec[1]]
    and groups == rhs.shape[spec.rhs_spec[0]]
    and node.params["batch_group_count"] == 1
  )


def outer_axes(node: Node) -> list[list[int]]:
  """Return the axes of each factor of a product that its result has too."""
  if node.name == "dot_general":
    free, batch = dot_axes(node)[0], node.params["dimension_numbers"][1]
    return [[*free[0], *batch[0]], [*free[1], *batch[1]]]
  spec = node.params["dimension_numbers"]
  batch, features = spec.lhs_spec[:2]
  lhs = [batch, features] if is_depthwise(node) else [batch]
  return [lhs, [spec.rhs_spec[0]]]


def _conv(dims: Dims, node: Node) -> None:
  lhs, rhs = node.inputs
  out = node.outputs[0]
  spec = node.params["dimension_numbers"]
  batch, features, *space = spec.lhs_spec
  to, of, *window = spec.rhs_spec
  dims.pair(node, out, spec.out_spec[0], lhs, batch)
  dims.pair(node, out, spec.out_spec[1], rhs, to)
  for var, axes in ((lhs, space), (rhs, window), (out, spec.out_spec[2:])):
    for i in axes:
      dims.block(node, var, i)
  if is_depthwise(node):
    dims.pair(node, lhs, features, rhs, to)
  elif (
    node.params["feature_group_count"] * node.params["batch_group_count"] == 1
  ):
    dims.pair(node, lhs, features, rhs, of)
    dims.add(node, (lhs, features), (rhs, of))
  else:
    dims.block(node, lhs, features)
    dims.block(node, rhs, of)
    dims.block(node, rhs, to)


def _gather(dims: Dims, node: Node) -> None:
  source, indices = node.inputs
  out = node.outputs[0]
  spec = node.params["dimension_numbers"]
  for i in range(len(indices.shape)):
    dims.block(node, indices, i)
  batching = getattr(spec, "operand_batching_dims", ())
  gone = (*spec.collapsed_slice_dims, *batching)
  windows = iter(spec.offset_dims)
  for i, size in enumerate(source.shape):
    if i in gone:
      dims.block(node, source, i)
      continue
    j = next(windows)
    if node.params["slice_sizes"][i] == size:
      dims.pair(node, out, j, source, i)
    else:
      dims.block(node, source, i)
      dims.block(node, out, j)
  for j in range(len(out.shape)):
    if j not in spec.offset_dims:
      dims.block(node, out, j)


def _dynamic_update_slice(dims: Dims, node: Node) -> None:
  source, update, *_ = node.inputs
  out = node.outputs[0]
  for i, size in enumerate(source.shape):
    dims.pair(node, out, i, source, i)
    dims.pair(node, out, i, update, i)
    if update.shape[i] != size:
      dims.block(node, out, i)
      dims.block(node, update, i)


def _window(node: Node, i: int) -> bool:
  params = node.params
  return (
    params["window_dimensions"][i] != 1
    or params["window_strides"][i] != 1
    or tuple(params["padding"][i]) != (0, 0)
    or (params["base_dilation"] or [1] * (i + 1))[i] != 1
  )


def _pad(node: Node, i: int) -> bool:
  return tuple(node.params["padding_config"][i]) != (0, 0, 0)


_RULES: dict[str, Callable[[Dims, Node], None]] = {
  CUT: _cut,
  **dict.fromkeys(primitives.ELEMENTWISE, _elementwise),
  **dict.fromkeys(
    primitives.CUMULATIVE, _along(lambda n, i: i == n.params["axis"])
  ),
  **dict.fromkeys(primitives.REDUCTIONS, _reduce),
  **dict.fromkeys(primitives.WINDOWS, _along(_window)),
  "broadcast_in_dim": _broadcast,
  "concatenate": _concatenate,
  "conv_general_dilated": _conv,
  "dot_general": _dot_general,
  "dynamic_slice": _slice,
  "dynamic_update_slice": _dynamic_update_slice,
  "gather": _gather,
  "iota": _iota,
  "optimization_barrier": _copies,
  "pad": _along(_pad, inputs=1),
  "reduce_sum": _reduce_sum,
  "reshape": _reshape,
  "rev": _along(lambda n, i: i in n.params["dimensions"]),
  "slice": _slice,
  "sort": _along(lambda n, i: i == n.params["dimension"]),
  "split": _split_rule,
  "squeeze": _squeeze,
  "stack": _stack,
  "tile": _tile,
  "transpose": _transpose,
  "unstack": _unstack,
}
