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

from jaxpruner import program
from jaxpruner._tools import recent
from jaxpruner.post_training._graph import Graph, Norm, Part, Site
from jaxpruner.program import Node, Program, Var

# Pieces by what they compute: equal layers, and calls with other sparsities,
# share one compilation. A piece that is kept keeps what its description names.
_compiled = recent.Recent(64)


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
    """Make the written arrays the current state of every batch."""
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
  """The execution of a program over all batches, piece by piece.

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
    self._needed = self._liveness()

  def _sites(self, cut: Cut) -> list[Site | Norm]:
    """Return the products since the cut before, and the norms of this one."""
    i = self._cuts.index(cut)
    start = self._cuts[i - 1].position if i else -1
    sites = [
      site
      for site, position in self._graph.position.items()
      if start < position <= cut.position
      and any(site in p.sites for c in self._cuts for p in c.parts)
    ]
    return [*sites, *cut.norms]

  def _liveness(self) -> list[tuple[list[Node], list[Var]]]:
    """Return, per cut, the operations up to it and its live variables."""
    result: list[Any] = [None] * len(self._cuts)
    live: dict[Var, None] = {}
    moving = self._graph.moving
    nodes = self._graph.program.nodes
    for i in reversed(range(len(self._cuts))):
      cut = self._cuts[i]
      start = self._cuts[i - 1].position if i else 0
      after = [v for v in live if v in moving]
      for site in self._sites(cut):
        live[site.y if isinstance(site, Norm) else site.x] = None
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
        sites = [] if self._all_skipped(i, skip) else self._sites(cut)
        kept |= self._piece(i, sites, spool, count)
        yield cut, kept
        later = {
          site for c in self._cuts[i + 1 :] for p in c.parts
          for site in p.sites
        }  # fmt: skip
        kept = {k: v for k, v in kept.items() if k in later}

  def _all_skipped(self, i: int, skip: Callable[[Cut], bool]) -> bool:
    sites = set(self._sites(self._cuts[i]))
    users = [
      c
      for c in self._cuts
      if c is self._cuts[i]
      or any(site in sites for p in c.parts for site in p.sites)
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

  def _piece(self, i, sites, spool, count) -> dict[Any, tuple[int, Moments]]:
    nodes, after = self._needed[i]
    before = list(self._first) if not i else self._needed[i - 1][1]
    fixed = list(
      dict.fromkeys(
        v
        for v in (v for node in nodes for v in node.inputs)
        if v not in self._graph.moving and v.value is None
      )
    )
    held = [self._place(value, False) for value in self._fixed(fixed)]
    means = [
      self._place(self.leaves[p.mean], False)
      for p in sites
      if isinstance(p, Norm)
    ]
    step = self._compile(nodes, before, fixed, after, sites)
    sums: Any = [
      jax.tree.map(lambda s: self._place(np.zeros(s.shape, s.dtype), False), m)
      for m, _ in map(self._moments_like, sites)
    ]
    for batch in range(count):
      live, sums = step(spool.read(batch), held, means, sums)
      spool.write(batch, live)
    spool.turn(count, after)
    sizes = [size for _, size in map(self._moments_like, sites)]
    return {
      p: (size * count, s)
      for p, size, s in zip(sites, sizes, sums, strict=True)
    }

  def _moments_like(self, site: Site | Norm) -> tuple[Any, int]:
    """Return the shapes of a site's sums, and its tokens per batch."""
    v = site.y if isinstance(site, Norm) else site.x
    x = jax.eval_shape(
      functools.partial(_rows, site, None),
      jax.ShapeDtypeStruct(v.shape, v.dtype),
    )
    gram = self._gram and not isinstance(site, Norm)
    moments = jax.eval_shape(functools.partial(_moments, gram=gram), x)
    return moments, x.shape[1]

  def _fixed(self, fixed: list[Var]) -> list[Any]:
    """Return the values of variables that depend on parameters alone."""
    sliced = self._graph.program.slice(fixed)
    batch = len(sliced.inputs) - len(self.leaves)
    return program.run(sliced, [*self.leaves, *[None] * batch])

  def _compile(self, nodes, before, fixed, after, sites):
    wanted = [s.y if isinstance(s, Norm) else s.x for s in sites]
    piece = Program(nodes, [*before, *fixed], [*after, *wanted])
    lay = [
      ("norm", p.axis) if isinstance(p, Norm) else (p.kind, p.layout)
      for p in sites
    ]
    step = functools.partial(_step, piece, sites, self._gram)
    return _compiled.get(
      (piece.signature(), lay, len(before), self._gram),
      lambda: jax.jit(step, donate_argnums=3),
    )


def _step(piece: Program, sites, gram: bool, live, held, means, sums):
  """Run one piece on one batch; return the live arrays and the new sums."""
  values = program.run(piece, [*live, *held])
  after = len(values) - len(sites)
  shifts = iter(means)
  new = []
  for site, old, value in zip(sites, sums, values[after:], strict=True):
    norm = isinstance(site, Norm)
    shift = next(shifts) if norm else None
    x = _rows(site, shift, value)
    moments = _moments(x, gram and not norm)
    new.append(jax.tree.map(jnp.add, old, moments))
  return values[:after], new


def _rows(site: Site | Norm, shift: Any, x: jax.Array) -> jax.Array:
  """Return a site's activations as (groups, tokens, inputs)."""
  if not isinstance(site, Norm):
    return site.matrix(x)
  y = jnp.moveaxis(x, site.axis, -1).astype(jnp.float32)
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
