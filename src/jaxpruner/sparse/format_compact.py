"""Whole rows and columns removed: a smaller dense matrix."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats


@formats.register
class Compact(formats.SparseMatrix):
  """Store the rows and columns that keep any weight, as one dense matrix.

  The product gathers the kept inputs, multiplies the small dense matrix and
  writes zeros for the removed outputs.

  Attributes:
    values: (kept rows, kept columns).
    rows: int32, ascending indices of the kept rows.
    cols: int32, ascending indices of the kept columns.
    shape: (K, N).

  Example:
    >>> w = Compact.fromdense([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    >>> w.values.tolist(), w.rows.tolist(), w.cols.tolist()
    ([[1.0, 2.0]], [0], [1, 2])
    >>> (jnp.ones((1, 2)) @ w).tolist()
    [[0.0, 1.0, 2.0]]
  """

  name: ClassVar[str] = "compact"

  values: jax.Array  # (kept rows, kept columns)
  rows: jax.Array  # int32, ascending
  cols: jax.Array  # int32, ascending
  shape: tuple[int, int] = formats.static()

  @classmethod
  def fits(cls, kept: formats.Kept) -> dict[str, Any] | None:
    return {} if kept.inner_density <= 0.9 else None

  @classmethod
  def fromdense(cls, dense: Any, mask: Any = None, **options: Any) -> "Compact":
    formats.refuse_options(cls, options)
    dense, kept = formats.kept_entries(dense, mask)
    rows = np.nonzero(kept.any(axis=1))[0].astype(np.int32)
    cols = np.nonzero(kept.any(axis=0))[0].astype(np.int32)
    inner = np.ix_(rows, cols)
    values = np.where(kept[inner], dense[inner], 0).astype(dense.dtype)
    return cls(
      jnp.asarray(values), jnp.asarray(rows), jnp.asarray(cols), dense.shape
    )

  def positions(self) -> tuple[jax.Array, jax.Array, None]:
    row, col = jnp.meshgrid(self.rows, self.cols, indexing="ij")
    return row, col, None

  def take(self, columns: jax.Array) -> jax.Array:
    place = jnp.searchsorted(self.cols, columns)
    found = self.cols.at[place].get(mode="fill", fill_value=-1) == columns
    inner = self.values.at[:, place].get(mode="fill", fill_value=0)
    inner = jnp.where(found, inner, 0).T
    full = jnp.zeros((len(columns), self.shape[0]), self.dtype)
    return full.at[:, self.rows].set(inner)

  def matmul(self, x: jax.Array) -> jax.Array:
    """Gather the kept inputs, multiply, spread the kept outputs."""
    if len(self.rows) < self.shape[0]:
      x = x[..., self.rows]
    y = x @ self.values
    if len(self.cols) < self.shape[1]:
      full = jnp.zeros((*y.shape[:-1], self.shape[1]), y.dtype)
      y = full.at[..., self.cols].set(y)
    return y
