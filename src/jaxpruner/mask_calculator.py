"""Exact masks from scores, without sorting.

The functions here compute masks with exactly the requested number of ones. The
result equals that of a stable sort: larger scores are kept first, among equal
scores the lower row-major index, and NaN ranks below every number. They work
under `jit`, `vmap`, `scan`, `shard_map` and on sharded arrays.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from jaxpruner import _legacy, engine
from jaxpruner._counts import AtStep, num_ones, num_ones_each, pick
from jaxpruner.engine.expression import trace
from jaxpruner.engine.leaves import MASK_DTYPE
from jaxpruner.engine.order import sort_key

Scores: TypeAlias = engine.Scores | Callable[[], Array]

__all__ = [
  "MASK_DTYPE",
  "AtStep",
  "get_topk_fn",
  "n_by_m_mask",
  "num_ones",
  "num_ones_each",
  "pack_mask",
  "pick",
  "rank",
  "topk_mask_calculator",
  "topk_masks",
  "unpack_mask",
]


def topk_masks(
  scores: Sequence[Scores],
  ones: Any,
  *,
  together: bool = False,
) -> list[Array]:
  """Keep the largest scores of each leaf, or of all leaves together.

  The masks have exactly the requested number of ones. Among equal scores the
  earlier leaf and the lower row-major index are kept first; NaN ranks below
  every number.

  Args:
    scores: arrays, expressions (`engine.defer`), or functions without arguments
      that return the scores of a leaf as an elementwise expression of arrays
      they close over (|w|, |w g|). Expressions are evaluated inside the passes
      and never stored.
    ones: the number to keep, per leaf; with `together` one number for all. Ints
      or int32 scalars, or one int32 array of them.
    together: rank all leaves in one order (global pruning).

  Returns:
    uint8 masks, 1 = kept, shaped as the scores.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import mask_calculator
    >>> scores = [jnp.array([3.0, 1.0, 3.0, 3.0])]
    >>> mask_calculator.topk_masks(scores, [2])[0].tolist()
    [1, 0, 1, 0]
  """
  given = [trace(s) if callable(s) else s for s in scores]
  return engine.select(given, ones, together=together).masks


def topk_mask_calculator(scores: Array, sparsity: Any) -> Array:
  """Keep the largest `num_ones(scores.size, sparsity)` scores.

  Args:
    scores: the scores of one leaf.
    sparsity: the fraction removed, a float or a traced scalar.

  Returns:
    A uint8 mask, 1 = kept, shaped as the scores.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import mask_calculator
    >>> scores = jnp.array([1.0, 3.0, 2.0, 0.0])
    >>> mask_calculator.topk_mask_calculator(scores, 0.5).tolist()
    [0, 1, 1, 0]
  """
  scores = jnp.asarray(scores)
  return topk_masks([scores], [num_ones(scores.size, sparsity)])[0]


def n_by_m_mask(scores: Array, n: Any, m: int, axis: int = -2) -> Array:
  """Keep the `n` largest of every `m` consecutive scores along `axis`.

  Among equal scores the lower index along `axis` is kept first.

  Args:
    scores: the scores of one leaf.
    n: the number kept of each group; may be traced.
    m: the size of a group; must divide the length of `axis`.
    axis: the axis along which groups are formed.

  Returns:
    A uint8 mask, 1 = kept, shaped as the scores.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import mask_calculator
    >>> scores = jnp.array([1.0, 4.0, 3.0, 2.0])
    >>> mask_calculator.n_by_m_mask(scores, 2, 4, axis=0).tolist()
    [0, 1, 1, 0]
  """
  scores = jnp.asarray(scores)
  if isinstance(n, int) and not 0 < n <= m:
    raise ValueError(
      f"n:m keeps n of m weights, so 0 < n <= m; got n={n}, m={m}: pass n=2, "
      "m=4, for example"
    )
  axis = range(scores.ndim)[axis]
  length = scores.shape[axis]
  if length % m:
    raise ValueError(
      f"axis {axis} of scores {scores.shape} has length {length}, not "
      f"divisible by m={m}; pad it, choose another axis, or leave it dense"
    )
  split = (*scores.shape[:axis], length // m, m, *scores.shape[axis + 1 :])
  image = sort_key(scores).reshape(split)
  place = lax.broadcasted_iota(jnp.int32, split, axis + 1)
  rank = jnp.zeros(split, jnp.int32)
  for i in range(m):
    other = lax.slice_in_dim(image, i, i + 1, axis=axis + 1)
    rank += (other > image) | ((other == image) & (place > i))
  return (rank < n).astype(MASK_DTYPE).reshape(scores.shape)


def rank(scores: Array) -> Array:
  """Return the position of each score in its row, 0 for the largest.

  Among equal scores the lower index comes first.

  Args:
    scores: the scores; the last axis is ranked.

  Returns:
    int32, shaped as the scores.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import mask_calculator
    >>> mask_calculator.rank(jnp.array([1.0, 3.0, 3.0])).tolist()
    [2, 0, 1]
  """
  order = jnp.argsort(~sort_key(scores), axis=-1, stable=True)
  return jnp.argsort(order, axis=-1)


def pack_mask(mask: Array) -> Array:
  """Store a mask at one bit per weight, in the bit order of `numpy.packbits`.

  If the length of the last axis is a multiple of 8, each row is packed alone,
  so that the leading axes and their sharding stay. Other shapes are packed as
  one row. The bytes are the same in both cases.

  Args:
    mask: a mask of zeros and ones.

  Returns:
    uint8, an eighth of the mask's size, rounded up.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import mask_calculator
    >>> mask_calculator.pack_mask(jnp.array([1, 0, 1], jnp.uint8)).tolist()
    [160]
  """
  if not mask.ndim or mask.shape[-1] % 8:
    mask = mask.reshape(-1)
  return jnp.packbits(mask.astype(jnp.bool_), axis=-1)


def unpack_mask(packed: Array, shape: tuple[int, ...]) -> Array:
  """Return the mask that `pack_mask` stored.

  Args:
    packed: the bytes that `pack_mask` returned.
    shape: the shape of the mask.

  Returns:
    A uint8 mask of this shape, 1 = kept.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import mask_calculator
    >>> packed = jnp.array([160], jnp.uint8)
    >>> mask_calculator.unpack_mask(packed, (3,)).tolist()
    [1, 0, 1]
  """
  size = math.prod(shape)
  if packed.size != -(-size // 8):
    raise ValueError(
      f"packed mask of shape {packed.shape} does not fit the parameter of "
      f"shape {shape}, which takes {-(-size // 8)} bytes"
    )
  rows = bool(shape) and shape[-1] % 8 == 0
  out = shape if rows else (packed.size * 8,)
  spread = jnp.broadcast_to(packed[..., None], (*packed.shape, 8)).reshape(out)
  # The bit is computed from the index, in words as wide as the weights: XLA
  # then vectorizes the pass that applies the mask; with a table it does not.
  place = lax.broadcasted_iota(jnp.int32, out, len(out) - 1)
  bits = ((spread.astype(jnp.int32) << (place & 7)) >> 7) & 1
  bits = bits.astype(MASK_DTYPE)
  return bits if rows else bits[:size].reshape(shape)


def get_topk_fn(sparsity_type: Any) -> Callable[..., Array]:
  """Return the function that computes masks of a sparsity type.

  Args:
    sparsity_type: a sparsity type, for example `NByM(2, 4)`, or a class of
      them that needs no arguments.

  Returns:
    A function `(scores, sparsity) -> mask`.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import mask_calculator, sparsity_types
    >>> mask_fn = mask_calculator.get_topk_fn(sparsity_types.NByM(2, 4, axis=0))
    >>> mask_fn(jnp.array([1.0, 4.0, 3.0, 2.0]), 0.5).tolist()
    [0, 1, 1, 0]
  """
  if isinstance(sparsity_type, type):
    sparsity_type = sparsity_type()
  return sparsity_type.mask


__getattr__ = _legacy.old_names(__name__)
