"""Run a traced program with sparse weights in place of dense ones.

A visitor of the traced program: a product with a sparse weight becomes a sparse
product; calls and scans are entered when a sparse weight is passed to them; any
other operation gets the decoded weight, which is always right.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import program
from jaxpruner.program import Node, jaxprs
from jaxpruner.program.primitives import ELEMENTWISE, REDUCTIONS
from jaxpruner.sparse import _parts, _products
from jaxpruner.sparse._parts import Parts, Stacked
from jaxpruner.sparse._recording import Recorder, Use
from jaxpruner.sparse.formats import Sparse, SparseTensor

# Copies that mean nothing to a packed weight. `stop_gradient` would not reach
# its values, and a placement not its arrays.
_COPIES = frozenset({"copy", "name", "optimization_barrier"})


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
  results = [
    _decoded("returned by the function", r) for r in evaluate(closed, operands)
  ]
  return jax.tree.unflatten(jax.tree.structure(out), results)


def find_uses(
  function: Callable[..., Any], params: Any, inputs: tuple[Any, ...]
) -> list[list[Use]]:
  """Return, for each leaf of params, how the program consumes it."""
  leaves, treedef = jax.tree.flatten(params)
  uses: list[list[Use]] = [[] for _ in leaves]

  def recorded(values):
    recorders = [
      Recorder(v, u) if _is_array(v) else v
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
    alone = all(_is_sparse(a) or np.ndim(a) == 0 for a in args)
    results = _dense(node, args, _words(node.name, alone))
  return results


def _dense(node: Node, args: Sequence[Any], why: str) -> list[Any]:
  """Do an operation with decoded weights."""
  return program.bind(node, [_decoded(why, a) for a in args])


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
  return _maybe(_parts.cast(w, dtype))


def _maybe(result: Any) -> list[Any] | None:
  return None if result is None else [result]


def _transposed(node: Node, w: Any) -> list[Any] | None:
  return _maybe(_parts.permuted(w, node.params["permutation"]))


def _reshaped(node: Node, w: Any) -> list[Any] | None:
  """Reshape a weight, also where axes of length 1 come or go."""
  shape = node.outputs[0].shape
  if np.prod(shape) != np.prod(w.shape):
    return None  # a broadcast
  return _maybe(_parts.reshaped(w, shape))


def _sliced(node: Node, w: Any) -> list[Any] | None:
  starts, stops = node.params["start_indices"], node.params["limit_indices"]
  cut = [d for d, n in enumerate(w.shape) if (starts[d], stops[d]) != (0, n)]
  strides = node.params["strides"] or (1,)
  if len(cut) != 1 or set(strides) != {1}:
    return None
  return _maybe(_parts.sliced(w, cut[0], starts[cut[0]], stops[cut[0]]))


def _split(node: Node, w: Any) -> list[Any] | None:
  axis = node.params["axis"]
  stops = np.cumsum(node.params["sizes"]).tolist()
  ranges = zip([0, *stops[:-1]], stops, strict=True)
  parts = [_parts.sliced(w, axis, a, b) for a, b in ranges]
  return None if any(p is None for p in parts) else parts


def _concatenated(node: Node, *args: Any) -> list[Any] | None:
  recording = any(map(_is_recorded, args))
  if recording and not all(map(_is_recorded, args)):
    return None  # not weights alone
  return [Parts(tuple(args), node.params["dimension"])]


def _is_recorded(w: Any) -> bool:
  if isinstance(w, Parts):
    return all(map(_is_recorded, w.parts))
  return isinstance(w, Recorder)


def _dot(node: Node, lhs: Any, rhs: Any) -> list[Any] | None:
  if _is_sparse(lhs) and _is_sparse(rhs):
    why = "multiplied by another weight: do it once and pass the result"
    return _dense(node, [lhs, rhs], why)
  dot = _products.Dot(
    _tuples(node.params["dimension_numbers"]),
    node.params["precision"],
    node.outputs[0].dtype,
  )
  return [dot(lhs, rhs)]


def _tuples(value: Any) -> Any:
  if isinstance(value, list | tuple):
    return tuple(map(_tuples, value))
  return value


def _conv(node: Node, x: Any, w: Any) -> list[Any] | None:
  if _is_sparse(x):
    return _dense(node, [x, w], "the image of a convolution, not its kernel")
  return _maybe(_products.Conv(node.params)(x, w))


def _ragged_dot(node: Node, x: Any, w: Any, sizes: Any) -> list[Any] | None:
  numbers = node.params["ragged_dot_dimension_numbers"]
  (xc, wc), (xb, wb) = numbers.dot_dimension_numbers
  plain = len(xc) == 1 and not xb and not wb and np.ndim(x) == 2
  groups, ragged = numbers.rhs_group_dimensions, numbers.lhs_ragged_dimensions
  offset = node.params.get("group_offset")
  if _is_sparse(x) or not plain or len(groups) != 1 or offset is not None:
    return None
  if tuple(ragged) == tuple(xc):
    return None
  dtype = node.outputs[0].dtype
  dot = _products.RaggedDot(xc[0], wc[0], groups[0], dtype)
  if isinstance(w, Recorder):
    dot.record(x, w)
    return program.bind(node, [x, w.dense, sizes])
  return _maybe(dot(x, w, sizes))


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


def _cond(node: Node, index: Any, *operands: Any) -> list[Any]:
  """Enter the branches."""

  def branch(body):
    return lambda: [
      _decoded("returned by a cond", v) for v in evaluate(body, operands)
    ]

  return jax.lax.switch(index, [branch(b) for b in node.params["branches"]])


def _while(node: Node, *operands: Any) -> list[Any]:
  """Enter a loop: weights are its constants."""
  params = node.params
  first = params["cond_nconsts"]
  second = first + params["body_nconsts"]
  test, shared = operands[:first], operands[first:second]
  start = [_decoded("carried by a while", v) for v in operands[second:]]

  def body(carry):
    results = evaluate(params["body_jaxpr"], [*shared, *carry])
    return [_decoded("carried by a while", v) for v in results]

  def go_on(carry):
    return _decoded(
      "carried by a while", evaluate(params["cond_jaxpr"], [*test, *carry])[0]
    )

  return jax.lax.while_loop(go_on, body, start)


def _scan(node: Node, *args: Any) -> list[Any]:
  """Enter a scan: sparse constants are shared, stacked weights are sliced."""
  scan = jaxprs.scan(node.eqn)
  first = scan.constants + scan.carried
  shared, xs = args[: scan.constants], args[first:]
  start = [
    _decoded("carried by a scan", c) for c in args[scan.constants : first]
  ]

  def sliceable(x):
    if isinstance(x, Stacked):
      return x.layers
    if isinstance(x, Parts) and x.axis > 0 and not _is_recorded(x):
      return Parts(tuple(map(sliceable, x.parts)), x.axis - 1)
    if isinstance(x, Recorder) and x.layer(x.dense) is not None:
      return x.dense
    return _decoded("sliced by a scan along another axis", x)

  def sliced(x, part):
    layer = x.layer(part) if isinstance(x, Recorder) else None
    return part if layer is None else layer

  def body(carry, parts):
    parts = [sliced(x, part) for x, part in zip(xs, parts, strict=True)]
    out = evaluate(scan.body, [*shared, *carry, *parts])
    out = [_decoded("carried by a scan", o) for o in out]
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
  "broadcast_in_dim": _reshaped,
  "concatenate": _concatenated,
  "cond": _cond,
  "conv_general_dilated": _conv,
  "convert_element_type": _converted,
  "dot_general": _dot,
  "dynamic_slice": _dynamic_slice,
  "gather": _gather,
  "ragged_dot_general": _ragged_dot,
  "reshape": _reshaped,
  "scan": _scan,
  "slice": _sliced,
  "split": _split,
  "squeeze": _reshaped,
  "transpose": _transposed,
  "while": _while,
}


def _decoded(why: str, value: Any) -> Any:
  """Return a dense value; a recorder notes why it is needed."""
  if not _is_sparse(value):
    return value
  _refuse(value, why)
  return value.todense()


def _refuse(w: Any, why: str) -> None:
  """Record a use that can't be replaced."""
  if isinstance(w, Recorder):
    w.refuse(why)
  elif isinstance(w, Parts):
    for part in w.parts:
      _refuse(part, why)


def _words(operation: str, alone: bool) -> str:
  """Return why an operation needs a weight whole.

  Args:
    operation: the name of the primitive.
    alone: whether all its operands are weights or numbers.
  """
  if alone and operation in ELEMENTWISE | REDUCTIONS:
    return (
      f"changed by {operation} before it is used: if that depends on weights "
      "alone, do it once and pass the result"
    )
  return f"used by {program.describe(operation)}, which is no product"


def _is_sparse(value: Any) -> bool:
  return isinstance(value, Sparse)


def _is_array(value: Any) -> bool:
  return hasattr(value, "shape") and hasattr(value, "dtype")
