"""Laws of scale: loss as a function of sparsity, weights and training data.

`fit` finds the coefficients of a law from finished trainings, with intervals;
a law then predicts a larger one, and `optimal_sparsity` says how sparse it
should be. `jaxpruner fit RUN` does the same with run folders of
`jaxpruner compare`.
"""

from jaxpruner.scaling.fitting import Fit, Points, Prediction, fit
from jaxpruner.scaling.laws import (
  AverageLaw,
  JointLaw,
  average_weights,
  optimal_sparsity,
)

__all__ = [
  "AverageLaw",
  "Fit",
  "JointLaw",
  "Points",
  "Prediction",
  "average_weights",
  "fit",
  "optimal_sparsity",
]
