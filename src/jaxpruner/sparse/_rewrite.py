"""Run a traced program with sparse weights in place of dense ones.

The program is replayed equation by equation. A product with a sparse weight
becomes a sparse product; calls and scans are entered when a sparse weight is
passed to them; any other use decodes the weight first, which is always right.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxpruner.program import evaluate as _jaxprs
from jaxpruner.sparse import formats, ops
from jaxpruner.sparse.formats import Sparse, SparseTensor

_CALLS = frozenset({
  "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2",
  "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin",
})  # fmt: skip

_CONV_PARAMS = frozenset({
  "window_strides", "padding", "lhs_dilation", "rhs_dilation",
  "dimension_numbers", "feature_group_count", "batch_group_count",
  "precision", "preferred_element_type",
})  # fmt: skip


@formats.register
class Stacked(Sparse):
  """Layers of equal shape, stacked for a scan; each layer is sparse."""

  layers: SparseTensor  # every array with one more axis in front
  length: int = formats.static()

  @property
  def shape(self) -> tuple[int, ...]:  # pyright: ignore
    return (self.length, *self.layers.shape)

  @property
  def dtype(self) -> np.dtype:
    return self.layers.dtype

  def todense(self) -> jax.Array:
    return jax.vmap(lambda layer: layer.todense())(self.layers)


@dataclasses.dataclass(frozen=True)
class Use:
  """One place where the program consumes a weight."""

  operation: str  # "dot", "conv", or the primitive that we can't replace
  contract: tuple[int, ...] = ()
  stacked: bool = False
  x: Any = None  # shape and dtype of the other operand
  run: Any = None  # run(x, w) repeats the product


class Probe(Sparse):
  """A dense weight that writes down how it is used."""

  def __init__(self, dense: Any, uses: list[Use], axes: Any, stacked: bool):
    self.dense, self.uses, self.stacked = dense, uses, stacked
    self.axes = axes  # which axis of the parameter each axis is
    self.shape = dense.shape

  @property
  def dtype(self) -> np.dtype:
    return self.dense.dtype

  def todense(self) -> jax.Array:
    return self.dense

  def like(
    self, dense: Any, axes: Any = None, stacked: bool = False
  ) -> "Probe":
    axes = self.axes if axes is None else axes
    return Probe(dense, self.uses, axes, self.stacked or stacked)

  def note(
    self,
    operation: str,
    contract: Sequence[int] = (),
    x: Any = None,
    product: Callable[[Any, Any], Any] | None = None,
  ) -> None:
    """Write a use down in terms of the parameter's own axes."""
    axes = self.axes

    def run(x, w):
      assert product is not None
      return product(x, _permuted(w, axes))

    contract = tuple(axes[d] for d in contract)
    shape = None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
    self.uses.append(Use(operation, contract, self.stacked, shape, run))


def run(
  function: Callable[..., Any], params: Any, inputs: tuple[Any, ...]
) -> Any:
  """Return function(params, *inputs), where params may hold sparse leaves."""
  leaves, treedef = jax.tree.flatten((params, inputs), is_leaf=_is_sparse)
  arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

  def flat(values):
    full = list(leaves)
    for i, value in zip(arrays, values, strict=True):
      full[i] = value
    params, inputs = jax.tree.unflatten(treedef, full)
    return function(params, *inputs)

  operands = [leaves[i] for i in arrays]
  shapes = [jax.ShapeDtypeStruct(np.shape(a), _dtype(a)) for a in operands]
  closed, out = jax.make_jaxpr(flat, return_shape=True)(shapes)
  results = [_decoded("output", r) for r in evaluate(closed, operands)]
  return jax.tree.unflatten(jax.tree.structure(out), results)


def find_uses(
  function: Callable[..., Any], params: Any, inputs: tuple[Any, ...]
) -> list[list[Use]]:
  """Return, for each leaf of params, how the program consumes it."""
  leaves, treedef = jax.tree.flatten(params)
  uses: list[list[Use]] = [[] for _ in leaves]

  def probe(values):
    probes = [
      Probe(v, u, tuple(range(np.ndim(v))), False) if _is_array(v) else v
      for v, u in zip(values, uses, strict=True)
    ]
    return run(function, jax.tree.unflatten(treedef, probes), inputs)

  # Non-array leaves (activation functions in an Equinox module) stay outside.
  arrays = [leaf if _is_array(leaf) else None for leaf in leaves]

  def abstract(values):
    return probe(
      [leaf if v is None else v for leaf, v in zip(leaves, values, strict=True)]
    )

  jax.eval_shape(abstract, arrays)
  return uses


def evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
  """Evaluate a closed jaxpr on arrays and sparse weights.

  A weight that the program merely hands back (cast, transposed) stays sparse.
  """
  jaxpr = closed.jaxpr
  values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
  values.update(zip(jaxpr.invars, args, strict=True))

  def read(var):
    return var.val if isinstance(var, core.Literal) else values[var]

  for eqn in jaxpr.eqns:
    operands = [read(v) for v in eqn.invars]
    results = None
    if any(map(_is_sparse, operands)):
      results = _sparse_equation(eqn, operands)
    if results is None:
      name = eqn.primitive.name
      results = _jaxprs.apply(eqn, [_decoded(name, a) for a in operands])
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(v) for v in jaxpr.outvars]


