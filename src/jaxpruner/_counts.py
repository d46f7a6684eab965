# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""How many weights a sparsity keeps, in exact arithmetic."""

import fractions
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class AtStep(NamedTuple):
  """Hold a scheduled sparsity: its value now and its target.

  A float32 cannot represent every sparsity of a large leaf. From the step at
  which the value reaches the target, the exact target is used.

  Attributes:
    value: the sparsity at this step, a float32 scalar that may be traced.
    target: the sparsity at the end of the schedule.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import mask_calculator
    >>> now = mask_calculator.AtStep(jnp.float32(0.5), target=0.9)
    >>> int(mask_calculator.num_ones(10, now))
    5
  """

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


def _product(a: Any, b: Any) -> tuple[Array, Array]:
  """Return the upper and the lower 32 bits of products of uint32."""
  low = (a & 0xFFFF) * (b & 0xFFFF)
  middle = (a >> 16) * (b & 0xFFFF) + (low >> 16)
  cross = (a & 0xFFFF) * (b >> 16) + (middle & 0xFFFF)
  high = (a >> 16) * (b >> 16) + (middle >> 16) + (cross >> 16)
  return high, (cross << 16) | (low & 0xFFFF)


def _traced_ones(size: Any, sparsity: Array) -> Array:
  """`round_half_even(size * (1 - sparsity))` in 32-bit words, elementwise.

  The sparsity is taken as 64 binary digits after the point, two words: all
  that a float32 has from 2**-40 on. Below that, nothing is removed.
  """
  word, size = jnp.uint32, np.asarray(size, np.uint32)
  scaled = jnp.clip(sparsity, 0, 1) * np.float32(2.0**32)
  whole = scaled.astype(word)
  digits = ((scaled - whole.astype(scaled.dtype)) * 2.0**32).astype(word)
  (removed, half), (carry, tail) = _product(size, whole), _product(size, digits)
  half += carry
  ones = size - removed - (half < carry).astype(word)
  # `half` and `tail` are what is removed beside whole weights, from one half on
  # rounded up; exactly one half is rounded to an even number of ones.
  is_more = ((half << 1) != 0) | (tail != 0) | ((ones & 1) == 1)
  ones -= ((half >> 31 == 1) & is_more).astype(word)
  ones = jnp.where(sparsity < 1, ones, 0)
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
    raise ValueError(
      f"size={size} must be at least 0 and below 2**32; split a larger leaf "
      "into layers (stacked_axis), or leave it dense with filter_fn"
    )
  if isinstance(sparsity, AtStep):
    ones = num_ones_each([size], [sparsity])[0]
  elif isinstance(sparsity, jax.Array):
    ones = _traced_ones(size, sparsity.astype(jnp.float32))
  else:
    return _exact_ones(size, sparsity)
  return ones.astype(jnp.int32) if size < 1 << 31 else ones


def num_ones_each(sizes: Sequence[int], sparsities: Sequence[AtStep]) -> Array:
  """Return `num_ones` of every leaf, computed in one array.

  Args:
    sizes: the number of weights of each leaf.
    sparsities: the scheduled sparsity of each leaf.

  Returns:
    uint32 per leaf.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import mask_calculator
    >>> now = mask_calculator.AtStep(jnp.float32(0.5), target=0.9)
    >>> mask_calculator.num_ones_each([10, 100], [now, now]).tolist()
    [5, 50]
  """
  now = jnp.stack([jnp.asarray(s.value, jnp.float32) for s in sparsities])
  target = [s.target for s in sparsities]
  exact = np.array(list(map(_exact_ones, sizes, target)), np.uint32)
  ones = jnp.maximum(_traced_ones(sizes, now), exact)
  done = now >= np.asarray(target, np.float32)
  return jnp.where(done, exact, ones)


def pick(counts: Sequence[Any] | Array, ids: Sequence[int]) -> Any:
  """Return the counts at some positions.

  An array is indexed as a whole, because one kernel per entry would cost more.

  Args:
    counts: a list of counts, or one array of them.
    ids: the positions to return.

  Returns:
    A list if `counts` is a list, else an array.

  Example:
    >>> from jaxpruner import mask_calculator
    >>> mask_calculator.pick([5, 6, 7], [0, 2])
    [5, 7]
  """
  if len(ids) == len(counts):
    return counts
  if isinstance(counts, Array | np.ndarray):
    return counts[np.array(ids, np.int32)]
  return [counts[i] for i in ids]
