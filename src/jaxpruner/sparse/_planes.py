"""Convolutions of images stored channel by channel, without their windows.

`conv` is a primitive: a compiled kernel on CPU, elsewhere (and for derivatives)
the product of the windows, written out as rows, and the packed kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jaxpruner.program import windows
from jaxpruner.sparse import kernels
from jaxpruner.sparse.formats import SparseMatrix

# The compiled kernel, and the format that it reads.
NAME, FORMAT = "sell_conv", "sell"


@dataclasses.dataclass(frozen=True)
class Windows:
  """Where a kernel looks: one entry for each of the two axes of space."""

  window: tuple[int, int]
  strides: tuple[int, int]
  dilation: tuple[int, int]

  def out(self, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the size of the result for an image (channel, batch, y, x)."""
    reach = [
      (k - 1) * d for k, d in zip(self.window, self.dilation, strict=True)
    ]
    high, wide = (
      max(0, (n - r - 1) // s + 1)
      for n, r, s in zip(shape[2:], reach, self.strides, strict=True)
    )
    return high, wide


def fits(w: SparseMatrix, positions: int) -> bool:
  """Tell whether the compiled kernel takes this weight and result.

  Args:
    w: the packed kernel.
    positions: those of the result, over the batch.
  """
  kernel = kernels.load(NAME) if w.name == FORMAT else None
  return (
    kernel is not None
    and str(w.dtype) in kernel.DTYPES
    and positions >= kernel.LEAST
  )


def conv(x: jax.Array, w: SparseMatrix, where: Windows) -> jax.Array:
  """Return the convolution of a padded image with a packed kernel.

  Args:
    x: (channel, batch, y, x), float32.
    w: the kernel as a matrix, (window and channel, feature).
    where: the windows.

  Returns:
    (feature, batch, y, x).
  """
  arrays, form = jax.tree.flatten(w)
  return _conv_p.bind(x, *arrays, form=form, where=where)


def _by_rows(x: jax.Array, w: SparseMatrix, where: Windows) -> jax.Array:
  """Do it by a matrix of windows."""
  rows = windows.rows(
    x, (1, 0, 2, 3), where.window, where.strides, [(0, 0)] * 2, (1, 1),
    where.dilation,
  )  # fmt: skip
  y = kernels.product(rows.reshape(*rows.shape[:-2], -1), w)
  return jnp.moveaxis(y, -1, 0)


def _by_kernel(x: jax.Array, w: SparseMatrix, where: Windows) -> jax.Array:
  channels, batch, high, wide = x.shape
  out = where.out(x.shape)
  offsets = [
    a * where.dilation[0] * wide + b * where.dilation[1]
    for a, b in np.ndindex(*where.window)
  ]
  plane = high * wide
  geometry = [
    channels, batch * plane, plane, wide, *out, *where.strides, len(offsets),
    *offsets,
  ]  # fmt: skip
  shape = (w.shape[1], batch, *out)
  call = jax.ffi.ffi_call(
    kernels.target(NAME),
    (
      jax.ShapeDtypeStruct(shape, jnp.float32),
      jax.ShapeDtypeStruct((1,), jnp.float32),
    ),
  )
  return call(x, *jax.tree.leaves(w), np.asarray(geometry, np.int32))[0]


def _run(x: Any, *arrays: Any, form: Any, where: Windows) -> jax.Array:
  w = form.unflatten(arrays)
  if kernels.load(NAME) is None:
    return _by_rows(x, w, where)
  return jax.lax.platform_dependent(
    x,
    w,
    cpu=functools.partial(_by_kernel, where=where),
    default=functools.partial(_by_rows, where=where),
  )


def _shape(x: Any, *arrays: Any, form: Any, where: Windows) -> Any:
  features = form.unflatten(arrays).shape[1]
  return x.update(shape=(features, x.shape[1], *where.out(x.shape)))


def _jvp(primals: Any, tangents: Any, *, form: Any, where: Windows) -> Any:
  """Derive through the rows: linear in the image and in the values."""
  (x, *arrays), (x_dot, *dots) = primals, tangents
  w, values = form.unflatten(arrays), form.unflatten(dots).values
  parts = []
  if type(x_dot) is not ad.Zero:
    parts.append(_by_rows(x_dot, w, where))
  if type(values) is not ad.Zero:
    parts.append(_by_rows(x, w.with_values(values), where))
  y = conv(x, w, where)
  zero = ad.Zero(jax.typeof(y).to_tangent_aval())
  return y, functools.reduce(ad.add_tangents, parts, zero)


def _vmap(operands: Any, axes: Any, *, form: Any, where: Windows) -> Any:
  def rows(x, *arrays):
    return _by_rows(x, form.unflatten(arrays), where)

  return jax.vmap(rows, in_axes=axes)(*operands), 0


_conv_p = core.Primitive("jaxpruner_conv")
_conv_p.def_impl(jax.jit(_conv_p.bind, static_argnames=("form", "where")))
_conv_p.def_abstract_eval(_shape)
ad.primitive_jvps[_conv_p] = _jvp
batching.primitive_batchers[_conv_p] = _vmap
mlir.register_lowering(_conv_p, mlir.lower_fun(_run, multiple_results=False))
