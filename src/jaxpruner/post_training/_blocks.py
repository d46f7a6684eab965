"""Cut a traced function into blocks between which one activation passes."""

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpruner.post_training._graph import Graph, Part
from jaxpruner.program import Node, Program, Var


class Block(NamedTuple):
  """A piece of a program, as a program of its own.

  Attributes:
    program: its inputs are the parameters `leaves`, then `inputs`.
    leaves: the indices of the parameters that it reads.
    own: those of them that are read nowhere else.
    parts: the weights of its products that are to be pruned.
    inputs: the variables of the batch that it reads.
    outputs: those that later blocks read; the first is its result.
  """

  program: Program
  leaves: tuple[int, ...]
  own: tuple[int, ...]
  parts: tuple[Part, ...]
  inputs: tuple[Var, ...]
  outputs: tuple[Var, ...]


def split(
  graph: Graph, parts: Sequence[Part], count: int, span: int
) -> list[Block]:
  """Return the blocks of a program that hold weights to be pruned, in order.

  A program may be cut where a single variable that depends on both the batch
  and the parameters is still needed: between the layers of a chain, and after
  each residual sum, so twice in a layer of a transformer.

  Args:
    graph: the program and its products.
    parts: the weights to be pruned; a weight that is used in several places is
      never cut apart.
    count: number of parameters, the first inputs of the program.
    span: how many pieces with weights form a block.

  Returns:
    The blocks; what follows the last one holds no weight to be pruned.
  """
  program = graph.program
  at = {id(node): i for i, node in enumerate(program.nodes)}
  uses = [sorted(graph.position[site] for site in part.sites) for part in parts]
  places = [
    (position, live)
    for position, live in _narrow(program, graph.moving, count, at)
    if not any(use[0] < position <= use[-1] for use in uses)
  ]
  starts = [(0, tuple(program.inputs[count:])), *places]
  ends = [*places, (len(at) + 1, tuple(program.outputs))]
  pieces: list[_Piece] = []
  held: tuple[Var, ...] | None = None
  for (start, before), (end, after) in zip(starts, ends, strict=True):
    found = [
      part
      for part, use in zip(parts, uses, strict=True)
      if start <= use[0] < end
    ]
    held = before if held is None else held
    if found:  # operations without weights belong to the piece that follows
      pieces.append(_Piece(held, after, found))
      held = None
  groups = [pieces[i : i + span] for i in range(0, len(pieces), span)]
  cut = [(group[0].inputs, group[-1].outputs) for group in groups]
  programs = [_between(program, count, *ends) for ends in cut]
  rest = _between(program, count, cut[-1][1], tuple(program.outputs))
  reads = collections.Counter(
    i for _, leaves in (*programs, rest) for i in leaves
  )
  return [
    Block(
      piece,
      leaves,
      tuple(i for i in leaves if reads[i] == 1),
      tuple(part for piece in group for part in piece.parts),
      *ends,
    )
    for group, ends, (piece, leaves) in zip(groups, cut, programs, strict=True)
  ]


class _Piece(NamedTuple):
  """Operations between two neighbouring places to cut."""

  inputs: tuple[Var, ...]
  outputs: tuple[Var, ...]
  parts: list[Part]


def _narrow(
  program: Program, moving: set[Var], count: int, at: dict[int, int]
) -> Iterator[tuple[int, tuple[Var, ...]]]:
  """Yield (position, live variables) of the places to cut, result first."""
  learned = set(program.inputs[:count])
  made: dict[Var, int] = dict.fromkeys(program.inputs[count:], -1)
  last: dict[Var, int] = {}
  needed = program.slice(program.outputs).nodes
  for node in needed:
    position = at[id(node)]
    last.update(dict.fromkeys(node.inputs, position))
    if not learned.isdisjoint(node.inputs):
      learned.update(node.outputs)
    made.update((v, position) for v in node.outputs if v in moving)
  last.update(dict.fromkeys(program.outputs, len(at)))
  live: dict[Var, None] = {v: None for v in made if made[v] < 0 and v in last}
  previous = None
  for node in needed:
    position = at[id(node)]
    live.update((v, None) for v in node.outputs if v in made and v in last)
    for v in node.inputs:
      if v in live and last[v] == position:
        del live[v]
    results = [v for v in live if v in learned]
    if len(results) == 1 and results[0] is not previous:
      previous = results[0]
      yield position + 1, (previous, *(v for v in live if v not in learned))


def _between(
  program: Program,
  count: int,
  inputs: tuple[Var, ...],
  outputs: tuple[Var, ...],
) -> tuple[Program, tuple[int, ...]]:
  """Return the program from inputs to outputs, and the parameters it reads."""
  given, needed = set(inputs), set(outputs) - set(inputs)
  nodes: list[Node] = []
  for node in reversed(program.nodes):
    if not needed.isdisjoint(node.outputs):
      nodes.append(node)
      needed.update(v for v in node.inputs if v not in given)
  every = program.inputs[:count]
  leaves = tuple(i for i, v in enumerate(every) if v in needed)
  chosen = [every[i] for i in leaves]
  return Program(nodes[::-1], [*chosen, *inputs], list(outputs)), leaves
