"""The base class of sparse matrices, and weights of any rank folded to one.

A sparse matrix is a pytree node of shape (K, N): K is contracted, N is kept,
so that `x @ w` maps (..., K) to (..., N). It has one float array, `values`;
the other arrays hold the positions of the values and are not differentiated.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner._tools import registry

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def register(cls: type[T]) -> type[T]:
  """Make a dataclass a pytree node; fields marked `static` are its shape."""
  cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
  fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
  static = [f.name for f in fields if f.metadata.get("static")]
  data = [f.name for f in fields if f.name not in static]
  return jax.tree_util.register_dataclass(cls, data, static)


def static(default: Any = dataclasses.MISSING) -> Any:
  """Declare a field that is part of the tree structure, as the shape is.

  Args:
    default: the value of the field if none is given.

  Returns:
    The default of the field in a class body: `shape: tuple = static()`. JAX
    does not trace the field; another value means another compilation.

  Example:
    >>> static().metadata["static"]
    True
  """
  return dataclasses.field(default=default, metadata={"static": True})


class Sparse:
  """Base class of sparse matrices and folded weights: size and operators."""

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
    """Return the same pattern with other values, as fine-tuning does.

    Args:
      values: an array of the shape and dtype of `self.values`.

    Returns:
      A sparse weight with the same positions.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Kept:
  """The mask of a folded weight and the batch size of its product.

  `SparseMatrix.fits` decides by it whether a format may be fast.

  Attributes:
    mask: boolean (contracted, kept) matrix, True = kept.
    batch: number of rows of the dense operand.

  Example:
    >>> kept = Kept(np.array([[True, False], [False, False]]), batch=8)
    >>> kept.density, kept.inner_density, kept.block_density(2)
    (0.25, 0.25, 1.0)
  """

  mask: np.ndarray
  batch: int

  @functools.cached_property
  def density(self) -> float:
    """The fraction of weights kept."""
    return float(self.mask.mean())

  @functools.cached_property
  def inner_density(self) -> float:
    """The share of the matrix left without all-zero rows and columns."""
    rows, columns = self.mask.any(axis=1), self.mask.any(axis=0)
    return float(rows.mean() * columns.mean())

  def block_density(self, size: int) -> float:
    """Return the fraction of blocks that keep at least one weight.

    Args:
      size: height and width of the blocks.

    Returns:
      Blocks with a kept weight over all blocks.
    """
    starts = [np.arange(0, length, size) for length in self.mask.shape]
    rows = np.add.reduceat(self.mask, starts[0], axis=0)
    both = np.add.reduceat(rows, starts[1], axis=1)
    return float((both > 0).mean())


