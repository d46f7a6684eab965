"""Run a traced program with sparse weights in place of dense ones.

A visitor of the traced program: a product with a sparse weight becomes a sparse
product; calls and scans are entered when a sparse weight is passed to them; any
other operation gets the decoded weight, which is always right.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import program
from jaxpruner.program import Node, jaxprs
from jaxpruner.sparse import formats, ops
from jaxpruner.sparse.formats import Sparse, SparseTensor

# Copies that mean nothing to a packed weight. `stop_gradient` would not reach
# its values, and a placement not its arrays.
_COPIES = frozenset({"copy", "name", "optimization_barrier"})

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

  operation: str  # "dot", "conv", "take", or what we can't replace
  contract: tuple[int, ...] = ()
  stacked: bool = False
  x: Any = None  # shape and dtype of the other operand
  run: Any = None  # run(x, w) repeats the product


class Recorder(Sparse):
  """A dense weight that records the operations that use it."""

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
  ) -> "Recorder":
    axes = self.axes if axes is None else axes
    return Recorder(dense, self.uses, axes, self.stacked or stacked)

  def record(
    self,
    operation: str,
    contract: Sequence[int] = (),
    x: Any = None,
    product: Callable[[Any, Any], Any] | None = None,
  ) -> None:
    """Record a use in terms of the parameter's own axes."""
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
  shapes = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in operands]
  closed, out = jax.make_jaxpr(flat, return_shape=True)(shapes)
  results = [_decoded("output", r) for r in evaluate(closed, operands)]
  return jax.tree.unflatten(jax.tree.structure(out), results)


def find_uses(
  function: Callable[..., Any], params: Any, inputs: tuple[Any, ...]
) -> list[list[Use]]:
  """Return, for each leaf of params, how the program consumes it."""
  leaves, treedef = jax.tree.flatten(params)
  uses: list[list[Use]] = [[] for _ in leaves]

  def recorded(values):
    recorders = [
      Recorder(v, u, tuple(range(np.ndim(v))), False) if _is_array(v) else v
      for v, u in zip(values, uses, strict=True)
    ]
    return run(function, jax.tree.unflatten(treedef, recorders), inputs)

  # Non-array leaves (activation functions in an Equinox module) stay outside.
  arrays = [leaf if _is_array(leaf) else None for leaf in leaves]

  def abstract(values):
    return recorded(
      [leaf if v is None else v for leaf, v in zip(leaves, values, strict=True)]
    )

  jax.eval_shape(abstract, arrays)
  return uses


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
  """Evaluate a jaxpr on arrays and sparse weights.

  A weight that the program merely hands back (cast, transposed) stays sparse.
  """
  return program.run(jaxpr, args, _visit)


def _visit(node: Node, args: list[Any]) -> list[Any]:
  """Do one operation: sparsely if there is a way, else with dense operands."""
  results = None
  if any(map(_is_sparse, args)):
    results = _sparse(node, args)
  if results is None:
    reason = program.describe(node.name)
    results = program.bind(node, [_decoded(reason, a) for a in args])
  return results


def _sparse(node: Node, args: list[Any]) -> list[Any] | None:
  """Do an operation with a sparse operand, or return None."""
  callee = jaxprs.callee(node.eqn)
  if callee is not None:
    return evaluate(callee, args)
  if node.name in _COPIES:
    return args
  rule = _RULES.get(node.name)
  return None if rule is None else rule(node, *args)


def _converted(node: Node, w: Any) -> list[Any] | None:
  dtype = node.params["new_dtype"]
  if not jnp.issubdtype(dtype, jnp.floating):
    return None
  if isinstance(w, Recorder):
    return [w.like(w.dense.astype(dtype))]
  if isinstance(w, SparseTensor):
    return [w.with_values(w.values.astype(dtype))]
  return None


def _permuted(w: Any, order: Sequence[int]) -> Any:
  """Transpose an array, a recorder or a sparse weight."""
  if isinstance(w, Recorder):
    axes = tuple(w.axes[d] for d in order)
    return w.like(jnp.transpose(w.dense, order), axes)
  if isinstance(w, SparseTensor):
    # The kept axes are folded in order: one that permutes them is decoded.
    if [d for d in order if d in w.kept] == list(w.kept):
      shape = tuple(w.shape[d] for d in order)
      contract = tuple(list(order).index(d) for d in w.contract)
      return dataclasses.replace(w, shape=shape, contract=contract)
  return jnp.transpose(ops.decode(w), order)


def _transposed(node: Node, w: Any) -> list[Any]:
  return [_permuted(w, node.params["permutation"])]


