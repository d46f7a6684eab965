"""Convert parameter trees to and from JAX's BCOO, and count their bytes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner.sparse import formats


class Sizes(NamedTuple):
  """Bytes of a tree: as dense arrays, as stored, and leaf by leaf.

  Attributes:
    dense: bytes of all leaves as dense arrays.
    sparse: bytes of all leaves as stored.
    leaves: path -> `(dense, sparse)`.

  Example:
    >>> sizes = Sizes(256, 64, {"['w']": (256, 64)})
    >>> sizes.ratio, sizes.saved
    (0.25, 192)
  """

  dense: int
  sparse: int
  leaves: dict[str, tuple[int, int]]

  @property
  def ratio(self) -> float:
    """Stored bytes over dense bytes."""
    return self.sparse / self.dense if self.dense else 1.0

  @property
  def saved(self) -> int:
    """Dense bytes minus stored bytes (negative where BCOO costs more)."""
    return self.dense - self.sparse


def is_sparse(leaf: Any) -> bool:
  """Tell whether `leaf` is a sparse weight: one of ours, or BCOO / BCSR."""
  return hasattr(leaf, "todense") and hasattr(leaf, "shape")


def to_bcoo(params: Any, masks: Any) -> Any:
  """Keep exactly the entries with mask 1 of each leaf, as `BCOO`.

  A kept weight whose value is zero is stored too: a leaf holds `mask.sum()`
  entries, sorted and unique. Every axis is sparse (`n_batch = n_dense = 0`),
  also for stacked layers and convolutions: batch axes would need the same count
  in every layer, and padding otherwise.

  Args:
    params: a tree of arrays.
    masks: the same tree of 0/1 arrays; `None` leaves stay dense.

  Returns:
    `params` with a `jax.experimental.sparse.BCOO` where there is a mask.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> tree = sparse.to_bcoo({"w": jnp.eye(8)}, {"w": jnp.eye(8)})
    >>> tree["w"].nse
    8
  """
  from jax.experimental import sparse as jax_sparse

  leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  packed = []
  aligned = _leaves.align(params, masks)
  for (path, leaf), mask in zip(leaves, aligned, strict=True):
    if mask is None:
      packed.append(leaf)
      continue
    if np.shape(mask) != np.shape(leaf):
      raise ValueError(
        f"masks{jax.tree_util.keystr(path)} has shape {np.shape(mask)}, its "
        f"parameter {np.shape(leaf)}; a mask has its parameter's shape, or is "
        "None for a leaf that stays dense"
      )
    where = np.nonzero(np.asarray(mask))
    packed.append(
      jax_sparse.BCOO(
        (
          jnp.asarray(leaf)[where],
          jnp.asarray(np.stack(where, axis=-1).astype(np.int32)),
        ),
        shape=np.shape(leaf),
        indices_sorted=True,
        unique_indices=True,
      )
    )
  return jax.tree_util.tree_unflatten(treedef, packed)


def to_bcsr(params: Any, masks: Any) -> Any:
  """Keep exactly the entries with mask 1, with matrices as `BCSR`.

  BCSR needs a third fewer bytes than the BCOO of `to_bcoo`. Leaves of other
  ranks, which have no rows to compress, become BCOO.

  Args:
    params: a tree of arrays.
    masks: the same tree of 0/1 arrays; `None` leaves stay dense.

  Returns:
    `params` with a `jax.experimental.sparse.BCSR` for each masked matrix.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> tree = sparse.to_bcsr({"w": jnp.eye(8)}, {"w": jnp.eye(8)})
    >>> type(tree["w"]).__name__, tree["w"].nse
    ('BCSR', 8)
  """
  from jax.experimental import sparse as jax_sparse

  def compress(leaf):
    if is_sparse(leaf) and leaf.ndim == 2:
      return jax_sparse.BCSR.from_bcoo(leaf)
    return leaf

  tree = to_bcoo(params, masks)
  return jax.tree_util.tree_map(compress, tree, is_leaf=is_sparse)


def from_bcoo(tree: Any) -> Any:
  """Return the dense tree: kept entries bit for bit, `+0.0` elsewhere.

  Undoes `to_bcoo`, `to_bcsr` and `pack`.

  Args:
    tree: a tree with sparse and dense leaves.

  Returns:
    The same tree with an array for each leaf.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> tree = sparse.to_bcoo({"w": jnp.eye(2)}, {"w": jnp.eye(2)})
    >>> sparse.from_bcoo(tree)["w"].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
  """

  def dense(leaf):
    if not is_sparse(leaf):
      return leaf
    if isinstance(leaf, formats.Sparse):
      return leaf.todense()
    leaf = leaf.to_bcoo() if hasattr(leaf, "indptr") else leaf
    # Set, not BCOO.todense's add: 0.0 + -0.0 would lose the sign of a -0.0.
    index = tuple(jnp.moveaxis(leaf.indices, -1, 0))
    return (
      jnp.zeros(leaf.shape, leaf.dtype).at[index].set(leaf.data, mode="drop")
    )

  return jax.tree_util.tree_map(dense, tree, is_leaf=is_sparse)


def bytes_report(tree: Any) -> Sizes:
  """Count the bytes of a tree of dense and sparse leaves.

  Args:
    tree: a tree with sparse and dense leaves.

  Returns:
    `Sizes(dense, sparse, leaves)`, with `leaves[path] = (dense, sparse)`;
    `.ratio` and `.saved` follow from them.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> tree = sparse.to_bcoo({"w": jnp.eye(8)}, {"w": jnp.eye(8)})
    >>> sizes = sparse.bytes_report(tree)
    >>> sizes.dense, sizes.sparse
    (256, 96)
  """
  leaves = {}
  flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse)[0]
  for path, leaf in flat:
    if hasattr(leaf, "dtype"):
      dense = int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
      stored = sum(a.nbytes for a in jax.tree_util.tree_leaves(leaf))
      leaves[jax.tree_util.keystr(path)] = (dense, stored)
  return Sizes(
    sum(d for d, _ in leaves.values()),
    sum(s for _, s in leaves.values()),
    leaves,
  )
