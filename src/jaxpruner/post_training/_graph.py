"""Find the products of activations and weights in a traced function.

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

from jaxpruner import program as _program
from jaxpruner.program import Node, Program, Var, windows
from jaxpruner.program.primitives import CASTS, COPIES, PRODUCTS, VIEWS

# Operations of one operand through which a weight stays the same weights.
_FOLLOWED = VIEWS | CASTS | COPIES
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
    """Return, for each element, its index in the flat parameter."""
    at: Any = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    for node, output in self.chain:
      if node.name not in CASTS:  # an index has no fraction to round
        at = _program.bind(node, [at])[output]
    return np.asarray(at)


@dataclasses.dataclass(frozen=True)
class Site:
  """A product of activations and a weight, with the activations' layout."""

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
  sites: list[Site]
  run_length: int  # inputs side by side: channels of a convolution
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
  moving: set[Var]  # variables that depend on the batch
  position: dict[Site, int]  # the first operation that reads it


def find(program: Program, names: Sequence[tuple[str, ...]]) -> Graph:
  """Find the products and normalisations of a program.

  Args:
    program: a traced function; its first inputs are the parameters.
    names: the path of each parameter.
  """
  finder = _Finder(program, names)
  for position, node in enumerate(program.nodes):
    finder.visit(position, node)
  for v in program.outputs:
    if v in finder.views:
      finder.forbid(finder.views[v].leaf, "output")
  shapes = finder.shapes
  parts = _merged(finder.products, finder.position, shapes)
  users = program.users()
  for part, node in finder.products:  # a bias may be shaped after the product
    part.bias = _bias(node, users, finder.views, part.shape, shapes)
  for leaf in {p.leaf for p in parts}:
    sizes = [math.prod(p.shape) for p in parts if p.leaf == leaf]
    if sum(sizes) > math.prod(shapes[leaf]):
      finder.forbid(leaf, "products in several layouts")
  return Graph(
    program,
    parts,
    finder.norms,
    finder.other,
    finder.moving,
    finder.position,
  )


class _Finder:
  """Follows parameters and activations through a program.

  Attributes:
    views: variables that are a parameter, or part of one, in another shape.
    moving: variables that depend on the batch.
    derived: variables that depend on parameters, not on the batch.
    products: weights of products, with the product.
    norms: normalisations by running statistics.
    other: leaf -> operations that forbid pruning it.
    position: the first operation that reads each site.
  """

  def __init__(self, program: Program, names: Sequence[tuple[str, ...]]):
    weights, inputs = program.inputs[: len(names)], program.inputs[len(names) :]
    self.names = names
    self.shapes = [v.shape for v in weights]
    self.views = {v: View(i) for i, v in enumerate(weights)}
    self.moving = set(inputs)
    self.derived = set(weights)
    self.products: list[tuple[Part, Node]] = []
    self.norms: list[Norm] = []
    self.other: dict[int, set[str]] = {}
    self.position: dict[Site, int] = {}

  def forbid(self, leaf: int, operation: str) -> None:
    self.other.setdefault(leaf, set()).add(operation)

  def visit(self, position: int, node: Node) -> None:
    weights = [v for v in node.inputs if v in self.views]
    if any(v in self.moving for v in node.inputs):
      self.moving.update(node.outputs)
      followed = self._meets_activations(position, node)
    else:
      followed = self._relaid(node, weights) or self._with_constant(node)
      if not self.derived.isdisjoint(node.inputs):
        self.derived.update(node.outputs)
    if not followed:
      for v in weights:
        self.forbid(self.views[v].leaf, _program.describe(node.name))

  def _relaid(self, node: Node, weights: Sequence[Var]) -> bool:
    """Follow a parameter through a change of layout."""
    if len(weights) != 1 or node.name not in _FOLLOWED or len(node.inputs) > 1:
      return False
    for i, out in enumerate(node.outputs):
      self.views[out] = self.views[weights[0]].then(node, i)
    return True

  def _with_constant(self, node: Node) -> bool:
    """Tell whether a weight is multiplied by numbers of the program itself.

    The first step of a recurrence multiplies a state of zeros. Nothing of the
    data is there to be counted, and nothing forbids pruning.
    """
    numbers = [v for v in node.inputs[:2] if v not in self.derived]
    return node.name in PRODUCTS and len(numbers) == 1

  def _meets_activations(self, position: int, node: Node) -> bool:
    """Note a product or a normalisation; tell whether it was a product."""
    part = _product(node, self.views, self.moving)
    if part is not None:
      self.position.setdefault(part.sites[0], position)
      self.products.append((part, node))
      return True
    norm = _norm(
      node, position, self.views, self.moving, self.names, self.shapes
    )
    if norm is not None:
      self.norms.append(norm)
    return False


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
    known.sites += [s for s in part.sites if s not in known.sites]
    known.position = max(known.position, position[part.sites[0]])
    products[i] = known, node
  return list(found.values())


def _product(
  node: Node, views: dict[Var, View], moving: set[Var]
) -> Part | None:
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
    return _dot(node, views[w], x, w, left)
  if left or node.params["batch_group_count"] != 1:
    return None
  return _conv(node, views[w], x, w)


def _dot(node: Node, view: View, x: Var, w: Var, left: bool) -> Part:
  (xc, wc), (xb, wb) = node.params["dimension_numbers"]
  if left:
    xc, wc, xb, wb = wc, xc, wb, xb
  pairs = sorted(zip(wc, xc, strict=True))
  wc, xc = ([p[i] for p in pairs] for i in (0, 1))
  arrange = functools.partial(_matrix, batch=tuple(wb), contract=tuple(wc))
  site = Site(x, "dot", (tuple(xb), tuple(xc)))
  return _part(view, arrange, w, site, math.prod(w.shape[d] for d in wc))


def _conv(node: Node, view: View, x: Var, w: Var) -> Part:
  spec = node.params["dimension_numbers"]
  groups = node.params["feature_group_count"]
  layout = (
    groups,
    spec.lhs_spec,
    tuple(w.shape[d] for d in spec.rhs_spec[2:]),
    tuple(node.params["window_strides"]),
    tuple(map(tuple, node.params["padding"])),
    tuple(node.params["lhs_dilation"]),
    tuple(node.params["rhs_dilation"]),
  )
  arrange = functools.partial(_kernel, spec=spec.rhs_spec, groups=groups)
  site = Site(x, "conv", layout)
  return _part(view, arrange, w, site, w.shape[spec.rhs_spec[1]])


def _part(view: View, arrange, w: Var, site: Site, run: int) -> Part:
  like = jax.ShapeDtypeStruct(w.shape, w.dtype)
  shape = jax.eval_shape(arrange, like).shape
  return Part(view.leaf, view, arrange, shape, [site], run)


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


def _window_rows(x: jax.Array, groups: int, *layout: Any) -> jax.Array:
  """Lay every window of a convolution out as a row, channels innermost."""
  rows = windows.rows(x, *layout)
  taps, channels = rows.shape[-2:]
  rows = rows.reshape(-1, taps, groups, channels // groups)
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
