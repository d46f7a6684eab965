"""Wanda: keep the largest |w| ‖x‖ of each output."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.post_training._pattern import Pattern
from jaxpruner.post_training.solvers.magnitude import ranked
from jaxpruner.post_training.solvers.table import Solver


def solve(
  w: jax.Array, statistics: Any, sparsity: float, pattern: Pattern
) -> tuple[jax.Array, jax.Array]:
  """Keep the largest |w| ‖x‖ among the inputs of each output.

  ‖x‖ is the root mean square of an input (Sun et al., 2023).
  """
  scores = jnp.abs(w) * statistics.norm[:, :, None]
  mask = ranked(pattern, scores, sparsity, True)
  return jnp.where(mask, w, 0), mask


SOLVER = Solver(solve, needs="square")