def _sparse_equation(eqn: Any, args: list[Any]) -> list[Any] | None:
  """Do one equation sparsely, or return None."""
  name = eqn.primitive.name
  if name in _CALLS:
    inner = _inner(eqn)
    return None if inner is None else evaluate(inner, args)
  if name == "scan":
    return _scan(eqn, args)
  if name == "convert_element_type":
    return _converted(args[0], eqn.params["new_dtype"])
  if name == "transpose":
    return [_permuted(args[0], eqn.params["permutation"])]
  if name in ("copy", "copy_p", "optimization_barrier"):
    return args
  if name == "dot_general":
    return _dot(eqn, *args)
  if name == "conv_general_dilated":
    return _conv(eqn, *args)
  return None


def _converted(w: Any, dtype: Any) -> list[Any] | None:
  if not jnp.issubdtype(dtype, jnp.floating):
    return None
  if isinstance(w, Probe):
    return [w.like(w.dense.astype(dtype))]
  if isinstance(w, SparseTensor):
    return [w.with_values(w.values.astype(dtype))]
  return None


def _permuted(w: Any, order: Sequence[int]) -> Any:
  """Transpose an array, a probe or a sparse weight."""
  if isinstance(w, Probe):
    axes = tuple(w.axes[d] for d in order)
    return w.like(jnp.transpose(w.dense, order), axes)
  if isinstance(w, SparseTensor):
    # The kept axes are folded in order: one that permutes them is decoded.
    if [d for d in order if d in w.kept] == list(w.kept):
      shape = tuple(w.shape[d] for d in order)
      contract = tuple(list(order).index(d) for d in w.contract)
      return dataclasses.replace(w, shape=shape, contract=contract)
  return jnp.transpose(ops.decode(w), order)


def _dot(eqn: Any, lhs: Any, rhs: Any) -> list[Any] | None:
  dimensions = eqn.params["dimension_numbers"]
  (lc, rc), batch = dimensions
  left = _is_sparse(lhs)
  if batch != ((), ()) or (left and _is_sparse(rhs)):
    return None
  dtype = eqn.outvars[0].aval.dtype

  def product(x, w):
    pair = (w, x) if left else (x, w)
    precision = eqn.params["precision"]
    return ops.dot_general(*pair, dimensions, precision, dtype)

  w, x, contract = (lhs, rhs, lc) if left else (rhs, lhs, rc)
  if not isinstance(w, Probe):
    return [product(x, w)]
  w.note("dot", contract, x, product)
  return [product(x, w.dense)]


def _conv(eqn: Any, lhs: Any, rhs: Any) -> list[Any] | None:
  spec = eqn.params["dimension_numbers"]
  # What a newer JAX adds (shardings) has no meaning for one device's product.
  params = {k: v for k, v in eqn.params.items() if k in _CONV_PARAMS}
  groups = params["feature_group_count"], params["batch_group_count"]
  if _is_sparse(lhs) or groups != (1, 1):
    return None

  def product(x, w):
    return ops.conv_general_dilated(x, w, **params)

  if not isinstance(rhs, Probe):
    return [product(lhs, rhs)]
  contract = ops.conv_contract(spec)
  rhs.note("conv", contract, lhs, product)
  return [product(lhs, rhs.dense)]


def _scan(eqn: Any, args: list[Any]) -> list[Any] | None:
  """Enter a scan: sparse constants are shared, stacked weights are sliced."""
  params = eqn.params
  inner = params["jaxpr"].jaxpr

  def stacked(outside, inside):
    pairs = zip(outside, inside, strict=True)
    return [len(o.aval.shape) > len(i.aval.shape) for o, i in pairs]

  # Counted by rank: the names of scan's parameters differ between releases.
  first = len(args) - sum(stacked(eqn.invars, inner.invars))
  carried = stacked(eqn.outvars, inner.outvars).count(False)
  consts = first - carried
  shared, carry, xs = args[:consts], args[consts:first], args[first:]

  def followed(x):
    # Only a stack along the parameter's own first axis can be packed as one.
    return isinstance(x, Probe) and not x.stacked and x.axes[0] == 0

  def sliceable(x):
    if isinstance(x, Stacked):
      return x.layers
    return x.dense if followed(x) else _decoded("scan", x)

  def sliced(x, part):
    if not followed(x):
      return part
    return x.like(part, tuple(d - 1 for d in x.axes[1:]), stacked=True)

  def body(carry, parts):
    parts = [sliced(x, part) for x, part in zip(xs, parts, strict=True)]
    out = evaluate(params["jaxpr"], [*shared, *carry, *parts])
    out = [_decoded("scan", o) for o in out]
    return out[: len(carry)], out[len(carry) :]

  carry, ys = jax.lax.scan(
    body,
    [_decoded("scan", c) for c in carry],
    [sliceable(x) for x in xs],
    length=params["length"],
    reverse=params["reverse"],
    unroll=params["unroll"],
  )
  return [*carry, *ys]


def _decoded(reason: str, value: Any) -> Any:
  """Return a dense value; a probe notes what forced it."""
  if isinstance(value, Probe):
    value.note(reason)
  return value.todense() if _is_sparse(value) else value


def _inner(eqn: Any) -> Any:
  """Return the jaxpr that a call equation would run."""
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    inner = eqn.params.get(key)
    if isinstance(inner, core.ClosedJaxpr):
      return inner
    if isinstance(inner, core.Jaxpr):
      return core.ClosedJaxpr(inner, ())
  return None


def _is_sparse(value: Any) -> bool:
  return isinstance(value, Sparse)


def _is_array(value: Any) -> bool:
  return hasattr(value, "shape") and hasattr(value, "dtype")


def _dtype(value: Any) -> Any:
  return value.dtype
