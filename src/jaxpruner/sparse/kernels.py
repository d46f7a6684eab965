"""x @ w inside `jit` for formats with a kernel: gradients, batching, export."""

import ctypes
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.formats import SparseMatrix

# Modules `_<name>_kernel`; `_back` is the product with the transpose.
KERNELS = ("sell", "sell_back", "bitmask")


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


def _dense_product(x: jax.Array, w: SparseMatrix, back: bool) -> jax.Array:
  dense = w.todense().astype(jnp.float32)
  return x @ (dense.T if back else dense)


def _kernel_product(
  x: jax.Array, w: SparseMatrix, kernel: str, back: bool
) -> jax.Array:
  batch = int(np.prod(x.shape[:-1]))
  # The second result is room for the packed batch, in XLA's own memory.
  room = load(kernel).scratch_size(batch, *w.shape)
  call = jax.ffi.ffi_call(
    _target(kernel),
    (
      jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[not back]), jnp.float32),
      jax.ShapeDtypeStruct((room,), jnp.float32),
    ),
  )
  return call(x, *jax.tree_util.tree_leaves(w))[0]


def _batched(back: bool) -> Callable[[jax.Array, SparseMatrix], jax.Array]:
  """Make x @ w, or x @ w.T, with a rule for vmap."""

  @jax.custom_batching.custom_vmap
  def call(x, w):
    kernel = f"{w.name}_back" if back else w.name
    if kernel not in KERNELS or load(kernel) is None:
      return _dense_product(x, w, back)
    # One program for all platforms: it exports to those without the kernel.
    return jax.lax.platform_dependent(
      x,
      w,
      cpu=functools.partial(_kernel_product, kernel=kernel, back=back),
      default=functools.partial(_dense_product, back=back),
    )

  @call.def_vmap
  def rule(axis_size, in_batched, x, w):
    x_batched, w_batched = in_batched
    if not any(jax.tree_util.tree_leaves(w_batched)):
      return call(x, w), True

    def pick(leaf, batched, i):
      return leaf[i] if batched else leaf

    def one(i):
      weight = jax.tree_util.tree_map(lambda a, b: pick(a, b, i), w, w_batched)
      return call(pick(x, x_batched, i), weight)

    return jax.lax.map(one, jnp.arange(axis_size)), True

  return call


_forward_call, _back_call = _batched(back=False), _batched(back=True)


@jax.custom_vjp
def _product(x: jax.Array, w: SparseMatrix) -> jax.Array:
  return _forward_call(x, w)


def _forward(x, w):
  return _forward_call(x, w), (x, w)


def _backward(residuals, g):
  x, w = residuals
  zeros = jax.tree_util.tree_map(
    lambda a: np.zeros(a.shape, jax.dtypes.float0), w
  )
  rows, cols = w.shape
  outer = x.reshape(-1, rows).T @ g.reshape(-1, cols)
  values = w.gather(outer).astype(w.dtype)
  return _back_call(g, w), zeros.with_values(values)


_product.defvjp(_forward, _backward)
