"""x @ w inside `jit` for formats with a kernel: gradients, batching, export."""

import ctypes
import functools
import importlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.formats import SparseMatrix


@functools.cache
def load(name: str) -> Any:
  """Compile (or load from Numba's cache) and register a format's kernel.

  Returns None where there is none: Numba is not installed (said once), or the
  processor lacks what the kernel needs.
  """
  if not _has_numba():
    return None
  kernel = importlib.import_module(f"jaxpruner.sparse._{name}_kernel")
  if not kernel.SUPPORTED:
    return None
  capsule = jax.ffi.pycapsule(ctypes.c_void_p(kernel.handler.address))
  jax.ffi.register_ffi_target(_target(name), capsule, platform="cpu")
  return kernel


@functools.cache
def _has_numba() -> bool:
  try:
    importlib.import_module("numba")
  except ImportError:
    warnings.warn(
      "numba is not installed: products with unstructured sparse weights "
      "decode them first and are slower than dense; "
      "pip install 'jaxpruner[sparse]'",
      stacklevel=4,
    )
    return False
  return True


def _target(name: str) -> str:
  return f"jaxpruner_{name}"


def matmul(x: jax.Array, w: SparseMatrix) -> jax.Array:
  """Return x @ w, accumulated in float32, in the dtype of a dense product."""
  dtype = jnp.result_type(x, w.dtype)
  kernel = None
  if dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    kernel = load(w.name)
  if kernel is None:
    return x @ w.todense()
  if w.dtype not in kernel.DTYPES:
    w = w.with_values(w.values.astype(jnp.float32))
  return _product(x.astype(jnp.float32), w).astype(dtype)


def _dense_product(x: jax.Array, w: SparseMatrix) -> jax.Array:
  return x @ w.todense().astype(jnp.float32)


def _kernel_product(x: jax.Array, w: SparseMatrix) -> jax.Array:
  batch = int(np.prod(x.shape[:-1]))
  # The second result is room for the packed batch, in XLA's own memory.
  room = load(w.name).scratch_size(batch, w.shape[0])
  call = jax.ffi.ffi_call(
    _target(w.name),
    (
      jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[1]), jnp.float32),
      jax.ShapeDtypeStruct((room,), jnp.float32),
    ),
  )
  return call(x, *jax.tree_util.tree_leaves(w))[0]


@jax.custom_batching.custom_vmap
def _call(x: jax.Array, w: SparseMatrix) -> jax.Array:
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
def _product(x: jax.Array, w: SparseMatrix) -> jax.Array:
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
