"""Run a traced function piece by piece over many batches.

The program is cut where a weight meets its activations. Each piece runs once
per batch; what later pieces need waits in files, not in memory. At a cut the
statistics of all batches are complete, the weights there can be replaced, and
the next piece already runs with the new ones: one forward pass in all.
"""

import functools
import math
import pathlib
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training._graph import Graph, Norm, Part, Probe
from jaxpruner.program import evaluate as _jaxprs
from jaxpruner.program.trace import Node, Program, Var


class Cut(NamedTuple):
  """A place where statistics are complete."""

  position: int
  parts: tuple[Part, ...]
  norms: tuple[Norm, ...]


class Moments(NamedTuple):
  """Running sums of activations: of x, of x², and of x xᵀ if asked for."""

  total: jax.Array
  square: jax.Array
  gram: jax.Array | None


def cuts(parts: Sequence[Part], norms: Sequence[Norm]) -> list[Cut]:
  """Return the cuts in the order in which the program reaches them."""
  positions = sorted({p.position for p in (*parts, *norms)})
  return [
    Cut(
      at,
      tuple(p for p in parts if p.position == at),
      tuple(n for n in norms if n.position == at),
    )
    for at in positions
  ]


class _Spool:
  """The live arrays of every batch, in files."""

  def __init__(self, folder: str, place: Callable[[Any, bool], Any]):
    self._folder, self._place = pathlib.Path(folder), place
    self._vars: list[Var] = []
    self.batches = 0

  def write(self, batch: int, values: Sequence[Any]) -> None:
    with open(self._folder / f"next-{batch}", "wb") as file:
      for value in values:
        np.asarray(value).tofile(file)

  def turn(self, batches: int, live: list[Var]) -> None:
    """Make what was written the current state of every batch."""
    for batch in range(batches):
      (self._folder / f"next-{batch}").replace(self._folder / f"now-{batch}")
    self._vars, self.batches = live, batches

  def read(self, batch: int) -> list[Any]:
    with open(self._folder / f"now-{batch}", "rb") as file:
      return [
        self._place(
          np.fromfile(file, v.dtype, math.prod(v.shape)).reshape(v.shape),
          True,
        )
        for v in self._vars
      ]


