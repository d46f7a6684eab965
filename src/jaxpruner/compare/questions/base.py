"""What a question is, what its answer is computed from, and its words."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner.compare import run_folder, statistics
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.records import Record
from jaxpruner.compare.statistics import Estimate


@dataclasses.dataclass(frozen=True)
class Findings:
  """The results of a run, as a question reads them.

  Attributes:
    cells: the cells with a result and without a problem.
    records: cell id -> its record.
    latency: cell id -> measured inference time relative to dense.
    measures: cell id -> measurement -> a number for each seed.
    metric: the name of the task's metric.
    unit: its unit.
    higher_is_better: whether a higher metric is better.

  Example:
    >>> Findings([], {}, {}, {}, "accuracy", "%", True).metric
    'accuracy'
  """

  cells: list[Cell]
  records: dict[str, Record]
  latency: dict[str, float]
  measures: dict[str, dict[str, list[float]]]
  metric: str
  unit: str
  higher_is_better: bool

  @property
  def suffix(self) -> str:
    """What follows a number of the metric: its unit, if it has one."""
    return f" {self.unit}" if self.unit else ""

  def values(self, cell: Cell, name: str = "") -> list[float] | None:
    """Return a metric or a measurement of a cell, a number for each seed.

    Args:
      cell: the cell.
      name: the metric or measurement; the task's metric by default.

    Returns:
      The numbers; None if the cell has none.
    """
    record = self.records.get(cell.id)
    if record is None:
      return None
    found = self.measures.get(cell.id, {}).get(name)
    if found is None:
      stored = record.metrics.get(name or self.metric) or []
      found = [value for value in stored if value is not None]
      found = found if len(found) == len(stored) else []
    return list(found) or None

  def better(
    self, cell: Cell, other: Cell, name: str = "", higher: bool | None = None
  ) -> Estimate | None:
    """Return by how much a cell is better than another one, paired by seed.

    Args:
      cell: the cell.
      other: the cell that it is compared with.
      name: the metric or measurement; the task's metric by default.
      higher: whether more is better; by default as the task's metric.

    Returns:
      The mean difference with its interval; positive is better. None if one of
      them has no numbers.
    """
    return self.gain(self.values(cell, name), self.values(other, name), higher)

  def gain(
    self,
    ours: Sequence[float] | None,
    theirs: Sequence[float] | None,
    higher: bool | None = None,
  ) -> Estimate | None:
    """Return by how much numbers are better than others, paired by seed."""
    if ours is None or theirs is None or len(ours) != len(theirs):
      return None
    up = self.higher_is_better if higher is None else higher
    sides = (ours, theirs) if up else (theirs, ours)
    return statistics.paired_difference(*sides)


@dataclasses.dataclass(frozen=True)
class Table:
  """A small table of an answer: its title, its heading and its lines."""

  title: str
  head: list[str]
  lines: list[list[str]]


def _nothing(*_: Any) -> Any:
  return {}


def _no_tables(*_: Any) -> list[Table]:
  return []


@dataclasses.dataclass(frozen=True)
class Question:
  """A question that a comparison answers.

  Attributes:
    name: what `--question` takes.
    asks: the question in one sentence.
    axes: task -> settings of `ComparisonSettings` that the user did not give.
      A value under "options" holds for each option by itself.
    verdict: findings -> the answer, in sentences with their intervals.
    section: the section of the handbook that asks it, or "".
    measure: (cell, networks) -> measurement -> a number for each seed; called
      once for every trained cell.
    pictures: findings -> name -> a matplotlib figure, or None.
    captions: name of a picture -> its caption.
    tables: findings -> tables that stand between verdict and pictures.

  Example:
    >>> none = lambda task: {}
    >>> Question("lost", "How much is lost?", none, lambda found: []).name
    'lost'
  """

  name: str
  asks: str
  axes: Callable[[Any], dict[str, Any]]
  verdict: Callable[[Findings], list[str]]
  section: str = ""
  measure: Callable[[Cell, Any], Mapping[str, Sequence[float]]] | None = None
  pictures: Callable[[Findings], dict[str, Any]] = _nothing
  captions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  tables: Callable[[Findings], list[Table]] = _no_tables


def findings(path: str) -> Findings:
  """Return the results in a run folder, as a question reads them.

  Args:
    path: the run folder.

  Returns:
    The findings.
  """
  info = run_folder.read_run(path)
  results = run_folder.read_results(path)
  records = {
    key: record
    for key, record in results.items()
    if isinstance(record, Record) and not record.problem
  }
  measures = run_folder.read_measures(path)
  latency = run_folder.read_latency(path)
  finite = lambda values: [v for v in values if v is not None]
  return Findings(
    cells=[
      entry.cell
      for entry in run_folder.listed_cells(info, path)
      if entry.cell.id in records
    ],
    records=records,
    latency={key: measured.ratio for key, measured in latency.items()},
    measures={
      key: {name: finite(v) for name, v in found.values.items()}
      for key, found in measures.items()
    },
    metric=info.metric or "accuracy",
    unit=info.unit,
    higher_is_better=info.higher_is_better,
  )


def signed(difference: Estimate | None, digits: int = 2) -> str:
  """Return a difference with its interval: "+1.20 [+0.40, +2.00]".

  Args:
    difference: the estimate.
    digits: the number of digits after the point.

  Returns:
    The text; "–" without an estimate.

  Example:
    >>> signed(Estimate(1.2, 0.1, 0.4, 2.0, 3))
    '+1.20 [+0.40, +2.00]'
  """
  if difference is None:
    return "–"
  form = lambda value: f"{value:+.{digits}f}"
  if math.isnan(difference.low):
    return f"{form(difference.mean)} (one seed)"
  ends = f"[{form(difference.low)}, {form(difference.high)}]"
  return f"{form(difference.mean)} {ends}"


def judged(difference: Estimate | None) -> str:
  """Return "better", "worse", or "not told apart" by a 95 % interval.

  Args:
    difference: positive is better.

  Returns:
    The word.

  Example:
    >>> judged(Estimate(1.2, 0.1, 0.4, 2.0, 3))
    'better'
  """
  if difference is None or math.isnan(difference.low):
    return "not told apart"
  if difference.low > 0:
    return "better"
  return "worse" if difference.high < 0 else "not told apart"


def counted(differences: Sequence[Estimate | None]) -> str:
  """Return how many differences are better, worse, or neither.

  Args:
    differences: positive is better.

  Returns:
    Part of a sentence.

  Example:
    >>> counted([Estimate(1.2, 0.1, 0.4, 2.0, 3), None])
    'better in 1 of 2 cases, worse in 0, not told apart in 1'
  """
  found = [judged(difference) for difference in differences]
  return (
    f"better in {found.count('better')} of {len(found)} cases, worse in "
    f"{found.count('worse')}, not told apart in {found.count('not told apart')}"
  )
