"""LAMP: leaves give what a global ranking of normalised squares takes."""

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
  """Return `w²` over the sum of all squares not smaller (Lee et al., 2021).

  Among equals the later index counts as the larger.
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
  """Give each leaf what a global ranking by LAMP scores would (Lee et al.).

  The score of a weight is the share it has of its leaf's squares when all
  smaller weights are gone: no leaf is ever emptied.
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
