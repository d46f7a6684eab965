"""x @ w for kept weights, with both gradients, inside `jit`.

On CPU three products share one layout and run in machine code; elsewhere, and
without Numba, the weight is decoded, which is right but not faster than dense.
Blocks have products of their own, fast on every device.
"""

import ctypes
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner.kept import block_products
from jaxpruner.kept.blocks import BlockLayout
from jaxpruner.kept.layouts import Layout
from jaxpruner.sparse import kernels

# Vectors of a panel that the second cache holds.
CACHED = 4 * 4096


@functools.cache
def load() -> Any:
  """Compile (or load from Numba's cache) and register the kernel, or None."""
  if not kernels._has_numba():
    return None
  from jaxpruner.kept import _kernel, _panels_kernel

  register(_kernel, "product", "gradients")
  register(_panels_kernel, "panels")
  return _kernel


def register(module: Any, *names: str) -> None:
  """Make functions of a kernel known to XLA as `jaxpruner_kept_<name>`."""
  for name in names:
    address = ctypes.c_void_p(getattr(module, name).address)
    capsule = jax.ffi.pycapsule(address)
    target = f"jaxpruner_kept_{name}"
    jax.ffi.register_ffi_target(target, capsule, platform="cpu")


def product(
  x: Array,
  values: Array,
  layout: Layout | BlockLayout,
  transposed: bool = False,
) -> Array:
  """Return x @ w, or x @ w.T, where w is the folded matrix of a layout.

  Args:
    x: a dense array (batch, K).
    values: the kept values, by slot.
    layout: their positions.
    transposed: whether to multiply by the transpose.

  Returns:
    A dense array (batch, N), accumulated in float32, in the common dtype.
  """
  dtype = jnp.result_type(x, values)
  wide = jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype
  run: Any = _product
  if isinstance(layout, BlockLayout):
    run = block_products.product
  y: Any = run(x.astype(wide), values.astype(wide), layout, transposed)
  return y.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: Array, values: Array, layout: Layout, transposed: bool):
  y = functools.partial(_dense_product, transposed=transposed)
  if load() is None or x.dtype != jnp.float32:
    return y(x, values, layout)
  fast = functools.partial(_fast_product, transposed=transposed)
  return jax.lax.platform_dependent(x, values, layout, cpu=fast, default=y)


def _forward(x, values, layout, transposed):
  return _product(x, values, layout, transposed), (x, values, layout)


def _backward(transposed, saved, g):
  x, values, layout = saved
  slow = functools.partial(_dense_gradients, transposed=transposed)
  if load() is None or x.dtype != jnp.float32:
    dx, dv = slow(x, g, values, layout)
  else:
    fast = functools.partial(_fast_gradients, transposed=transposed)
    dx, dv = jax.lax.platform_dependent(
      x, g, values, layout, cpu=fast, default=slow
    )
  nothing = lambda a: np.zeros(a.shape, jax.dtypes.float0)
  return dx, dv, jax.tree.map(nothing, layout)


_product.defvjp(_forward, _backward)


def _dense_product(x, values, layout, transposed):
  w = layout.scatter(values)
  return x @ (w.T if transposed else w)


def _dense_gradients(x, g, values, layout, transposed):
  w = layout.scatter(values)
  dx = g @ (w if transposed else w.T)
  outer = g.T @ x if transposed else x.T @ g
  return dx, layout.gather(outer)


def _width(batch: int, size: int) -> int:
  """Return the batch rows of a panel: few enough that one stays in cache."""
  sizes, vector = load().SIZES, load().VECTOR
  # Longer rows save decoding; panels far above a megabyte leave the cache.
  most = max(v for v in sizes if v == 1 or v * size <= CACHED)
  need = -(-batch // vector)
  return vector * min([most, *(v for v in sizes if v >= need)])


def _panels(x: Array, width: int) -> Array:
  """Return (batch, K) as panels (P, K, width) of transposed rows.

  Not in XLA: see `_panels_kernel`.
  """
  batch, size = x.shape
  count = -(-batch // width)
  x = jnp.pad(x, ((0, count * width - batch), (0, 0)))
  out = jax.ShapeDtypeStruct((count, size, width), jnp.float32)
  return jax.ffi.ffi_call("jaxpruner_kept_panels", out)(x)


def _fast_product(x, values, layout, transposed):
  width = _width(len(x), max(layout.matrix))
  lists = layout.by_row if transposed else layout.by_column
  out = (len(x), layout.matrix[not transposed])
  call = jax.ffi.ffi_call(
    "jaxpruner_kept_product", jax.ShapeDtypeStruct(out, jnp.float32)
  )
  return call(_panels(x, width), values, *lists)


def _fast_gradients(x, g, values, layout, transposed):
  width = _width(len(x), max(layout.matrix))
  lists = layout.by_column if transposed else layout.by_row
  call = jax.ffi.ffi_call(
    "jaxpruner_kept_gradients",
    (
      jax.ShapeDtypeStruct(x.shape, jnp.float32),
      jax.ShapeDtypeStruct(values.shape, jnp.float32),
    ),
  )
  return call(_panels(x, width), _panels(g, width), values, *lists)
