"""Products of a dense array and a sparse weight, with the signatures of JAX.

All functions accept a dense weight too, so that one model runs with both kinds.
Where a format cannot compute a product (batch axes in the weight, or other
contracted axes than those it was packed for), the weight is decoded first.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.program import windows
from jaxpruner.sparse import _planes
from jaxpruner.sparse.formats import Sparse, SparseMatrix, SparseTensor

Array = jax.Array


def matmul(x: Any, w: Any) -> Array:
  """Return x @ w, contracting x's last axis with w's rows.

  Args:
    x: a dense array (..., K).
    w: a sparse weight of shape (K, N), or folded from any rank with the first
      axis contracted; or a dense array.

  Returns:
    A dense array (..., N).

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> w = sparse.pack(jnp.eye(4))
    >>> sparse.matmul(jnp.arange(4.0), w).tolist()
    [0.0, 1.0, 2.0, 3.0]
  """
  if isinstance(x, Sparse):
    raise TypeError(
      "x is sparse: matmul(x, w) takes the sparse weight second; pack w with "
      "contract=(1,) and compute (w @ x).T as matmul(x.T, w)"
    )
  if not isinstance(w, Sparse):
    return jnp.matmul(x, w)
  x = jnp.asarray(x)
  axis = 0 if w.ndim == 2 else w.contract[0]  # pyright: ignore
  if x.ndim == 0 or x.shape[-1] != w.shape[axis]:
    raise ValueError(
      f"x has shape {x.shape}, w {w.shape}: x's last axis must have length "
      f"{w.shape[axis]}"
    )
  return dot_general(x, w, (((x.ndim - 1,), (axis,)), ((), ())))


def dot_general(
  lhs: Any,
  rhs: Any,
  dimension_numbers: Any,
  precision: Any = None,
  preferred_element_type: Any = None,
) -> Array:
  """Compute `jax.lax.dot_general` with a sparse weight on one side.

  Args:
    lhs: a dense array or a sparse weight.
    rhs: a dense array or a sparse weight.
    dimension_numbers: `((lhs contracted, rhs contracted), (lhs batch, rhs
      batch))`, as for `jax.lax.dot_general`.
    precision: used only if the product is computed densely.
    preferred_element_type: dtype of the result.

  Returns:
    A dense array: axes kept of `lhs`, then axes kept of `rhs`.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> w = sparse.pack(jnp.array([[1.0, 0.0, 2.0]]), contract=(1,))
    >>> contract_last = (((1,), (1,)), ((), ()))
    >>> sparse.dot_general(w, jnp.ones((2, 3)), contract_last).tolist()
    [[3.0, 3.0]]
  """
  (lc, rc), (lb, rb) = dimension_numbers
  left = isinstance(lhs, Sparse)
  w, wc, xc, x = (lhs, lc, rc, rhs) if left else (rhs, rc, lc, lhs)
  folded = _foldable(w, wc) if not (lb or rb) else None
  if folded is None or isinstance(x, Sparse):
    return jax.lax.dot_general(
      decode(lhs),
      decode(rhs),
      dimension_numbers,
      precision,
      preferred_element_type,
    )
  axes = [xc[list(wc).index(d)] for d in folded.contract]
  y = _contract(x, axes, folded, preferred_element_type)
  if left:
    kept = len(folded.kept)
    y = jnp.moveaxis(y, range(y.ndim - kept, y.ndim), range(kept))
  return y


def einsum(spec: str, lhs: Any, rhs: Any) -> Array:
  """Compute `jnp.einsum` of two operands, one of which may be sparse.

  Args:
    spec: the subscripts, with an explicit `->`; an ellipsis is allowed.
    lhs: a dense array or a sparse weight.
    rhs: a dense array or a sparse weight.

  Returns:
    A dense array with the axes that `spec` names.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> heads = sparse.pack(jnp.ones((8, 2, 4)))
    >>> sparse.einsum("bsd,dhk->bshk", jnp.ones((1, 3, 8)), heads).shape
    (1, 3, 2, 4)
  """
  plan = _einsum_plan(spec, lhs, rhs)
  if plan is None:
    return jnp.einsum(spec, decode(lhs), decode(rhs))
  dimensions, order = plan
  return jnp.transpose(dot_general(lhs, rhs, dimensions), order)


def conv_general_dilated(
  lhs: Any,
  rhs: Any,
  window_strides: Sequence[int],
  padding: Any,
  lhs_dilation: Sequence[int] | None = None,
  rhs_dilation: Sequence[int] | None = None,
  dimension_numbers: Any = None,
  feature_group_count: int = 1,
  batch_group_count: int = 1,
  precision: Any = None,
  preferred_element_type: Any = None,
) -> Array:
  """Compute `jax.lax.conv_general_dilated` with a sparse kernel.

  A kernel of single weights is multiplied by compiled code that finds its
  windows in the image; for other formats the windows become the rows of a
  matrix. The kernel must be packed with `contract=conv_contract(spec)`;
  otherwise, and for grouped convolutions, it is decoded.

  Args:
    lhs: the dense input.
    rhs: the kernel, sparse or dense.
    window_strides: stride of each spatial axis.
    padding: "SAME", "VALID", or pairs of integers.
    lhs_dilation: dilation of the input.
    rhs_dilation: dilation of the kernel.
    dimension_numbers: axes of input, kernel and output, as for JAX.
    feature_group_count: groups of features.
    batch_group_count: groups of the batch.
    precision: used only if the convolution is computed densely.
    preferred_element_type: dtype of the result.

  Returns:
    The dense output of the convolution.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> axes = ("NHWC", "HWIO", "NHWC")
    >>> image, kernel = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 1))
    >>> spec = jax.lax.conv_dimension_numbers(image.shape, kernel.shape, axes)
    >>> packed = sparse.pack(kernel, contract=sparse.conv_contract(spec))
    >>> y = sparse.conv_general_dilated(
    ...   image, packed, (1, 1), "VALID", dimension_numbers=axes)
    >>> y.ravel().tolist()
    [18.0, 18.0, 18.0, 18.0]
  """
  spec = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
  spatial = len(window_strides)
  contract = conv_contract(spec)
  folded = None
  if feature_group_count == batch_group_count == 1:
    folded = _foldable(rhs, contract)
  if folded is None or folded.contract != contract:
    return jax.lax.conv_general_dilated(
      lhs,
      decode(rhs),
      window_strides,
      padding,
      lhs_dilation,
      rhs_dilation,
      dimension_numbers,
      feature_group_count,
      batch_group_count,
      precision,
      preferred_element_type,
    )
  lhs_dilation = tuple(lhs_dilation or (1,) * spatial)
  rhs_dilation = tuple(rhs_dilation or (1,) * spatial)
  window = [rhs.shape[d] for d in spec.rhs_spec[2:]]
  sizes = [lhs.shape[d] for d in spec.lhs_spec[2:]]
  padding = windows.pads(
    padding, sizes, window, window_strides, lhs_dilation, rhs_dilation
  )
  geometry = spec, window, window_strides, padding, lhs_dilation, rhs_dilation
  y = _by_planes(lhs, folded, geometry, preferred_element_type)
  if y is not None:
    return y
  rows = windows.rows(
    lhs,
    spec.lhs_spec,
    window,
    window_strides,
    padding,
    lhs_dilation,
    rhs_dilation,
  )
  rows = rows.reshape(*rows.shape[:-2], -1)
  y = _contract(rows, None, folded, preferred_element_type)
  out = spec.out_spec
  order = np.argsort([out[0], *out[2:], out[1]]).tolist()
  return jnp.transpose(y, order)


def _by_planes(
  x: Array, w: SparseTensor, geometry: Any, dtype: Any
) -> Array | None:
  """Convolve an image channel by channel; None if there is no kernel for it.

  XLA keeps this layout from one such convolution to the next.
  """
  spec, window, strides, padding, lhs_dilation, rhs_dilation = geometry
  wide = jnp.result_type(x, w.dtype if dtype is None else dtype)
  if len(window) != 2 or wide not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return None
  where = _planes.Windows(tuple(window), tuple(strides), tuple(rhs_dilation))
  image = jnp.transpose(
    x, (spec.lhs_spec[1], spec.lhs_spec[0], *spec.lhs_spec[2:])
  )
  edges = [
    (low, high, d - 1)
    for (low, high), d in zip(padding, lhs_dilation, strict=True)
  ]
  zero = jnp.zeros((), x.dtype)
  image = jax.lax.pad(image, zero, [(0, 0, 0), (0, 0, 0), *edges])
  positions = image.shape[1] * int(np.prod(where.out(image.shape)))
  if not _planes.fits(w.matrix, positions):
    return None
  y = _planes.conv(image.astype(jnp.float32), w.matrix, where).astype(wide)
  out = spec.out_spec
  return jnp.transpose(y, np.argsort([out[1], out[0], *out[2:]]).tolist())


def conv_contract(spec: Any) -> tuple[int, ...]:
  """Return the axes of a kernel that a convolution contracts.

  Args:
    spec: the result of `jax.lax.conv_dimension_numbers`.

  Returns:
    The spatial axes, then the axis of input features: the argument `contract`
    of `pack` for this kernel.

  Example:
    >>> import jax
    >>> from jaxpruner import sparse
    >>> sparse.conv_contract(jax.lax.conv_dimension_numbers(
    ...   (1, 4, 4, 2), (3, 3, 2, 1), ("NHWC", "HWIO", "NHWC")))
    (0, 1, 2)
  """
  return (*spec.rhs_spec[2:], spec.rhs_spec[1])


def decode(array: Any) -> Any:
  """Return a sparse weight as a dense array; a dense one unchanged."""
  return array.todense() if isinstance(array, Sparse) else array


def _foldable(w: Any, contract: Sequence[int]) -> SparseTensor | None:
  """Return `w` if it was packed for a contraction of these axes."""
  if isinstance(w, SparseMatrix):
    w = SparseTensor(w, w.shape, (0,))
  if not isinstance(w, SparseTensor):
    return None
  # Axes of length 1 may be on either side.
  long = [d for d in w.contract if w.shape[d] != 1]
  wanted = [d for d in contract if w.shape[d] != 1]
  if sorted(long) != sorted(wanted):
    return None
  order = iter(long)
  axes = tuple(d if w.shape[d] == 1 else next(order) for d in contract)
  return dataclasses.replace(w, contract=axes)


def _contract(
  x: Array, axes: Sequence[int] | None, w: SparseTensor, dtype: Any
) -> Array:
  """Contract x's `axes` (None: its last, already folded) with all of w's."""
  if axes is not None:
    x = jnp.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    x = x.reshape(*x.shape[: x.ndim - len(axes)], w.matrix.shape[0])
  if dtype is not None:
    x = x.astype(jnp.result_type(x, dtype))
  y = w.matrix.matmul(x)
  y = y.reshape(*y.shape[:-1], *(w.shape[d] for d in w.kept))
  return y if dtype is None else y.astype(dtype)


def _einsum_plan(spec: str, lhs: Any, rhs: Any) -> Any:
  """Return dot_general's dimensions and the final order, or None."""
  inputs, arrow, output = spec.replace(" ", "").partition("->")
  terms = inputs.split(",")
  if len(terms) != 2 or not arrow:
    return None
  # An ellipsis stands for axes without a letter: name them by capitals.
  extra = max(
    (
      a.ndim - len(t) + 3
      for t, a in zip(terms, (lhs, rhs), strict=True)
      if "..." in t
    ),
    default=0,
  )
  free = [c for c in "ABCDEFGHIJKLMNOP" if c not in spec][:extra]
  left, right, output = (
    t.replace("...", "".join(free)) for t in (*terms, output)
  )
  if len(left) != lhs.ndim or len(right) != rhs.ndim:
    return None
  shared = [c for c in left if c in right]
  rest = [c for c in left + right if c not in shared]
  if sorted(rest) != sorted(output) or len(set(output)) != len(output):
    return None
  dimensions = (
    (
      tuple(left.index(c) for c in shared),
      tuple(right.index(c) for c in shared),
    ),
    ((), ()),
  )
  return dimensions, [rest.index(c) for c in output]