def _dot(node: Node, lhs: Any, rhs: Any) -> list[Any] | None:
  dimensions = node.params["dimension_numbers"]
  (lc, rc), batch = dimensions
  left = _is_sparse(lhs)
  if batch != ((), ()) or (left and _is_sparse(rhs)):
    return None
  dtype = node.outputs[0].dtype

  def product(x, w):
    pair = (w, x) if left else (x, w)
    precision = node.params["precision"]
    return ops.dot_general(*pair, dimensions, precision, dtype)

  w, x, contract = (lhs, rhs, lc) if left else (rhs, lhs, rc)
  if not isinstance(w, Recorder):
    return [product(x, w)]
  w.record("dot", contract, x, product)
  return [product(x, w.dense)]


def _conv(node: Node, lhs: Any, rhs: Any) -> list[Any] | None:
  spec = node.params["dimension_numbers"]
  # What a newer JAX adds (shardings) has no meaning for one device's product.
  params = {k: v for k, v in node.params.items() if k in _CONV_PARAMS}
  groups = params["feature_group_count"], params["batch_group_count"]
  if _is_sparse(lhs) or groups != (1, 1):
    return None

  def product(x, w):
    return ops.conv_general_dilated(x, w, **params)

  if not isinstance(rhs, Recorder):
    return [product(lhs, rhs)]
  contract = ops.conv_contract(spec)
  rhs.record("conv", contract, lhs, product)
  return [product(lhs, rhs.dense)]


def _take(w: Any, axis: int, indices: Any) -> Any:
  """Return slices of a weight along an axis, or None if it can't say."""
  if isinstance(w, Recorder):
    w.record("take", [d for d in range(w.ndim) if d != axis])
    return jnp.take(w.dense, indices, axis, mode="clip")
  if isinstance(w, SparseTensor) and w.kept == (axis,):
    return w.take(indices)
  return None


def _gather(node: Node, w: Any, indices: Any) -> list[Any] | None:
  """Look up rows of a table: decode these, then gather from them alone."""
  numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
  mapped = numbers.start_index_map
  cut = [d for d in range(len(sizes)) if not sizes[d] == np.shape(w)[d] > 1]
  if not _is_sparse(w) or len(cut) != 1 or numbers.operand_batching_dims:
    return None
  (axis,) = cut
  fill = node.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
  # Along an axis taken whole a start of 0 is the only one within bounds.
  if axis not in mapped or sizes[axis] != 1 or (fill and len(mapped) > 1):
    return None
  place = mapped.index(axis)
  flat = indices[..., place].reshape(-1)
  rows = _take(w, axis, jnp.clip(flat, 0, w.shape[axis] - 1))
  if rows is None:
    return None
  order = jnp.arange(len(flat), dtype=indices.dtype)
  if fill:  # an index outside the table must stay outside
    inside = (flat >= 0) & (flat < w.shape[axis])
    order = jnp.where(inside, order, len(flat))
  order = order.reshape(indices.shape[:-1])
  indices = indices.at[..., place].set(order)
  return program.bind(node, [rows, indices], indices_are_sorted=False)


def _dynamic_slice(node: Node, w: Any, *starts: Any) -> list[Any] | None:
  """Look up one row of a table."""
  sizes = node.params["slice_sizes"]
  cut = [d for d in range(len(sizes)) if sizes[d] != w.shape[d]]
  if len(cut) != 1 or sizes[cut[0]] != 1:
    return None
  (axis,) = cut
  index = jnp.clip(starts[axis], 0, w.shape[axis] - 1)
  row = _take(w, axis, jnp.reshape(index, (1,)))
  return None if row is None else [row]


def _scan(node: Node, *args: Any) -> list[Any]:
  """Enter a scan: sparse constants are shared, stacked weights are sliced."""
  scan = jaxprs.scan(node.eqn)
  first = scan.constants + scan.carried
  shared, xs = args[: scan.constants], args[first:]
  start = [_decoded("scan", c) for c in args[scan.constants : first]]

  def followed(x):
    # Only a stack along the parameter's own first axis can be packed as one.
    return isinstance(x, Recorder) and not x.stacked and x.axes[0] == 0

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
    out = evaluate(scan.body, [*shared, *carry, *parts])
    out = [_decoded("scan", o) for o in out]
    return out[: len(carry)], out[len(carry) :]

  carry, ys = jax.lax.scan(
    body,
    start,
    [sliceable(x) for x in xs],
    length=scan.length,
    reverse=scan.reverse,
    unroll=scan.unroll,
  )
  return [*carry, *ys]


_RULES: dict[str, Callable[..., list[Any] | None]] = {
  "conv_general_dilated": _conv,
  "convert_element_type": _converted,
  "dot_general": _dot,
  "dynamic_slice": _dynamic_slice,
  "gather": _gather,
  "scan": _scan,
  "transpose": _transposed,
}


def _decoded(reason: str, value: Any) -> Any:
  """Return a dense value; a recorder notes the operation that needs it."""
  if isinstance(value, Recorder):
    value.record(reason)
  return value.todense() if _is_sparse(value) else value


def _is_sparse(value: Any) -> bool:
  return isinstance(value, Sparse)


def _is_array(value: Any) -> bool:
  return hasattr(value, "shape") and hasattr(value, "dtype")
