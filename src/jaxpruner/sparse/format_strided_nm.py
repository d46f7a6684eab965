"""N of every M kept, the weights of a group 128 rows apart: a TPU's N:M."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats, kernels


@formats.register
class StridedNM(formats.SparseMatrix):
  """Store N values per group of M rows that lie `stride` rows apart.

  With a stride of 128, a whole register of groups is decoded by M·N selections
  and no shuffle: `jaxpruner.sparse._pallas.strided_nm` does it on the chip, so
  that only the packed weights are read from memory. Elsewhere the product
  decodes the matrix. Make masks with `NByM(n, m, stride=128)`.

  Attributes:
    values: (K / (M · stride), N, stride, columns).
    indices: uint8, the member of the group. A byte holds the indices of rows
      that are a quarter of the stride apart (2 bits), or a half (4 bits).
    shape: (K, columns).
    m: members of a group.

  Example:
    >>> w = StridedNM.fromdense(np.eye(8, dtype=np.float32), n=2, stride=2)
    >>> w.values.shape, w.todense()[5].tolist()
    ((1, 2, 2, 8), [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
  """

  name: ClassVar[str] = "strided_nm"

  values: jax.Array  # (K / (M stride), N, stride, cols)
  indices: jax.Array  # (K / (M stride), N, stride * bits / 8, cols) uint8
  shape: tuple[int, int] = formats.static()
  m: int = formats.static()

  @classmethod
  def fromdense(
    cls,
    dense: Any,
    mask: Any = None,
    n: int = 2,
    m: int = 4,
    stride: int = 128,
    **options: Any,
  ) -> "StridedNM":
    formats.refuse_options(cls, options)
    dense, kept = formats.kept_entries(dense, mask)
    rows, cols = dense.shape
    if not 1 <= n <= m <= 256:
      raise ValueError(f"n={n}, m={m}: need 1 <= n <= m <= 256")
    if rows % (m * stride):
      raise ValueError(
        f"the contracted length {rows} is not divisible by m={m} times "
        f'stride={stride}; pad it, or use format="nm" or "bitmask"'
      )
    kept = kept.reshape(-1, m, stride, cols)
    if (worst := kept.sum(axis=1).max(initial=0)) > n:
      raise ValueError(
        f"a group of m={m} rows keeps {worst} weights, more than n={n}; mask "
        f"with NByM({n}, {m}, stride={stride}) along this axis, or use "
        'format="bitmask"'
      )
    # Stable: kept members first, in order, then removed ones as padding.
    order = np.argsort(~kept, axis=1, kind="stable")[:, :n]
    order = np.sort(order, axis=1)
    groups = np.where(kept, dense.reshape(kept.shape), 0)
    values = np.take_along_axis(groups, order, axis=1).astype(dense.dtype)
    packed = _pack(order.astype(np.uint8), index_bits(m, stride))
    return cls(jnp.asarray(values), jnp.asarray(packed), (rows, cols), m)

  @property
  def members(self) -> jax.Array:
    """The member of its group that each value is, shaped as `values`."""
    bits = 8 * self.indices.shape[2] // self.values.shape[2]
    return unpack(self.indices, bits)

  def positions(self) -> tuple[jax.Array, jax.Array, None]:
    runs, _, stride, cols = self.values.shape
    run = jnp.arange(runs)[:, None, None, None] * (self.m * stride)
    within = jnp.arange(stride)[:, None]
    row = run + self.members.astype(jnp.int32) * stride + within
    return row, jnp.broadcast_to(jnp.arange(cols), row.shape), None

  def todense(self) -> jax.Array:
    # Selections, not a scatter: they are fused with what reads the result.
    slabs = decode(self.values, self.members, self.m, axis=1)
    return jnp.stack(slabs, axis=1).reshape(self.shape)

  def matmul(self, x: jax.Array) -> jax.Array:
    return kernels.promoted_product(x, self)

  def product(
    self, x: jax.Array, back: bool, platform: str | None = None
  ) -> jax.Array:
    if platform == "tpu" and _pallas().supports(self.values):
      flat = x.reshape(-1, x.shape[-1])
      y = _pallas().product(flat, self.values, self.indices, self.m, back=back)
      return y[: len(flat)].reshape(*x.shape[:-1], y.shape[1])
    return super().product(x, back)

  def outer(
    self, x: jax.Array, g: jax.Array, platform: str | None = None
  ) -> jax.Array:
    if platform == "tpu" and _pallas().supports(self.values):
      like = jax.ShapeDtypeStruct(self.values.shape, x.dtype)
      return _pallas().at_values(x, g, like, self.indices, self.m)
    return super().outer(x, g)


def index_bits(m: int, stride: int) -> int:
  """Return the bits of an index: 2 or 4 if they fit and fill whole bytes."""
  for bits in (2, 4):
    if m <= 2**bits and stride % (8 // bits) == 0:
      return bits
  return 8


def _pack(index: np.ndarray, bits: int) -> np.ndarray:
  runs, n, stride, cols = index.shape
  planes = index.reshape(runs, n, 8 // bits, -1, cols)
  shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1, 1)
  return np.bitwise_or.reduce(planes << shifts, axis=2).astype(np.uint8)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
  """Return the indices of (..., bytes, columns), planes one after another."""
  if bits == 8:
    return packed
  low = jnp.asarray(2**bits - 1, packed.dtype)
  shifts = range(0, 8, bits)
  planes = [(packed >> jnp.asarray(s, packed.dtype)) & low for s in shifts]
  return jnp.concatenate(planes, axis=-2)


def decode(
  values: jax.Array, members: jax.Array, m: int, axis: int
) -> list[jax.Array]:
  """Return the M dense slabs of groups whose N values lie along an axis."""
  zero = jnp.zeros((), values.dtype)
  # At most one value is chosen, or stored zeros: the sum is exact.
  return [
    jnp.sum(jnp.where(members == j, values, zero), axis, dtype=values.dtype)
    for j in range(m)
  ]


def _pallas() -> Any:
  """Import the TPU kernels where a program is lowered for it."""
  from jaxpruner.sparse._pallas import strided_nm

  return strided_nm
