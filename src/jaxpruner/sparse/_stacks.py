"""Permute the units of each layer of a stack, so that all lose the same ones.

The layers of a scan share one array, so an index goes from all of them or from
none. But the units inside a layer have no order: each layer may have its own.
With the units that must stay in front, a stack is as wide as its widest layer
needs.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxpruner.program import Node, Program, Var
from jaxpruner.sparse._dims import Dim, Dims, resolve
from jaxpruner.sparse._removal import Removal


class _Layer(NamedTuple):
  """One layer, taken out of a stack by a slice."""

  stack: Var
  number: int
  node: Node


class _Place(NamedTuple):
  """Where a dim of one layer stands: the layer, and the stack's flat dims."""

  layer: _Layer
  position: int
  dim: Dim


class Order:
  """The order of the units in each layer of the stacks of a program.

  Args:
    program: the operations, with scans unrolled.
    dims: the dims of its arrays.
    values: the parameters, masked.

  Calling it with a parameter and an array of its shape returns the array with
  the units of each layer in that order.
  """

  def __init__(
    self, program: Program, dims: Dims, values: Mapping[Var, np.ndarray]
  ):
    self._dims = dims
    self._orders: dict[Var, list[tuple[_Place, np.ndarray]]] = {}
    layers = list(_layers(program, values))
    if not layers:
      return
    apart = Dims(program, len(values), {layer.node for layer in layers})
    stacks = {layer.stack for layer in layers}
    known = {v: x for v, x in values.items() if v not in stacks}
    known |= {
      layer.node.outputs[0]: values[layer.stack][layer.number][None]
      for layer in layers
    }
    fixed = _ordered(program, apart, [v for v in values if v not in stacks])
    keep: dict[Dim, np.ndarray] | None = None
    for places in _united(dims, apart, layers).values():
      if not _is_free(places, fixed):
        continue
      if keep is None:
        keep = Removal(program, apart, known).keep
      self._add(places, keep)

  def _add(self, places: list[_Place], keep: Mapping[Dim, np.ndarray]) -> None:
    """Order a dim of the stack, if that removes more of it."""
    stay = {p.dim: keep.get(p.dim, np.arange(p.dim.size)) for p in places}
    together = np.unique(np.concatenate(list(stay.values())))
    if len(together) == max(map(len, stay.values())):
      return
    for place in places:
      first = stay[place.dim]
      rest = np.setdiff1d(np.arange(place.dim.size), first)
      order = np.concatenate([first, rest])
      self._orders.setdefault(place.layer.stack, []).append((place, order))

  def __call__(self, var: Var, array: np.ndarray) -> np.ndarray:
    if var not in self._orders:
      return array
    units = np.array(array).reshape([d.size for d in self._dims.flat(var)])
    for place, order in self._orders[var]:
      layer = units[place.layer.number]
      layer[...] = np.take(layer, order, place.position - 1)
    return units.reshape(array.shape)


def _layers(
  program: Program, values: Mapping[Var, np.ndarray]
) -> Iterator[_Layer]:
  """Yield the layers of all parameters that are only used layer by layer."""
  users = program.users()
  for var in values:
    nodes = users.get(var, [])
    found = [_Layer(var, _index(node), node) for node in nodes]
    if var not in program.outputs and all(f.number >= 0 for f in found):
      yield from found


def _index(node: Node) -> int:
  """Return which layer of a stack a slice takes; -1 if it takes none."""
  (source, *_), (out, *_) = node.inputs, node.outputs
  if node.name != "slice" or len(source.shape) < 2 or source.shape[0] < 2:
    return -1
  if out.shape != (1, *source.shape[1:]):
    return -1
  return int(node.params["start_indices"][0])


def _ordered(program: Program, dims: Dims, others: list[Var]) -> set[Dim]:
  """Return the dims whose order is seen: of constants, of other parameters."""
  constants = [
    v for n in program.nodes for v in n.inputs if v.value is not None
  ]
  fixed = {d for v in (*others, *constants) for d in dims.flat(v)}
  return fixed | {d for s in dims.segments for d in (s.whole, s.part)}


def _united(
  dims: Dims, apart: Dims, layers: list[_Layer]
) -> dict[Dim, list[_Place]]:
  """Return, for each dim of a stack, the dims of the layers that it stands for.

  Dims that the layers split in different ways are left out.
  """
  found: dict[Dim, list[_Place]] = {}
  unlike: set[Dim] = set()
  for layer in layers:
    axes = dims.of(layer.stack)[1:]
    own = apart.of(layer.node.outputs[0])[1:]
    position = 1
    for axis, mine in zip(map(resolve, axes), map(resolve, own), strict=True):
      if [d.size for d in axis] != [d.size for d in mine]:
        unlike.update(axis)
      else:
        for i, (dim, part) in enumerate(zip(axis, mine, strict=True)):
          found.setdefault(dim, []).append(_Place(layer, position + i, part))
      position += len(axis)
  return {d: p for d, p in found.items() if d not in unlike and not d.blocked}


def _is_free(places: list[_Place], fixed: set[Dim]) -> bool:
  """Tell whether the units of each layer can be in an order of their own."""
  layer_of: dict[Dim, int] = {}
  for place in places:
    index = layer_of.setdefault(place.dim, place.layer.number)
    if place.dim.blocked or place.dim in fixed or index != place.layer.number:
      return False
  return True
