"""Products with whole diagonals on TPU: rotations in registers.

A tile of the batch is read once and stays on the chip; for every diagonal it is
rotated by the diagonal's offset, multiplied by the diagonal and added up. The
matrix unit is not used: what is saved is memory traffic, and the index per
weight that scattered weights need.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Array = jax.Array

_LANES = 128
_TILE = 8  # one register of rows: the tile and its sum stay on the chip
# The longest side whose tiles, several at a time, fit the memory on the chip.
_LONGEST = 1 << 17


def supports(side: int, values: Any) -> bool:
  """Tell whether the kernels take diagonals of this length and dtype.

  Args:
    side: the longer side of the matrix.
    values: the diagonals, or their shape and dtype.

  Returns:
    False where the product of XLA must do.

  Example:
    >>> supports(256, jax.ShapeDtypeStruct((3, 256), jnp.float32))
    True
  """
  fits = side % _LANES == 0 and side <= _LONGEST and len(values) > 0
  return fits and values.dtype in (jnp.float32, jnp.bfloat16)


def product(
  x: Array,
  values: Array,
  offsets: Array,
  *,
  back: bool = False,
  interpret: Any = False,
) -> Array:
  """Return x @ w, or x @ w.T, for a square of diagonals.

  Args:
    x: (batch, side).
    values: (diagonals, side), by column.
    offsets: column minus row of each diagonal, modulo the side.
    back: whether w is transposed.
    interpret: run without the device, as `pallas_call` does.

  Returns:
    (padded batch, side) in float32.
  """
  x = _tiles(x)
  side = x.shape[1]
  tile = pl.BlockSpec((_TILE, side), lambda b, *_: (b, 0))
  return pl.pallas_call(
    functools.partial(_kernel, back=back),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(len(x) // _TILE, len(values)),
      in_specs=[tile, _row(side)],
      out_specs=tile,
    ),
    out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    interpret=interpret,
  )(offsets, x, _rows(values))


def at_values(
  x: Array, g: Array, offsets: Array, interpret: Any = False
) -> Array:
  """Return x.T @ g along the diagonals: the gradient of their values.

  Args:
    x: (batch, side).
    g: (batch, side).
    offsets: column minus row of each diagonal, modulo the side.
    interpret: run without the device, as `pallas_call` does.

  Returns:
    (diagonals, side) in float32.
  """
  x, g = _tiles(x), _tiles(g)
  side = x.shape[1]
  tile = pl.BlockSpec((_TILE, side), lambda _, b, *__: (b, 0))
  found = pl.pallas_call(
    _at_values_kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(len(offsets), len(x) // _TILE),
      in_specs=[tile, tile],
      out_specs=pl.BlockSpec((1, 1, side), lambda d, *_: (d, 0, 0)),
    ),
    out_shape=jax.ShapeDtypeStruct((len(offsets), 1, side), jnp.float32),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    interpret=interpret,
  )(offsets, x, g)
  return found[:, 0]


def _tiles(x: Array) -> Array:
  """Return x in float32, which registers rotate, padded to whole tiles."""
  padded = jnp.pad(x, [(0, -len(x) % _TILE), (0, 0)])
  return padded.astype(jnp.float32)


def _rows(values: Array) -> Array:
  """Return each diagonal as a matrix of one row: blocks must be matrices."""
  return values.astype(jnp.float32)[:, None]


def _row(side: int) -> pl.BlockSpec:
  return pl.BlockSpec((1, 1, side), lambda _, d, *__: (d, 0, 0))


def _rotate(x: Array, offset: Array) -> Array:
  return pltpu.roll(x, offset, 1)


def _kernel(offsets, x, diagonal, y, *, back):
  d = pl.program_id(1)

  @pl.when(d == 0)
  def _():
    y[...] = jnp.zeros_like(y)

  if back:
    away = jax.lax.rem(x.shape[1] - offsets[d], x.shape[1])
    y[...] += _rotate(x[...] * diagonal[0], away)
  else:
    y[...] += _rotate(x[...], offsets[d]) * diagonal[0]


def _at_values_kernel(offsets, x, g, diagonal):
  d, b = pl.program_id(0), pl.program_id(1)

  @pl.when(b == 0)
  def _():
    diagonal[...] = jnp.zeros_like(diagonal)

  rotated = _rotate(x[...], offsets[d])
  diagonal[0] += jnp.sum(rotated * g[...], axis=0, keepdims=True)
