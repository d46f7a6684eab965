"""Fit a law to points: a robust loss, many starts, intervals by bootstrap."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from jaxpruner.scaling.laws import AverageLaw, JointLaw, Law


class Points(NamedTuple):
  """Finished trainings, one entry of each array per training.

  Attributes:
    sparsity: the fraction removed at the end.
    weights: how many weights are not zero at the end.
    data: how much data training has seen: examples, tokens or steps.
    loss: the loss on held-out data.
    average: the non-zero weights averaged over all steps, for the average law.

  Example:
    >>> points = Points([0.0, 0.5], [8e6, 4e6], [1e9, 1e9], [2.1, 2.2])
    >>> len(points.loss)
    2
  """

  sparsity: Any
  weights: Any
  data: Any
  loss: Any
  average: Any = None


class Prediction(NamedTuple):
  """A predicted loss with its 95 % interval.

  Attributes:
    loss: what the law predicts.
    low: the lower end of the interval, over the resampled fits.
    high: the upper end.

  Example:
    >>> Prediction(1.5, 1.4, 1.6).high
    1.6
  """

  loss: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Fit:
  """A fitted law.

  Attributes:
    law: the law with the best coefficients.
    resampled: laws fitted to points that were drawn again, with replacement.
    error: the root of the mean squared error of log(loss) at the points.
    objective: the mean of the robust loss that was minimised.
    agreed: how many of the starts ended at the best objective.
    starts: how many starts there were.

  Example:
    >>> law = AverageLaw(2, 0.5, 3, 1, 1)
    >>> found = Fit(law, (law, law), 0.0, 0.0, 1, 1)
    >>> found.intervals()["c"]
    (1.0, 1.0)
  """

  law: Law
  resampled: tuple[Law, ...]
  error: float
  objective: float
  agreed: int
  starts: int

  def predict(self, sparsity: float, weights: float, data: float) -> Prediction:
    """Return the loss of a training that was not run, with its interval.

    The interval says how much the coefficients move if other points had been
    there; it does not say whether the law holds that far away.

    Args:
      sparsity: the fraction removed.
      weights: the non-zero weights; for the average law, their mean over
        training.
      data: the amount of data, in the unit of the fit.

    Returns:
      The prediction.

    Example:
      >>> law = AverageLaw(2, 0.5, 3, 1, 1)
      >>> float(Fit(law, (law,), 0.0, 0.0, 1, 1).predict(0.5, 4, 3).low)
      3.0
    """
    loss = lambda law: float(law.loss(sparsity, weights, data))
    low, high = _interval([loss(law) for law in self.resampled or (self.law,)])
    return Prediction(loss(self.law), low, high)

  def intervals(self) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each coefficient.

    Returns:
      Coefficient -> (low, high).

    Example:
      >>> law = AverageLaw(2, 0.5, 3, 1, 1)
      >>> Fit(law, (law,), 0.0, 0.0, 1, 1).intervals()["b_n"]
      (0.5, 0.5)
    """
    laws = self.resampled or (self.law,)
    return {
      field.name: _interval([getattr(law, field.name) for law in laws])
      for field in dataclasses.fields(self.law)
    }


def _interval(values: list[float]) -> tuple[float, float]:
  low, high = np.percentile(values, [2.5, 97.5])
  return float(low), float(high)


