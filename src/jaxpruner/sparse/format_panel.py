"""Dense weights in panels: for weights with little or no sparsity."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats, kernels

PANEL = 64
# For larger batches XLA packs the weights anew and still loses little.
MAX_BATCH = 64
# Below this, formats that skip zeros are faster.
MIN_DENSITY = 0.3


@formats.register
class Panel(formats.SparseMatrix):
  """Store all weights, removed ones as zeros, in panels of 64 columns.

  XLA's product of a few rows reads the weights far below the speed of memory.
  In panels they are read in the order in which a compiled kernel multiplies
  them. Saves time, no memory.

  Attributes:
    values: (panels, K, 64); columns past the end are zeros.
    shape: (K, N).

  Example:
    >>> w = Panel.fromdense(np.eye(3, dtype=np.float32))
    >>> w.values.shape, (jnp.arange(3.0) @ w).tolist()
    ((1, 3, 64), [0.0, 1.0, 2.0])
  """

  name: ClassVar[str] = "panel"
  stackable: ClassVar[bool] = True

  values: jax.Array  # (panels, K, 64)
  shape: tuple[int, int] = formats.static()

  @classmethod
  def fits(cls, kept: formats.Kept) -> dict[str, Any] | None:
    wide = min(kept.mask.shape) >= PANEL
    full = kept.density >= MIN_DENSITY
    return {} if wide and full and kept.batch <= MAX_BATCH else None

  @classmethod
  def runs_here(cls) -> bool:
    return kernels.load(cls.name) is not None

  @classmethod
  def fromdense(cls, dense: Any, mask: Any = None, **options: Any) -> "Panel":
    formats.refuse_options(cls, options)
    dense, kept = formats.kept_entries(dense, mask)
    rows, cols = dense.shape
    padded = np.zeros((rows, -(-cols // PANEL) * PANEL), dense.dtype)
    padded[:, :cols] = np.where(kept, dense, 0)
    panels = padded.reshape(rows, -1, PANEL).transpose(1, 0, 2)
    return cls(jnp.asarray(np.ascontiguousarray(panels)), (rows, cols))

  def positions(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    panels, rows, _ = self.values.shape
    row = jnp.arange(rows)[None, :, None]
    col = (jnp.arange(panels)[:, None] * PANEL + jnp.arange(PANEL))[:, None, :]
    return row, col, col < self.shape[1]

  def todense(self) -> jax.Array:
    rows, cols = self.shape
    return self.values.transpose(1, 0, 2).reshape(rows, -1)[:, :cols]

  def take(self, columns: jax.Array) -> jax.Array:
    return self.values[columns // PANEL, :, columns % PANEL]

  def matmul(self, x: jax.Array) -> jax.Array:
    """Multiply in machine code on CPU, through a dense copy elsewhere."""
    if np.prod(x.shape[:-1]) > MAX_BATCH:
      return x @ self.todense()
    return kernels.matmul(x, self)
