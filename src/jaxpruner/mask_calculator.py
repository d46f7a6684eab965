"""Exact masks from scores, without sorting.

The functions here turn scores into masks of exactly the wanted number of
ones, the same as a stable sort would give: larger scores win, among equals
the lower row-major index, NaN loses against every number. They work under
`jit`, `vmap`, `scan`, `shard_map` and on sharded arrays.
"""

import fractions
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner import engine
from jaxpruner.engine.expression import trace
from jaxpruner.engine.lazy import Lazy
from jaxpruner.engine.leaves import MASK_DTYPE, row_from
from jaxpruner.engine.order import sort_key
from jaxpruner.engine.selection import pick

Scores: TypeAlias = Array | Lazy | Callable[[], Array]


class AtStep(NamedTuple):
  """A scheduled sparsity: its value now, and the target it ends at."""

  value: Array
  target: float


def _exact_ones(size: int, sparsity: float) -> int:
  sparsity = float(sparsity)
  if not 0 <= sparsity < 1:
    raise ValueError(
      f"sparsity must be at least 0 and below 1, got {sparsity}; it is the "
      "fraction removed, so write 0.9 to keep one weight in ten"
    )
  kept = round(size * (1 - fractions.Fraction(sparsity)))
  return min(size, max(1, kept))


def _traced_ones(size: Any, sparsity: Array) -> Array:
  """`round_half_even(size * (1 - sparsity))` in 32-bit words, elementwise.

  A float32 is `mantissa / 2**shift`; size * mantissa takes 56 bits, of which
  a float32 product would keep 24.
  """
  word, size = jnp.uint32, np.asarray(size, np.uint32)
  bits = lax.bitcast_convert_type(jnp.clip(sparsity, 0, 1), word)
  exponent = bits >> 23
  mantissa = jnp.where(exponent > 0, (bits & 0x7FFFFF) | 0x800000, 0)
  # Beyond 57 the product is below one half, whatever the size.
  shift = jnp.minimum(word(150) - exponent, 57)

  low, high = jnp.zeros_like(bits), jnp.zeros_like(bits)
  for i, part in enumerate((mantissa & 0xFFF, mantissa >> 12)):
    for j, half in enumerate((size & 0xFFFF, size >> 16)):
      product, by = part * half, 12 * i + 16 * j  # below 2**28
      low = low + (product << by)
      carry = (low < (product << by)).astype(word)
      high = high + carry + (product >> (32 - by) if by else 0)

  def shifted(by):
    near = (low >> by) | (high << (32 - by))
    return jnp.where(by < 32, near, high >> (by - 32))

  removed, below = shifted(shift), shift - 1
  half = (shifted(below) & 1) == 1
  under = jnp.minimum(below, 31)
  rest = (low & ((word(1) << under) - 1)) != 0
  rest |= (below > 31) & ((low >> 31) != 0)
  over = jnp.maximum(below, 32) - 32
  rest |= (high & ((word(1) << over) - 1)) != 0
  ones = size - removed
  # The fraction is taken away, so it rounds down from above one half.
  ones -= (half & (rest | ((ones & 1) == 1))).astype(word)
  return jnp.maximum(ones, np.minimum(size, np.uint32(1)))


def num_ones(size: int, sparsity: Any) -> int | Array:
  """Return how many of `size` weights a sparsity keeps.

  `max(1, round_half_even(size * (1 - sparsity)))` in exact arithmetic, of the
  very value the float holds; 0 only when there are no weights.

  Args:
    size: number of weights, below 2**32.
    sparsity: fraction removed: a Python or NumPy float, a (traced) float32,
      bfloat16 or float16 scalar, or `AtStep`, which gives the target's own
      count from the moment its value reaches the target.

  Returns:
    An int, or an int32 scalar (uint32 from 2**31 weights) if traced.

  >>> num_ones(10, 0.25)  # 7.5 rounds to the even neighbour
  8
  """
  if not 0 <= size < 1 << 32:
    raise ValueError(f"size must be at least 0 and below 2**32, got {size}")
  if isinstance(sparsity, AtStep):
    ones = num_ones_each([size], [sparsity])[0]
  elif isinstance(sparsity, jax.Array):
    ones = _traced_ones(size, sparsity.astype(jnp.float32))
  else:
    return _exact_ones(size, sparsity)
  return ones.astype(jnp.int32) if size < 1 << 31 else ones


