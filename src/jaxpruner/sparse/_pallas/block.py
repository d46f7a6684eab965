"""Block-sparse products: x @ w, g @ w.T, and x.T @ g at the stored blocks.

All three walk a list of blocks. On TPU, block indices are prefetched to scalar
memory, so that the pipeline knows which blocks to copy next; the blocks of one
column follow each other, and their sum stays on the chip. On GPU, a program
owns one tile of the result and loops over its blocks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

Array = jax.Array

# The sides of a block must be multiples of a TPU's register (128 lanes), and of
# what a GPU's matrix unit takes.
SIDES = {"tpu": 128, "cuda": 16}
# Rows of the batch per program.
TILES = {"tpu": 512, "cuda": 64}
_LEAST_TILE = 16


class Walk(NamedTuple):
  """The blocks in the order in which a product visits them.

  Attributes:
    inner: the block of the contracted axis, for each visited block.
    outer: the block of the result's axis; equal ones follow each other.
    at: the place of the block in `values`.
  """

  inner: Array
  outer: Array
  at: Array


def supports(platform: str, values: Array) -> bool:
  """Tell whether a platform's kernels take blocks of this shape and dtype.

  Args:
    platform: "tpu" or "cuda".
    values: the blocks (blocks, height, width), or their shape and dtype.

  Returns:
    False where the plain XLA product must do.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> blocks = jax.ShapeDtypeStruct((5, 64, 64), jnp.bfloat16)
    >>> supports("cuda", blocks), supports("tpu", blocks)
    (True, False)
  """
  _, height, width = values.shape
  side = SIDES[platform]
  if height % side or width % side or not len(values):
    return False
  if platform == "cuda" and (_odd(height) or _odd(width)):
    return False
  return values.dtype in (jnp.float32, jnp.bfloat16)


def walk(rows: Array, cols: Array, back: bool) -> Walk:
  """Order the blocks by the axis of the result.

  Args:
    rows: block row of each block.
    cols: block column of each block.
    back: whether the product is with the transpose, whose result has rows.

  Returns:
    The blocks, those of one column (with `back`, of one row) together.

  Example:
    >>> walk(jnp.array([0, 1, 1]), jnp.array([1, 0, 1]), False).at.tolist()
    [1, 0, 2]
  """
  inner, outer = (cols, rows) if back else (rows, cols)
  at = jnp.argsort(outer, stable=True).astype(jnp.int32)
  return Walk(inner[at].astype(jnp.int32), outer[at].astype(jnp.int32), at)


def product(
  x: Array,
  values: Array,
  order: Walk,
  columns: int,
  *,
  platform: str,
  back: bool = False,
  interpret: Any = False,
) -> Array:
  """Return x @ w, or x @ w.T, for a matrix of blocks.

  Args:
    x: (batch, inner blocks × their side).
    values: (blocks, height, width).
    order: the visits, from `walk`.
    columns: number of blocks of the result's axis.
    platform: "tpu" or "cuda".
    back: whether w is transposed.
    interpret: run without the device, as `pallas_call` does.

  Returns:
    (batch, columns × their side), in the dtype of x, summed in float32.
  """
  run = _tpu_product if platform == "tpu" else _gpu_product
  tile, x = _tiles(x, platform)
  y = run(x, values, order, columns, tile, back, interpret)
  return y


def at_blocks(
  x: Array,
  g: Array,
  values: Any,
  rows: Array,
  cols: Array,
  *,
  platform: str,
  interpret: Any = False,
) -> Array:
  """Return x.T @ g at the stored blocks, the gradient of `values`.

  Args:
    x: (batch, block rows × height).
    g: (batch, block columns × width).
    values: the blocks (blocks, height, width), or their shape and dtype.
    rows: block row of each block.
    cols: block column of each block.
    platform: "tpu" or "cuda".
    interpret: run without the device, as `pallas_call` does.

  Returns:
    (blocks, height, width), in the dtype of `values`, summed in float32.
  """
  run = _tpu_at_blocks if platform == "tpu" else _gpu_at_blocks
  tile, x = _tiles(x, platform)
  _, g = _tiles(g, platform)
  rows, cols = rows.astype(jnp.int32), cols.astype(jnp.int32)
  return run(x, g, values, rows, cols, tile, interpret)


def _odd(side: int) -> bool:
  return side & (side - 1) != 0


def _tiles(x: Array, platform: str) -> tuple[int, Array]:
  """Return the rows per program, and x padded to whole tiles."""
  tile = min(TILES[platform], pl.next_power_of_2(max(len(x), _LEAST_TILE)))
  return tile, jnp.pad(x, [(0, -len(x) % tile), (0, 0)])


def _dot(x: Array, block: Array, back: bool) -> Array:
  contract = ((1,), (1 if back else 0,))
  return jax.lax.dot_general(
    x, block, (contract, ((), ())), preferred_element_type=jnp.float32
  )


# --- TPU -------------------------------------------------------------------


def _tpu_kernel(inner, outer, at, x, block, y, sums, *, blocks, back):
  del inner, at  # the index maps read them
  i = pl.program_id(1)
  here = outer[i]

  @pl.when((i == 0) | (outer[jnp.maximum(i - 1, 0)] != here))
  def _():
    sums[...] = jnp.zeros_like(sums)

  sums[...] += _dot(x[...], block[0], back)

  @pl.when((i == blocks - 1) | (outer[jnp.minimum(i + 1, blocks - 1)] != here))
  def _():
    y[...] = sums[...].astype(y.dtype)


def _tpu_product(x, values, order, columns, tile, back, interpret):
  blocks, height, width = values.shape
  inside, outside = (width, height) if back else (height, width)
  y = pl.pallas_call(
    functools.partial(_tpu_kernel, blocks=blocks, back=back),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(len(x) // tile, blocks),
      in_specs=[
        pl.BlockSpec((tile, inside), lambda b, i, r, *_: (b, r[i])),
        pl.BlockSpec((1, height, width), lambda _, i, *a: (a[2][i], 0, 0)),
      ],
      out_specs=pl.BlockSpec((tile, outside), lambda b, i, *a: (b, a[1][i])),
      scratch_shapes=[pltpu.VMEM((tile, outside), jnp.float32)],
    ),
    out_shape=jax.ShapeDtypeStruct((len(x), columns * outside), x.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    interpret=interpret,
  )(*order, x, values)
  # Nobody visits a column without blocks, so nobody writes it.
  visited = jnp.zeros(columns, bool).at[order.outer].set(True)
  return jnp.where(jnp.repeat(visited, outside), y, jnp.zeros_like(y))


def _tpu_at_blocks_kernel(rows, cols, x, g, block, sums, *, tiles):
  del rows, cols  # the index maps read them
  b = pl.program_id(1)

  @pl.when(b == 0)
  def _():
    sums[...] = jnp.zeros_like(sums)

  sums[...] += _dot(x[...].T, g[...], False)

  @pl.when(b == tiles - 1)
  def _():
    block[0] = sums[...].astype(block.dtype)


def _tpu_at_blocks(x, g, values, rows, cols, tile, interpret):
  blocks, height, width = values.shape
  tiles = len(x) // tile
  return pl.pallas_call(
    functools.partial(_tpu_at_blocks_kernel, tiles=tiles),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(blocks, tiles),
      in_specs=[
        pl.BlockSpec((tile, height), lambda i, b, r, *_: (b, r[i])),
        pl.BlockSpec((tile, width), lambda i, b, _, c: (b, c[i])),
      ],
      out_specs=pl.BlockSpec((1, height, width), lambda i, *_: (i, 0, 0)),
      scratch_shapes=[pltpu.VMEM((height, width), jnp.float32)],
    ),
    out_shape=jax.ShapeDtypeStruct(values.shape, values.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    interpret=interpret,
  )(rows, cols, x, g)


# --- GPU -------------------------------------------------------------------


def _whole(array: Any) -> pl.BlockSpec:
  return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _gpu_kernel(starts, inner, at, x, values, y, *, inside, back):
  column = pl.program_id(1)

  def add(i, sums):
    part = x[:, pl.ds(inner[i] * inside, inside)]
    return sums + _dot(part, values[at[i]], back)

  zeros = jnp.zeros(y.shape, jnp.float32)
  span = starts[column], starts[column + 1]
  y[...] = jax.lax.fori_loop(*span, add, zeros).astype(y.dtype)


def _gpu_product(x, values, order, columns, tile, back, interpret):
  _, height, width = values.shape
  inside, outside = (width, height) if back else (height, width)
  bounds = jnp.arange(columns + 1, dtype=jnp.int32)
  starts = jnp.searchsorted(order.outer, bounds).astype(jnp.int32)
  return pl.pallas_call(
    functools.partial(_gpu_kernel, inside=inside, back=back),
    grid=(len(x) // tile, columns),
    in_specs=[
      _whole(starts),
      _whole(order.inner),
      _whole(order.at),
      pl.BlockSpec((tile, x.shape[1]), lambda b, _: (b, 0)),
      _whole(values),
    ],
    out_specs=pl.BlockSpec((tile, outside), lambda b, c: (b, c)),
    out_shape=jax.ShapeDtypeStruct((len(x), columns * outside), x.dtype),
    compiler_params=triton.CompilerParams(),
    interpret=interpret,
  )(starts, order.inner, order.at, x, values)


def _gpu_at_blocks_kernel(rows, cols, x, g, block, *, tile, tiles):
  i = pl.program_id(0)
  height, width = block.shape[1:]
  row, col = rows[i] * height, cols[i] * width

  def add(b, sums):
    mine = pl.ds(b * tile, tile)
    part, other = x[mine, pl.ds(row, height)], g[mine, pl.ds(col, width)]
    return sums + _dot(part.T, other, False)

  zeros = jnp.zeros((height, width), jnp.float32)
  block[0] = jax.lax.fori_loop(0, tiles, add, zeros).astype(block.dtype)


def _gpu_at_blocks(x, g, values, rows, cols, tile, interpret):
  blocks, height, width = values.shape
  return pl.pallas_call(
    functools.partial(_gpu_at_blocks_kernel, tile=tile, tiles=len(x) // tile),
    grid=(blocks,),
    in_specs=[_whole(rows), _whole(cols), _whole(x), _whole(g)],
    out_specs=pl.BlockSpec((1, height, width), lambda i: (i, 0, 0)),
    out_shape=jax.ShapeDtypeStruct(values.shape, values.dtype),
    compiler_params=triton.CompilerParams(),
    interpret=interpret,
  )(rows, cols, x, g)
