"""OWL: leaves, or whole layers, with more outliers keep more."""

import fractions
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxpruner import _leaves
from jaxpruner.sparsity_distributions.budget import Budget, SparsityMap, values
from jaxpruner.sparsity_distributions.filters import FilterFn, default_filter
from jaxpruner.sparsity_types import check_sparsity

PyTree: TypeAlias = Any


# What the paper found best for language models.
THRESHOLD = 5.0  # times the mean of the scores: an outlier
LIMIT = 0.08  # half of what densities span


def outlier_ratio(scores: Any, threshold: float) -> float:
  """Return the share of scores above `threshold` times their mean."""
  scores = np.abs(np.asarray(scores, np.float64))
  return float(np.mean(scores > threshold * scores.mean()))


def owl_densities(
  ratios: Sequence[float], sizes: Sequence[int], sparsity: float, limit: float
) -> list[fractions.Fraction]:
  """Return densities affine in outlier ratios that average to the request.

  They span `2 * limit`, or as much less as keeps all of them within 0 and 1.
  """
  density = 1 - fractions.Fraction(sparsity)
  exact = [fractions.Fraction(r) for r in ratios]
  total = sum(r * n for r, n in zip(exact, sizes, strict=True))
  away = [r - fractions.Fraction(total, max(sum(sizes), 1)) for r in exact]
  if not any(away):
    return [density] * len(away)
  slope = min(
    2 * fractions.Fraction(limit) / (max(away) - min(away)),
    min(density, 1 - density) / max(map(abs, away)),
  )
  return [density + a * slope for a in away]


def owl(
  params: PyTree,
  sparsity: float,
  scores: PyTree = None,
  threshold: float = THRESHOLD,
  limit: float = LIMIT,
  filter_fn: FilterFn = default_filter,
) -> PyTree:
  """Keep more of leaves with more outliers (Yin et al., 2023).

  The outlier ratio of a leaf is the share of scores above `threshold` times
  their mean. Densities are affine in the ratios and span `2 * limit`.

  Args:
    params: the weights.
    sparsity: fraction removed of all leaves together.
    scores: a tree like `params`, such as |w| times activation norms; |w| by
      default.
    threshold: how many times the mean makes an outlier.
    limit: half of what the densities span.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
  """
  sparsity = check_sparsity(sparsity)
  budget = Budget(params, filter_fn, None)
  found = values(budget, "owl")
  if scores is not None:
    given = _leaves.align(params, scores, "scores")
    found = {i: given[i] for i in budget.free}
  ratios = [outlier_ratio(score, threshold) for score in found.values()]
  sizes = [budget.sizes[i] for i in found]
  densities = owl_densities(ratios, sizes, sparsity, limit)
  return budget.fill(sparsity, dict(zip(found, densities, strict=True)))


def owl_by_layer(
  shapes: Mapping[str, Any],
  sparsity: float,
  outliers: Mapping[str, Sequence[tuple[int, float]]],
  custom_sparsity_map: SparsityMap | None = None,
) -> dict[str, float | None]:
  """Keep more of layers with more outliers; a layer's weights share a density.

  Args:
    shapes: path -> weight (or its shape); all are pruned.
    sparsity: fraction removed of all of them together.
    outliers: path -> `(number of scores, outlier ratio)` of each of its parts,
      for the paths that `custom_sparsity_map` does not fix.
    custom_sparsity_map: exact path or glob to the sparsity of these weights.

  Returns:
    path -> sparsity; the total is exact (Yin et al., "OWL", 2024).
  """
  budget = Budget(shapes, lambda *_: True, custom_sparsity_map)
  names = {i: _leaves.join(budget.leaves[i][0]) for i in budget.free}
  layers: dict[str, list[tuple[int, float]]] = {}
  for name in names.values():
    layers.setdefault(layer_of(name), []).extend(outliers[name])
  sizes = {k: sum(n for n, _ in rows) for k, rows in layers.items()}
  ratios = [sum(n * r for n, r in layers[k]) / sizes[k] for k in layers]
  densities = owl_densities(ratios, list(sizes.values()), sparsity, LIMIT)
  by_layer = dict(zip(layers, densities, strict=True))
  return budget.fill(
    sparsity, {i: by_layer[layer_of(name)] for i, name in names.items()}
  )


def layer_of(name: str) -> str:
  """Return the layer a weight belongs to: its path up to the first number.

  >>> layer_of("layers/3/attention/q"), layer_of("head/kernel")
  ('layers/3', 'head/kernel')
  """
  names = name.split("/")
  for i, part in enumerate(names):
    if re.search(r"\d", part):
      return "/".join(names[: i + 1])
  return name
