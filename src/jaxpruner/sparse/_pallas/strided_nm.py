"""Products with strided N:M weights on TPU, decoded on the chip.

The weights cross the memory bus packed: for 2:4 in bfloat16, 1.25 bytes per
weight instead of 2. A group's members are a register apart, so decoding is a
selection per member and stored value, without a shuffle.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxpruner.sparse.format_strided_nm import unpack

Array = jax.Array

_LANES = 128
# Rows and columns of the result per program: larger ones read less often.
TILE, _LEAST_TILE = 512, 16
COLUMNS = 512


def supports(values: Any) -> bool:
  """Tell whether the kernels take values of this shape and dtype.

  Args:
    values: (runs, n, stride, columns), or its shape and dtype.

  Returns:
    False where the decoded product must do.

  Example:
    >>> supports(jax.ShapeDtypeStruct((4, 2, 128, 256), jnp.bfloat16))
    True
  """
  stride, columns = values.shape[2:]
  if stride % _LANES or columns % _LANES:
    return False
  return values.dtype in (jnp.float32, jnp.bfloat16)


def product(
  x: Array,
  values: Array,
  indices: Array,
  m: int,
  *,
  back: bool = False,
  interpret: Any = False,
) -> Array:
  """Return x @ w, or x @ w.T, for packed weights; rows padded to tiles.

  Args:
    x: (batch, K), or (batch, N) with `back`.
    values: (runs, n, stride, N).
    indices: (runs, n, bytes, N).
    m: members of a group.
    back: whether w is transposed.
    interpret: run without the device, as `pallas_call` does.

  Returns:
    (padded batch, N), or (padded batch, K), in the dtype of x.
  """
  tile, x = _tiles(x)
  runs, n, stride, cols = values.shape
  width = math.gcd(cols, COLUMNS)
  run, col = (1, 2) if back else (2, 1)  # which axis of the grid is which
  group = m * stride
  by_row, by_column = ((tile, group), 0, run), ((tile, width), 0, col)
  inside, result = (by_column, by_row) if back else (by_row, by_column)
  sizes = {0: len(x) // tile, run: runs, col: cols // width}
  return pl.pallas_call(
    functools.partial(_kernel, m=m, back=back, steps=sizes[2]),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=0,
      grid=tuple(sizes[i] for i in range(3)),
      in_specs=[
        _spec(*inside),
        _spec((1, n, stride, width), run, None, None, col),
        _spec((1, n, indices.shape[2], width), run, None, None, col),
      ],
      out_specs=_spec(*result),
      scratch_shapes=[pltpu.VMEM(result[0], jnp.float32)],
    ),
    out_shape=jax.ShapeDtypeStruct(
      (len(x), runs * group if back else cols), x.dtype
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
    interpret=interpret,
  )(x, values, indices)


def at_values(
  x: Array,
  g: Array,
  values: Any,
  indices: Array,
  m: int,
  interpret: Any = False,
) -> Array:
  """Return x.T @ g at the stored positions: the gradient of the values.

  Args:
    x: (batch, K).
    g: (batch, N).
    values: (runs, n, stride, N), or its shape and dtype.
    indices: (runs, n, bytes, N).
    m: members of a group.
    interpret: run without the device, as `pallas_call` does.

  Returns:
    An array shaped as `values`, in their dtype.
  """
  tile, x = _tiles(x)
  _, g = _tiles(g)
  runs, n, stride, cols = values.shape
  tiles = len(x) // tile
  stored = _spec((1, n, stride, _LANES), 0, None, None, 1)
  return pl.pallas_call(
    functools.partial(_at_values_kernel, m=m, tiles=tiles),
    grid=(runs, cols // _LANES, tiles),
    in_specs=[
      _spec((tile, m * stride), 2, 0),
      _spec((tile, _LANES), 2, 1),
      _spec((1, n, indices.shape[2], _LANES), 0, None, None, 1),
    ],
    out_specs=stored,
    out_shape=jax.ShapeDtypeStruct(values.shape, values.dtype),
    scratch_shapes=[pltpu.VMEM((m, stride, _LANES), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
    interpret=interpret,
  )(x, g, indices)


def _tiles(x: Array) -> tuple[int, Array]:
  """Return the rows per program, and x padded to whole tiles."""
  tile = min(TILE, pl.next_power_of_2(max(len(x), _LEAST_TILE)))
  return tile, jnp.pad(x, [(0, -len(x) % tile), (0, 0)])


def _spec(shape: tuple[int, ...], *axes: int | None) -> pl.BlockSpec:
  """Return a spec whose blocks are numbered by axes of the grid (None: 0)."""
  return pl.BlockSpec(
    shape, lambda *at: tuple(0 if a is None else at[a] for a in axes)
  )


def _members(indices: Array, stride: int) -> Array:
  """Return the members of one run, (n, stride, columns)."""
  # Bytes are widened first: a TPU shifts and compares 32-bit registers.
  bits = 8 * indices.shape[1] // stride
  return unpack(indices.astype(jnp.int32), bits)


def _slab(values: Array, members: Array, j: int) -> Array:
  """Return the dense weights of member j, (stride, columns)."""
  kept = [
    jnp.where(members[t] == j, values[t], jnp.zeros_like(values[t]))
    for t in range(len(values))
  ]
  return functools.reduce(jnp.add, kept)


def _kernel(x, values, indices, y, sums, *, m, back, steps):
  step = pl.program_id(2)

  @pl.when(step == 0)
  def _():
    sums[...] = jnp.zeros_like(sums)

  stride = values.shape[2]
  stored, members = values[0], _members(indices[0], stride)
  for j in range(m):
    slab = _slab(stored, members, j)
    mine = pl.ds(j * stride, stride)
    if back:
      sums[:, mine] += _dot(x[...], slab, (1, 1))
    else:
      sums[...] += _dot(x[:, mine], slab, (1, 0))

  @pl.when(step == steps - 1)
  def _():
    y[...] = sums[...].astype(y.dtype)


def _at_values_kernel(x, g, indices, values, sums, *, m, tiles):
  step = pl.program_id(2)

  @pl.when(step == 0)
  def _():
    sums[...] = jnp.zeros_like(sums)

  stride = values.shape[2]
  for j in range(m):
    sums[j] += _dot(x[:, pl.ds(j * stride, stride)], g[...], (0, 0))

  @pl.when(step == tiles - 1)
  def _():
    members = _members(indices[0], stride)
    for t in range(values.shape[1]):
      mine = [jnp.where(members[t] == j, sums[j], 0.0) for j in range(m)]
      values[0, t] = functools.reduce(jnp.add, mine).astype(values.dtype)


def _dot(x: Array, w: Array, contract: tuple[int, int]) -> Array:
  axes = ((contract[0],), (contract[1],))
  return jax.lax.dot_general(
    x, w, (axes, ((), ())), preferred_element_type=jnp.float32
  )
