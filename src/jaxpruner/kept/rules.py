"""Operations that have a form for kept weights.

A rule takes the operation and its operands, some of them views, and returns the
results, or None if this use has no sparse form.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner.kept import block_products, capture, views
from jaxpruner.kept.blocks import BlockLayout
from jaxpruner.kept.tensors import KeptTensor
from jaxpruner.kept.views import View, is_view
from jaxpruner.program import Node, windows


def _convert(node: Node, view: View) -> list[Any] | None:
  dtype = node.params["new_dtype"]
  if not jnp.issubdtype(dtype, jnp.floating):
    return None
  return [view.with_values(view.tensor.values.astype(dtype))]


def _stop(node: Node, view: View) -> list[Any]:
  del node
  return [views.stopped(view)]


def _transpose(node: Node, view: View) -> list[Any]:
  order = tuple(view.order[d] for d in node.params["permutation"])
  return [View(view.tensor, order)]


def _reshape(node: Node, view: View) -> list[Any] | None:
  """Fold the same matrix from other axes, if rows and columns stay apart."""
  shape = tuple(node.outputs[0].shape)
  layout = view.tensor.layout
  if view.stacked or view.order != tuple(range(view.tensor.ndim)):
    return None
  for split in range(1, len(shape)):
    if int(np.prod(shape[:split])) == layout.matrix[0]:
      layout = dataclasses.replace(layout, shape=shape, split=split)
      return [views.whole(KeptTensor(view.tensor.values, layout))]
  return None


def _dot(node: Node, lhs: Any, rhs: Any) -> list[Any] | None:
  (lc, rc), (lb, rb) = node.params["dimension_numbers"]
  if is_view(lhs) and is_view(rhs):
    return None
  left = is_view(lhs)
  view, x, wc, xc = (lhs, rhs, lc, rc) if left else (rhs, lhs, rc, lc)
  wb, xb = (lb, rb) if left else (rb, lb)
  if view.stacked:
    return _dot_layers(node, view, x, (wc, xc), (wb, xb), left)
  columns = views.side(view, wc)
  if wb or columns is None:
    return None
  free = [d for d in range(x.ndim) if d not in xc]
  x = _contracted_last(x, view, wc, xc, free)
  y = views.multiply(_floating(node, x), view, columns)
  y = views.unfolded(y, view, _others(view, wc))
  if left:
    y = jnp.moveaxis(y, range(len(free)), range(-len(free), 0))
  return [y.astype(node.outputs[0].dtype)]


def _dot_layers(
  node: Node, stack: View, x: Any, contract: Any, batch: Any, left: bool
) -> list[Any] | None:
  """Multiply by every layer of a stack, as `vmap` writes it."""
  (wc, xc), (wb, xb) = contract, batch
  at = stack.order.index(stack.tensor.layout.axis)
  if at in wc or list(wb) not in ([], [at]):
    return None
  wc, view = [d - (d > at) for d in wc], stack.layer()
  columns = views.side(view, wc)
  if columns is None:
    return None
  free = [d for d in range(x.ndim) if d not in xc and d not in xb]
  x = _contracted_last(x, view, wc, xc, [*xb, *free])
  if not xb:  # one input for all layers
    x = jnp.broadcast_to(x, (stack.shape[at], *x.shape))
  y = views.multiply_layers(_floating(node, x), stack, columns)
  others = _others(view, wc)
  y = views.unfolded(y, view, others)
  if left:
    y = jnp.moveaxis(y, range(1, 1 + len(free)), range(-len(free), 0))
  if not xb:  # the layers stand where the weight has them
    own = sum(d < at for d in others)
    y = jnp.moveaxis(y, 0, own if left else len(free) + own)
  return [y.astype(node.outputs[0].dtype)]


def _contracted_last(x, view: View, wc, xc, free) -> Array:
  """Return x with its contracted axes as one, as the weight is folded."""
  order = sorted(range(len(wc)), key=lambda i: view.order[wc[i]])
  x = jnp.transpose(x, [*free, *(xc[i] for i in order)])
  return x.reshape(*x.shape[: len(free)], -1)


def _others(view: View, contract: Sequence[int]) -> list[int]:
  return [d for d in range(len(view.order)) if d not in contract]


def _floating(node: Node, x: Array) -> Array:
  plain = jnp.issubdtype(x.dtype, jnp.floating)
  return x if plain else x.astype(node.outputs[0].dtype)


def _conv(node: Node, lhs: Any, rhs: Any) -> list[Any] | None:
  p = node.params
  spec = p["dimension_numbers"]
  if is_view(lhs) or p["feature_group_count"] * p["batch_group_count"] != 1:
    return None
  contract = (*spec.rhs_spec[2:], spec.rhs_spec[1])
  columns = views.side(rhs, contract)
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
  y = views.multiply(seen, rhs, columns)
  out = spec.out_spec
  order = np.argsort([out[0], *out[2:], out[1]]).tolist()
  return [jnp.transpose(y, order).astype(node.outputs[0].dtype)]


def _gather(node: Node, view: Any, indices: Any) -> list[Any] | None:
  """Look up whole rows of an embedding."""
  if not is_view(view) or not _whole_rows(view, node.params["slice_sizes"]):
    return None
  spec, out = node.params["dimension_numbers"], node.outputs[0].shape
  collapsed = tuple(spec.collapsed_slice_dims)
  one, rank = collapsed == (0,), len(out)
  starts = tuple(spec.start_index_map)
  fills = str(node.params["mode"]).endswith(("FILL_OR_DROP", "fill"))
  plain = (
    not getattr(spec, "operand_batching_dims", ())
    and (one or not collapsed)
    and tuple(spec.offset_dims) == tuple(range(rank - 2 + one, rank))
    # A start among the columns is brought to 0, unless misses are filled.
    and (starts == (0,) or (starts == (0, 1) and not fills))
  )
  if not plain:
    return None
  rows = indices[..., 0]
  y = _rows_of(view.tensor, rows.reshape(-1))
  if fills:
    inside = (rows >= 0) & (rows < view.shape[0])
    fill = node.params.get("fill_value")
    fill = jnp.nan if fill is None else fill
    y = jnp.where(inside.reshape(-1, 1), y, jnp.asarray(fill, y.dtype))
  return [y.reshape(out)]


def _dynamic_slice(node: Node, view: Any, *starts: Any) -> list[Any] | None:
  """Look up one row of an embedding."""
  if not is_view(view) or not _whole_rows(view, node.params["slice_sizes"]):
    return None
  return [_rows_of(view.tensor, jnp.reshape(starts[0], 1))]


def _whole_rows(view: View, sizes: Sequence[int]) -> bool:
  """Tell whether slices of this size are rows of a matrix as it is kept."""
  plain = not view.stacked and view.order == (0, 1)
  return plain and tuple(sizes) == (1, view.shape[1])


def _rows_of(tensor: KeptTensor, rows: Array) -> Array:
  """Return rows of a kept matrix, captured if asked for."""
  rows = jnp.clip(rows, 0, tensor.shape[0] - 1).astype(jnp.int32)
  y = look_up(tensor, rows)
  noting = capture.active()
  if noting is not None:
    y = noting.use(tensor.layout.name, capture.Use(rows, False), y)
  return y


def look_up(tensor: KeptTensor, rows: Array) -> Array:
  """Return rows of a kept matrix as a dense array: a search per entry."""
  if isinstance(tensor.layout, BlockLayout):
    return block_products.look_up(tensor.values, tensor.layout, rows)
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


RULES: dict[str, Callable[..., list[Any] | None]] = {
  "conv_general_dilated": _conv,
  "convert_element_type": _convert,
  "dot_general": _dot,
  "dynamic_slice": _dynamic_slice,
  "gather": _gather,
  "reshape": _reshape,
  "stop_gradient": _stop,
  "transpose": _transpose,
}
