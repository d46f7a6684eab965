"""OWL: layers with more outliers are pruned less."""

import re
from collections.abc import Mapping, Sequence

import numpy as np


def block_of(name: str) -> str:
  """Return the layer a weight belongs to: its path up to the first number.

  >>> block_of("layers/3/attention/q"), block_of("head/kernel")
  ('layers/3', 'head/kernel')
  """
  names = name.split("/")
  for i, part in enumerate(names):
    if re.search(r"\d", part):
      return "/".join(names[: i + 1])
  return name


def outlier_ratio(scores: np.ndarray, times: float) -> float:
  """Return the share of scores above `times` their mean."""
  return float((scores > times * scores.mean()).mean())


def allocate(
  ratios: Mapping[str, Sequence[tuple[int, float]]],
  sparsity: float,
  spread: float = 0.08,
) -> dict[str, float]:
  """Give each layer a sparsity: the more outliers, the lower.

  Densities are affine in the layers' outlier ratios, span 2 × `spread`, and
  average (by weights) to the request (Yin et al., "OWL", 2024).

  Args:
    ratios: layer -> (size, outlier ratio) of each of its weights.
    sparsity: fraction removed of all layers together.
    spread: how far layers may lie from the mean.

  Returns:
    Layer -> sparsity.
  """
  names = list(ratios)
  sizes = np.array([sum(n for n, _ in ratios[k]) for k in names], np.float64)
  means = np.array(
    [sum(n * r for n, r in ratios[k]) for k in names], np.float64
  )
  means = means / sizes
  reach = means.max() - means.min()
  density = 2 * spread * (means - means.min()) / (reach if reach else 1)
  density += (1 - sparsity) - (density * sizes).sum() / sizes.sum()
  return {
    name: float(min(max(1 - d, 0.0), 0.999))
    for name, d in zip(names, density, strict=True)
  }
