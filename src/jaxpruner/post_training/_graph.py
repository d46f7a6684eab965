"""Where a traced function multiplies activations by weights.

A weight is followed from its place in the parameter tree through casts,
transposes, reshapes and slices into products; nothing depends on the class of
the module that holds it. Every such product is seen as one matrix product
`x (groups, tokens, inputs) @ w (groups, inputs, outputs)`: experts and grouped
convolutions have several groups, windows of a convolution are its inputs.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.program.trace import Node, Program, Var

_VIEWS = frozenset(
  """transpose convert_element_type reshape squeeze slice broadcast_in_dim copy
  copy_p split""".split()
)
# Names of the running mean of a normalisation, and of the variance beside it.
_NORMS = {
  "mean": "var",
  "moving_mean": "moving_variance",
  "running_mean": "running_var",
}


class View(NamedTuple):
  """A parameter, or part of it, in another shape."""

  leaf: int
  chain: tuple[tuple[Node, int], ...] = ()

  def then(self, node: Node, output: int) -> "View":
    return View(self.leaf, (*self.chain, (node, output)))

  @property
  def repeats(self) -> bool:
    return any(
      math.prod(node.outputs[0].shape) > math.prod(node.inputs[0].shape)
      for node, _ in self.chain
    )

  def indices(self, shape: Sequence[int]) -> np.ndarray:
    """Return which element of the parameter each element is."""
    at: Any = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    for node, output in self.chain:
      if node.name != "convert_element_type":
        at = node.primitive.bind(at, **node.params)
        at = at[output] if node.primitive.multiple_results else at
    return np.asarray(at)


@dataclasses.dataclass(frozen=True)
class Probe:
  """Activations that a weight multiplies, and how to lay them out."""

  x: Var
  kind: str
  layout: tuple

  def matrix(self, x: jax.Array) -> jax.Array:
    """Return the activations as (groups, tokens, inputs) in float32."""
    lay = _product_rows if self.kind == "dot" else _window_rows
    return lay(x, *self.layout).astype(jnp.float32)


@dataclasses.dataclass(eq=False)
class Part:
  """A weight (or one layer of a stack) as (groups, inputs, outputs)."""

  leaf: int
  view: View
  arrange: Callable[[Any], Any]
  shape: tuple[int, ...]
  probes: list[Probe]
  run: int  # inputs that lie in one run: channels of a convolution
  bias: int | None = None
  position: int = -1

  def indices(self, shape: Sequence[int]) -> np.ndarray:
    return self.arrange(self.view.indices(shape))

  def matrix(self, leaf: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight as (groups, inputs, outputs), and its `indices`."""
    at = self.indices(leaf.shape)
    return np.asarray(leaf).reshape(-1)[at].astype(np.float32), at


class Norm(NamedTuple):
  """A normalisation by running statistics: (y - mean) / sqrt(var)."""

  mean: int
  var: int
  y: Var
  axis: int
  position: int


@dataclasses.dataclass(eq=False)
class Graph:
  """The products of a program, in the order in which it runs."""

  program: Program
  parts: list[Part]
  norms: list[Norm]
  other: dict[int, set[str]]  # leaf -> operations that forbid pruning it
  moving: set[Var]  # what depends on the batch
  position: dict[Probe, int]  # the first operation that reads it


def find(program: Program, names: Sequence[tuple[str, ...]]) -> Graph:
  """Find the products and normalisations of a program.

  Args:
    program: a traced function; its first inputs are the parameters.
    names: the path of each parameter.
  """
  views = {v: View(i) for i, v in enumerate(program.inputs[: len(names)])}
  shapes = [v.shape for v in program.inputs]
  graph = Graph(program, [], [], {}, set(program.inputs[len(names) :]), {})
  users: dict[Var, list[Node]] = {}
  for node in program.nodes:
    for v in node.inputs:
      users.setdefault(v, []).append(node)
  products: list[tuple[Part, Node]] = []
  for position, node in enumerate(program.nodes):
    weights = [v for v in node.inputs if v in views]
    if not any(v in graph.moving for v in node.inputs):
      if len(weights) == 1 and node.name in _VIEWS:
        for i, out in enumerate(node.outputs):
          views[out] = views[weights[0]].then(node, i)
        continue
    else:
      graph.moving.update(node.outputs)
      part = _product(node, views, graph.moving)
      if part is not None:
        graph.position.setdefault(part.probes[0], position)
        products.append((part, node))
        continue
      norm = _norm(node, position, views, graph.moving, names, shapes)
      if norm is not None:
        graph.norms.append(norm)
    for v in weights:
      graph.other.setdefault(views[v].leaf, set()).add(node.name)
  for v in program.outputs:
    if v in views:
      graph.other.setdefault(views[v].leaf, set()).add("output")
  graph.parts = _merged(products, graph.position, shapes)
  for part, node in products:  # a bias may be shaped after the product
    part.bias = _bias(node, users, views, part.shape, shapes)
  for leaf in {p.leaf for p in graph.parts}:
    sizes = [math.prod(p.shape) for p in graph.parts if p.leaf == leaf]
    if sum(sizes) > math.prod(shapes[leaf]):
      graph.other.setdefault(leaf, set()).add("products in several layouts")
  return graph


def _merged(products, position, shapes) -> list[Part]:
  """Return the parts of all products; products of the same elements share one.

  Which elements those are takes an index for each, so it is looked at only
  where a parameter has several products.
  """
  uses = collections.Counter(part.leaf for part, _ in products)
  found: dict[Any, Part] = {}
  for i, (part, node) in enumerate(products):
    key = part.leaf
    if uses[part.leaf] > 1:
      at = part.indices(shapes[part.leaf])
      key = part.leaf, at.shape, hash(at.tobytes())
    known = found.setdefault(key, part)
    known.probes += [p for p in part.probes if p not in known.probes]
    known.position = max(known.position, position[part.probes[0]])
    products[i] = known, node
  return list(found.values())


