"""Run any model with kept weights in place of dense ones.

The user's function is traced with the dense shapes and evaluated again,
operation by operation; a product with a kept weight becomes a sparse product.
No dense weight is ever made: an operation without a sparse form is refused.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner import program
from jaxpruner.kept import capture, products
from jaxpruner.kept.tensors import KeptTensor, is_kept
from jaxpruner.program import Node, jaxprs, windows
from jaxpruner.sparse import formats

_COPIES = frozenset(
  "copy device_put name optimization_barrier sharding_constraint".split()
)
# Derivative rules of their own would be lost if we entered these.
_RULED = frozenset("custom_jvp_call custom_vjp_call".split())
_CURE = (
  "keep this weight dense with filter_fn, write the operation as a product, or "
  'pass on_unsupported="densify" to kept.lift'
)


@formats.register
class _View:
  """A kept weight with its axes in another order."""

  tensor: KeptTensor
  order: tuple[int, ...] = formats.static()

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(self.tensor.shape[d] for d in self.order)

  def todense(self) -> Array:
    return jnp.transpose(self.tensor.todense(), self.order)


def lift(
  apply_fn: Callable[..., Any], *, on_unsupported: str = "refuse"
) -> Callable[..., Any]:
  """Return the function of kept parameters that a model computes.

  `apply_fn` is traced, not edited, so any framework's will do. Dense layers,
  attention projections, convolutions and embeddings (a gather, a product, or
  both) become sparse; weights may pass through `jit`, `remat` and `scan`. The
  result is differentiable with respect to inputs and values (`jax.grad`; not
  forward mode).

  Args:
    apply_fn: any function of parameters and inputs.
    on_unsupported: what to do with a kept weight that is used in another way:
      "refuse", or "densify", which decodes it with a warning.

  Returns:
    A function with the arguments of `apply_fn`, which accepts `KeptTensor`
    leaves anywhere in them.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> model = lambda params, x: jnp.tanh(x @ params["w"]) + params["b"]
    >>> params = {"w": kept.from_dense(jnp.eye(2)), "b": jnp.ones(2)}
    >>> kept.lift(model)(params, jnp.zeros((1, 2))).tolist()
    [[1.0, 1.0]]
  """
  if on_unsupported not in ("refuse", "densify"):
    raise ValueError(
      f'on_unsupported={on_unsupported!r} must be "refuse" or "densify"'
    )

  @functools.wraps(apply_fn)
  def lifted(*args: Any, **kwargs: Any) -> Any:
    named, treedef = jax.tree_util.tree_flatten_with_path(
      (args, kwargs), is_leaf=is_kept
    )
    leaves = [leaf for _, leaf in named]
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    operands = [_named(*named[i]) for i in places]

    def flat(values):
      full = list(leaves)
      for i, value in zip(places, values, strict=True):
        full[i] = value
      args, kwargs = jax.tree.unflatten(treedef, full)
      return apply_fn(*args, **kwargs)

    shapes = [jax.ShapeDtypeStruct(np.shape(a), _dtype(a)) for a in operands]
    closed, out = jax.make_jaxpr(flat, return_shape=True)(shapes)
    views = [_View(a, _identity(a)) if is_kept(a) else a for a in operands]
    lifter = _Lifter(on_unsupported == "densify")
    results = [
      lifter.decoded(r, None, "it is returned") if _is_view(r) else r
      for r in lifter.run(closed, views)
    ]
    return jax.tree.unflatten(jax.tree.structure(out), results)

  return lifted


def _named(path: Any, leaf: Any) -> Any:
  """Give a kept weight without a name its path, for errors."""
  if not is_kept(leaf) or leaf.layout.name:
    return leaf
  name = jax.tree_util.keystr(path[2:], simple=True, separator="/")
  layout = dataclasses.replace(leaf.layout, name=name or "kernel")
  return KeptTensor(leaf.values, layout)


def _identity(tensor: KeptTensor) -> tuple[int, ...]:
  return tuple(range(tensor.ndim))


def _is_array(value: Any) -> bool:
  return hasattr(value, "shape") and hasattr(value, "dtype")


def _dtype(value: Any) -> Any:
  return value.dtype


def _is_view(value: Any) -> bool:
  return isinstance(value, _View)


@dataclasses.dataclass(frozen=True)
class _Lifter:
  """A visitor that multiplies by kept weights."""

  densify: bool

  def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return program.run(jaxpr, args, self.visit)

  def visit(self, node: Node, args: list[Any]) -> list[Any]:
    if not any(map(_is_view, args)):
      return program.bind(node, args)
    if node.name in _COPIES:
      return args
    callee = jaxprs.callee(node.eqn)
    if callee is not None and node.name not in _RULED:
      return self._call(node, callee, args)
    if node.name == "scan":
      return _scan(self, node, *args)
    rule = _RULES.get(node.name)
    results = None if rule is None else rule(node, *args)
    if results is None:
      reason = "it has no sparse form"
      dense = [self.decoded(a, node, reason) for a in args]
      results = program.bind(node, dense)
    return results

  def decoded(self, value: Any, node: Node | None, reason: str) -> Any:
    """Return a dense value, or refuse."""
    if not _is_view(value):
      return value
    path = value.tensor.layout.name
    if not self.densify:
      if node is None:
        raise ValueError(
          f"kept.lift: the parameter {path!r}: {reason}; {_CURE}"
        )
      raise program.unsupported("kept.lift", node, reason, _CURE, path)
    warnings.warn(
      f"kept.lift: the parameter {path!r} is decoded to its dense size: "
      + (reason if node is None else str(node)),
      stacklevel=2,
    )
    return value.todense()

  def _call(self, node: Node, callee: Any, args: list[Any]) -> list[Any]:
    run = functools.partial(self.run, callee)
    if node.name != "remat2" or capture.active() is not None:
      return run(args)
    # Views are traced like arrays: what the body returns must be dense.
    inner = lambda args: [self.decoded(r, node, "") for r in run(args)]
    policy, cse = node.params["policy"], node.params["prevent_cse"]
    return jax.checkpoint(inner, policy=policy, prevent_cse=cse)(args)


def _convert(node: Node, view: _View) -> list[Any] | None:
  dtype = node.params["new_dtype"]
  if not jnp.issubdtype(dtype, jnp.floating):
    return None
  tensor = view.tensor.with_values(view.tensor.values.astype(dtype))
  return [_View(tensor, view.order)]


def _stop(node: Node, view: _View) -> list[Any]:
  del node
  values = jax.lax.stop_gradient(view.tensor.values)
  return [_View(view.tensor.with_values(values), view.order)]


def _transpose(node: Node, view: _View) -> list[Any]:
  order = tuple(view.order[d] for d in node.params["permutation"])
  return [_View(view.tensor, order)]


def _reshape(node: Node, view: _View) -> list[Any] | None:
  """Fold the same matrix from other axes, if rows and columns stay apart."""
  shape = tuple(node.outputs[0].shape)
  layout = view.tensor.layout
  if view.order != _identity(view.tensor):
    return None
  for split in range(1, len(shape)):
    if int(np.prod(shape[:split])) == layout.matrix[0]:
      layout = dataclasses.replace(layout, shape=shape, split=split)
      tensor = KeptTensor(view.tensor.values, layout)
      return [_View(tensor, _identity(tensor))]
  return None


def _side(view: _View, contract: Sequence[int]) -> bool | None:
  """Tell whether a product contracts the columns; None: neither side."""
  axes = {view.order[d] for d in contract}
  split, ndim = view.tensor.layout.split, view.tensor.ndim
  if axes == set(range(split)):
    return False
  return True if axes == set(range(split, ndim)) else None


def _multiply(x: Array, view: _View, columns: bool) -> Array:
  """Return (..., K) times the folded weight, captured if asked for."""
  layout = view.tensor.layout
  rows = x.reshape(-1, x.shape[-1])
  y = products.product(rows, view.tensor.values, layout, columns)
  noting = capture.active()
  if noting is not None:
    y = noting.use(layout.name, (rows, columns), y)
  return y.reshape(*x.shape[:-1], -1)


def _dot(node: Node, lhs: Any, rhs: Any) -> list[Any] | None:
  (lc, rc), batch = node.params["dimension_numbers"]
  if any(map(len, batch)) or (_is_view(lhs) and _is_view(rhs)):
    return None
  left = _is_view(lhs)
  view, x, wc, xc = (lhs, rhs, lc, rc) if left else (rhs, lhs, rc, lc)
  columns = _side(view, wc)
  if columns is None:
    return None
  # x's contracted axes, in the order in which the weight is folded.
  order = sorted(range(len(wc)), key=lambda i: view.order[wc[i]])
  axes = [xc[i] for i in order]
  free = [d for d in range(x.ndim) if d not in axes]
  x = jnp.transpose(x, [*free, *axes])
  x = x.reshape(*x.shape[: len(free)], -1)
  out = node.outputs[0].dtype
  if not jnp.issubdtype(x.dtype, jnp.floating):
    x = x.astype(out)
  y = _multiply(x, view, columns)
  y = _unfolded(y, view, [d for d in range(len(view.order)) if d not in wc])
  if left:
    y = jnp.moveaxis(y, range(len(free)), range(-len(free), 0))
  return [y.astype(out)]


def _unfolded(y: Array, view: _View, axes: Sequence[int]) -> Array:
  """Split the last axis of a product into the view's axes, in its order."""
  before = y.ndim - 1
  own = [view.order[d] for d in axes]
  inside = sorted(own)
  y = y.reshape(*y.shape[:-1], *(view.tensor.shape[d] for d in inside))
  order = [*range(before), *(before + inside.index(d) for d in own)]
  return jnp.transpose(y, order)