class SparseMatrix(Sparse):
  """Base class of sparse formats: a (K, N) matrix.

  A format must define `values`, fields for the positions of the values, `shape`
  (declared as `static()`), `fromdense` and `positions`. With these a weight can
  be packed, decoded, multiplied and differentiated. A format may define
  `matmul`, a faster product, `fits`, by which `accelerate` decides whether to
  time the format, and `take`, a lookup of columns. Register it with
  `register_format`.

  Attributes:
    values: the stored values, the only array that is differentiated.
    name: name of the format and of its compiled kernel, if there is one.
    stackable: whether a stack of layers can be padded to equal arrays.

  Example:
    >>> from jaxpruner import sparse
    >>> w = sparse.Compact.fromdense([[0.0, 0.0], [3.0, 0.0]])
    >>> isinstance(w, SparseMatrix), w.shape, w.values.tolist()
    (True, (2, 2), [[3.0]])
    >>> row, column, _ = w.positions()
    >>> row.tolist(), column.tolist()
    ([[1]], [[0]])
  """

  values: jax.Array
  name: ClassVar[str] = ""
  stackable: ClassVar[bool] = False

  @classmethod
  def fits(cls, kept: Kept) -> dict[str, Any] | None:
    """Tell whether a product in this format may beat the dense one.

    Args:
      kept: the mask of the weight, and the batch size.

    Returns:
      The options for `fromdense` if `accelerate` should time this format, else
      None.
    """
    del kept
    return None

  @classmethod
  def runs_here(cls) -> bool:
    """Tell whether the fast product is available on this machine."""
    return True

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(self.values.dtype)

  def with_values(self: T, values: jax.Array) -> T:
    return dataclasses.replace(self, values=values)  # pyright: ignore

  @classmethod
  def fromdense(cls, dense: Any, mask: Any = None, **options: Any) -> Any:
    """Pack the kept weights of a matrix.

    Args:
      dense: a matrix (contracted, kept).
      mask: 1 = kept; by default nonzero weights are kept.
      **options: the format's own options.

    Returns:
      A sparse matrix of this format.
    """
    raise NotImplementedError

  def positions(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the position of every entry of `values`.

    Returns:
      `(row, column, kept)`, arrays that broadcast to the shape of `values`.
      `kept` is False at padding; it is None if the format has no padding.
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
    """Return x @ w; by default through the decoded matrix.

    Args:
      x: a dense array (..., K).

    Returns:
      A dense array (..., N).
    """
    return x @ self.todense()

  def product(
    self, x: jax.Array, back: bool, platform: str | None = None
  ) -> jax.Array:
    """Return x @ w, or x @ w.T, where the format has no compiled kernel.

    `kernels.product` calls it when a program is lowered.

    Args:
      x: a dense array (..., K); with `back`, (..., N).
      back: whether w is transposed.
      platform: "tpu" or "cuda", where a format may have a kernel of its own;
        None for operations that run everywhere.

    Returns:
      A dense array (..., N); with `back`, (..., K). It has the dtype of x.
    """
    del platform
    dense = self.todense().astype(x.dtype)
    return x @ (dense.T if back else dense)

  def outer(
    self, x: jax.Array, g: jax.Array, platform: str | None = None
  ) -> jax.Array:
    """Return x.T @ g at the positions of `values`: the gradient of `values`.

    Args:
      x: a dense matrix (batch, K).
      g: a dense matrix (batch, N).
      platform: as for `product`.

    Returns:
      An array of the shape of `values`, in the dtype of x.
    """
    del platform
    return self.gather(x.T @ g)

  def take(self, columns: jax.Array) -> jax.Array:
    """Return some columns; by default out of the decoded matrix.

    A table of embeddings that is also the last layer is packed for its
    product, in which every token is a column; this is how it is looked up. A
    format that does not define it is not used for such tables.

    Args:
      columns: (n,) integers, at least 0 and less than N.

    Returns:
      A dense array (n, K).
    """
    return self.todense()[:, columns].T

  def gather(self, dense: jax.Array) -> jax.Array:
    """Return the entries of a dense matrix at the positions of `values`.

    Args:
      dense: a matrix of this shape.

    Returns:
      An array of the shape of `values`, zero at padding.
    """
    row, col, kept = self.positions()
    values = dense.at[row, col].get(mode="fill", fill_value=0)
    return values if kept is None else jnp.where(kept, values, 0)


@register
class SparseTensor(Sparse):
  """A weight of any rank, folded to a (contracted, kept) sparse matrix.

  `pack` returns it. It is a pytree node and takes the place of the dense weight
  in a tree of parameters.

  Attributes:
    matrix: the sparse matrix (K, N).
    shape: the shape of the dense weight.
    contract: the contracted axes of the dense weight, in the order in which
      they are folded into K; the other axes, in order, are folded into N.

  Example:
    >>> from jaxpruner import sparse
    >>> w = sparse.pack(np.ones((8, 2, 4), np.float32), contract=(0,))
    >>> w.shape, w.matrix.shape, w.kept
    ((8, 2, 4), (8, 8), (1, 2))
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

  def take(self, indices: jax.Array) -> jax.Array:
    """Return slices along the only axis that is kept.

    Args:
      indices: (n,) integers within the axis.

    Returns:
      A dense array like the weight, of length n along this axis.
    """
    (axis,) = self.kept
    sides = [self.shape[d] for d in self.contract]
    rows = self.matrix.take(indices).reshape([len(indices), *sides])
    order = (axis, *self.contract)
    return jnp.transpose(rows, np.argsort(order).tolist())

  def todense(self) -> jax.Array:
    order = self.contract + self.kept
    folded = self.matrix.todense().reshape([self.shape[d] for d in order])
    return jnp.transpose(folded, np.argsort(order).tolist())


def kept_entries(dense: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
  """Return a matrix and its boolean mask as NumPy arrays of checked shapes.

  Args:
    dense: a matrix.
    mask: 1 = kept; None keeps the nonzero entries.

  Returns:
    `(dense, kept)`, NumPy arrays of one shape.

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


def refuse_options(cls: type[SparseMatrix], options: dict[str, Any]) -> None:
  """Raise if `fromdense` was given options that the format does not have.

  Args:
    cls: the format.
    options: the keyword arguments that no parameter of `fromdense` took.
  """
  if not options:
    return
  taken = inspect.signature(cls.fromdense).parameters.values()
  known = [p.name for p in taken if p.kind is not p.VAR_KEYWORD][2:]
  raise TypeError(
    f"format={cls.name!r} has no option {', '.join(map(repr, options))}; "
    + (f"its options are {', '.join(known)}" if known else "it has no options")
  )


# Those without a kernel first.
FORMATS: registry.Registry[type[SparseMatrix]] = registry.Registry(
  "format",
  "jaxpruner.sparse.register_format",
  {
    "compact": "jaxpruner.sparse.format_compact:Compact",
    "block": "jaxpruner.sparse.format_block:Block",
    "diagonals": "jaxpruner.sparse.format_diagonals:Diagonals",
    "nm": "jaxpruner.sparse.format_nm:NM",
    "strided_nm": "jaxpruner.sparse.format_strided_nm:StridedNM",
    "sell": "jaxpruner.sparse.format_sell:Sell",
    "bitmask": "jaxpruner.sparse.format_bitmask:Bitmask",
    "int8": "jaxpruner.sparse.format_int8:Int8",
    "panel": "jaxpruner.sparse.format_panel:Panel",
  },
)


def register_format(name: str) -> Callable[[type[T]], type[T]]:
  """Register a sparse format under a name; use it as a class decorator.

  `pack(…, format="name")` then packs in this format, and `accelerate` times it
  for each weight that its `fits` accepts. The class becomes a frozen dataclass
  and a pytree node.

  Args:
    name: the name; a name that is already taken is refused.

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
  """Return an array as a matrix (contracted axes, other axes)."""
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
  """Store the kept entries of `weight` in a sparse format.

  Args:
    weight: a dense array of any rank.
    mask: 1 = kept; by default nonzero entries are kept.
    format: "sell" (unstructured), "block", "nm", "bitmask", "compact" (whole
      rows and columns removed), "panel" (dense), or a name given to
      `register_format`.
    contract: the axes that a product sums over: (0,) for an in × out kernel,
      (1,) for out × in.
    **options: the format's own options, for example `block_shape=(64, 64)`.

  Returns:
    A pytree node that takes the place of `weight` in a tree of parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> w = sparse.pack(jnp.eye(4), format="bitmask")
    >>> (jnp.ones((1, 4)) @ w).tolist(), w.nbytes, w.size * 4
    ([[1.0, 1.0, 1.0, 1.0]], 52, 64)
  """
  weight = np.asarray(weight)
  contract = tuple(d % weight.ndim for d in contract)
  matrix = FORMATS.find(format).fromdense(
    fold(weight, contract),
    None if mask is None else fold(mask, contract),
    **options,
  )
  return SparseTensor(matrix, weight.shape, contract)
