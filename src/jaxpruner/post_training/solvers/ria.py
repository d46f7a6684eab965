"""RIA: relative importance of a weight, times its activations."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.post_training._pattern import Pattern
from jaxpruner.post_training.solvers.magnitude import ranked
from jaxpruner.post_training.solvers.table import Solver


def solve(
  w: jax.Array, statistics: Any, sparsity: float, pattern: Pattern
) -> tuple[jax.Array, jax.Array]:
  """Keep the largest (|w| / Σᵢ|w| + |w| / Σₒ|w|) √‖x‖ of the whole weight.

  The sums run over the inputs of an output and over the outputs of an input, so
  no channel is emptied (Zhang et al., 2024). ‖x‖ is the root mean square of an
  input.
  """
  size = jnp.abs(w)
  share = lambda axis: (
    size
    / jnp.maximum(size.sum(axis, keepdims=True), jnp.finfo(jnp.float32).tiny)
  )
  scores = (share(1) + share(2)) * jnp.sqrt(statistics.norm)[:, :, None]
  mask = ranked(pattern, scores, sparsity, False)
  return jnp.where(mask, w, 0), mask


SOLVER = Solver(solve, needs="square")