def _conv(node: Node, lhs: Any, rhs: Any) -> list[Any] | None:
  p = node.params
  spec = p["dimension_numbers"]
  if _is_view(lhs) or p["feature_group_count"] * p["batch_group_count"] != 1:
    return None
  contract = (*spec.rhs_spec[2:], spec.rhs_spec[1])
  columns = _side(rhs, contract)
  if columns is None:
    return None
  window = [rhs.shape[d] for d in spec.rhs_spec[2:]]
  seen = windows.rows(
    lhs,
    spec.lhs_spec,
    window,
    p["window_strides"],
    p["padding"],
    p["lhs_dilation"],
    p["rhs_dilation"],
  )
  space = seen.shape[:-2]
  seen = seen.reshape(*space, *window, seen.shape[-1])
  inside = sorted(range(len(contract)), key=lambda i: rhs.order[contract[i]])
  order = [*range(len(space)), *(len(space) + i for i in inside)]
  seen = jnp.transpose(seen, order).reshape(*space, -1)
  y = _multiply(seen, rhs, columns)
  out = spec.out_spec
  order = np.argsort([out[0], *out[2:], out[1]]).tolist()
  return [jnp.transpose(y, order).astype(node.outputs[0].dtype)]


def _gather(node: Node, view: Any, indices: Any) -> list[Any] | None:
  """Look up whole rows of an embedding."""
  if not _is_view(view):
    return None
  spec, tensor = node.params["dimension_numbers"], view.tensor
  rank = len(node.outputs[0].shape)
  plain = (
    tensor.ndim == 2
    and view.order == (0, 1)
    and not getattr(spec, "operand_batching_dims", ())
    and tuple(spec.collapsed_slice_dims) == (0,)
    and tuple(spec.start_index_map) == (0,)
    and tuple(spec.offset_dims) == (rank - 1,)
    and tuple(node.params["slice_sizes"]) == (1, tensor.shape[1])
  )
  if not plain:
    return None
  rows = indices[..., 0]
  flat = jnp.clip(rows.reshape(-1), 0, tensor.shape[0] - 1).astype(jnp.int32)
  y = look_up(tensor, flat)
  if str(node.params["mode"]).endswith(("FILL_OR_DROP", "fill")):
    inside = (rows >= 0) & (rows < tensor.shape[0])
    fill = node.params.get("fill_value")
    fill = jnp.nan if fill is None else fill
    y = jnp.where(inside.reshape(-1, 1), y, jnp.asarray(fill, y.dtype))
  noting = capture.active()
  if noting is not None:
    y = noting.use(tensor.layout.name, (flat, False), y)
  return [y.reshape(*rows.shape, -1)]


