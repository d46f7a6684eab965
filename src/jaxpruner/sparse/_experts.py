"""Let experts go from a model whose router needs them all.

A softmax or a choice of the best sees the axis of experts whole, and so did
everything coupled to it. The weights of the experts need only the results for
those that stay: where such a result meets them, the program is cut, and takes
these along the axis. The router stays as it is, and so do its numbers.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import mlir

from jaxpruner.program import Node, Program, Var
from jaxpruner.sparse._dims import CUT, Dim, Dims, resolve


def _whole(x: Any, axis: int) -> Any:
  """Take all indices, as a program does before it is made smaller."""
  del axis
  return x


_cut_p = core.Primitive(CUT)
_cut_p.def_impl(_whole)
_cut_p.def_abstract_eval(_whole)
_lowered = mlir.lower_fun(_whole, multiple_results=False)
mlir.register_lowering(_cut_p, _lowered)


class _Edge(NamedTuple):
  """An array that an operation reads, and the axis along which to take."""

  node: Node
  place: int
  axis: int


def cut(program: Program, count: int) -> Program:
  """Cut a program between its routers and its experts.

  Args:
    program: the operations.
    count: how many of its inputs are parameters.

  Returns:
    The program with cuts where these let experts go, else as it was.
  """
  params = program.inputs[:count]
  # Weights of experts are stacks of matrices; biases and a router may be known
  # by the same axis.
  for least in (2, 3):
    if not any(len(v.shape) > 2 for v in params):
      break
    dims = Dims(program, count)
    stacks = _stacks(program, dims, params)
    found = {
      p: edges
      for dim, p in stacks.items()
      if (edges := _edges(program, dims, dim, params, least))
    }
    while found:
      tried = _inserted(program, found.values())
      after = Dims(tried, count)
      free = {
        p: e
        for p, e in found.items()
        if not any(d.blocked for d in resolve(after.of(p)[0]))
      }
      if len(free) == len(found):
        program = tried
        break
      found = free
  return program


def _stacks(
  program: Program, dims: Dims, params: Collection[Var]
) -> dict[Dim, Var]:
  """Return the blocked axes of stacked matrices, each with a parameter."""
  first = {}
  for v in params:
    axis = resolve(dims.of(v)[0]) if len(v.shape) > 2 else []
    if len(axis) == 1 and axis[0].blocked:
      first.setdefault(axis[0], v)
  found: dict[Dim, Var] = {}
  for node in program.nodes:
    if node.name != "dot_general":
      continue
    for side, v in enumerate(node.inputs):
      summed = node.params["dimension_numbers"][0][side]
      axis = resolve(dims.of(v)[0]) if len(v.shape) > 2 else []
      if len(axis) == 1 and axis[0] in first and 0 not in summed:
        found[axis[0]] = first[axis[0]]
  return found


def _edges(
  program: Program, dims: Dims, dim: Dim, params: Collection[Var], least: int
) -> list[_Edge]:
  """Return where arrays of all experts meet those of the experts that stay."""
  inner = {
    v
    for v in params
    if len(v.shape) >= least and resolve(dims.of(v)[0]) == [dim]
  }
  edges: list[_Edge] = []
  for node in program.nodes:
    if inner.isdisjoint(node.inputs):
      continue
    inner.update(v for v in node.outputs if dim in dims.flat(v))
    for place, v in enumerate(node.inputs):
      if v in inner or v.value is not None or dim not in dims.flat(v):
        continue
      axes = [i for i, a in enumerate(dims.of(v)) if resolve(a) == [dim]]
      if len(axes) != 1 or dims.flat(v).count(dim) != 1:
        return []
      edges.append(_Edge(node, place, axes[0]))
  return edges


def _inserted(program: Program, groups: Collection[list[_Edge]]) -> Program:
  """Return a program with a cut on each of these edges."""
  by_node: dict[Node, list[_Edge]] = {}
  for edge in (e for group in groups for e in group):
    by_node.setdefault(edge.node, []).append(edge)
  made: dict[tuple[Var, int], Var] = {}
  nodes: list[Node] = []
  for node in program.nodes:
    inputs = list(node.inputs)
    for _, place, axis in by_node.get(node, ()):
      v = inputs[place]
      if (v, axis) not in made:
        made[v, axis] = Var(v.shape, v.dtype)
        nodes.append(Node(_equation(v, axis), [v], [made[v, axis]]))
      inputs[place] = made[v, axis]
    changed = node in by_node
    nodes.append(Node(node.eqn, inputs, node.outputs) if changed else node)
  return Program(nodes, program.inputs, program.outputs, program.out_tree)


def _equation(v: Var, axis: int) -> Any:
  shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
  return jax.make_jaxpr(lambda x: _cut_p.bind(x, axis=axis))(shape).eqns[0]
