"""Magnitude: keep the largest weights; the inputs are not used."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.post_training._pattern import Pattern
from jaxpruner.post_training.solvers.table import Solver


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def ranked(
  pattern: Pattern, scores: jax.Array, sparsity: float, per_output: bool
) -> jax.Array:
  """Return the mask of the highest scores."""
  return pattern.mask(scores, sparsity, per_output)


def solve(
  w: jax.Array, statistics: Any, sparsity: float, pattern: Pattern
) -> tuple[jax.Array, jax.Array]:
  """Keep the largest |w| of a (groups, inputs, outputs) weight."""
  del statistics
  mask = ranked(pattern, jnp.abs(w), sparsity, False)
  return jnp.where(mask, w, 0), mask


SOLVER = Solver(solve, needs="none")
