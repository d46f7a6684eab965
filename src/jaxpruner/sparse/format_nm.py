"""N of every M kept along the contraction: values and small indices."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats, kernels
from jaxpruner.sparse.format_bitmask import MAX_BATCH


@formats.register
class NM(formats.SparseMatrix):
  """Store N values per group of M rows, with 2-bit indices for M up to 4.

  A group that keeps fewer than N weights is padded with stored zeros. Small
  batches on CPU are multiplied by a compiled kernel if M is 4 and the columns
  are a multiple of 16; otherwise the matrix is decoded.

  Attributes:
    values: (K / M, N, columns).
    indices: (K / M, N, bytes) uint8, the row within the group; several indices
      per byte.
    shape: (K, columns).
    m: rows per group.

  Example:
    >>> w = NM.fromdense([[5.0], [0.0], [0.0], [7.0]], n=2, m=4)
    >>> w.values.ravel().tolist(), w.indices.ravel().tolist()
    ([5.0, 7.0], [0, 3])
    >>> w.todense().ravel().tolist()
    [5.0, 0.0, 0.0, 7.0]
  """

  name: ClassVar[str] = "nm"

  values: jax.Array  # (K / M, N, cols)
  indices: jax.Array  # (K / M, N, bytes): row within the group, packed
  shape: tuple[int, int] = formats.static()
  m: int = formats.static()

  @classmethod
  def fits(cls, kept: formats.Kept) -> dict[str, Any] | None:
    rows, cols = kept.mask.shape
    if rows % 4 or cols % 16 or not kept.mask.size or kept.batch > MAX_BATCH:
      return None
    most = int(kept.mask.reshape(-1, 4, cols).sum(axis=1).max())
    return {"n": most, "m": 4} if 1 <= most <= 2 else None

  @classmethod
  def runs_here(cls) -> bool:
    return kernels.load(cls.name) is not None

  def matmul(self, x: jax.Array) -> jax.Array:
    """Multiply small batches in machine code; decode for large ones."""
    suits = self.m == 4 and self.shape[1] % 16 == 0
    if not suits or np.prod(x.shape[:-1]) > MAX_BATCH:
      return x @ self.todense()
    return kernels.matmul(x, self)

  @classmethod
  def fromdense(
    cls,
    dense: Any,
    mask: Any = None,
    n: int = 2,
    m: int = 4,
    **options: Any,
  ) -> "NM":
    formats.refuse_options(cls, options)
    dense, kept = formats.kept_entries(dense, mask)
    rows, cols = dense.shape
    if rows % m:
      raise ValueError(
        f"the contracted length {rows} is not divisible by m={m}; pad it, or "
        'use format="bitmask"'
      )
    if not 1 <= n <= m <= 256:
      raise ValueError(f"n={n}, m={m}: need 1 <= n <= m <= 256")
    kept = kept.reshape(rows // m, m, cols)
    if (worst := kept.sum(axis=1).max(initial=0)) > n:
      raise ValueError(
        f"a group of m={m} rows keeps {worst} weights, more than n={n}; mask "
        f'with NByM({n}, {m}) along this axis, or use format="bitmask"'
      )
    # Stable: kept rows first, in order, then removed rows as padding.
    order = np.argsort(~kept, axis=1, kind="stable")[:, :n]
    order = np.sort(order, axis=1)
    groups = np.where(kept, dense.reshape(kept.shape), 0)
    values = np.take_along_axis(groups, order, axis=1).astype(dense.dtype)
    return cls(
      jnp.asarray(values),
      jnp.asarray(_pack(order.astype(np.uint8), _bits(m))),
      (rows, cols),
      m,
    )

  def positions(self) -> tuple[jax.Array, jax.Array, None]:
    groups, n, cols = self.values.shape
    index = _unpack(self.indices, _bits(self.m))[..., :cols]
    row = jnp.arange(groups)[:, None, None] * self.m + index.astype(jnp.int32)
    return row, jnp.broadcast_to(jnp.arange(cols), row.shape), None

  def take(self, columns: jax.Array) -> jax.Array:
    groups, _, _ = self.values.shape
    bits = _bits(self.m)
    place, shift = columns // (8 // bits), columns % (8 // bits) * bits
    packed = self.indices[:, :, place] >> shift.astype(jnp.uint8)
    index = (packed & jnp.uint8(2**bits - 1)).astype(jnp.int32)
    row = jnp.arange(groups)[:, None, None] * self.m + index
    full = jnp.zeros((len(columns), self.shape[0]), self.dtype)
    line = jnp.arange(len(columns))
    return full.at[line, row].set(self.values[:, :, columns])


def _bits(m: int) -> int:
  return 2 if m <= 4 else 4 if m <= 16 else 8


def _pack(index: np.ndarray, bits: int) -> np.ndarray:
  per_byte = 8 // bits
  pad = -index.shape[-1] % per_byte
  index = np.pad(index, [(0, 0)] * (index.ndim - 1) + [(0, pad)])
  index = index.reshape(*index.shape[:-1], -1, per_byte)
  shifts = np.arange(0, 8, bits, dtype=np.uint8)
  return np.bitwise_or.reduce(index << shifts, axis=-1).astype(np.uint8)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
  shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
  index = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
  return index.reshape(*packed.shape[:-1], -1)
