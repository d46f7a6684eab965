"""One byte per kept weight, a scale per group, and a bit mask if need be."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import _int8, formats, kernels
from jaxpruner.sparse._int8 import GROUP
from jaxpruner.sparse.format_bitmask import PANEL

# The kernel reads whole vectors: so many bytes may follow the last value.
SLACK = 64
# For larger batches the decoding is paid once, and the product is dense.
MAX_BATCH = 64


@formats.register
class Int8(formats.SparseMatrix):
  """Store kept weights as int8, with one scale per group of inputs.

  A weight is its byte times the scale of its group: 64 neighbouring inputs of
  one output. The largest weight of a group becomes ±127. At 50 % sparsity a
  weight takes 0.66 bytes, without a mask 1.03. The columns are divided into
  panels of 64, as in `Bitmask`. Small batches on CPU are multiplied by a
  compiled kernel that decodes in registers; otherwise the matrix is decoded.
  Activations stay float32.

  `accelerate` never chooses this format, because it rounds weights: ask for it
  with `pack(w, format="int8")`, or `Writer(model, values="int8")`.

  Attributes:
    values: (kept + 64,) int8, by panel, row and column.
    bits: (panels, K, 8) uint8, lowest bit first; (0, K, 8) if all are kept.
    starts: (panels,) int32, the index of each panel's first value.
    scales: (panels, groups, 64) bfloat16.
    shape: (K, N).

  Example:
    >>> w = Int8.fromdense([[0.0, 127.0], [254.0, 3.9]])
    >>> w.values[:3].tolist(), w.scales[0, 0, :2].tolist()
    ([127, 127, 4], [2.0, 1.0])
    >>> w.todense().tolist()
    [[0.0, 127.0], [254.0, 4.0]]
  """

  name: ClassVar[str] = "int8"

  values: jax.Array  # (kept + SLACK,): by panel, row, column
  bits: jax.Array  # (panels, K, 8) uint8, or (0, K, 8)
  starts: jax.Array  # (panels,) int32: first value of the panel
  scales: jax.Array  # (panels, groups, PANEL) bfloat16
  shape: tuple[int, int] = formats.static()

  @property
  def dtype(self) -> np.dtype:
    """That of the decoded weights."""
    return np.dtype(np.float32)

  @classmethod
  def runs_here(cls) -> bool:
    return kernels.load(cls.name) is not None

  @classmethod
  def fromdense(cls, dense: Any, mask: Any = None, **options: Any) -> "Int8":
    formats.refuse_options(cls, options)
    dense, kept = formats.kept_entries(dense, mask)
    codes, scales = _int8.encode(np.where(kept, dense, 0).T, "dense")
    full = bool(kept.all())
    codes, kept = _by_panel(codes.T), _by_panel(kept)
    counts = np.full(len(kept), kept[0].size if len(kept) else 0)
    bits = np.zeros((0, dense.shape[0], 8), np.uint8)
    if not full:
      counts = kept.sum(axis=(1, 2))
      bits = np.packbits(kept, axis=-1, bitorder="little")
      codes = codes[kept]
    return cls(
      jnp.asarray(np.append(codes.reshape(-1), np.zeros(SLACK, np.int8))),
      jnp.asarray(bits),
      jnp.asarray((np.cumsum(counts) - counts).astype(np.int32)),
      jnp.asarray(_by_panel(scales.T)),
      dense.shape,
    )

  def positions(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = self.shape[0]
    kept = self._kept(self.bits, rows * len(self.starts) * PANEL)
    stored = self.values.shape[0]
    panel, row, col = jnp.nonzero(
      kept.reshape(len(self.starts), rows, PANEL), size=stored
    )
    col = panel * PANEL + col
    real = (jnp.arange(stored) < stored - SLACK) & (col < self.shape[1])
    return row, col, real

  def _kept(self, bits: jax.Array, size: int) -> jax.Array:
    """Return 1 for each kept weight, flat."""
    if not self.bits.shape[0]:
      return jnp.ones(size, jnp.uint8)
    return jnp.unpackbits(bits.reshape(-1), bitorder="little")

  def _decoded(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Scale (panels, K, 64) codes; return (K, panels · 64)."""
    wide = jnp.repeat(scales.astype(jnp.float32), GROUP, axis=1)
    dense = codes.astype(jnp.float32) * wide[:, : codes.shape[1]]
    return dense.transpose(1, 0, 2).reshape(codes.shape[1], -1)

  def _codes(self, panels: Any, starts: jax.Array) -> jax.Array:
    """Return the codes (panels, K, 64) of some panels."""
    rows = self.shape[0]
    count = starts.shape[0]
    if not self.bits.shape[0]:
      place = jnp.arange(rows * PANEL)
      codes = self.values[starts[:, None] + place]
    else:
      kept = self._kept(self.bits[panels], count * rows * PANEL)
      kept = kept.reshape(count, rows * PANEL)
      place = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
      codes = jnp.where(kept, self.values[starts[:, None] + place], 0)
    return codes.reshape(count, rows, PANEL)

  def todense(self) -> jax.Array:
    codes = self._codes(slice(None), self.starts)
    return self._decoded(codes, self.scales)[:, : self.shape[1]]

  def take(self, columns: jax.Array) -> jax.Array:
    panel, lane = columns // PANEL, columns % PANEL
    codes = self._codes(panel, self.starts[panel])
    pick = lambda x: jnp.take_along_axis(x, lane[:, None, None], axis=2)
    return self._decoded(pick(codes), pick(self.scales[panel])).T

  def matmul(self, x: jax.Array) -> jax.Array:
    """Multiply small batches in machine code; decode for large ones."""
    if np.prod(x.shape[:-1]) > MAX_BATCH:
      return x @ self.todense()
    return kernels.matmul(x, self)


def _by_panel(matrix: np.ndarray) -> np.ndarray:
  """Return (rows, N) as (panels, rows, 64), padded with zeros."""
  rows, cols = matrix.shape
  panels = -(-cols // PANEL)
  padded = np.zeros((rows, panels * PANEL), matrix.dtype)
  padded[:, :cols] = matrix
  return padded.reshape(rows, panels, PANEL).transpose(1, 0, 2)
