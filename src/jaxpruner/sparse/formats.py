"""What every sparse matrix can do, and weights of any rank folded to one.

A sparse matrix is a pytree node of shape (K, N): K is contracted, N is kept,
so that `x @ w` maps (..., K) to (..., N). It has one float array, `values`;
the other arrays say where the values go and are not differentiated.
"""

import dataclasses
import functools
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def register(cls: type[T]) -> type[T]:
  """Make a dataclass a pytree node; fields marked `static` are its shape."""
  cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
  fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
  static = [f.name for f in fields if f.metadata.get("static")]
  data = [f.name for f in fields if f.name not in static]
  return jax.tree_util.register_dataclass(cls, data, static)


def static() -> Any:
  """Declare a field that belongs to the tree's structure."""
  return dataclasses.field(metadata={"static": True})


class Sparse:
  """What matrices and folded weights share: size, operators, no surprises."""

  # NumPy must not try to turn us into an object array in `x @ w`. There is no
  # __jax_array__ either: jnp would densify before it tries __rmatmul__.
  __array_ufunc__: ClassVar[None] = None
  shape: tuple[int, ...]

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    """Number of weights, removed ones included."""
    return int(np.prod(self.shape))

  @property
  def nbytes(self) -> int:
    """Bytes of all the stored arrays."""
    return sum(a.nbytes for a in jax.tree_util.tree_leaves(self))

  def todense(self) -> jax.Array:
    """Return the dense array: kept weights bit for bit, `+0.0` elsewhere."""
    raise NotImplementedError

  def __rmatmul__(self, x: Any) -> jax.Array:
    from jaxpruner.sparse import ops

    return ops.matmul(x, self)

  def with_values(self: T, values: jax.Array) -> T:
    """Return the same pattern with other values, as fine-tuning does."""
    raise NotImplementedError


class SparseMatrix(Sparse):
  """A (K, N) matrix in some sparse format."""

  values: jax.Array
  name: ClassVar[str]

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(self.values.dtype)

  def with_values(self: T, values: jax.Array) -> T:
    return dataclasses.replace(self, values=values)  # pyright: ignore

  @classmethod
  def fromdense(cls, dense: Any, mask: Any = None, **options: Any) -> Any:
    """Pack the kept weights; without a mask, those that are not zero."""
    raise NotImplementedError

  def positions(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return (row, column, kept) of every entry of `values`.

    `kept` is false at padding, and None where a format has none.
    """
    raise NotImplementedError

  def todense(self) -> jax.Array:
    row, col, kept = self.positions()
    if kept is not None:
      # An index past the end is dropped: padding leaves no trace.
      row = jnp.where(kept, row, self.shape[0])
    zeros = jnp.zeros(self.shape, self.dtype)
    return zeros.at[row, col].set(self.values, mode="drop")

  def matmul(self, x: jax.Array) -> jax.Array:
    """Return x @ w; a format without a faster way decodes itself."""
    return x @ self.todense()

  def gather(self, dense: jax.Array) -> jax.Array:
    """Return what `values` would hold if this matrix had been `dense`."""
    row, col, kept = self.positions()
    values = dense.at[row, col].get(mode="fill", fill_value=0)
    return values if kept is None else jnp.where(kept, values, 0)


@register
class SparseTensor(Sparse):
  """A weight of any rank, folded to a (contracted, kept) sparse matrix.

  `contract` lists the contracted axes of the original array in the order in
  which they are folded into K; the remaining axes, in order, make up N.
  """

  matrix: SparseMatrix
  shape: tuple[int, ...] = static()
  contract: tuple[int, ...] = static()

  @property
  def dtype(self) -> np.dtype:
    return self.matrix.dtype

  @property
  def values(self) -> jax.Array:
    return self.matrix.values

  def with_values(self, values: jax.Array) -> "SparseTensor":
    return dataclasses.replace(self, matrix=self.matrix.with_values(values))

  @property
  def kept(self) -> tuple[int, ...]:
    """The axes that are not contracted."""
    return tuple(d for d in range(self.ndim) if d not in self.contract)

  def todense(self) -> jax.Array:
    order = self.contract + self.kept
    folded = self.matrix.todense().reshape([self.shape[d] for d in order])
    return jnp.transpose(folded, np.argsort(order).tolist())


def kept_entries(dense: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
  """Return a matrix and its boolean mask on the host, checked."""
  dense = np.asarray(dense)
  if dense.ndim != 2:
    raise ValueError(
      f"dense has shape {dense.shape}; a format packs a matrix (contracted, "
      "kept): use pack(weight, contract=axes) for other ranks"
    )
  kept = dense != 0 if mask is None else np.asarray(mask).astype(bool)
  if kept.shape != dense.shape:
    raise ValueError(
      f"mask has shape {kept.shape}, dense has {dense.shape}; they must agree"
    )
  return dense, kept


@functools.cache
def format_named(name: str) -> type[SparseMatrix]:
  """Look a format up by name."""
  from jaxpruner.sparse import (
    format_bitmask,
    format_block,
    format_compact,
    format_nm,
    format_sell,
  )

  table = {
    "sell": format_sell.Sell,
    "block": format_block.Block,
    "nm": format_nm.NM,
    "bitmask": format_bitmask.Bitmask,
    "compact": format_compact.Compact,
  }
  if name not in table:
    raise ValueError(f"format {name!r} is not one of {sorted(table)}")
  return table[name]


def fold(array: Any, contract: tuple[int, ...]) -> np.ndarray:
  """Bring the contracted axes to the front and flatten to two axes."""
  array = np.asarray(array)
  kept = [d for d in range(array.ndim) if d not in contract]
  rows = int(np.prod([array.shape[d] for d in contract]))
  return array.transpose([*contract, *kept]).reshape(rows, -1)


def pack(
  weight: Any,
  mask: Any = None,
  *,
  format: str = "sell",
  contract: tuple[int, ...] = (0,),
  **options: Any,
) -> SparseTensor:
  """Keep the masked-in entries of `weight` in a sparse format.

  Args:
    weight: a dense array of any rank.
    mask: 1 = kept; by default what is not zero is kept.
    format: "sell" (unstructured), "block", "nm", "bitmask" or "compact"
      (whole rows and columns removed).
    contract: the axes that a product sums over: (0,) for an in × out kernel,
      (1,) for out × in.
    **options: the format's own, such as `block_shape=(64, 64)`.

  Returns:
    A pytree node that takes the place of `weight` in a tree of parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> w = sparse.pack(jnp.eye(4), format="bitmask")
    >>> (jnp.ones((2, 4)) @ w).shape
    (2, 4)
  """
  weight = np.asarray(weight)
  contract = tuple(d % weight.ndim for d in contract)
  matrix = format_named(format).fromdense(
    fold(weight, contract),
    None if mask is None else fold(mask, contract),
    **options,
  )
  return SparseTensor(matrix, weight.shape, contract)