def _product(node: Node, views: dict[Var, View], moving: set[Var]):
  """Return the weight of a product with activations, or None."""
  if node.name not in ("dot_general", "conv_general_dilated"):
    return None
  x, w = node.inputs[:2]
  left = x in views
  if left:
    x, w = w, x
  if w not in views or x not in moving or views[w].repeats:
    return None
  if node.name == "dot_general":
    (xc, wc), (xb, wb) = node.params["dimension_numbers"]
    if left:
      xc, wc, xb, wb = wc, xc, wb, xb
    pairs = sorted(zip(wc, xc, strict=True))
    wc, xc = ([p[i] for p in pairs] for i in (0, 1))
    arrange = functools.partial(_matrix, batch=tuple(wb), contract=tuple(wc))
    probe = Probe(x, "dot", (tuple(xb), tuple(xc)))
    run = math.prod(w.shape[d] for d in wc)
    return _part(views[w], arrange, w, probe, run)
  if left or node.params["batch_group_count"] != 1:
    return None
  spec = node.params["dimension_numbers"]
  groups = node.params["feature_group_count"]
  window = tuple(w.shape[d] for d in spec.rhs_spec[2:])
  layout = (
    spec.lhs_spec,
    window,
    tuple(node.params["window_strides"]),
    tuple(map(tuple, node.params["padding"])),
    tuple(node.params["lhs_dilation"]),
    tuple(node.params["rhs_dilation"]),
    groups,
  )
  arrange = functools.partial(_kernel, spec=spec.rhs_spec, groups=groups)
  run = w.shape[spec.rhs_spec[1]]
  probe = Probe(x, "conv", layout)
  return _part(views[w], arrange, w, probe, run)


def _part(view: View, arrange, w: Var, probe: Probe, run: int) -> Part:
  like = jax.ShapeDtypeStruct(w.shape, w.dtype)
  shape = jax.eval_shape(arrange, like).shape
  return Part(view.leaf, view, arrange, shape, [probe], run)


def _matrix(w: Any, batch: tuple, contract: tuple) -> Any:
  outer = [d for d in range(w.ndim) if d not in batch + contract]
  size = lambda dims: math.prod(w.shape[d] for d in dims)
  shape = size(batch), size(contract), size(outer)
  return w.transpose(*batch, *contract, *outer).reshape(shape)


def _kernel(w: Any, spec: tuple, groups: int) -> Any:
  rows = w.transpose(spec[0], *spec[2:], spec[1])
  rows = rows.reshape(groups, w.shape[spec[0]] // groups, -1)
  return rows.transpose(0, 2, 1)


def _product_rows(x: jax.Array, batch: tuple, contract: tuple) -> jax.Array:
  outer = [d for d in range(x.ndim) if d not in batch + contract]
  size = lambda dims: math.prod(x.shape[d] for d in dims)
  shape = size(batch), size(outer), size(contract)
  return x.transpose(*batch, *outer, *contract).reshape(shape)


def _window_rows(
  x: jax.Array, spec, window, strides, padding, dilation, reach, groups
) -> jax.Array:
  """Lay every window of a convolution out as a row, channels innermost."""
  x = x.transpose(spec[0], *spec[2:], spec[1])
  edges = [
    (low, high, d - 1) for (low, high), d in zip(padding, dilation, strict=True)
  ]
  x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
  sizes = [
    (n - (k - 1) * d - 1) // s + 1
    for n, k, d, s in zip(x.shape[1:-1], window, reach, strides, strict=True)
  ]
  slices = []
  for offset in np.ndindex(*window):
    start = [o * d for o, d in zip(offset, reach, strict=True)]
    stop = [
      a + (n - 1) * s + 1 for a, n, s in zip(start, sizes, strides, strict=True)
    ]
    slices.append(
      jax.lax.slice(
        x,
        (0, *start, 0),
        (x.shape[0], *stop, x.shape[-1]),
        (1, *strides, 1),
      )
    )
  rows = jnp.stack(slices, axis=-2)
  rows = rows.reshape(-1, len(slices), groups, x.shape[-1] // groups)
  rows = rows.transpose(2, 0, 1, 3)
  return rows.reshape(groups, rows.shape[1], -1)


def _bias(node, users, views, matrix, shapes) -> int | None:
  """Return the parameter added to the product right after it."""
  outputs = [node.outputs[0]]
  for user in users.get(outputs[0], ()):
    if user.name in ("reshape", "convert_element_type", "transpose"):
      outputs += user.outputs
  for y in outputs:
    for user in users.get(y, ()):
      for v in user.inputs:
        if user.name == "add" and v in views and matrix[0] == 1:
          leaf = views[v].leaf
          if math.prod(shapes[leaf]) == matrix[2]:
            return leaf
  return None


def _norm(node, position, views, moving, names, shapes) -> Norm | None:
  if node.name != "sub" or node.inputs[1] not in views:
    return None
  y, view = node.inputs[0], views[node.inputs[1]]
  *scope, last = names[view.leaf]
  if y not in moving or last not in _NORMS:
    return None
  other = (*scope, _NORMS[last])
  if other not in names:
    return None
  var = list(names).index(other)
  shape = shapes[view.leaf]
  if shapes[var] != shape or len(shape) != 1:
    return None
  at = np.broadcast_to(view.indices(shape), y.shape)
  for axis in range(at.ndim):
    line = at[tuple(slice(None) if d == axis else 0 for d in range(at.ndim))]
    if shape[0] > 1 and np.array_equal(line, np.arange(shape[0])):
      return Norm(view.leaf, var, y, axis, position)
  return None
