"""Means, intervals and paired differences over a handful of seeds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
  """A mean over seeds with its spread; `low, high` is the 95 % interval."""

  mean: float
  std: float
  low: float
  high: float
  n: int


def t_quantile(confidence: float, dof: int) -> float:
  """Return t with P(|T| <= t) = confidence for `dof` degrees of freedom.

  Inverts the finite series for P(|T| <= t) at integer `dof` (Abramowitz &
  Stegun 26.7.3 and 26.7.4), so no statistics package is needed.
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
  # Neighbouring terms differ by cos^2 and k / (k + 1).
  for k in range(1 + odd, dof + odd, 2):
    total += term
    term *= cosine**2 * k / (k + 1)
  if odd:
    return 2 / math.pi * (angle + total)
  return total


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
  """Return mean, sample standard deviation (n - 1) and Student's t interval.

  One value has no spread: `std, low, high` are then NaN.
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
  """Estimate `values - reference`, seed by seed.

  Pairing removes what the seeds share (initial weights, batches): the
  interval is that of the differences, not of two independent means.
  """
  if len(values) != len(reference):
    raise ValueError(
      f"{len(values)} values against {len(reference)} references: a paired "
      "difference needs the same seeds on both sides"
    )
  return estimate([a - b for a, b in zip(values, reference, strict=True)])
