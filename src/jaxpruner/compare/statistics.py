"""Means, intervals and paired differences over a few seeds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
  """A mean over seeds, with its standard deviation and interval.

  Attributes:
    mean: the mean.
    std: the sample standard deviation.
    low: the lower end of the confidence interval.
    high: the upper end of the confidence interval.
    n: the number of seeds.
  """

  mean: float
  std: float
  low: float
  high: float
  n: int


def t_quantile(confidence: float, dof: int) -> float:
  """Return t with P(|T| <= t) = confidence for `dof` degrees of freedom.

  Inverts the finite series for P(|T| <= t) at integer `dof` (Abramowitz &
  Stegun, 26.7.3 and 26.7.4), so that no statistics package is needed.

  Args:
    confidence: the probability, strictly between 0 and 1.
    dof: the degrees of freedom, at least 1.

  Returns:
    The quantile of Student's t distribution.

  Example:
    >>> round(t_quantile(0.95, 2), 3)
    4.303
  """
  if dof < 1 or not 0 < confidence < 1:
    raise ValueError(
      f"dof={dof}, confidence={confidence}: need dof >= 1 (two or more seeds) "
      "and a confidence strictly between 0 and 1"
    )
  low, high = 0.0, 1.0
  while _central_probability(high, dof) < confidence:
    high *= 2
  for _ in range(200):
    middle = (low + high) / 2
    if _central_probability(middle, dof) < confidence:
      low = middle
    else:
      high = middle
  return (low + high) / 2


def _central_probability(t: float, dof: int) -> float:
  angle = math.atan(t / math.sqrt(dof))
  sine, cosine = math.sin(angle), math.cos(angle)
  odd = dof % 2
  term = sine * (cosine if odd else 1.0)
  total = 0.0
  # The ratio of two consecutive terms is cos^2 * k / (k + 1).
  for k in range(1 + odd, dof + odd, 2):
    total += term
    term *= cosine**2 * k / (k + 1)
  if odd:
    return 2 / math.pi * (angle + total)
  return total


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
  """Return mean, sample standard deviation (n - 1) and Student's t interval.

  Args:
    values: one number per seed.
    confidence: the probability that the interval contains the mean.

  Returns:
    The estimate; for a single value, `std, low, high` are NaN.

  Example:
    >>> estimate([1.0, 2.0, 3.0]).std
    1.0
  """
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or array.size == 0:
    raise ValueError(f"values={values!r}: need a non-empty list of numbers")
  mean = float(array.mean())
  if array.size == 1:
    return Estimate(mean, math.nan, math.nan, math.nan, 1)
  std = float(array.std(ddof=1))
  half = t_quantile(confidence, array.size - 1) * std / math.sqrt(array.size)
  return Estimate(mean, std, mean - half, mean + half, int(array.size))


def paired_difference(
  values: Sequence[float], reference: Sequence[float]
) -> Estimate:
  """Estimate the mean of `values - reference`, paired by seed.

  Both sides of a pair share initial weights and batches. The variation that
  they have in common cancels, and the interval is that of the differences.

  Args:
    values: one number per seed.
    reference: the numbers of the reference, for the same seeds.

  Returns:
    The estimate of the difference.

  Example:
    >>> paired_difference([2.0, 3.0], [1.0, 2.0]).mean
    1.0
  """
  if len(values) != len(reference):
    raise ValueError(
      f"{len(values)} values against {len(reference)} references: a paired "
      "difference needs the same seeds on both sides"
    )
  return estimate([a - b for a, b in zip(values, reference, strict=True)])
