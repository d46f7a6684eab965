"""x @ w inside `jit` for formats with a kernel: derivatives, vmap, export."""

import ctypes
import functools
import importlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jaxpruner.sparse.formats import SparseMatrix

# Modules `_<name>_kernel`; `_back` is the product with the transpose. The
# number is the version of the call: its operands, results and room for scratch.
# A saved program states the version it calls.
KERNELS = {
  "sell": 1, "sell_back": 1, "sell_conv": 1, "bitmask": 1, "panel": 1,
  "int8": 1, "nm": 1,
}  # fmt: skip


@functools.cache
def load(name: str) -> Any:
  """Compile (or load from Numba's cache) and register a format's kernel.

  Returns None if there is no kernel: Numba is not installed (warned once), or
  the processor lacks instructions that the kernel needs.
  """
  if not _has_numba():
    return None
  kernel = importlib.import_module(f"jaxpruner.sparse._{name}_kernel")
  if not kernel.SUPPORTED:
    return None
  capsule = jax.ffi.pycapsule(ctypes.c_void_p(kernel.handler.address))
  jax.ffi.register_ffi_target(target(name), capsule, platform="cpu")
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


def target(name: str) -> str:
  """Return the name under which XLA knows a kernel."""
  return f"jaxpruner_{name}"


def register_kernels() -> dict[str, int]:
  """Register the compiled products with XLA, for programs made elsewhere.

  `accelerate` and `load_model` do it themselves. A program that was written
  with `jax.export` and is called in a process of its own needs it, and so does
  the export, which must know that these custom calls are meant to be there.
  Sparse weights may then be arguments of the exported function.

  Returns:
    The name of each custom call that runs on this machine, and its version.
    Empty without the extra `sparse` (Numba). A call keeps its name as long as
    its version.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jax import export
    >>> from jaxpruner import sparse
    >>> w = sparse.pack(jnp.eye(16))
    >>> checks = [export.DisabledSafetyCheck.custom_call(name)
    ...           for name in sparse.register_kernels()]
    >>> program = export.export(
    ...   jax.jit(lambda x: x @ w), disabled_checks=checks)(jnp.ones((1, 16)))
    >>> content = program.serialize()  # a fresh process registers, then calls
    >>> _ = sparse.register_kernels()
    >>> export.deserialize(content).call(jnp.ones((1, 16)))[0, :3].tolist()
    [1.0, 1.0, 1.0]
  """
  from jaxpruner.sparse import _stablehlo  # which needs this module

  _stablehlo.register_trees()
  return {
    target(name): version
    for name, version in KERNELS.items()
    if load(name) is not None
  }


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
  return product(x.astype(jnp.float32), w).astype(dtype)


def _kernel_product(
  x: jax.Array, w: SparseMatrix, kernel: str, back: bool
) -> jax.Array:
  batch = int(np.prod(x.shape[:-1]))
  # The second result is room for the packed batch, in XLA's own memory.
  room = load(kernel).scratch_size(batch, *w.shape)
  call = jax.ffi.ffi_call(
    target(kernel),
    (
      jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[not back]), jnp.float32),
      jax.ShapeDtypeStruct((room,), jnp.float32),
    ),
  )
  return call(x, *jax.tree_util.tree_leaves(w))[0]


def _run(
  x: jax.Array,
  *arrays: jax.Array,
  form: Any,
  back: bool,
  platform: str | None = None,
) -> jax.Array:
  """Multiply by the compiled kernel, or as the format does without one."""
  w = form.unflatten(arrays)
  kernel = f"{w.name}_back" if back else w.name
  if platform or kernel not in KERNELS or load(kernel) is None:
    return w.product(x, back, platform)
  # One program for all platforms: it exports to those without the kernel.
  return jax.lax.platform_dependent(
    x,
    w,
    cpu=functools.partial(_kernel_product, kernel=kernel, back=back),
    default=lambda x, w: w.product(x, back),
  )


# Primitives of our own, not custom_vjp: that one knows no forward mode.
_product_p = core.Primitive("jaxpruner_product")


def product(x: jax.Array, w: SparseMatrix, back: bool = False) -> jax.Array:
  """Return x @ w, or x @ w.T: linear in x and in the values of w."""
  arrays, form = jax.tree_util.tree_flatten(w)
  return _product_p.bind(x, *arrays, form=form, back=back)


def promoted_product(x: jax.Array, w: SparseMatrix) -> jax.Array:
  """Return x @ w in the common dtype, by the product of the format itself."""
  dtype = jnp.result_type(x, w.values)
  w = w.with_values(w.values.astype(dtype))
  return product(x.astype(dtype), w)


