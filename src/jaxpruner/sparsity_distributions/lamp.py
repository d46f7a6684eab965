"""LAMP: densities from a global ranking of normalised squared weights."""

import fractions
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator
from jaxpruner.sparsity_distributions.budget import Budget, values
from jaxpruner.sparsity_distributions.filters import FilterFn, default_filter
from jaxpruner.sparsity_types import check_sparsity

PyTree: TypeAlias = Any


def lamp_scores(weights: jax.Array) -> jax.Array:
  """Return LAMP scores: `w²` over the sum of the squares at least as large.

  Among equal weights the later index counts as the larger one (Lee et al.,
  "Layer-Adaptive Sparsity for the Magnitude-based Pruning", 2021).

  Args:
    weights: one leaf.

  Returns:
    float32 scores of the same shape; the largest weight has score 1.

  Example:
    >>> lamp_scores(jnp.array([1.0, 2.0])).tolist()
    [0.20000000298023224, 1.0]
  """
  squares = jnp.square(weights.astype(jnp.float32)).reshape(-1)
  order = jnp.argsort(squares, stable=True)
  ascending = squares[order]
  tail = jnp.cumsum(ascending[::-1])[::-1]
  scores = ascending / jnp.maximum(tail, jnp.finfo(jnp.float32).tiny)
  return jnp.zeros_like(squares).at[order].set(scores).reshape(weights.shape)


def lamp(
  params: PyTree,
  sparsity: float,
  filter_fn: FilterFn = default_filter,
  custom_sparsity_map: Any = None,
) -> PyTree:
  """Give each leaf the density that a global ranking by LAMP scores gives it.

  The largest weight of every leaf has the highest possible score, so no leaf
  loses all its weights (Lee et al., "Layer-Adaptive Sparsity for the
  Magnitude-based Pruning", 2021).

  Args:
    params: the weights; values are read, so call it outside `jit`.
    sparsity: the fraction removed from all leaves together.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: as in `uniform`.

  Returns:
    A tree like `params` with sparsities, `None` for dense leaves.

  Example:
    >>> lamp({"in": jnp.eye(4), "out": jnp.ones((4, 4))}, 0.5)
    {'in': 0.75, 'out': 0.25}
  """
  sparsity = check_sparsity(sparsity)
  budget = Budget(params, filter_fn, custom_sparsity_map)
  weights = values(budget, "lamp")
  scores = {
    i: np.asarray(lamp_scores(jnp.asarray(w))) for i, w in weights.items()
  }
  flat = np.concatenate([s.ravel() for s in scores.values()] or [np.zeros(0)])
  owner = np.repeat(list(scores), [s.size for s in scores.values()])
  keep = mask_calculator.num_ones(budget.size, sparsity)
  kept = owner[np.argsort(-flat, kind="stable")[:keep]]
  return budget.fill(
    sparsity,
    {
      i: fractions.Fraction(int((kept == i).sum()), budget.sizes[i])
      for i in weights
    },
  )
