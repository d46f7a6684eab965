"""Solvers of one (inputs, outputs) matrix, applied to every group."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def stack(
  solve: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
  w: jax.Array,
  statistics: Any,
) -> tuple[jax.Array, jax.Array]:
  """Return `(w, mask)` of all groups from `solve(w, gram)` of each."""
  pairs = [solve(w[g], statistics.gram[g]) for g in range(len(w))]
  new, mask = (jnp.stack(x) for x in zip(*pairs, strict=True))
  return new, mask
