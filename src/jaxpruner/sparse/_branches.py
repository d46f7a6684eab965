"""Residual blocks: branches that a program adds to what they read.

In x + f(x) the branch f may be taken out whole. It is a block if it has
parameters of its own and no smaller block lies within it.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import program as _program
from jaxpruner.program import Node, Program, Var
from jaxpruner.program.primitives import ELEMENTWISE, PRODUCTS, RESHAPES


class Branch(NamedTuple):
  """A residual block.

  Attributes:
    node: the index of the operation that adds it.
    side: which operand of that is the branch.
    params: the parameters that only the branch uses.
  """

  node: int
  side: int
  params: frozenset[Var]


def find(program: Program, parameters: Collection[Var]) -> list[Branch]:
  """Return the residual blocks of a program, in order."""
  bit, above = _above(program)
  trunk: dict[Var, int] = {}
  found: list[Branch] = []
  for index, node in enumerate(program.nodes):
    if node.name not in ("add", "add_any"):
      continue
    for side in (0, 1):
      branch, rest = node.inputs[side], node.inputs[1 - side]
      stem = trunk.get(rest, bit[rest])
      if branch.shape != rest.shape or not above.get(branch, 0) & stem:
        continue
      own = _own(program, index, side, parameters)
      if any(len(v.shape) > 1 for v in own):
        # Blocks beside each other read what is before all of them.
        trunk[node.outputs[0]] = bit[node.outputs[0]] | stem
        found.append(Branch(index, side, own))
  return [
    b
    for i, b in enumerate(found)
    if not any(
      c.params < b.params or (c.params == b.params and j < i)
      for j, c in enumerate(found)
    )
  ]


def _above(program: Program) -> tuple[dict[Var, int], dict[Var, int]]:
  """Return a bit for each variable, and the bits of all it is made from."""
  bit: dict[Var, int] = {}
  above: dict[Var, int] = {}
  for node in program.nodes:
    mine = 0
    for v in node.inputs:
      mine |= above.get(v, 0) | bit.setdefault(v, 1 << len(bit))
    for v in node.outputs:
      bit.setdefault(v, 1 << len(bit))
      above[v] = mine
  return bit, above


def _own(
  program: Program, index: int, side: int, parameters: Collection[Var]
) -> frozenset[Var]:
  """Return the parameters that matter only through one operand of a sum."""
  needed = set(program.outputs)
  for i in range(len(program.nodes) - 1, -1, -1):
    node = program.nodes[i]
    if not needed.isdisjoint(node.outputs):
      kept = [v for s, v in enumerate(node.inputs) if i != index or s != side]
      needed.update(kept)
  through = {program.nodes[index].inputs[side]}
  for node in reversed(program.nodes[:index]):
    if not through.isdisjoint(node.outputs):
      through.update(node.inputs)
  return frozenset(v for v in parameters if v in through and v not in needed)


def without(
  program: Program, gone: Sequence[tuple[int, int]]
) -> tuple[Program, set[Var]]:
  """Return a program without some branches, and the inputs it lost.

  Args:
    program: the operations.
    gone: of each branch, the index of its sum and the operand.

  Raises:
    ValueError: if there is no such sum.
  """
  if not gone:
    return program, set()
  sides = dict(gone)
  now: dict[Var, Var] = {}
  nodes: list[Node] = []
  for index, node in enumerate(program.nodes):
    inputs = [now.get(v, v) for v in node.inputs]
    if index not in sides:
      nodes.append(Node(node.eqn, inputs, node.outputs))
    elif node.name not in ("add", "add_any"):
      raise ValueError("the function runs other operations at these shapes")
    else:
      now[node.outputs[0]] = inputs[1 - sides[index]]
  outputs = [now.get(v, v) for v in program.outputs]
  small = Program(nodes, program.inputs, outputs).slice(outputs)
  used = lambda p: {v for n in p.nodes for v in n.inputs} | {*p.outputs}
  lost = used(program) - used(small)
  result = Program(small.nodes, program.inputs, outputs, program.out_tree)
  return result, lost & {*program.inputs}


def empty(
  program: Program, branches: Sequence[Branch], values: Mapping[Var, np.ndarray]
) -> list[tuple[int, int]]:
  """Return the branches that are zero for every input."""
  zero = {v for v, x in values.items() if not np.any(x)}
  for node in program.nodes:
    if _is_zero(node, zero):
      zero.update(node.outputs)
  return [
    (b.node, b.side)
    for b in branches
    if program.nodes[b.node].inputs[b.side] in zero
  ]


def _is_zero(node: Node, zero: set[Var]) -> bool:
  """Tell whether all results of an operation are zero."""
  known = [v in zero or _is_zero_constant(v) for v in node.inputs]
  if node.name in PRODUCTS or node.name == "mul":
    return any(known[:2])
  if node.name == "div":
    return known[0] and not known[1]
  if node.name == "select_n":
    return all(known[1:])
  if node.name in _MOVES:
    return known[0]
  if node.name not in ELEMENTWISE | {"concatenate", "pad"} or not all(known):
    return False
  if node.name in ("concatenate", "pad"):
    return True
  if not all(jnp.issubdtype(v.dtype, jnp.inexact) for v in node.inputs):
    return False
  zeros = [np.zeros((), v.dtype) for v in node.inputs]
  return not any(np.any(y) for y in _program.bind(node, zeros))


_MOVES = RESHAPES | frozenset(
  """convert_element_type slice split reduce_sum reduce_max reduce_min rev
  cumsum dynamic_slice""".split()
)


def _is_zero_constant(v: Var) -> bool:
  return v.value is not None and not np.any(v.array)


def name(branch: Branch, names: Mapping[Var, str]) -> str:
  """Name a block by the path of its matrices, or by the first of them."""
  paths = [n.split("/") for v, n in names.items() if _is_matrix(v, branch)]
  shared = "/".join(os.path.commonprefix(paths))
  others = [n for v, n in names.items() if v not in branch.params]
  if shared and not any(n.startswith(f"{shared}/") for n in others):
    return shared
  more = len(paths) - 1
  return "/".join(paths[0]) + (f" and {more} more" if more else "")


def _is_matrix(v: Var, branch: Branch) -> bool:
  return v in branch.params and len(v.shape) > 1


def shares(
  program: Program, branches: Sequence[Branch], arguments: Sequence[Any]
) -> list[float]:
  """Return how large each block's result is beside the sum it is added to."""

  @jax.jit
  def run(arguments: Sequence[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    sums = {id(program.nodes[b.node]): i for i, b in enumerate(branches)}

    def visit(node: Node, values: list[Any]) -> list[Any]:
      results = _program.bind(node, values)
      if id(node) in sums:
        i = sums[id(node)]
        part = values[branches[i].side]
        found[i] = _norm(part) / jnp.maximum(_norm(results[0]), 1e-30)
      return results

    _program.run(program, arguments, visit)
    return [found[i] for i in range(len(branches))]

  return [float(x) for x in run(list(arguments))]


def _norm(x: Any) -> Any:
  return jnp.linalg.norm(x.astype(jnp.float32).reshape(-1))


def worth(
  branches: Sequence[Branch], arrays: Mapping[Var, np.ndarray]
) -> list[float]:
  """Return the mean of an array per parameter over each block's matrices."""
  scores = []
  for branch in branches:
    own = [arrays[v] for v in branch.params if len(v.shape) > 1]
    scores.append(sum(x.sum() for x in own) / sum(x.size for x in own))
  return scores
