"""One bit per weight and the kept values: for 50–80 % sparsity and N:M."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats, kernels

PANEL = 64
# For larger batches a dense product reads the weights equally often.
MAX_BATCH = 16


@formats.register
class Bitmask(formats.SparseMatrix):
  """Store one bit per weight and the kept values; for 50–80 % sparsity.

  The columns are divided into panels of 64. A row of a panel is 64 bits, and
  the values of its kept weights follow in order. Small batches on CPU are
  multiplied by a compiled kernel; otherwise the matrix is decoded.

  Attributes:
    values: (kept,), the values by panel, row and column.
    bits: (panels, K, 8) uint8, lowest bit first.
    starts: (panels,) int32, the index of each panel's first value.
    shape: (K, N).

  Example:
    >>> w = Bitmask.fromdense([[0.0, 2.0], [3.0, 0.0]])
    >>> w.values.tolist(), w.bits[0, :, 0].tolist()
    ([2.0, 3.0], [2, 1])
    >>> w.todense().tolist()
    [[0.0, 2.0], [3.0, 0.0]]
  """

  name: ClassVar[str] = "bitmask"

  values: jax.Array  # (kept,): by panel, row, column
  bits: jax.Array  # (panels, K, 8) uint8, lowest bit first
  starts: jax.Array  # (panels,) int32: first value of the panel
  shape: tuple[int, int] = formats.static()

  @classmethod
  def fits(cls, kept: formats.Kept) -> dict[str, Any] | None:
    fits = 0.15 <= kept.density <= 0.75 and kept.batch <= MAX_BATCH
    return {} if fits else None

  @classmethod
  def runs_here(cls) -> bool:
    return kernels.load(cls.name) is not None

  @classmethod
  def fromdense(cls, dense: Any, mask: Any = None, **options: Any) -> "Bitmask":
    formats.refuse_options(cls, options)
    dense, kept = formats.kept_entries(dense, mask)
    rows, cols = dense.shape
    panels = -(-cols // PANEL)

    def by_panel(array):
      padded = np.zeros((rows, panels * PANEL), array.dtype)
      padded[:, :cols] = array
      return padded.reshape(rows, panels, PANEL).transpose(1, 0, 2)

    kept = by_panel(kept).astype(bool)
    counts = kept.sum(axis=(1, 2))
    return cls(
      jnp.asarray(by_panel(dense)[kept]),
      jnp.asarray(np.packbits(kept, axis=-1, bitorder="little")),
      jnp.asarray((np.cumsum(counts) - counts).astype(np.int32)),
      (rows, cols),
    )

  def positions(self) -> tuple[jax.Array, jax.Array, None]:
    kept = jnp.unpackbits(self.bits, axis=-1, bitorder="little")
    panel, row, col = jnp.nonzero(kept, size=self.values.shape[0])
    return row, panel * PANEL + col, None

  def take(self, columns: jax.Array) -> jax.Array:
    panel, lane = columns // PANEL, columns % PANEL
    bits = jnp.unpackbits(self.bits[panel], axis=-1, bitorder="little")
    counts = bits.sum(axis=-1, dtype=jnp.int32)
    before = jnp.where(jnp.arange(PANEL) < lane[:, None, None], bits, 0)
    # Values of earlier panels, of earlier rows, of earlier bits of the row.
    place = self.starts[panel][:, None] + jnp.cumsum(counts, axis=1) - counts
    place += before.sum(axis=-1, dtype=jnp.int32)
    kept = jnp.take_along_axis(bits, lane[:, None, None], axis=2)[..., 0]
    values = self.values.at[place].get(mode="fill", fill_value=0)
    return jnp.where(kept, values, 0).astype(self.dtype)

  def matmul(self, x: jax.Array) -> jax.Array:
    """Multiply small batches in machine code; decode for large ones."""
    if np.prod(x.shape[:-1]) > MAX_BATCH:
      return x @ self.todense()
    return kernels.matmul(x, self)
