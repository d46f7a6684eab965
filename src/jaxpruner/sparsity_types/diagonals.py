"""Whole diagonals kept or removed, wrapped around the edge."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jaxpruner.sparsity_types import base


@dataclasses.dataclass(frozen=True)
class Diagonals(base.SparsityType):
  """Keep or remove whole diagonals of the last two axes.

  Diagonal d of a K × N matrix with K <= N has the weights (k, k + d modulo N);
  with K > N, the weights (n + d modulo K, n). So each has min(K, N) weights,
  and a product with one is a rotation and an elementwise product: no index per
  weight (Tyagi et al., "Dynamic Sparse Training of Diagonally Sparse Networks",
  2025). A diagonal's score is the mean of its weights' scores.

  Example:
    >>> scores = jnp.array([[1.0, 5.0, 0.0], [0.0, 1.0, 5.0], [5.0, 0.0, 1.0]])
    >>> Diagonals().mask(scores, 0.6).tolist()
    [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
  """

  def check(self, shape: base.Shape, sparsity: Any, name: str = "scores"):
    super().check(shape, sparsity, name)
    if len(shape) < 2:
      raise ValueError(
        f"{name}: shape {shape} has no diagonals; leave it out with filter_fn"
      )

  def units(self, shape: base.Shape) -> int:
    return math.prod(shape[:-2]) * max(shape[-2:])

  def pool(self, scores: base.Array) -> base.Array:
    """Average the scores along each diagonal."""
    wide = _wide(scores)
    short, long = wide.shape[-2:]
    at = (jnp.arange(short)[:, None] + jnp.arange(long)) % long
    rows = jnp.take_along_axis(wide, jnp.broadcast_to(at, wide.shape), axis=-1)
    return base.pairwise_sum(rows, -2) / short

  def expand(self, units: base.Array, shape: base.Shape) -> base.Array:
    """Spread the chosen diagonals over the matrix."""
    short, long = sorted(shape[-2:])
    at = (jnp.arange(long) - jnp.arange(short)[:, None]) % long
    mask = jnp.take(units, at, axis=-1)
    return mask if shape[-2] <= shape[-1] else jnp.swapaxes(mask, -1, -2)


def _wide(scores: base.Array) -> base.Array:
  """Return the matrix with at least as many columns as rows."""
  if scores.shape[-2] <= scores.shape[-1]:
    return scores
  return jnp.swapaxes(scores, -1, -2)
