# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Sort keys: integers that order as scores do.

A key is a signed integer as wide as the score. -0.0 and +0.0 have one key; all
NaN have one key, below that of -inf. Below that is one key that no float has.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Shaped


def _infinity(dtype: Any) -> int:
  info = jnp.finfo(dtype)
  return ((1 << info.nexp) - 1) << info.nmant


def bounds(dtype: Any) -> tuple[int, int]:
  """Return the key below all floats (the least integer's), and the top key."""
  dtype = jnp.dtype(dtype)
  if dtype == jnp.bool_:
    return -1, 1
  top = (1 << (8 * dtype.itemsize - 1)) - 1
  if jnp.issubdtype(dtype, jnp.integer):
    return -top - 1, top
  return top - 2 * _infinity(dtype) - 2, top


def nan_key(dtype: Any) -> int:
  """Return the key of NaN; the next two are those of -inf and -max."""
  return bounds(dtype)[0] + 1


def search_dtype(dtype: Any) -> Any:
  """Return the dtype in which keys of scores are searched: 32 or 64 bits."""
  return jnp.dtype("int64" if jnp.dtype(dtype).itemsize == 8 else "int32")


@jax.jit
def sort_key(scores: Shaped[Array, "*shape"]) -> Int[Array, "*shape"]:
  """Return the keys of scores."""
  dtype = scores.dtype
  if dtype == jnp.bool_:
    return scores.astype(jnp.int8)
  if jnp.issubdtype(dtype, jnp.signedinteger):
    return scores
  bits = 8 * dtype.itemsize
  signed = jnp.dtype(f"int{bits}").type
  raw = lax.bitcast_convert_type(scores, signed)
  sign = signed(-(1 << (bits - 1)))
  if jnp.issubdtype(dtype, jnp.unsignedinteger):
    return raw ^ sign
  # The lift wraps positive NaN from above +inf to the bottom.
  lift = signed(bounds(dtype)[1] - _infinity(dtype))
  ordered = jnp.where(raw < 0, signed(int(sign) + int(lift)) - raw, raw + lift)
  return jnp.maximum(ordered, signed(nan_key(dtype)))


def from_sort_key(
  keys: Int[Array, "*shape"], dtype: Any
) -> Float[Array, "*shape"]:
  """Return the floats that have these keys."""
  bits = 8 * jnp.dtype(dtype).itemsize
  keys = keys.astype(f"int{bits}")
  lift = bounds(dtype)[1] - _infinity(dtype)
  below = keys.dtype.type(lift - (1 << (bits - 1))) - keys
  raw = jnp.where(keys < lift, below, keys - keys.dtype.type(lift))
  return lax.bitcast_convert_type(raw, dtype)