def num_ones_each(sizes: Sequence[int], sparsities: Sequence[AtStep]) -> Array:
  """Return `num_ones` of every leaf, uint32, computed side by side."""
  now = jnp.stack([jnp.asarray(s.value, jnp.float32) for s in sparsities])
  target = [s.target for s in sparsities]
  exact = np.array(list(map(_exact_ones, sizes, target)), np.uint32)
  ones = jnp.maximum(_traced_ones(sizes, now), exact)
  done = now >= np.asarray(target, np.float32)
  return jnp.where(done, exact, ones)


def topk_masks(
  scores: Sequence[Scores],
  ones: Any,
  *,
  together: bool = False,
) -> list[Array]:
  """Keep the largest scores of each leaf, or of all leaves together.

  Exactly as many ones as asked for; among equal scores the earlier leaf and
  the lower row-major index win; NaN ranks below every number.

  Args:
    scores: arrays, expressions (`engine.defer`), or functions of no arguments
      that return the scores of a leaf as an elementwise expression of arrays
      they close over (|w|, |w g|). These are evaluated inside the passes and
      never stored.
    ones: how many to keep, per leaf; with `together` one number for all.
      Ints or int32 scalars, or one int32 array of them.
    together: rank all leaves in one order (global pruning).

  Returns:
    uint8 masks, 1 = kept, shaped as the scores.

  >>> topk_masks([jnp.array([3.0, 1.0, 3.0, 3.0])], [2])[0].tolist()
  [1, 0, 1, 0]
  """
  lazy = [s for s in scores if isinstance(s, Lazy)]
  hint = None
  if lazy and len(lazy) == len(scores) and not together:
    trails = [s.trail for s in lazy]
    if all(t is not None for t in trails):
      hint = jnp.stack(trails)
  given = [trace(s) if callable(s) else s for s in scores]
  found = engine.select(given, ones, together=together, hint=hint)
  for row, entry in enumerate(scores):
    if isinstance(entry, Lazy):
      entry.finite = row_from([found.finite], row)[0]
      entry.trail = None if hint is None else found.hint[row]
  return found.masks


def topk_mask_calculator(scores: Array, sparsity: Any) -> Array:
  """Keep the largest `num_ones(scores.size, sparsity)` scores.

  >>> topk_mask_calculator(jnp.array([1.0, 3.0, 2.0, 0.0]), 0.5).tolist()
  [0, 1, 1, 0]
  """
  scores = jnp.asarray(scores)
  return topk_masks([scores], [num_ones(scores.size, sparsity)])[0]


def n_by_m_mask(scores: Array, n: Any, m: int, axis: int = -2) -> Array:
  """Keep the `n` largest of every `m` consecutive scores along `axis`.

  Among equals the lower index along `axis` wins. `n` may be traced.

  >>> n_by_m_mask(jnp.array([1.0, 4.0, 3.0, 2.0]), 2, 4, axis=0).tolist()
  [0, 1, 1, 0]
  """
  scores = jnp.asarray(scores)
  if isinstance(n, int) and not 0 < n <= m:
    raise ValueError(f"n:m needs 0 < n <= m, got n={n}, m={m}")
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
  """Return the place of each score in its row, 0 for the largest.

  Among equals the lower index comes first.

  >>> rank(jnp.array([1.0, 3.0, 3.0])).tolist()
  [2, 0, 1]
  """
  order = jnp.argsort(~sort_key(scores), axis=-1, stable=True)
  return jnp.argsort(order, axis=-1)


def pack_mask(mask: Array) -> Array:
  """Store a mask at one bit per weight, as `numpy.packbits` orders them.

  Rows of a multiple of 8 are packed each by itself, so that the leading axes
  (and their sharding) stay; other shapes become one row. The bytes are the
  same.

  >>> pack_mask(jnp.array([1, 0, 1], MASK_DTYPE)).tolist()
  [160]
  """
  if not mask.ndim or mask.shape[-1] % 8:
    mask = mask.reshape(-1)
  return jnp.packbits(mask.astype(jnp.bool_), axis=-1)


def unpack_mask(packed: Array, shape: tuple[int, ...]) -> Array:
  """Return the uint8 mask of `shape` that `pack_mask` stored.

  >>> unpack_mask(jnp.array([160], MASK_DTYPE), (3,)).tolist()
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
  # Which bit follows from the place alone, in words as wide as the weights: so
  # the pass that applies the mask is vectorized, as it is not with a table.
  place = lax.broadcasted_iota(jnp.int32, out, len(out) - 1)
  bits = ((spread.astype(jnp.int32) << (place & 7)) >> 7) & 1
  bits = bits.astype(MASK_DTYPE)
  return bits if rows else bits[:size].reshape(shape)


def get_topk_fn(sparsity_type: Any) -> Callable[..., Array]:
  """Return the `(scores, sparsity) -> mask` function of a sparsity type."""
  return sparsity_type.mask
