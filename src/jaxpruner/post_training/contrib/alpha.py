"""AlphaPruning: how heavy the tail of a weight's spectrum is."""

import numpy as np


def tail_exponent(w: np.ndarray) -> float:
  """Return Hill's estimate of the power law of the larger half of a spectrum.

  With eigenvalues λ₁ ≥ … ≥ λₙ of wᵀw and k = n / 2, it is
  1 + k / Σ ln(λᵢ / λₖ₊₁), the sum over i ≤ k. Well-trained layers have heavy
  tails, which are small exponents, and AlphaPruning prunes them less (Lu et
  al., 2024).

  Args:
    w: a matrix.

  Returns:
    The exponent, above 1; infinite if the larger half is all equal.

  Example:
    >>> round(tail_exponent(np.diag([4.0, 2.0, 1.0, 0.5])), 4)
    1.4809
  """
  values = np.linalg.svd(np.asarray(w, np.float64), compute_uv=False) ** 2
  k = len(values) // 2
  if not k:
    return np.inf
  floor = max(values[k], np.finfo(np.float64).tiny)
  total = np.log(np.maximum(values[:k], floor) / floor).sum()
  return float(1 + k / total) if total else np.inf