def look_up(tensor: KeptTensor, rows: Array) -> Array:
  """Return rows of a kept matrix as a dense array: a search per entry."""
  starts, columns, slots = tensor.layout.by_row
  low = jnp.broadcast_to(starts[rows, None], (len(rows), tensor.shape[1]))
  high = jnp.broadcast_to(starts[rows + 1, None], low.shape)
  end = high
  wanted = jnp.arange(tensor.shape[1], dtype=jnp.int32)
  last = tensor.layout.count - 1

  def halve(_, bounds):
    low, high = bounds
    middle = (low + high) // 2
    below = columns[jnp.minimum(middle, last)].astype(jnp.int32) < wanted
    open_ = low < high
    low = jnp.where(open_ & below, middle + 1, low)
    return low, jnp.where(open_ & ~below, middle, high)

  steps = int(np.ceil(np.log2(tensor.shape[1] + 1)))
  place, _ = jax.lax.fori_loop(0, steps, halve, (low, high))
  safe = jnp.minimum(place, last)
  found = (place < end) & (columns[safe].astype(jnp.int32) == wanted)
  return jnp.where(found, tensor.values[slots[safe]], 0)


def _scan(lifter: _Lifter, node: Node, *args: Any) -> list[Any]:
  """Enter a scan; kept weights may be its constants, not what it slices."""
  scan = jaxprs.scan(node.eqn)
  first = scan.constants + scan.carried
  shared = args[: scan.constants]
  start, xs = (
    [lifter.decoded(a, node, reason) for a in part]
    for part, reason in (
      (args[scan.constants : first], "it is carried through a scan"),
      (args[first:], "it is sliced by a scan"),
    )
  )
  noting = capture.active()
  if noting is None:

    def body(carry, parts):
      out = _dense_results(lifter, node, scan, [*shared, *carry, *parts])
      return out[: len(carry)], out[len(carry) :]

    carry, ys = _run_scan(scan, body, start, xs)
    return [*carry, *ys]
  return _noting_scan(lifter, node, scan, shared, start, xs, noting)


