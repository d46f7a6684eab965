"""What every sparse matrix can do, and weights of any rank folded to one.

A sparse matrix is a pytree node of shape (K, N): K is contracted, N is kept,
so that `x @ w` maps (..., K) to (..., N). It has one float array, `values`;
the other arrays say where the values go and are not differentiated.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _registry

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
  """Declare a field that belongs to the tree's structure, as the shape does.

  Returns:
    What stands behind the field's annotation in the class.

  Example:
    >>> static().metadata["static"]
    True
  """
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


@dataclasses.dataclass(frozen=True)
class Kept:
  """Where a weight keeps anything, and what it will be multiplied by.

  Attributes:
    mask: boolean (contracted, kept) matrix.
    batch: how many rows it multiplies.
  """

  mask: np.ndarray
  batch: int

  @functools.cached_property
  def density(self) -> float:
    """The fraction of weights kept."""
    return float(self.mask.mean())

  @functools.cached_property
  def inner_density(self) -> float:
    """The fraction of the area in rows and columns that keep anything."""
    rows, columns = self.mask.any(axis=1), self.mask.any(axis=0)
    return float(rows.mean() * columns.mean())

  def block_density(self, size: int) -> float:
    """Return the fraction of the area in blocks that keep anything."""
    starts = [np.arange(0, length, size) for length in self.mask.shape]
    rows = np.add.reduceat(self.mask, starts[0], axis=0)
    both = np.add.reduceat(rows, starts[1], axis=1)
    return float((both > 0).mean())


class SparseMatrix(Sparse):
  """A (K, N) matrix in some sparse format: what a format must define.

  `values`, the fields that say where they go, and `shape`, declared as
  `static()`; `fromdense`; `positions`. With these it packs, decodes, multiplies
  and is differentiated. `matmul` is for a faster product. `fits` offers the
  format to `accelerate`, which times it against the others.

  Attributes:
    name: of its kernel in machine code, where there is one.
    stackable: whether a stack of layers can be padded to equal arrays.
  """

  values: jax.Array
  name: ClassVar[str] = ""
  stackable: ClassVar[bool] = False

  @classmethod
  def fits(cls, kept: Kept) -> dict[str, Any] | None:
    """Tell whether a product in this format may beat the dense one.

    Args:
      kept: where the weight keeps anything, and the batch.

    Returns:
      The options for `fromdense` if `accelerate` should time it, else None.
    """
    del kept
    return None

  @classmethod
  def runs_here(cls) -> bool:
    """Tell whether what makes the product fast is there on this machine."""
    return True

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
  """Return a matrix and its boolean mask on the host, checked.

  Args:
    dense: a matrix.
    mask: 1 = kept; None keeps what is not zero.

  Returns:
    `(dense, kept)`, NumPy arrays.

  Example:
    >>> kept_entries([[0.0, 2.0]], None)[1].tolist()
    [[False, True]]
  """
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


# Those without a kernel first.
FORMATS: _registry.Registry[type[SparseMatrix]] = _registry.Registry(
  "format",
  "jaxpruner.sparse.register_format",
  {
    "compact": "jaxpruner.sparse.format_compact:Compact",
    "block": "jaxpruner.sparse.format_block:Block",
    "nm": "jaxpruner.sparse.format_nm:NM",
    "sell": "jaxpruner.sparse.format_sell:Sell",
    "bitmask": "jaxpruner.sparse.format_bitmask:Bitmask",
  },
)


def register_format(name: str) -> Callable[[type[T]], type[T]]:
  """Give a sparse format a name: a class decorator.

  `pack(…, format="name")` then packs in it, and `accelerate` tries it wherever
  its `fits` says so. The class becomes a frozen dataclass and a pytree node.

  Args:
    name: the name; a taken one is refused.

  Returns:
    A function that registers a subclass of `SparseMatrix` and returns it.

  Example:
    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from jaxpruner import sparse
    >>> @sparse.register_format("coo")
    ... class Coo(sparse.SparseMatrix):
    ...   values: jax.Array
    ...   rows: jax.Array
    ...   cols: jax.Array
    ...   shape: tuple[int, int] = sparse.static()
    ...   @classmethod
    ...   def fromdense(cls, dense, mask=None):
    ...     dense, kept = sparse.kept_entries(dense, mask)
    ...     rows, cols = np.nonzero(kept)
    ...     arrays = map(jnp.asarray, (dense[kept], rows, cols))
    ...     return cls(*arrays, dense.shape)
    ...   def positions(self):
    ...     return self.rows, self.cols, None
    >>> (jnp.ones((1, 3)) @ sparse.pack(jnp.eye(3), format="coo")).tolist()
    [[1.0, 1.0, 1.0]]
  """

  def add(cls: type[T]) -> type[T]:
    if not (isinstance(cls, type) and issubclass(cls, SparseMatrix)):
      raise ValueError(
        f"format={cls!r} must be a subclass of jaxpruner.sparse.SparseMatrix"
      )
    if "__dataclass_fields__" not in vars(cls):
      cls = register(cls)
    FORMATS.register(name, cls)
    return cls

  return add


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
    format: "sell" (unstructured), "block", "nm", "bitmask", "compact" (whole
      rows and columns removed), or a name given to `register_format`.
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
  matrix = FORMATS.find(format).fromdense(
    fold(weight, contract),
    None if mask is None else fold(mask, contract),
    **options,
  )
  return SparseTensor(matrix, weight.shape, contract)
