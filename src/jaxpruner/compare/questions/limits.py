"""The sparsity at which a method breaks (handbook, 3.10)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpruner.compare.cells import Cell
from jaxpruner.compare.columns import percent
from jaxpruner.compare.questions import drawing
from jaxpruner.compare.questions.base import Findings, Question, Table
from jaxpruner.compare.statistics import estimate

LOSSES = (0.01, 0.05)  # of the dense network's metric


def axes(task: Any) -> dict[str, Any]:
  """Return many sparsities, out of the box and with a teacher."""
  del task
  return {
    "algorithms": (
      "magnitude",
      "magnitude{distill=0.5}",
      "rigl",
      "static_sparse",
      "after:magnitude",
    ),
    "sparsity": (0.5, 0.7, 0.8, 0.9, 0.95, 0.98),
  }


def crossing(
  sparsities: Sequence[float], losses: Sequence[float], limit: float
) -> float:
  """Return the sparsity at which a loss first reaches a limit.

  Args:
    sparsities: in rising order; the dense network, with no loss, is before
      them.
    losses: the loss relative to dense at each.
    limit: the loss that is looked for.

  Returns:
    The place between two neighbours on a straight line; infinity if the loss
    stays below the limit.

  Example:
    >>> round(crossing([0.5, 0.9], [0.0, 0.04], 0.01), 3)
    0.6
    >>> crossing([0.5, 0.9], [0.0, 0.04], 0.05)
    inf
  """
  before, lost = 0.0, 0.0
  for sparsity, loss in zip(sparsities, losses, strict=True):
    if loss >= limit:
      part = (limit - lost) / (loss - lost)
      return before + max(0.0, part) * (sparsity - before)
    before, lost = sparsity, loss
  return np.inf


def curves(found: Findings) -> dict[str, list[Cell]]:
  """Return label -> the cells of a method over sparsity, in rising order."""
  result: dict[str, list[Cell]] = {}
  for cell in found.cells:
    if cell.name == "dense" or found.values(cell.dense) is None:
      continue
    result.setdefault(cell.label, []).append(cell)
  return {
    label: sorted(cells, key=lambda cell: cell.sparsity)
    for label, cells in result.items()
  }


def limits_of(
  found: Findings, cells: Sequence[Cell], limit: float
) -> list[float]:
  """Return for each seed the sparsity at which a method loses a part of dense.

  Args:
    found: the findings.
    cells: the cells of the method, by rising sparsity.
    limit: the part of the dense network's metric.

  Returns:
    A sparsity per seed, infinity where the loss stays smaller.
  """
  dense = np.array(found.values(cells[0].dense), float)
  table = np.array([found.values(cell) for cell in cells], float)
  sign = 1 if found.higher_is_better else -1
  losses = sign * (dense - table) / np.maximum(np.abs(dense), 1e-12)
  levels = [cell.sparsity for cell in cells]
  return [crossing(levels, column, limit) for column in losses.T]


def words(limits: Sequence[float], highest: float) -> str:
  """Return the sparsity with its interval, or that it was not reached.

  Args:
    limits: a sparsity per seed.
    highest: the highest sparsity that was tried.

  Returns:
    The text.

  Example:
    >>> words([0.9, 0.92], 0.98)
    '91 % [78, 100]'
    >>> words([float("inf")], 0.98)
    'above 98 %'
  """
  reached = [limit for limit in limits if np.isfinite(limit)]
  if not reached:
    return f"above {percent(highest)}"
  found = estimate(reached)
  text = percent(round(found.mean, 3))
  if not np.isnan(found.low):
    ends = np.clip([found.low, found.high], 0, 1)
    text += f" [{100 * ends[0]:.0f}, {100 * ends[1]:.0f}]"
  if len(reached) < len(limits):
    text += (
      f", not reached by {len(limits) - len(reached)} of {len(limits)} seeds"
    )
  return text


def tables(found: Findings) -> list[Table]:
  """Return method × loss: the sparsity at which it is reached."""
  lines = []
  for label, cells in curves(found).items():
    whole = [cell for cell in cells if found.values(cell) is not None]
    if len(whole) < 2:
      continue
    highest = whole[-1].sparsity
    texts = [words(limits_of(found, whole, x), highest) for x in LOSSES]
    lines.append([label, *texts])
  head = ["method", *(f"loses {percent(loss)} of dense at" for loss in LOSSES)]
  title = "The sparsity at which a method loses part of the dense network's "
  return [Table(title + found.metric, head, lines)] if lines else []


def verdict(found: Findings) -> list[str]:
  """Name the method that lasts longest, and say where each breaks."""
  sentences = []
  for table in tables(found):
    for label, *texts in table.lines:
      parts = [
        f"{percent(loss)} of dense at {text}"
        for loss, text in zip(LOSSES, texts, strict=True)
      ]
      sentences.append(f"{label} loses {'; '.join(parts)}.")
  return sentences or ["Give at least two sparsities."]


def pictures(found: Findings) -> dict[str, Any]:
  """Draw the metric over sparsity, with the two limits."""
  figure, axis = drawing.plt.subplots(figsize=(6.6, 4.2), layout="constrained")
  methods = curves(found)
  styles = drawing.styles(list(methods))
  shown = []
  for label, cells in methods.items():
    points = [(c.sparsity, found.values(c) or []) for c in cells]
    points = [point for point in points if point[1]]
    shown.append(drawing.Curve(label, points, styles[label]))
  name = drawing.label_of(found.metric, found.unit)
  drawing.draw(axis, shown, "sparsity", name)
  dense = [c for c in found.cells if c.name == "dense"]
  for cell in dense[:1]:
    mean = estimate(found.values(cell) or [np.nan]).mean
    sign = -1 if found.higher_is_better else 1
    for loss in (0.0, *LOSSES):
      axis.axhline(mean * (1 + sign * loss), color="black", lw=0.7, ls=":")
  axis.legend(loc="best", fontsize=7)
  axis.set_title("Where a method breaks: dense, and 1 % and 5 % of it lost")
  return {"limits": figure}


QUESTION = Question(
  name="limits",
  asks="At which sparsity does each method break?",
  section="3.10",
  axes=axes,
  verdict=verdict,
  tables=tables,
  pictures=pictures,
  captions={
    "limits": "The metric over sparsity. The dotted lines are the dense "
    "network, and 1 % and 5 % of its metric lost. Bars are 95 % intervals."
  },
)
