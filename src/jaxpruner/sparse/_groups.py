"""Groups of coupled slices: what can be removed, its score and its cost.

A group is one index of a dim (see `_dims`): a channel, a neuron, a head, with
everything that belongs to it in every array.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner import program as _program
from jaxpruner.program import Node, Program, Var
from jaxpruner.program.primitives import PRODUCTS
from jaxpruner.sparse import _branches
from jaxpruner.sparse._branches import Branch
from jaxpruner.sparse._dims import Dim, Dims, complete, is_depthwise, resolve
from jaxpruner.sparse._removal import Removal


@dataclasses.dataclass(frozen=True)
class Traced:
  """A traced function, its dims and its parameters.

  Attributes:
    program: the operations.
    dims: the dims of its arrays.
    values: the parameters.
    names: their paths.
    lost: those of residual blocks that were taken out.
  """

  program: Program
  dims: Dims
  values: dict[Var, np.ndarray]
  names: dict[Var, str]
  lost: Collection[Var] = ()

  def without(self, blocks: Sequence[Branch]) -> "Traced":
    """Return the function without some of its residual blocks."""
    gone = [(b.node, b.side) for b in blocks]
    program, lost = _branches.without(self.program, gone)
    dims = Dims(program, len(self.values))
    return dataclasses.replace(self, program=program, dims=dims, lost=lost)

  def removable(self) -> list[Dim]:
    """Return the dims of which `shrink` can remove any indices."""
    joined = {segment.whole for segment in self.dims.segments}
    owned = dict.fromkeys(
      d
      for v in self.values
      if v not in self.lost
      for d in self.dims.flat(v)
      if not d.blocked and d not in joined
    )
    wanted = {d: np.arange(d.size) < -(-d.size // 2) for d in owned}
    values = {
      v: np.where(self.mask(v, wanted), x, np.zeros((), x.dtype))
      for v, x in self.values.items()
    }
    kept = Removal(self.program, self.dims, values).keep
    return [
      d
      for d, keep in wanted.items()
      if d in kept and keep[kept[d]].all()  # some may have been empty before
    ]

  def mask(self, var: Var, keep: Mapping[Dim, np.ndarray]) -> np.ndarray:
    """Return the mask of a parameter: 1 where all its indices are kept."""
    if var in self.lost:
      return np.zeros(var.shape, np.uint8)
    keep = complete(self.dims.segments, dict(keep))
    flat = self.dims.flat(var)
    mask = np.ones([d.size for d in flat], np.uint8)
    for i, dim in enumerate(flat):
      if dim in keep:
        mask *= _line(keep[dim], i, len(flat)).astype(np.uint8)
    return mask.reshape(var.shape)

  def fan_in(self, keep: Mapping[Dim, np.ndarray]) -> dict[Var, float]:
    """Return what is left of the axes that each parameter is summed over.

    A parameter may meet its product transposed or cast: it is then the one
    with the same dims. Of several products the first one counts.
    """
    keep = complete(self.dims.segments, dict(keep))
    dims_of = lambda v: frozenset(self.dims.flat(v))
    # A bias has the dims of an activation with a batch of one.
    alike = {dims_of(v): v for v in self.values if len(dims_of(v)) > 1}
    left: dict[Var, tuple[Node, float]] = {}
    for total in self.dims.sums:
      kept = [keep[d].mean() for d in resolve(total.axis) if d in keep]
      for var, _ in total.operands if len(total.operands) > 1 else ():
        owner = var if var in self.values else alike.get(dims_of(var))
        if owner is None:
          continue
        node, before = left.get(owner, (total.node, 1.0))
        if node is total.node:
          left[owner] = (node, before * float(np.prod(kept)))
    return {v: left[v][1] if v in left else 1.0 for v in self.values}

  def name(self, dim: Dim) -> str:
    """Name a dim by a weight that makes it: the last axis of a matrix."""
    places = [
      (len(self.dims.flat(v)) < 2, i != v_ndim - 1, order, self.names[v], i)
      for order, v in enumerate(self.values)
      for v_ndim in [len(v.shape)]
      for i, axis in enumerate(self.dims.of(v))
      if dim in resolve(axis)
    ]
    _, _, _, name, axis = min(places)
    return f"{name}[{axis}]"


def trace(
  apply_fn: Callable[..., Any], params: Any, inputs: Sequence[Any]
) -> tuple[Traced, Any]:
  """Trace a function; return also the structure of its parameters."""
  named, treedef = _leaves.flatten_with_names(params)
  values = [np.asarray(jax.numpy.asarray(leaf)) for _, leaf in named]
  shapes = treedef.unflatten(
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
  )
  program = _program.trace(apply_fn, shapes, *inputs)
  variables = program.inputs[: len(values)]
  traced = Traced(
    program,
    Dims(program, len(values)),
    dict(zip(variables, values, strict=True)),
    {
      v: _leaves.join(names)
      for v, (names, _) in zip(variables, named, strict=True)
    },
  )
  return traced, treedef


def chosen(traced: Traced, params: Any, filter_fn: Any) -> list[Dim]:
  """Return the dims that can become smaller and that the filter takes.

  Raises:
    ValueError: if there is none.
  """
  named, _ = _leaves.flatten_with_names(params)
  left_out = {
    dim
    for v, (names, leaf) in zip(traced.values, named, strict=True)
    if filter_fn is not None and not filter_fn(names, leaf)
    for dim in traced.dims.flat(v)
  }
  dims = [d for d in traced.removable() if d not in left_out]
  if not dims:
    raise ValueError(
      "no group of slices can be removed from this function: every axis of "
      "its parameters is an input, an output, or needed whole"
      + (", or left out by filter_fn" if filter_fn else "")
    )
  return dims


def _line(values: np.ndarray, axis: int, ndim: int) -> np.ndarray:
  return values.reshape([-1 if i == axis else 1 for i in range(ndim)])


@dataclasses.dataclass(frozen=True)
class Cost:
  """A sum of products of sizes: weights, bytes or operations.

  Attributes:
    terms: for each term a factor, and dims whose sizes multiply it.
    parts: the parts of joined dims.
  """

  terms: Sequence[tuple[float, Sequence[Dim]]]
  parts: Mapping[Dim, Sequence[Dim]]

  def total(self, sizes: Mapping[Dim, int]) -> float:
    """Return the cost at these sizes; other dims are whole."""
    return sum(self.term(term, sizes) for term in self.terms)

  def term(self, term: Any, sizes: Mapping[Dim, int]) -> float:
    factor, dims = term
    return factor * math.prod(self._size(d, sizes) for d in dims)

  def _size(self, dim: Dim, sizes: Mapping[Dim, int]) -> int:
    if dim in self.parts and dim not in sizes:
      return sum(self._size(part, sizes) for part in self.parts[dim])
    return sizes.get(dim, dim.size)

  def _within(self, dim: Dim) -> list[Dim]:
    parts = self.parts.get(dim, ())
    return [d for part in parts for d in self._within(part)] or [dim]

  def by_dim(self) -> dict[Dim, list[Any]]:
    """Return the terms that each dim is part of."""
    found: dict[Dim, list[Any]] = {}
    for term in self.terms:
      for dim in dict.fromkeys(d for t in term[1] for d in self._within(t)):
        found.setdefault(dim, []).append(term)
    return found


def _parts(dims: Dims) -> dict[Dim, list[Dim]]:
  found: dict[Dim, list[Dim]] = {}
  for whole, start, part in dims.segments:
    if start == sum(d.size for d in found.get(whole, ())):  # its first join
      found.setdefault(whole, []).append(part)
  return found


def size_cost(traced: Traced, per_weight: Callable[[Any], float]) -> Cost:
  """Return the cost of storing the parameters."""
  return Cost([
    (per_weight(v.dtype), traced.dims.flat(v))
    for v in traced.values
    if v not in traced.lost
  ], _parts(traced.dims))  # fmt: skip


def flops_cost(traced: Traced) -> Cost:
  """Return the operations of all products, two for a multiply and an add."""
  return Cost([
    _flops(traced.dims, node)
    for node in traced.program.nodes
    if node.name in PRODUCTS
  ], _parts(traced.dims))  # fmt: skip


def _flops(dims: Dims, node: Node) -> tuple[float, list[Dim]]:
  outer = dims.flat(node.outputs[0])
  w = node.inputs[1]
  if node.name == "dot_general":
    summed = node.params["dimension_numbers"][0][1]
  else:
    _, features, *window = node.params["dimension_numbers"].rhs_spec
    summed = window if is_depthwise(node) else [features, *window]
  inner = resolve([d for i in summed for d in dims.of(w)[i]])
  return 2.0, [*outer, *inner]


def plan(
  cost: Cost,
  scores: Mapping[Dim, np.ndarray],
  fraction: float,
  least: float,
) -> dict[Dim, np.ndarray]:
  """Remove the groups of lowest score until the cost is met.

  A group that would overshoot by more than half a percent is left, and smaller
  ones with higher scores are tried. Where groups are too large for that, the
  sizes nearby are searched.

  Args:
    cost: what is to be reduced.
    scores: a score for each index of each dim.
    fraction: what of the cost may remain.
    least: the fraction of each dim that stays.

  Returns:
    The indices that stay, as booleans, for each dim.
  """
  whole = cost.total({})
  floor = {d: max(1, math.ceil(least * d.size)) for d in scores}
  sizes = _greedy(cost, scores, floor, whole * fraction, whole * 0.005)
  if abs(cost.total(sizes) / whole - fraction) > 0.005:
    sizes = _nearby(cost, sizes, floor, whole * fraction)
  return best(scores, sizes)


def best(
  scores: Mapping[Dim, np.ndarray], sizes: Mapping[Dim, int]
) -> dict[Dim, np.ndarray]:
  """Return as booleans the indices of each dim with the highest scores.

  Args:
    scores: a score for each index of each dim.
    sizes: how many indices of each dim stay.

  Returns:
    The indices that stay.
  """
  keep = {}
  for dim, score in scores.items():
    order = np.argsort(score, kind="stable")
    keep[dim] = np.ones(dim.size, bool)
    keep[dim][order[: dim.size - sizes[dim]]] = False
  return keep


def _greedy(
  cost: Cost,
  scores: Mapping[Dim, np.ndarray],
  floor: Mapping[Dim, int],
  goal: float,
  slack: float,
) -> dict[Dim, int]:
  """Return the sizes left when the lowest scores go first."""
  sizes = {d: d.size for d in scores}
  terms = cost.by_dim()
  now = cost.total({})
  ranked = sorted(
    (score, i) for i, d in enumerate(scores) for score in scores[d].tolist()
  )
  dims = list(scores)
  for _, i in ranked:
    if now <= goal:
      break
    dim = dims[i]
    if sizes[dim] <= floor[dim] or dim not in terms:
      continue
    before = sum(cost.term(t, sizes) for t in terms[dim])
    sizes[dim] -= 1
    saved = before - sum(cost.term(t, sizes) for t in terms[dim])
    if now - saved >= goal - slack:
      now -= saved
    else:
      sizes[dim] += 1
  return sizes


def _nearby(
  cost: Cost, sizes: dict[Dim, int], floor: Mapping[Dim, int], goal: float
) -> dict[Dim, int]:
  """Return sizes that differ by a few in two dims and meet the goal best."""
  best, error = sizes, abs(cost.total(sizes) - goal)
  steps = [s for s in itertools.product(range(-3, 4), repeat=2) if any(s)]
  for pair in itertools.combinations(sizes, min(2, len(sizes))):
    for change in steps:
      moves = dict(zip(pair, change, strict=False))
      tried = {d: sizes[d] + n for d, n in moves.items()}
      if all(floor[d] <= n <= d.size for d, n in tried.items()):
        found = abs(cost.total({**sizes, **tried}) - goal)
        if found < error:
          best, error = {**sizes, **tried}, found
    if error <= 0.001 * goal:
      break
  return best


def weight_scores(
  traced: Traced, dims: Sequence[Dim], arrays: Mapping[Var, Any]
) -> dict[Dim, Any]:
  """Add up an array per parameter over the slices of each group.

  Args:
    traced: the function.
    dims: the dims of the groups.
    arrays: one for each parameter, of NumPy or of JAX.

  Returns:
    For each dim, a sum for each of its indices.
  """
  every = [*dims, *(s.whole for s in traced.dims.segments)]
  totals: dict[Dim, Any] = {d: np.zeros(d.size) for d in every}
  for var, array in arrays.items():
    flat = traced.dims.flat(var)
    if len(var.shape) < 2:
      continue  # biases and scales are removed along, but do not decide
    units = array.reshape([d.size for d in flat])
    for i, dim in enumerate(flat):
      if dim in totals:
        others = tuple(j for j in range(len(flat)) if j != i)
        totals[dim] = totals[dim] + units.sum(others)
  return _to_parts(traced, totals, dims)


def _to_parts(
  traced: Traced, totals: dict[Dim, Any], dims: Sequence[Dim]
) -> dict[Dim, Any]:
  """Add the scores of joined dims to those of their parts."""
  for whole, start, part in reversed(traced.dims.segments):
    if part in totals:
      totals[part] = totals[part] + totals[whole][start : start + part.size]
  return {d: totals[d] for d in dims}


def relative(scores: Mapping[Dim, np.ndarray]) -> dict[Dim, np.ndarray]:
  """Divide scores by their mean within the dim, so that dims compare."""
  return {
    d: s / mean if (mean := float(np.abs(s).mean())) > 0 else s
    for d, s in scores.items()
  }


def activation_scores(
  traced: Traced, dims: Sequence[Dim], inputs: Sequence[Any]
) -> dict[Dim, np.ndarray]:
  """Score a group by what it adds to sums: its activations times its weights.

  For each sum over a dim, |x| |w| of each index, with norms over everything
  else.
  """
  chosen, dims = dims, [*dims, *{s.whole: 0 for s in traced.dims.segments}]
  wanted = set(dims)
  sums: dict[Node, list[Any]] = {}
  for total in traced.dims.sums:
    shared = [d for d in resolve(total.axis) if d in wanted]
    if len(total.operands) == 2 and shared:
      sums.setdefault(total.node, []).append((total, shared))

  @jax.jit
  def run(arguments):
    found = {i: jnp.zeros(d.size) for i, d in enumerate(dims)}
    number = {d: i for i, d in enumerate(dims)}

    def visit(node, values):
      known = dict(zip(node.inputs, values, strict=True))
      for total, shared in sums.get(node, ()):
        for dim in shared:
          parts = [_norms(traced.dims, v, known[v], dim)
                   for v, _ in total.operands]  # fmt: skip
          found[number[dim]] += parts[0] * parts[1]
      return _program.bind(node, values)

    _program.run(traced.program, arguments, visit)
    return found

  found = run([*traced.values.values(), *inputs])
  totals = {d: np.asarray(found[i], np.float64) for i, d in enumerate(dims)}
  return _to_parts(traced, totals, chosen)


def _norms(dims: Dims, var: Var, value: Any, dim: Dim) -> jax.Array:
  """Return the norm of an array at each index of a dim."""
  flat = dims.flat(var)
  units = jnp.square(value.astype(jnp.float32)).reshape([d.size for d in flat])
  others = tuple(i for i, d in enumerate(flat) if d is not dim)
  kept = units.sum(others)
  while kept.ndim > 1:  # a square weight may have it twice
    kept = kept.sum(-1)
  return jnp.sqrt(kept)
