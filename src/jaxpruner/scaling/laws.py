"""The laws, and what they say about the best sparsity.

All numbers are NumPy's, in float64: a law is fitted to some dozens of points.
"""

import dataclasses
from typing import Any

import numpy as np
from scipy import optimize


@dataclasses.dataclass(frozen=True)
class JointLaw:
  """Loss by sparsity S, non-zero weights N and training data D.

  `(a_s * (1 - S)**b_s + c_s) * N**-b_n + (a_d / D)**b_d + c`, the law of
  Frantar et al., 2023 (https://arxiv.org/abs/2309.08520).

  Attributes:
    a_s: what density adds to the factor of the weights.
    b_s: the exponent of density.
    c_s: the factor of the weights in the limit of sparsity 1.
    b_n: the exponent of the weights.
    a_d: the scale of the data, in the unit of the data.
    b_d: the exponent of the data.
    c: the loss that no weights and no data remove.

  Example:
    >>> law = JointLaw(16.8, 0.722, 45.0, 0.245, 6.9e8, 0.203, 0.651)
    >>> round(float(law.loss(0.75, 6e8, 3.3e10)), 2)  # a T5 on C4
    1.47
  """

  a_s: float
  b_s: float
  c_s: float
  b_n: float
  a_d: float
  b_d: float
  c: float

  def loss(self, sparsity: Any, weights: Any, data: Any) -> Any:
    """Return the loss that the law predicts.

    Args:
      sparsity: the fraction removed; a number or an array.
      weights: how many weights are not zero at the end.
      data: the amount of training data, in the unit of the fit.

    Returns:
      The loss, a number or an array.

    Example:
      >>> JointLaw(0, 1, 2, 0.5, 3, 1, 1).loss(0.5, 4, 3)
      np.float64(3.0)
    """
    weights = np.asarray(weights, float)
    factor = self.a_s * (1 - np.asarray(sparsity, float)) ** self.b_s + self.c_s
    rest = (self.a_d / np.asarray(data, float)) ** self.b_d
    return factor * weights**-self.b_n + rest + self.c


@dataclasses.dataclass(frozen=True)
class AverageLaw:
  """Loss by the weights that training used on average, and by its data.

  `a_n * N**-b_n + (a_d / D)**b_d + c`, where N is the number of non-zero
  weights averaged over all steps (Jin et al., 2025,
  https://arxiv.org/abs/2501.12486). Dense training is the case of a constant
  number.

  Attributes:
    a_n: the factor of the weights.
    b_n: their exponent.
    a_d: the scale of the data, in the unit of the data.
    b_d: the exponent of the data.
    c: the loss that no weights and no data remove.

  Example:
    >>> float(AverageLaw(2, 0.5, 3, 1, 1).loss(0.9, 4, 3))
    3.0
  """

  a_n: float
  b_n: float
  a_d: float
  b_d: float
  c: float

  def loss(self, sparsity: Any, weights: Any, data: Any) -> Any:
    """Return the loss that the law predicts.

    Args:
      sparsity: not used: the average has it.
      weights: the non-zero weights, averaged over the steps of training; see
        `average_weights`.
      data: the amount of training data, in the unit of the fit.

    Returns:
      The loss, a number or an array.

    Example:
      >>> float(AverageLaw(2, 0.5, 3, 1, 0).loss(0, 16, 6))
      1.0
    """
    del sparsity
    weights, data = np.asarray(weights, float), np.asarray(data, float)
    return (
      self.a_n * weights**-self.b_n + (self.a_d / data) ** self.b_d + self.c
    )


Law = JointLaw | AverageLaw


def average_weights(
  dense: Any, sparsity: Any, start: float = 0.25, end: float = 0.75
) -> Any:
  """Return the mean number of non-zero weights of a gradual pruning run.

  The run is dense up to `start`, follows the cubic schedule up to `end`, whose
  mean is three quarters of the last sparsity, and stays there.

  Args:
    dense: how many weights there are before pruning.
    sparsity: the fraction removed at the end.
    start: when pruning starts, as a fraction of training.
    end: when it has reached `sparsity`.

  Returns:
    The mean over the steps.

  Example:
    >>> round(float(average_weights(1000, 0.8)))
    500
  """
  if not 0 <= start <= end <= 1:
    raise ValueError(
      f"start={start}, end={end}: must be fractions of training, "
      "0 <= start <= end <= 1"
    )
  kept = 1 - np.asarray(sparsity, float)
  between = (end - start) * (1 - 0.75 * (1 - kept))
  return np.asarray(dense, float) * (start + between + (1 - end) * kept)


def optimal_sparsity(
  law: JointLaw,
  weights: float,
  data: float,
  *,
  start: float = 0.25,
  end: float = 0.75,
) -> float:
  """Return the sparsity of least loss for a size and a budget of training.

  Sparser means a larger network at the same number of non-zero weights, which
  costs more per example while it is dense. So at equal training cost there is
  less data, and an optimum: where the budget is small, a dense network of that
  size is best, and the optimum is 0.

  Args:
    law: the law.
    weights: how many weights are not zero at the end.
    data: the budget: how much data a dense network with so many weights would
      be trained on.
    start: when gradual pruning starts, as a fraction of training.
    end: when it has reached its sparsity.

  Returns:
    The sparsity, from 0 to 0.999.

  Example:
    >>> law = JointLaw(16.8, 0.722, 45.0, 0.245, 6.9e8, 0.203, 0.651)
    >>> small, large = (optimal_sparsity(law, 1e7, d) for d in (1e9, 1e12))
    >>> small < large
    True
  """
  if weights <= 0 or data <= 0:
    raise ValueError(f"weights={weights}, data={data}: must be positive")

  def loss(sparsity):
    dense = weights / (1 - sparsity)
    cost = average_weights(dense, sparsity, start, end) / weights
    return law.loss(sparsity, weights, data / cost)

  grid = np.linspace(0, 0.999, 1000)
  best = int(np.argmin(loss(grid)))
  low, high = grid[max(best - 1, 0)], grid[min(best + 1, 999)]
  found = optimize.minimize_scalar(loss, bounds=(low, high), method="bounded")
  return float(min(found.x, 0.0, 0.999, key=loss))