class _Form(NamedTuple):
  """How a law is written for the optimizer: all coefficients are exponentials.

  Weights and data are divided by their geometric means, so that coefficients
  have the size of the loss whatever the units are.
  """

  law: type[Law]
  number: int

  def to_law(self, theta: np.ndarray, weights: float, data: float) -> Law:
    """Return the law in the units of the points, given the two means."""
    *first, b_n, a_d, b_d, c = np.exp(theta).tolist()
    scale = weights**b_n
    a_d = data * a_d ** (1 / b_d)
    if self.law is AverageLaw:
      return AverageLaw(first[0] * scale, b_n, a_d, b_d, c)
    a_s, b_s, c_s = first
    return JointLaw(a_s * scale, b_s, c_s * scale, b_n, a_d, b_d, c)

  def terms(
    self,
    theta: np.ndarray,
    kept: np.ndarray,
    weights: np.ndarray,
    data: np.ndarray,
  ) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the terms of the losses, and the slope of each coefficient.

    Args:
      theta: the logarithms of the coefficients.
      kept: the logarithm of the density.
      weights: that of the weights.
      data: that of the data.

    Returns:
      The terms, whose sum is the loss, and its derivatives by `theta`.
    """
    *first, b_n, a_d, b_d, c = np.exp(theta)
    of_weights = [first[0] * np.exp(-b_n * weights)]
    slopes = [of_weights[0]]
    if self.law is JointLaw:
      of_weights[0] = of_weights[0] * np.exp(first[1] * kept)
      of_weights.append(first[2] * np.exp(-b_n * weights))
      slopes = [of_weights[0], of_weights[0] * first[1] * kept, of_weights[1]]
    of_data, rest = a_d * np.exp(-b_d * data), np.full_like(data, c)
    slopes += [sum(of_weights) * -b_n * weights]
    slopes += [of_data, of_data * -b_d * data, rest]
    return [*of_weights, of_data, rest], slopes

  def loss(self, theta: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    """Return the losses; the arguments are those of `terms`."""
    return np.sum(self.terms(theta, *columns)[0], axis=0)


_FORMS = {"joint": _Form(JointLaw, 7), "average": _Form(AverageLaw, 5)}


def fit(
  points: Points,
  law: str = "joint",
  *,
  delta: float = 1e-3,
  logarithm: bool = True,
  starts: int = 32,
  resamples: int = 200,
  seed: int = 0,
) -> Fit:
  """Fit a law to finished trainings.

  Minimises the Huber loss of the residuals from random starts, as the papers
  do. Intervals come from the bootstrap: points are drawn again with replacement
  and the law is fitted anew.

  Args:
    points: the trainings; more of them than the law has coefficients.
    law: "joint" (7 coefficients) or "average" (5, needs `points.average`).
    delta: where the Huber loss turns from square to linear, as a difference of
      log(loss), or of the loss. The papers use 1e-3 for language models.
    logarithm: compare log(loss); False compares the loss itself, as Frantar et
      al. do for vision, with a delta of 0.01.
    starts: how many random starts.
    resamples: how many times the points are drawn again; 0 for no intervals.
    seed: of starts and draws.

  Returns:
    The fit.

  Raises:
    ValueError: points are too few, of different lengths, or not positive.

  Example:
    >>> truth = AverageLaw(2, 0.5, 3, 1, 1)
    >>> n, d = np.meshgrid([1, 4, 16, 64], [1, 4, 16])
    >>> n, d = n.ravel(), d.ravel()
    >>> points = Points(0 * n, n, d, truth.loss(0, n, d), average=n)
    >>> found = fit(points, "average", resamples=0)
    >>> round(found.law.b_n, 3), found.error < 1e-6
    (0.5, True)
  """
  if law not in _FORMS:
    raise ValueError(f"law={law!r}: must be one of {sorted(_FORMS)}")
  if delta <= 0 or starts < 1 or resamples < 0:
    raise ValueError(
      f"delta={delta}, starts={starts}, resamples={resamples}: delta must be "
      "positive, starts at least 1, resamples at least 0"
    )
  form = _FORMS[law]
  kept, weights, data, loss = _checked(points, law)
  centre = (weights.mean(), data.mean())
  columns = np.stack([kept, weights - centre[0], data - centre[1], loss])
  rng = np.random.default_rng(seed)

  def solve(columns, theta):
    measured = np.log(columns[3]) if logarithm else columns[3]

    def residuals(theta):
      with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        found = form.loss(theta, *columns[:3])
        found = np.log(found) if logarithm else found
      # Far from a solution exponentials overflow: a bad place, not an error.
      return np.nan_to_num(found - measured, nan=1e9, posinf=1e9, neginf=-1e9)

    def slopes(theta):
      with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        terms, found = form.terms(theta, *columns[:3])
        found = np.stack(found, axis=1)
        if logarithm:
          found = found / np.sum(terms, axis=0)[:, None]
      return np.nan_to_num(found, nan=0.0, posinf=1e9, neginf=-1e9)

    return optimize.least_squares(
      residuals,
      theta,
      slopes,  # pyright: ignore[reportArgumentType]: SciPy has no types
      loss="huber",
      f_scale=delta,
      max_nfev=2000,
    )

  random_start = lambda: rng.uniform(-3, 1, form.number)
  tries = [solve(columns, random_start()) for _ in range(starts)]
  best = min(tries, key=lambda found: found.cost)
  agreed = sum(found.cost <= best.cost * 1.001 + 1e-15 for found in tries)
  resampled = []
  for _ in range(resamples):
    drawn = columns[:, rng.integers(0, loss.size, loss.size)]
    near = [solve(drawn, best.x), solve(drawn, random_start())]
    theta = min(near, key=lambda found: found.cost).x
    resampled.append(form.to_law(theta, *np.exp(centre)))
  predicted = form.loss(best.x, *columns[:3])
  return Fit(
    form.to_law(best.x, *np.exp(centre)),
    tuple(resampled),
    error=float(np.sqrt(np.mean(np.log(predicted / loss) ** 2))),
    objective=float(best.cost / loss.size),
    agreed=agreed,
    starts=starts,
  )


def _checked(points: Points, law: str) -> tuple[np.ndarray, ...]:
  """Return log(density), log(weights), log(data) and the loss."""
  weights = points.average if law == "average" else points.weights
  if weights is None:
    raise ValueError(
      "points.average is None: the average law needs the mean number of "
      "non-zero weights of each training (see average_weights)"
    )
  named = {
    "sparsity": points.sparsity,
    "average" if law == "average" else "weights": weights,
    "data": points.data,
    "loss": points.loss,
  }
  arrays = {
    name: np.asarray(value, float).ravel() for name, value in named.items()
  }
  lengths = {name: array.size for name, array in arrays.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(f"points have different lengths: {lengths}")
  number, least = arrays["loss"].size, _FORMS[law].number + 1
  if number < least:
    raise ValueError(
      f"{number} points are too few for the {law} law, which has "
      f"{least - 1} coefficients: give at least {least}"
    )
  for name, array in arrays.items():
    good = np.isfinite(array)
    if name == "sparsity":
      good &= (array >= 0) & (array < 1)
    else:
      good &= array > 0
    if not good.all():
      place = int(np.flatnonzero(~good)[0])
      words = "from 0 to below 1" if name == "sparsity" else "positive"
      raise ValueError(
        f"points.{name}[{place}] is {array[place]}: must be {words} and finite"
      )
  sparsity, weights, data, loss = arrays.values()
  return np.log1p(-sparsity), np.log(weights), np.log(data), loss