class Stream:
  """A program on its way through all batches.

  Args:
    graph: the program and its products.
    leaves: the parameters' arrays; replaced entries count from the next piece.
    cuts: where to stop, in order.
    gram: whether sums of x xᵀ are wanted, besides those of x and x².
    place: puts an array on its devices, spread over the data axis if the
      second argument says so.
  """

  def __init__(
    self,
    graph: Graph,
    leaves: list[Any],
    cuts: Sequence[Cut],
    gram: bool,
    place: Callable[[Any, bool], Any],
  ):
    self._graph, self.leaves, self._cuts = graph, leaves, list(cuts)
    self._gram, self._place = gram, place
    self._maker = {
      v: node for node in graph.program.nodes for v in node.outputs
    }
    self._compiled: dict[str, Callable[..., Any]] = {}
    self._needed = self._liveness()

  def _probes(self, cut: Cut) -> list[Probe | Norm]:
    probes = [
      probe
      for probe, position in self._graph.position.items()
      if position == cut.position
      and any(probe in p.probes for c in self._cuts for p in c.parts)
    ]
    return [*probes, *cut.norms]

  def _liveness(self) -> list[tuple[list[Node], list[Var]]]:
    """Return, per cut, the operations up to it and what is live there."""
    result: list[Any] = [None] * len(self._cuts)
    live: dict[Var, None] = {}
    moving = self._graph.moving
    nodes = self._graph.program.nodes
    for i in reversed(range(len(self._cuts))):
      cut = self._cuts[i]
      start = self._cuts[i - 1].position if i else 0
      after = [v for v in live if v in moving]
      for probe in self._probes(cut):
        live[probe.y if isinstance(probe, Norm) else probe.x] = None
      kept = []
      for node in reversed(nodes[start : cut.position]):
        if any(v in live for v in node.outputs) and any(
          v in moving for v in node.outputs
        ):
          kept.append(node)
          for v in node.outputs:
            live.pop(v, None)
          live.update(dict.fromkeys(v for v in node.inputs if v in moving))
      result[i] = kept[::-1], after
    self._first = list(live)
    return result

  def run(
    self, batches: Iterable[Any], skip: Callable[[Cut], bool]
  ) -> Generator[tuple[Cut, dict[Any, tuple[int, Moments]]]]:
    """Yield every cut with the moments complete there.

    Args:
      batches: flat lists of the program's inputs behind the parameters.
      skip: tells that a cut needs no statistics.
    """
    with tempfile.TemporaryDirectory(prefix="jaxpruner-") as folder:
      spool = _Spool(folder, self._place)
      count = self._fill(spool, batches)
      kept: dict[Any, tuple[int, Moments]] = {}
      for i, cut in enumerate(self._cuts):
        probes = [] if self._all_skipped(i, skip) else self._probes(cut)
        kept |= self._piece(i, probes, spool, count)
        yield cut, kept
        later = {
          probe for c in self._cuts[i + 1 :] for p in c.parts
          for probe in p.probes
        }  # fmt: skip
        kept = {k: v for k, v in kept.items() if k in later}

  def _all_skipped(self, i: int, skip: Callable[[Cut], bool]) -> bool:
    probes = set(self._probes(self._cuts[i]))
    users = [
      c
      for c in self._cuts
      if c is self._cuts[i]
      or any(probe in probes for p in c.parts for probe in p.probes)
    ]
    return all(map(skip, users))

  def _fill(self, spool: _Spool, batches: Iterable[Any]) -> int:
    count = 0
    inputs = self._graph.program.inputs
    expected = inputs[len(self.leaves) :]
    for batch in batches:
      shapes = [(np.shape(x), np.asarray(x).dtype) for x in batch]
      if shapes != [(v.shape, v.dtype) for v in expected]:
        raise ValueError(
          f"batches[{count}] has arrays {shapes}, the first batch had "
          f"{[(v.shape, v.dtype) for v in expected]}; all batches must have "
          "the same shapes: drop or pad the last one"
        )
      values = dict(zip(expected, batch, strict=True))
      spool.write(count, [values[v] for v in self._first])
      count += 1
    if not count:
      raise ValueError("batches is empty; give at least one batch")
    spool.turn(count, self._first)
    return count

  def _piece(self, i, probes, spool, count) -> dict[Any, tuple[int, Moments]]:
    nodes, after = self._needed[i]
    before = list(self._first) if not i else self._needed[i - 1][1]
    fixed = list(
      dict.fromkeys(
        v
        for v in (v for node in nodes for v in node.inputs)
        if v not in self._graph.moving and v.value is None
      )
    )
    memo: dict[Var, Any] = {}
    held = [self._place(self._fixed(v, memo), False) for v in fixed]
    memo.clear()
    means = [
      self._place(self.leaves[p.mean], False)
      for p in probes
      if isinstance(p, Norm)
    ]
    step = self._compile(nodes, before, fixed, after, probes)
    sums: Any = [
      jax.tree.map(lambda s: self._place(np.zeros(s.shape, s.dtype), False), m)
      for m, _ in map(self._moments_like, probes)
    ]
    for batch in range(count):
      live, sums = step(spool.read(batch), held, means, sums)
      spool.write(batch, live)
    spool.turn(count, after)
    sizes = [size for _, size in map(self._moments_like, probes)]
    return {
      p: (size * count, s)
      for p, size, s in zip(probes, sizes, sums, strict=True)
    }

  def _moments_like(self, probe: Probe | Norm) -> tuple[Any, int]:
    """Return the shapes of a probe's sums, and its tokens per batch."""
    v = probe.y if isinstance(probe, Norm) else probe.x
    x = jax.eval_shape(
      functools.partial(_rows, probe, None),
      jax.ShapeDtypeStruct(v.shape, v.dtype),
    )
    gram = self._gram and not isinstance(probe, Norm)
    moments = jax.eval_shape(functools.partial(_moments, gram=gram), x)
    return moments, x.shape[1]

  def _fixed(self, var: Var, memo: dict[Var, Any]) -> Any:
    """Evaluate what depends on parameters alone."""
    if var.value is not None:
      return var.value
    if var not in memo:
      node = self._maker.get(var)
      if node is None:
        memo[var] = self.leaves[self._graph.program.inputs.index(var)]
      else:
        outs = _jaxprs.apply(node, [self._fixed(v, memo) for v in node.inputs])
        memo.update(zip(node.outputs, outs, strict=True))
    return memo[var]

  def _compile(self, nodes, before, fixed, after, probes):
    wanted = [p.y if isinstance(p, Norm) else p.x for p in probes]
    piece = Program(nodes, [*before, *fixed], [*after, *wanted], None)
    lay = [
      ("norm", p.axis) if isinstance(p, Norm) else (p.kind, p.layout)
      for p in probes
    ]
    # Layers of one shape share one compilation.
    key = repr((piece.signature(), lay, len(before)))
    if key not in self._compiled:
      step = functools.partial(
        _step, nodes, before, fixed, after, probes, self._gram
      )
      self._compiled[key] = jax.jit(step, donate_argnums=3)
    return self._compiled[key]


def _step(nodes, before, fixed, after, probes, gram, live, held, means, sums):
  env = dict(zip([*before, *fixed], [*live, *held], strict=True))

  def read(v):
    return v.value if v.value is not None else env[v]

  for node in nodes:
    outs = _jaxprs.apply(node, [read(v) for v in node.inputs])
    env.update(zip(node.outputs, outs, strict=True))
  shifts = iter(means)
  new = []
  for probe, old in zip(probes, sums, strict=True):
    norm = isinstance(probe, Norm)
    shift = next(shifts) if norm else None
    x = _rows(probe, shift, read(probe.y if norm else probe.x))
    moments = _moments(x, gram and not norm)
    new.append(jax.tree.map(jnp.add, old, moments))
  return [read(v) for v in after], new


def _rows(probe: Probe | Norm, shift: Any, x: jax.Array) -> jax.Array:
  """Return a probe's activations as (groups, tokens, inputs)."""
  if not isinstance(probe, Norm):
    return probe.matrix(x)
  y = jnp.moveaxis(x, probe.axis, -1).astype(jnp.float32)
  # Around the old mean: E[y²] - E[y]² would lose small variances.
  y = y if shift is None else y - shift
  return y.reshape(1, -1, y.shape[-1])


def _moments(x: jax.Array, gram: bool) -> Moments:
  outer = None
  if gram:
    outer = jnp.einsum(
      "gti,gtj->gij", x, x, precision=jax.lax.Precision.HIGHEST
    )
  return Moments(x.sum(1), jnp.square(x).sum(1), outer)