def _run_scan(scan: jaxprs.Scan, body: Any, start: Any, xs: Any) -> Any:
  return jax.lax.scan(
    body,
    start,
    xs,
    length=scan.length,
    reverse=scan.reverse,
    unroll=scan.unroll,
  )


def _dense_results(
  lifter: _Lifter, node: Node, scan: jaxprs.Scan, args: list[Any]
) -> list[Any]:
  out = lifter.run(scan.body, args)
  return [lifter.decoded(o, node, "a scan returns it") for o in out]


def _noting_scan(
  lifter: _Lifter,
  node: Node,
  scan: jaxprs.Scan,
  shared: Sequence[Any],
  start: list[Any],
  xs: list[Any],
  noting: capture.Capture,
) -> list[Any]:
  """Run a scan that also returns the inputs of its products, step by step."""
  found: list[capture.Capture] = []

  def body(carry, parts):
    parts, zeros = parts
    with capture.capturing(zeros) as inner:
      out = _dense_results(lifter, node, scan, [*shared, *carry, *parts])
    found.append(inner)
    inputs = {n: [x for x, _ in uses] for n, uses in inner.inputs.items()}
    return out[: len(carry)], (out[len(carry) :], inputs)

  # The first look tells the shapes of what is to be noted.
  slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
  jax.eval_shape(body, start, (slices, None))
  zeros: Any = {
    name: [
      noting.add(name, jax.ShapeDtypeStruct((scan.length, *s.shape), s.dtype))
      for s in shapes
    ]
    for name, shapes in found[0].shapes.items()
  }
  zeros = None if noting.zeros is None else zeros
  carry, (ys, inputs) = _run_scan(scan, body, start, (xs, zeros))
  for name, seen in inputs.items():
    sides = [side for _, side in found[0].inputs[name]]
    noting.inputs.setdefault(name, []).extend(zip(seen, sides, strict=True))
  return [*carry, *ys]


_RULES: dict[str, Callable[..., list[Any] | None]] = {
  "conv_general_dilated": _conv,
  "convert_element_type": _convert,
  "dot_general": _dot,
  "gather": _gather,
  "reshape": _reshape,
  "stop_gradient": _stop,
  "transpose": _transpose,
}