def _shape(x, *arrays, form, back):
  w = form.unflatten(arrays)
  return x.update(shape=(*x.shape[:-1], w.shape[not back]))


def _jvp(primals, tangents, *, form, back):
  (x, *arrays), (x_dot, *dots) = primals, tangents
  w, values = form.unflatten(arrays), form.unflatten(dots).values
  parts = []
  if type(x_dot) is not ad.Zero:
    parts.append(product(x_dot, w, back))
  if type(values) is not ad.Zero:
    parts.append(product(x, w.with_values(values), back))
  y = product(x, w, back)
  zero = ad.Zero(jax.typeof(y).to_tangent_aval())
  return y, functools.reduce(ad.add_tangents, parts, zero)


def _transpose(g, x, *arrays, form, back):
  w = form.unflatten(arrays)
  if ad.is_undefined_primal(x):
    return product(g, w, not back), *[None] * len(arrays)
  rows, cols = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
  if back:
    rows, cols = cols, rows
  # The indices are known, and only they say where the gradient is needed.
  dtype = w.values.aval.dtype
  known = w.with_values(jnp.zeros(w.values.aval.shape, dtype))
  values = outer(rows, cols, known)
  nothing = form.unflatten([None] * len(arrays))
  cotangents = nothing.with_values(values.astype(dtype))
  return None, *jax.tree_util.tree_leaves(cotangents, is_leaf=_is_none)


def _vmap(operands, axes, *, form, back):
  x, *arrays = operands
  if all(axis is None for axis in axes[1:]):
    x = jnp.moveaxis(x, axes[0], 0)
    return _product_p.bind(x, *arrays, form=form, back=back), 0

  def one(i):
    parts = [
      a if axis is None else jnp.take(a, i, axis=axis)
      for a, axis in zip(operands, axes, strict=True)
    ]
    return _product_p.bind(*parts, form=form, back=back)

  pairs = zip(operands, axes, strict=True)
  length = next(a.shape[d] for a, d in pairs if d is not None)
  return jax.lax.map(one, jnp.arange(length)), 0


def _is_none(value: Any) -> bool:
  return value is None


# --- x.T @ g at the positions of the values ---------------------------------

_outer_p = core.Primitive("jaxpruner_outer")


def outer(x: jax.Array, g: jax.Array, w: SparseMatrix) -> jax.Array:
  """Return x.T @ g at the positions of w's values: linear in x and in g."""
  arrays, form = jax.tree_util.tree_flatten(w)
  return _outer_p.bind(x, g, *arrays, form=form)


def _run_outer(x, g, *arrays, form, platform=None):
  return form.unflatten(arrays).outer(x, g, platform)


def _outer_shape(x, g, *arrays, form):
  del g
  return x.update(shape=form.unflatten(arrays).values.shape)


def _outer_jvp(primals, tangents, *, form):
  (x, g, *arrays), (x_dot, g_dot, *_) = primals, tangents
  w, parts = form.unflatten(arrays), []
  if type(x_dot) is not ad.Zero:
    parts.append(outer(x_dot, g, w))
  if type(g_dot) is not ad.Zero:
    parts.append(outer(x, g_dot, w))
  y = outer(x, g, w)
  zero = ad.Zero(jax.typeof(y).to_tangent_aval())
  return y, functools.reduce(ad.add_tangents, parts, zero)


def _outer_transpose(values, x, g, *arrays, form):
  w = form.unflatten(arrays).with_values(values)
  nothing = [None] * len(arrays)
  if ad.is_undefined_primal(x):
    return product(g, w, True), None, *nothing
  return None, product(x, w), *nothing


def _outer_vmap(operands, axes, *, form):
  run = functools.partial(_run_outer, form=form)
  return jax.vmap(run, in_axes=axes)(*operands), 0


def _register(primitive, run, shape, jvp, transpose, vmap) -> None:
  """Give a primitive its rules; TPU and GPU get a lowering of their own."""
  primitive.def_impl(jax.jit(primitive.bind, static_argnames=("form", "back")))
  primitive.def_abstract_eval(shape)
  ad.primitive_jvps[primitive] = jvp
  ad.primitive_transposes[primitive] = transpose
  batching.primitive_batchers[primitive] = vmap
  for platform in (None, "tpu", "cuda"):
    lowered = functools.partial(run, platform=platform)
    rule = mlir.lower_fun(lowered, multiple_results=False)
    mlir.register_lowering(primitive, rule, platform=platform)


_register(_product_p, _run, _shape, _jvp, _transpose, _vmap)
_register(
  _outer_p,
  _run_outer,
  _outer_shape,
  _outer_jvp,
  _outer_transpose,
  _outer_vmap,
)
