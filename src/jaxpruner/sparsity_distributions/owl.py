"""OWL: leaves or layers with more outliers keep a larger fraction."""

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


# The best values for language models in the paper.
THRESHOLD = 5.0  # an outlier is above this many times the mean score
LIMIT = 0.08  # half the range of the densities


def outlier_ratio(scores: Any, threshold: float) -> float:
  """Return the fraction of scores above `threshold` times their mean.

  Args:
    scores: an array of scores; absolute values are used.
    threshold: how many times the mean an outlier exceeds.

  Returns:
    The fraction, between 0 and 1.

  Example:
    >>> outlier_ratio([1, 1, 1, 9], threshold=2.0)
    0.25
  """
  scores = np.abs(np.asarray(scores, np.float64))
  return float(np.mean(scores > threshold * scores.mean()))


def owl_densities(
  ratios: Sequence[float], sizes: Sequence[int], sparsity: float, limit: float
) -> list[fractions.Fraction]:
  """Return densities that grow linearly with the outlier ratios.

  Their average, weighted by size, is exactly `1 - sparsity`. They cover a range
  of `2 * limit`, or less where a density would leave the interval from 0 to 1.

  Args:
    ratios: the outlier ratio of each leaf.
    sizes: the number of weights of each leaf.
    sparsity: the fraction removed from all leaves together.
    limit: half the range of the densities.

  Returns:
    One exact fraction per leaf.

  Example:
    >>> densities = owl_densities([0.25, 0.75], [4, 4], 0.5, limit=0.25)
    >>> [float(d) for d in densities]
    [0.25, 0.75]
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
  """Keep a larger fraction of leaves with more outliers.

  The outlier ratio of a leaf is the fraction of its scores above `threshold`
  times their mean. Densities grow linearly with it (Yin et al., "Outlier
  Weighed Layerwise Sparsity", 2023).

  Args:
    params: the weights; values are read, so call it outside `jit`.
    sparsity: the fraction removed from all leaves together.
    scores: a tree like `params`, such as |w| times activation norms; |w| by
      default.
    threshold: how many times the mean an outlier exceeds.
    limit: half the range of the densities.
    filter_fn: `(names, param) -> bool`, the leaves to prune.

  Returns:
    A tree like `params` with sparsities, `None` for dense leaves.

  Example:
    >>> params = {"even": np.ones((4, 4)), "spiky": 9 * np.eye(4) + 1}
    >>> owl(params, 0.5, threshold=2.0, limit=0.25)
    {'even': 0.75, 'spiky': 0.25}
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
  """Keep a larger fraction of layers with more outliers.

  All weights of a layer get the same density; the total is exact (Yin et al.,
  "Outlier Weighed Layerwise Sparsity", 2023).

  Args:
    shapes: path -> weight (or its shape); all are pruned.
    sparsity: the fraction removed from all of them together.
    outliers: path -> `(number of scores, outlier ratio)` of each of its parts,
      for the paths that `custom_sparsity_map` does not fix.
    custom_sparsity_map: exact path or glob -> the sparsity of these weights.

  Returns:
    path -> sparsity.

  Example:
    >>> owl_by_layer(
    ...   {"layer0/w": np.ones((4, 4)), "layer1/w": np.ones((4, 4))}, 0.5,
    ...   {"layer0/w": [(16, 0.0)], "layer1/w": [(16, 0.1)]})
    {'layer0/w': 0.5625, 'layer1/w': 0.4375}
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
  """Return the layer of a weight: its path up to the first number.

  >>> layer_of("layers/3/attention/q"), layer_of("head/kernel")
  ('layers/3', 'head/kernel')
  """
  names = name.split("/")
  for i, part in enumerate(names):
    if re.search(r"\d", part):
      return "/".join(names[: i + 1])
  return name
