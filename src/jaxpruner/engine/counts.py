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
from jax import Array, lax


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

  def shifted(by: Array) -> Array:
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
