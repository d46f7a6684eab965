"""Products with weights that are sparse, joined from parts, or recorded.

Each product is called with its operands. A weight joined from parts is
multiplied part by part; a recorder notes the product, and what of the weight it
needs; other sparse weights go to `ops`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import _parts, _taps, ops
from jaxpruner.sparse._parts import Parts
from jaxpruner.sparse._recording import Piece, Recorder
from jaxpruner.sparse._taps import Taps
from jaxpruner.sparse.formats import Sparse

# Products of a batch, groups of a convolution, experts: each becomes a product
# of its own, and a longer program.
MAX_PARTS = 256
# Weights that a product of a group should have at least.
MIN_GROUP = 4096
# Rows that a ragged product multiplies at once.
TILE = 32

_CONV_PARAMS = frozenset({
  "window_strides", "padding", "lhs_dilation", "rhs_dilation",
  "dimension_numbers", "feature_group_count", "batch_group_count",
  "precision", "preferred_element_type",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Dot:
  """`jax.lax.dot_general` of a dense array and a weight."""

  dimensions: Any
  precision: Any
  dtype: Any

  def __call__(self, lhs: Any, rhs: Any) -> Any:
    left = isinstance(lhs, Sparse)
    w, x = (lhs, rhs) if left else (rhs, lhs)
    if isinstance(w, Parts):
      return self._by_part(x, w, left)
    if not isinstance(w, Recorder):
      return ops.dot_general(
        lhs, rhs, self.dimensions, self.precision, self.dtype
      )
    self._record(x, w, left)
    return self(w.dense, x) if left else self(x, w.dense)

  def _sides(self, left: bool) -> tuple[Any, Any, Any, Any]:
    """Return the contracted axes of x and w, and their batch axes."""
    (lc, rc), (lb, rb) = self.dimensions
    return (rc, lc, rb, lb) if left else (lc, rc, lb, rb)

  def _record(self, x: Any, w: Recorder, left: bool) -> None:
    _, wc, xb, wb = self._sides(left)
    if len(wb) > 1:
      w.refuse("a batch of products along several axes")
      return
    if not wb:
      w.record("dot", wc, x, lambda x, w: self._of(x, w, left))
      return
    if w.shape[wb[0]] > MAX_PARTS:
      w.refuse(f"a batch of more than {MAX_PARTS} products")
      return

    def one(x, w):
      return self._by_part(x, Parts((w,), wb[0]), left)

    shape = jax.ShapeDtypeStruct(_with(x.shape, xb[0], 1), x.dtype)
    for i in range(w.shape[wb[0]]):
      w.record("dot", wc, shape, one, Piece(wb[0], i, i + 1))

  def _of(self, x: Any, w: Any, left: bool) -> Any:
    return self(w, x) if left else self(x, w)

  def _by_part(self, x: Any, w: Parts, left: bool) -> Any:
    """Multiply each part; add or join the results."""
    xc, wc, xb, wb = self._sides(left)
    axis = w.axis
    pairs = dict(zip((*wc, *wb), (*xc, *xb), strict=True))
    results, start = [], 0
    for part in w.parts:
      stop = start + part.shape[axis]
      mine = x
      if axis in pairs:
        mine = jax.lax.slice_in_dim(x, start, stop, axis=pairs[axis])
      if axis in wb and stop - start == 1:
        results.append(self._single(mine, part, left, wb.index(axis)))
      else:
        results.append(self._of(mine, part, left))
      start = stop
    if len(results) == 1:
      return results[0]
    if axis in wc:
      return sum(results[1:], start=results[0])
    return jnp.concatenate(results, self._place(x, w, left))

  def _place(self, x: Any, w: Any, left: bool) -> int:
    """Return the axis of the result that is the axis of the parts."""
    xc, wc, _, wb = self._sides(left)
    if w.axis in wb:
      return wb.index(w.axis)
    kept = [d for d in range(w.ndim) if d not in (*wc, *wb)]
    before = len(wb) if left else x.ndim - len(xc)
    return before + kept.index(w.axis)

  def _single(self, x: Any, w: Any, left: bool, place: int) -> Any:
    """Multiply one element of a batch, as a product without this batch."""
    (lc, rc), (lb, rb) = self.dimensions
    xd, wd = (rb[place], lb[place]) if left else (lb[place], rb[place])
    pairs = (wd, xd) if left else (xd, wd)

    def without(axes, gone):
      return tuple(d - (d > gone) for d in axes if d != gone)

    inner = dataclasses.replace(
      self,
      dimensions=(
        (without(lc, pairs[0]), without(rc, pairs[1])),
        (without(lb, pairs[0]), without(rb, pairs[1])),
      ),
    )
    x = jnp.squeeze(x, xd)
    shape = [n for d, n in enumerate(w.shape) if d != wd]
    flat = _parts.reshaped(w, shape)
    if flat is None:
      flat = ops.decode(w).reshape(shape)
    return jnp.expand_dims(inner._of(x, flat, left), place)


class Conv:
  """`jax.lax.conv_general_dilated` of an image and a kernel."""

  def __init__(self, params: Any):
    # What a newer JAX adds (shardings) has no meaning for one device's product.
    self._params = {k: v for k, v in params.items() if k in _CONV_PARAMS}
    self._spec = params["dimension_numbers"]

  def __call__(self, x: Any, w: Any) -> Any:
    """Return the convolution; None if the kernel must be decoded."""
    if self._params["batch_group_count"] != 1:
      return None
    groups = self._params["feature_group_count"]
    if isinstance(w, Parts):
      return self._by_part(x, w, groups)
    if isinstance(w, Taps) and self._is_depthwise(w):
      return _taps.conv(x, w.values, self._params)
    if not isinstance(w, Recorder):
      return self._run(x, w, groups)
    if groups == 1:
      contract = ops.conv_contract(self._spec)
      run = lambda x, w: self._run(x, w, 1)
      w.record("conv", contract, x, run, features=self._features())
    else:
      self._record_groups(x, w, groups)
    return self._run(x, w.dense, groups)

  def _features(self) -> tuple[int, int]:
    return self._spec.lhs_spec[1], self._spec.out_spec[1]

  def _is_depthwise(self, w: Any) -> bool:
    many = self._params["feature_group_count"] > 1
    return many and w.shape[self._spec.rhs_spec[1]] == 1

  def _run(self, x: Any, w: Any, groups: int) -> Any:
    params: dict[str, Any] = {**self._params, "feature_group_count": groups}
    return ops.conv_general_dilated(x, w, **params)

  def _record_groups(self, x: Any, w: Recorder, groups: int) -> None:
    out, into, *space = self._spec.rhs_spec
    width = w.shape[out] // groups
    taps = int(np.prod([w.shape[d] for d in space]))
    if w.shape[into] == 1:
      if taps > _taps.MOST or w.stacked:
        w.refuse(f"depthwise: {taps} weights per channel, nothing to gain")
      else:
        w.record("taps", [into], x, self)
      return
    weights = taps * w.shape[into] * width
    if weights < MIN_GROUP or groups > MAX_PARTS:
      w.refuse(
        f"a convolution of {groups} groups: {weights} weights in each, too "
        "few to gain"
      )
      return
    features = self._spec.lhs_spec[1]
    shape = _with(x.shape, features, x.shape[features] // groups)
    one = jax.ShapeDtypeStruct(shape, x.dtype)
    contract = ops.conv_contract(self._spec)
    for i in range(groups):
      piece = Piece(out, i * width, (i + 1) * width)
      run = lambda x, w: self._run(x, w, 1)
      w.record("conv", contract, one, run, piece, self._features())

  def _by_part(self, x: Any, w: Parts, groups: int) -> Any:
    out = self._spec.rhs_spec[0]
    if w.axis != out:
      return None
    width = w.shape[out] // groups
    features = self._spec.lhs_spec[1]
    inputs = x.shape[features] // groups
    results, start = [], 0
    for part in w.parts:
      count, rest = divmod(part.shape[out], width)
      if groups == 1:
        y = self(x, part)
      elif rest:
        return None
      else:
        stop = start + count * inputs
        mine = jax.lax.slice_in_dim(x, start, stop, axis=features)
        y = self._run(mine, part, count)
        start = stop
      results.append(y)
    return jnp.concatenate(results, self._spec.out_spec[1])


@dataclasses.dataclass(frozen=True)
class RaggedDot:
  """`jax.lax.ragged_dot`: rows in groups, a weight for each group.

  XLA multiplies all rows by all weights on a CPU. Here each group's rows are
  taken in tiles, so that a row is multiplied once.
  """

  x_axis: int  # contracted
  w_axis: int
  group_axis: int
  dtype: Any

  def __call__(self, x: Any, w: Any, sizes: Any) -> Any:
    """Return the product; None if the weight must be decoded."""
    groups = w.shape[self.group_axis]
    if not isinstance(w, Parts) or w.axis != self.group_axis:
      return None
    if len(w.parts) != groups:
      return None
    rows = jnp.moveaxis(x, self.x_axis, 1)
    tile = min(TILE, len(rows))
    ends = jnp.cumsum(sizes)
    padded = jnp.pad(rows, [(0, tile), (0, 0)])
    width = next(
      n for d, n in enumerate(w.shape) if d not in (self.w_axis, w.axis)
    )
    y = jnp.zeros((len(padded), width), self.dtype)
    for i, part in enumerate(w.parts):
      y = self._group(y, padded, part, ends[i] - sizes[i], ends[i], tile)
    return y[: len(rows)]

  def record(self, x: Any, w: Recorder) -> None:
    """Record a product for each group."""
    groups = w.shape[self.group_axis]
    if groups > MAX_PARTS:
      w.refuse(f"a ragged product of more than {MAX_PARTS} groups")
      return
    rows = min(TILE, x.shape[1 - self.x_axis])
    shape = jax.ShapeDtypeStruct((rows, x.shape[self.x_axis]), x.dtype)
    for i in range(groups):
      piece = Piece(self.group_axis, i, i + 1)
      w.record("dot", [self.w_axis], shape, self._product, piece)

  def _product(self, x: Any, w: Any) -> Any:
    shape = [n for d, n in enumerate(w.shape) if d != self.group_axis]
    flat = _parts.reshaped(w, shape)
    if flat is None:
      flat = ops.decode(w).reshape(shape)
    axis = self.w_axis - (self.w_axis > self.group_axis)
    dot = Dot((((1,), (axis,)), ((), ())), None, self.dtype)
    return dot(x, flat)

  def _group(
    self, y: Any, x: Any, w: Any, start: Any, end: Any, tile: int
  ) -> Any:
    """Write the rows of one group."""

    def step(y, i):
      first = start + i * tile

      def write(y):
        rows = jax.lax.dynamic_slice_in_dim(x, first, tile)
        old = jax.lax.dynamic_slice_in_dim(y, first, tile)
        mine = (first + jnp.arange(tile) < end)[:, None]
        new = jnp.where(mine, self._product(rows, w), old)
        return jax.lax.dynamic_update_slice_in_dim(y, new, first, 0)

      # A scan and a condition, not a loop of unknown length: it has a gradient.
      return jax.lax.cond(first < end, write, lambda y: y, y), None

    return jax.lax.scan(step, y, jnp.arange(-(-len(x) // tile)))[0]


def _with(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
  return (*shape[:axis], size, *shape[axis + 1 :])
