"""Whole diagonals: a rotation and an elementwise product for each."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats, kernels

# The share of a diagonal that must be kept for the format to be tried,
# and the most diagonals: a product takes one pass over the batch for each.
_FULL, _MOST = 0.7, 64


@formats.register
class Diagonals(formats.SparseMatrix):
  """Store the diagonals that keep any weight, wrapped around the edge.

  The matrix is seen as part of a square of the longer side L. Diagonal `d` has
  the weights whose column is their row plus `d`, modulo L. There is no index
  per weight, only one offset per diagonal. Make masks with
  `sparsity_types.Diagonals()`.

  Attributes:
    values: (diagonals, columns); entry n of a diagonal is the weight in column
      n, or padding where that lies outside the matrix.
    offsets: (diagonals,) int32.
    shape: (K, columns).

  Example:
    >>> w = Diagonals.fromdense(np.roll(np.eye(4, dtype=np.float32), 1, 1))
    >>> w.offsets.tolist(), w.values.shape
    ([1], (1, 4))
    >>> (jnp.arange(4.0) @ w).tolist()
    [3.0, 0.0, 1.0, 2.0]
  """

  name: ClassVar[str] = "diagonals"

  values: jax.Array  # (diagonals, columns)
  offsets: jax.Array  # (diagonals,) int32
  shape: tuple[int, int] = formats.static()

  @classmethod
  def fits(cls, kept: formats.Kept) -> dict[str, Any] | None:
    found = _by_offset(kept.mask).sum(axis=1)
    count = np.count_nonzero(found)
    full = found.sum() >= _FULL * count * min(kept.mask.shape)
    return {} if count <= _MOST and full and kept.density <= 0.5 else None

  @classmethod
  def fromdense(
    cls, dense: Any, mask: Any = None, **options: Any
  ) -> "Diagonals":
    formats.refuse_options(cls, options)
    dense, kept = formats.kept_entries(dense, mask)
    offsets = np.flatnonzero(_by_offset(kept).any(axis=1))
    masked = np.where(kept, dense, 0).astype(dense.dtype)
    return cls(
      jnp.asarray(_by_offset(masked)[offsets]),
      jnp.asarray(offsets.astype(np.int32)),
      dense.shape,
    )

  @property
  def _side(self) -> int:
    return max(self.shape)

  def positions(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    col = jnp.arange(self.shape[1])
    row = (col - self.offsets[:, None]) % self._side
    return row, jnp.broadcast_to(col, row.shape), row < self.shape[0]

  def matmul(self, x: jax.Array) -> jax.Array:
    return kernels.promoted_product(x, self)

  def product(
    self, x: jax.Array, back: bool, platform: str | None = None
  ) -> jax.Array:
    flat = x.reshape(-1, x.shape[-1])
    run = self._back if back else self._forward
    if platform == "tpu" and _pallas().supports(self._side, self.values):
      run = self._on_tpu
    y = run(self._square(flat), back)[: len(flat), : self.shape[not back]]
    return y.astype(x.dtype).reshape(*x.shape[:-1], y.shape[1])

  def outer(
    self, x: jax.Array, g: jax.Array, platform: str | None = None
  ) -> jax.Array:
    side = self._side
    x, g = self._square(x), self._square(g)
    if platform == "tpu" and _pallas().supports(side, self.values):
      values = _pallas().at_values(x, g, self.offsets)
    else:
      one = lambda d: jnp.sum(_rolled(x, d) * g, axis=0, dtype=jnp.float32)
      values = jax.lax.map(one, self.offsets)
    inside = self.positions()[2]
    return jnp.where(inside, values[:, : self.shape[1]], 0).astype(x.dtype)

  def _square(self, x: jax.Array) -> jax.Array:
    """Pad the last axis of x to the side of the square."""
    return jnp.pad(x, [(0, 0), (0, self._side - x.shape[1])])

  def _wide(self) -> jax.Array:
    """The values as rows of the square, without padding's values."""
    values = jnp.where(self.positions()[2], self.values, 0)
    return self._square(values)

  def _on_tpu(self, x: jax.Array, back: bool) -> jax.Array:
    return _pallas().product(x, self._wide(), self.offsets, back=back)

  def _forward(self, x: jax.Array, back: bool) -> jax.Array:
    del back
    add = lambda y, at: (y + _rolled(x, at[0]) * at[1], None)
    return self._sum(x, add)

  def _back(self, x: jax.Array, back: bool) -> jax.Array:
    del back
    add = lambda y, at: (y + _rolled(x * at[1], -at[0]), None)
    return self._sum(x, add)

  def _sum(self, x: jax.Array, add: Any) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    zeros = jnp.zeros(x.shape, wide)
    return jax.lax.scan(add, zeros, (self.offsets, self._wide()))[0]


def _rolled(x: jax.Array, offset: jax.Array) -> jax.Array:
  return jnp.roll(x, offset, axis=1)


def _by_offset(matrix: np.ndarray) -> np.ndarray:
  """Return the diagonals of a matrix, (longer side, columns)."""
  rows, cols = matrix.shape
  side = max(rows, cols)
  row = (np.arange(cols) - np.arange(side)[:, None]) % side
  inside = row < rows
  found = matrix[np.minimum(row, rows - 1), np.arange(cols)]
  return np.where(inside, found, np.zeros((), matrix.dtype))


def _pallas() -> Any:
  """Import the TPU kernels where a program is lowered for it."""
  from jaxpruner.sparse._pallas import diagonals

  return diagonals
