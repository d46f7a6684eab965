# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""The leaves of a selection: sizes, keys, masks."""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, UInt, UInt8

from jaxpruner.engine import order
from jaxpruner.engine.expression import Scores, value
from jaxpruner.engine.order import Keys

MASK_DTYPE = jnp.uint8
Indices: TypeAlias = UInt[Array, "*shape"]  # row-major
PerSegment: TypeAlias = UInt[Array, " segments"]


class Group(NamedTuple):
  """The leaves of a selection, ranked each by itself or together.

  Attributes:
    leaves: their scores; of one dtype if they are ranked together.
    together: whether all leaves are one segment, or each leaf is one.
  """

  leaves: list[Scores]
  together: bool

  @property
  def key_dtype(self) -> Any:
    """The dtype of all keys, as wide as the widest scores."""
    dtypes = [order.key_dtype(leaf.dtype) for leaf in self.leaves]
    return max(dtypes, key=lambda dtype: dtype.itemsize)

  @property
  def sizes(self) -> np.ndarray:
    """Sizes of the leaves, [leaves]."""
    return np.array([leaf.size for leaf in self.leaves], np.int64)

  @property
  def segment_sizes(self) -> np.ndarray:
    """Sizes of the segments, [segments]."""
    return self.sizes.sum(keepdims=True) if self.together else self.sizes

  @property
  def offsets(self) -> np.ndarray:
    """The index in its segment at which each leaf starts, [leaves]."""
    ends = np.cumsum(self.sizes)
    return ends - self.sizes if self.together else np.zeros_like(ends)

  def keys(self, scores: Scores) -> Keys:
    """Return the keys of a leaf's scores."""
    return order.sort_key(value(scores)).astype(self.key_dtype)

  def masks(self, level: Array, cut: PerSegment) -> list[UInt8[Array, "..."]]:
    """Return ones above the level, and on it before the cut."""
    if self.together:
      level = jnp.broadcast_to(level, len(self.leaves))
      offsets = jnp.asarray(self.offsets, cut.dtype)
      cut = jnp.where(cut > offsets, cut - offsets, 0)
    return [
      _mask(self.keys(scores), *row_from([level, cut], i)).astype(MASK_DTYPE)
      for i, scores in enumerate(self.leaves)
    ]


@jax.jit
def _mask(keys: Keys, level: Array, cut: Array) -> Bool[Array, "*shape"]:
  before, level = flat_index(keys.shape) < cut, level.astype(keys.dtype)
  return (keys > level) | ((keys == level) & before)


def flat_index(shape: tuple[int, ...]) -> Indices:
  """Return the row-major index of each element, without a reshape."""
  index, stride = jnp.zeros((), jnp.uint32), 1
  for axis in reversed(range(len(shape))):
    iota = lax.broadcasted_iota(jnp.uint32, shape, axis)
    index, stride = index + iota * np.uint32(stride), stride * shape[axis]
  return jnp.broadcast_to(index, shape)


def row_from(tables: list[Array], place: int) -> list[Array]:
  """Return a row of each table, from a place that the compiler takes for data.

  What XLA does: it compiles equal kernels once. What we do: we hide the place
  of a leaf behind a barrier, or it would be written into the code. What it
  saves: 12 ms of compiling for every further leaf of one shape. When it can go:
  when kernels that differ in a constant are compiled once.
  """
  # Not one number alone, which would be written into the code after all.
  return _row_from(tables, np.array([place, 0], np.uint32))


@jax.jit
def _row_from(tables: list[Array], places: Array) -> list[Array]:
  place = lax.index_in_dim(lax.optimization_barrier(places), 0, keepdims=False)
  return [row(table, place) for table in tables]


def row(table: Array, place: Any) -> Array:
  """Return a row of a table; the place is not negative."""
  return lax.dynamic_index_in_dim(
    table, place, keepdims=False, allow_negative_indices=False
  )


def manual_axes(x: Array) -> frozenset[str]:
  """Return the axes of an enclosing `shard_map` that `x` varies over."""
  kind: Any = jax.typeof(x)
  if hasattr(kind, "vma"):  # older JAX
    return frozenset(kind.vma)
  return frozenset(kind.manual_axis_type.varying)


def vary(tree: Any, anchor: Any) -> Any:
  """Give `tree` the mesh of `anchor`, and the manual axes it varies over.

  A loop's first carry must have the type of its last, which what it reads of
  `anchor` decides: inside `shard_map`, and where axes are explicit.
  """
  leaves = jax.tree.leaves(anchor)
  wanted = frozenset[str]().union(*map(manual_axes, leaves))
  meshes = [jax.typeof(x).sharding.mesh for x in leaves]
  mesh = next((m for m in meshes if m.explicit_axes), None)

  def cast(x: Array) -> Array:
    missing = tuple(wanted - manual_axes(x))
    if missing:
      x = lax.pcast(x, missing, to="varying")
    if mesh is None or jax.typeof(x).sharding.mesh.explicit_axes:
      return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))

  return jax.tree.map(cast, tree)
