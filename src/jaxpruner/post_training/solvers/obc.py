"""Exact greedy removal, one weight at a time, for small layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpruner import mask_calculator
from jaxpruner.post_training._pattern import FREE, Pattern
from jaxpruner.post_training.solvers import per_group, sparsegpt
from jaxpruner.post_training.solvers.table import Solver
from jaxpruner.sparsity_types import NByM, Unstructured


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def prune(
  w: Array,
  gram: Array,
  sparsity: float,
  pattern: Pattern = FREE,
  damping: float = 0.01,
  outputs_at_once: int = 32,
) -> tuple[Array, Array]:
  """Remove, for each output, one weight after another, the cheapest first.

  Each removal is the exact optimum of Optimal Brain Surgeon: the weight with
  the least wₚ² / [H⁻¹]ₚₚ goes, all others move by -wₚ H⁻¹₍:,ₚ₎ / [H⁻¹]ₚₚ, and p
  leaves the inverse by one step of elimination (Frantar et al., "Optimal Brain
  Compression", 2022). Every output keeps the same number.

  Cost: outputs × removed × inputs²; for layers up to about a thousand inputs.

  Args:
    w: (inputs, outputs).
    gram: (inputs, inputs), the mean of x xᵀ.
    sparsity: fraction removed.
    pattern: N:M, or single weights.
    damping: fraction of the mean diagonal added to the Hessian.
    outputs_at_once: how many inverses are held in memory.

  Returns:
    `(w, mask)`.
  """
  pattern.refuse_other("obc", Unstructured, NByM)
  inputs = len(w)
  factor = sparsegpt.inverse_factor(gram, damping)
  inverse = jnp.dot(factor.T, factor, precision=lax.Precision.HIGHEST)
  w = jnp.where(jnp.diagonal(gram)[:, None] == 0, 0, w)
  if pattern.m:
    removed = inputs // pattern.m * (pattern.m - pattern.n)
  else:
    removed = inputs - int(mask_calculator.num_ones(inputs, sparsity))

  def one(column):
    def remove(_, carry):
      column, inverse, kept = carry
      free = kept
      if pattern.m:
        left = kept.reshape(-1, pattern.m).sum(1, keepdims=True)
        groups = jnp.broadcast_to(left > pattern.n, (len(left), pattern.m))
        free = kept & groups.reshape(-1)
      diagonal = jnp.diagonal(inverse)
      cost = jnp.square(column) / jnp.where(free, diagonal, 1)
      # Ties: the higher index goes, so that the lower one is kept.
      cost = jnp.where(free, cost, jnp.inf)[::-1]
      p = inputs - 1 - jnp.argmin(cost)
      line = inverse[p]
      column = column - line * (column[p] / line[p])
      inverse = inverse - jnp.outer(line, line) / line[p]
      return column, inverse, kept.at[p].set(False)

    start = column, inverse, jnp.ones(inputs, jnp.bool_)
    column, _, kept = lax.fori_loop(0, removed, remove, start)
    return jnp.where(kept, column, 0), kept.astype(jnp.uint8)

  w, mask = lax.map(one, w.T, batch_size=outputs_at_once)
  return w.T, mask.T


def solve(
  w: Array, statistics: Any, sparsity: float, pattern: Pattern, damping: float
) -> tuple[Array, Array]:
  """Prune every group of a (groups, inputs, outputs) weight."""
  one = lambda w, gram: prune(w, gram, sparsity, pattern, damping)
  return per_group.stack(one, w, statistics)


SOLVER = Solver(solve, needs="gram")
