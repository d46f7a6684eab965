# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Sort keys: integers that order as scores do.

A key is a signed integer as wide as the score. -0.0 and +0.0 have one key; all
NaN have one key, below that of -inf; +inf has the highest. No float has the
lowest key.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

Keys: TypeAlias = Int[Array, "*shape"]


def key_dtype(dtype: Any) -> Any:
  """Return the dtype of the keys of scores."""
  return jnp.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")


def search_dtype(dtype: Any) -> Any:
  """Return the dtype in which keys are searched: 32 or 64 bits."""
  return jnp.dtype("int64" if jnp.dtype(dtype).itemsize == 8 else "int32")


def _infinity(dtype: Any) -> int:
  """Return the bits of +inf."""
  info = jnp.finfo(dtype)
  return ((1 << info.nexp) - 1) << info.nmant


def _lift(dtype: Any) -> int:
  """Return the key of 0.0: what takes the bits of +inf to the highest key."""
  return int(np.iinfo(key_dtype(dtype)).max) - _infinity(dtype)


@jax.jit
def sort_key(scores: Shaped[Array, "*shape"]) -> Keys:
  """Return the keys of scores."""
  dtype, signed = scores.dtype, key_dtype(scores.dtype)
  if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.signedinteger):
    return scores.astype(signed)
  raw, sign = lax.bitcast_convert_type(scores, signed), np.iinfo(signed).min
  if jnp.issubdtype(dtype, jnp.unsignedinteger):
    return raw ^ signed.type(sign)
  lift = _lift(dtype)
  # The lift wraps positive NaN from above +inf to the bottom.
  below, above = signed.type(sign + lift) - raw, raw + signed.type(lift)
  nan = signed.type(lift - _infinity(dtype) - 1)
  return jnp.maximum(jnp.where(raw < 0, below, above), nan)


def from_sort_key(keys: Keys, dtype: Any) -> Float[Array, "*shape"]:
  """Return the floats that have these keys."""
  signed, lift = key_dtype(dtype), _lift(dtype)
  keys, sign = keys.astype(signed), np.iinfo(signed).min
  below, above = signed.type(sign + lift) - keys, keys - signed.type(lift)
  return lax.bitcast_convert_type(jnp.where(keys < lift, below, above), dtype)


# Weights and gradients are small numbers.
_COMMON = [0, 2**-10, 2**-5, 1]


def landmarks(dtype: Any) -> np.ndarray:
  """Return keys to look at first, if nothing is known of the scores.

  Args:
    dtype: of the scores.

  Returns:
    int64 [6]. Of floats, the last two are the keys of -max and +inf: how many
    scores reach them tells whether all are finite.
  """
  signed = key_dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating):
    info = np.iinfo(signed)
    return np.linspace(info.min, info.max, 8)[1:-1].astype(np.int64)
  lift, infinity = _lift(dtype), _infinity(dtype)
  common = np.array(_COMMON, dtype).view(signed).astype(np.int64) + lift
  return np.array([*common, lift - infinity + 1, lift + infinity])
