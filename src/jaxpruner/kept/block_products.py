"""x @ w for kept blocks, with both gradients, on every device.

Gathers of inputs and one batched product of all blocks are what XLA does well
on CPUs, GPUs and TPUs alike. The products are summed by block column. Blocks
are taken some at a time, so that the gathered inputs stay small.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner.kept.blocks import BlockLayout

# Numbers that are gathered, or multiplied, at a time.
ROOM = 2**22


def product(
  x: Array, values: Array, layout: BlockLayout, transposed: bool
) -> Array:
  """Return x @ w, or x @ w.T, where w is the folded matrix of a layout.

  Args:
    x: a dense array (batch, K), float32 or wider.
    values: the kept blocks, by slot.
    layout: their positions.
    transposed: whether to multiply by the transpose.

  Returns:
    A dense array (batch, N).
  """
  out: Any = _product(x, values, layout, transposed)
  return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x, values, layout, transposed):
  sides = [(layout.rows, 0), (layout.columns, 1)]
  (into, first), (out_of, last) = sides[::-1] if transposed else sides
  inputs = _cut(x, layout.block[first])
  step = "nbo,nio->nbi" if transposed else "nbi,nio->nbo"
  start = jnp.zeros(
    (layout.grid[last], x.shape[0], layout.block[last]), x.dtype
  )

  def add(sums, at, number):
    take = lambda a: jax.lax.dynamic_slice_in_dim(a, at, number)
    parts = jnp.einsum(step, inputs[take(into)], take(values))
    return sums.at[take(out_of)].add(parts)

  sums = _some_at_a_time(add, start, layout, x.shape[0])
  return _join(sums, layout.matrix[last])


def _forward(x, values, layout, transposed):
  return _product(x, values, layout, transposed), (x, values, layout)


def _backward(transposed, saved, g):
  x, values, layout = saved
  dx = _product(g, values, layout, not transposed)
  left, right = (g, x) if transposed else (x, g)
  left, right = _cut(left, layout.block[0]), _cut(right, layout.block[1])

  def put(found, at, number):
    take = lambda a: jax.lax.dynamic_slice_in_dim(a, at, number)
    parts = jnp.einsum(
      "nbi,nbo->nio", left[take(layout.rows)], right[take(layout.columns)]
    )
    return jax.lax.dynamic_update_slice_in_dim(found, parts, at, 0)

  dv = _some_at_a_time(put, jnp.zeros_like(values), layout, x.shape[0])
  nothing = lambda a: np.zeros(a.shape, jax.dtypes.float0)
  return dx, dv, jax.tree.map(nothing, layout)


_product.defvjp(_forward, _backward)


def _some_at_a_time(
  step: Callable[[Array, Any, int], Array],
  start: Array,
  layout: BlockLayout,
  batch: int,
) -> Array:
  """Fold `step(carry, first, number)` over the blocks."""
  number = max(1, ROOM // (max(1, batch) * sum(layout.block)))
  whole, rest = divmod(layout.count, number)
  if whole > 1:
    run = lambda i, carry: step(carry, i * number, number)
    start = jax.lax.fori_loop(0, whole, run, start)
  elif whole:
    start = step(start, 0, number)
  return step(start, whole * number, rest) if rest else start


def _cut(x: Array, side: int) -> Array:
  """Return (batch, K) by block, (blocks, batch, side)."""
  x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % side)))
  return x.reshape(x.shape[0], x.shape[1] // side, side).transpose(1, 0, 2)


def _join(blocks: Array, size: int) -> Array:
  """Return the blocks of a result, (blocks, batch, side), as (batch, N)."""
  y = blocks.transpose(1, 0, 2)
  return y.reshape(y.shape[0], -1)[:, :size]


def look_up(values: Array, layout: BlockLayout, rows: Array) -> Array:
  """Return rows of a matrix as a dense array.

  Args:
    values: the kept blocks, by slot.
    layout: their positions.
    rows: int32, which rows.

  Returns:
    A dense array (rows, columns).
  """
  slots = jnp.full(layout.grid, -1, jnp.int32)
  slots = slots.at[layout.rows, layout.columns].set(
    jnp.arange(layout.count, dtype=jnp.int32)
  )
  height = layout.block[0]
  own = slots[rows // height]
  found = values[own, (rows % height)[:, None]]
  found = jnp.where((own >= 0)[..., None], found, 0)
  return found.reshape(len(rows), -1)[:, : layout.matrix[1]]
