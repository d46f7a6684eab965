"""Curves with intervals, for the pictures of questions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: F401, the questions draw with it

from jaxpruner import plot
from jaxpruner.compare.statistics import Estimate, estimate


class Curve(NamedTuple):
  """A curve: its label, and a point (x, a number for each seed) per network."""

  label: str
  points: list[tuple[float, list[float]]]
  style: dict[str, Any]


def draw(axis: Any, curves: Sequence[Curve], x: str, y: str) -> None:
  """Draw curves into a panel, with 95 % intervals over seeds.

  Args:
    axis: the matplotlib axis.
    curves: the curves; those without a point are left out.
    x: the label of the horizontal axis.
    y: the label of the vertical axis.
  """
  middle: list[float] = []
  for curve in curves:
    found = sorted(curve.points, key=lambda point: point[0])
    if not found:
      continue
    means: list[Estimate] = [estimate(values) for _, values in found]
    middle += [m.mean for m in means]
    columns = [[getattr(m, k) for m in means] for k in ("mean", "low", "high")]
    plot.errorbar(
      axis,
      [place for place, _ in found],
      *columns,
      label=plot.plain(curve.label),
      **({"ls": "-"} | curve.style),
    )
  if middle:
    # Wide intervals of a few seeds must not squeeze the curves.
    margin = 0.3 * (max(middle) - min(middle)) or 1.0
    axis.set_ylim(min(middle) - margin, max(middle) + margin)
  axis.set_xlabel(plot.plain(x))
  axis.set_ylabel(plot.plain(y))


def styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Return label -> style; the baselines are black and grey.

  Args:
    labels: the labels of the curves.

  Returns:
    Keyword arguments for matplotlib.

  Example:
    >>> styles(["dense", "rigl"])["dense"]["color"]
    'black'
  """
  fixed = {
    "dense": {"color": "black", "marker": "o"},
    "small_dense": {"color": "#777777", "marker": "_", "ls": "--"},
    "narrower dense": {"color": "#777777", "marker": "_", "ls": "--"},
  }
  others = plot.look([label for label in labels if label not in fixed])
  return {label: fixed.get(label) or others[label] for label in labels}


def label_of(metric: str, unit: str) -> str:
  """Return the label of an axis with its unit in brackets."""
  return f"{metric} ({unit})" if unit else metric
