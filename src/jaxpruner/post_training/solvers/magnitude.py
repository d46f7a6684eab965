"""Magnitude: keep the largest weights; the inputs are not used."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.post_training._pattern import Pattern, kept, largest
from jaxpruner.post_training.solvers.table import Solver
from jaxpruner.sparsity_types import Unstructured


def ranked(
  pattern: Pattern, scores: jax.Array, sparsity: float, per_output: bool
) -> jax.Array:
  """Return the mask of the highest scores."""
  if type(pattern.kind) is Unstructured:
    # One compilation for all sparsities: layers may have one each.
    return _largest(scores, kept(scores, sparsity, per_output), per_output)
  return _mask(pattern, scores, sparsity)


_largest = jax.jit(largest, static_argnums=2)
_mask = jax.jit(Pattern.mask, static_argnums=(0, 2))


def solve(
  w: jax.Array, statistics: Any, sparsity: float, pattern: Pattern
) -> tuple[jax.Array, jax.Array]:
  """Keep the largest |w| of a (groups, inputs, outputs) weight."""
  del statistics
  mask = ranked(pattern, jnp.abs(w), sparsity, False)
  return jnp.where(mask, w, 0), mask


SOLVER = Solver(solve, needs="none")
