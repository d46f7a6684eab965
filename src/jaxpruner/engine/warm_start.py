# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Extrapolate the last thresholds to the first probes of a search.

Scores that change little from step to step have thresholds that drift. A hint
[leaves, 3] holds, per leaf, the threshold, its last move, and the error of the
extrapolation before. Masks do not depend on it: it only saves passes.
"""

from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxpruner.engine import order

Hint: TypeAlias = Float[Array, "leaves 3"]

# Where to look first, in errors of the extrapolation.
_ERRORS = np.array([[-2.5, -0.6, 0.6, 2.5]], np.float32)
# And at least so many keys apart.
_APART = np.array([[-2, -1, 1, 2]], np.int32)


def new(number: int) -> Hint:
  """Return the hint before the first selection of `number` leaves.

  Args:
    number: how many leaves.

  Returns:
    float32 [number, 3].

  >>> new(2).shape
  (2, 3)
  """
  return jnp.asarray(np.tile(np.array([0, 0, np.inf], np.float32), (number, 1)))


def follow(hint: Hint, level: Int[Array, " leaves"], dtype: Any) -> Hint:
  """Return the hint after thresholds with these keys were found."""
  old, move, error = hint[:, 0], hint[:, 1], hint[:, 2]
  now = order.from_sort_key(level, dtype).astype(old.dtype)
  # A threshold that was met by chance does not make the next that certain.
  error = jnp.maximum(jnp.abs(now - (old + move)), error / 4)
  known = jnp.isfinite(error)
  move = jnp.where(known, now - old, 0)
  error = jnp.where(known, error, jnp.abs(now) / 32)
  return jnp.stack([now, move, error], 1)


def guess(hint: Hint, dtype: Any) -> Int[Array, "leaves probes-2"]:
  """Return keys around the extrapolated thresholds."""
  level, move, error = (hint[:, i, None] for i in range(3))
  scores = (level + move + error * _ERRORS).astype(dtype)
  keys = order.sort_key(scores)
  return keys.astype(order.search_dtype(dtype)) + _APART
