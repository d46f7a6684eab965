"""x @ w for the SELL format inside `jit`: kernel, gradients, batching."""

import ctypes
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.format_sell import Sell

_TARGET = "jaxpruner_sell"


@functools.cache
def load_kernel() -> Any:
  """Compile (or load from Numba's cache) and register the kernel.

  Returns None, and says so once, where Numba is not installed.
  """
  try:
    from jaxpruner.sparse import _sell_kernel
  except ImportError:
    warnings.warn(
      "numba is not installed: products with unstructured sparse weights "
      "decode them first and are slower than dense; "
      "pip install 'jaxpruner[sparse]'",
      stacklevel=2,
    )
    return None
  address = ctypes.c_void_p(_sell_kernel.handler.address)
  capsule = jax.ffi.pycapsule(address)
  jax.ffi.register_ffi_target(_TARGET, capsule, platform="cpu")
  return _sell_kernel


def matmul(x: jax.Array, w: Sell) -> jax.Array:
  """Return x @ w, accumulated in float32, in the dtype of a dense product."""
  dtype = jnp.result_type(x, w.dtype)
  if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return x @ w.todense()
  if load_kernel() is None:
    return x @ w.todense()
  if w.dtype not in (jnp.float32, jnp.bfloat16):
    w = w.with_values(w.values.astype(jnp.float32))
  return _product(x.astype(jnp.float32), w).astype(dtype)


def _dense_product(x: jax.Array, w: Sell) -> jax.Array:
  return x @ w.todense().astype(jnp.float32)


def _kernel_product(x: jax.Array, w: Sell) -> jax.Array:
  kernel = load_kernel()
  batch = int(np.prod(x.shape[:-1]))
  # The second result is room for the packed batch, in XLA's own memory.
  room = kernel.panel_size(batch, w.shape[0])
  call = jax.ffi.ffi_call(
    _TARGET,
    (
      jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[1]), jnp.float32),
      jax.ShapeDtypeStruct((room,), jnp.float32),
    ),
  )
  return call(x, w.values, w.indices, w.starts, w.counts, w.columns)[0]


@jax.custom_batching.custom_vmap
def _call(x: jax.Array, w: Sell) -> jax.Array:
  # One program for all platforms: it exports to those without the kernel.
  return jax.lax.platform_dependent(
    x, w, cpu=_kernel_product, default=_dense_product
  )


@_call.def_vmap
def _call_vmap(axis_size, in_batched, x, w):
  x_batched, w_batched = in_batched
  if not any(jax.tree_util.tree_leaves(w_batched)):
    return _call(x, w), True

  def pick(leaf, batched, i):
    return leaf[i] if batched else leaf

  def one(i):
    weight = jax.tree_util.tree_map(lambda a, b: pick(a, b, i), w, w_batched)
    return _call(pick(x, x_batched, i), weight)

  return jax.lax.map(one, jnp.arange(axis_size)), True


@jax.custom_vjp
def _product(x: jax.Array, w: Sell) -> jax.Array:
  return _call(x, w)


def _forward(x, w):
  return _call(x, w), (x, w)


def _backward(residuals, g):
  x, w = residuals
  zeros = jax.tree_util.tree_map(
    lambda a: np.zeros(a.shape, jax.dtypes.float0), w
  )
  rows, cols = w.shape
  outer = x.reshape(-1, rows).T @ g.reshape(-1, cols)
  values = w.gather(outer).astype(w.dtype)
  dx = g @ w.todense().astype(jnp.float32).T
  return dx, zeros.with_values(values)


_product.defvjp(_forward, _backward)
