"""The columns of the table, shared by its four text formats."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxpruner.compare.files import printable
from jaxpruner.compare.statistics import Estimate
from jaxpruner.compare.table import NOT_FINISHED, TableRow

NOTHING = "–"


class Column(NamedTuple):
  """A column of the table.

  Attributes:
    name: the heading.
    text: row -> cell, for rows that have numbers.
    priority: columns of low priority are dropped first where the terminal is
      too narrow; those of priority `ALWAYS` stay.
  """

  name: str
  text: Callable[[TableRow], str]
  priority: int


ALWAYS = 99


def _optional(value: float | None, form: str) -> str:
  return NOTHING if value is None else form.format(value)


def _metric(row: TableRow) -> str:
  m = _estimate(row)
  return f"{m.mean:.2f}" + ("" if math.isnan(m.std) else f" ± {m.std:.2f}")


def _interval(row: TableRow) -> str:
  m = _estimate(row)
  return "" if math.isnan(m.low) else f"[{m.low:.2f}, {m.high:.2f}]"


def _estimate(row: TableRow) -> Estimate:
  if row.metric is None:
    raise ValueError(f"{row.algorithm}: has no metric ({row.problem})")
  return row.metric


def _against_dense(row: TableRow) -> str:
  d = row.difference
  if d is None:
    return ""
  spread = "" if math.isnan(d.low) else f" [{d.low:+.2f}, {d.high:+.2f}]"
  return f"{d.mean:+.2f}{spread}"


def _sparsity(row: TableRow) -> str:
  lost = f" (collapsed: {printable(row.collapsed)})" if row.collapsed else ""
  return f"{100 * row.realised:.2f} %{lost}" if row.realised else NOTHING


# The axes: shown where they have several values.
STRUCTURE = Column("structure", lambda row: printable(row.structure), 12)
DISTRIBUTION = Column(
  "distribution", lambda row: printable(row.distribution), 9
)
OPTIONS = Column("options", lambda row: printable(row.options), 11)
METRIC = Column("metric", _metric, ALWAYS)  # shown under the metric's own name
COLUMNS = (
  Column("algorithm", lambda row: printable(row.algorithm), ALWAYS),
  METRIC,
  STRUCTURE,
  DISTRIBUTION,
  OPTIONS,
  Column("95 % interval", _interval, 1),
  Column("vs dense", _against_dense, ALWAYS),
  Column("sparsity", _sparsity, ALWAYS),
  Column(
    "train FLOPs", lambda row: _optional(row.training_flops, "{:.2f}×"), 5
  ),
  Column("step time", lambda row: _optional(row.step_time, "{:.2f}×"), 0),
  Column(
    "train memory",
    lambda row: _optional(row.training_memory, "{:.2f}×"),
    0,
  ),
  Column(
    "infer FLOPs", lambda row: _optional(row.inference_flops, "{:.2f}×"), 8
  ),
  Column("kB", lambda row: f"{(row.bytes or 0) / 1000:,.0f}", 4),
  Column("latency", lambda row: _optional(row.latency, "{:.2f}×"), 2),
  Column(
    "noise", lambda row: _optional(row.noise and row.noise.mean, "{:.1f}"), 7
  ),
  Column("ECE", lambda row: _optional(row.ece and row.ece.mean, "{:.1f}"), 6),
  Column("time", lambda row: _optional(row.seconds, "{:.0f} s"), 3),
)


def cells_as_text(
  row: TableRow, shown: Sequence[Column] = COLUMNS
) -> list[str]:
  """Return the texts of a row, one per column.

  Args:
    row: the row.
    shown: the columns.

  Returns:
    The texts. A row without numbers has its name and the reason, and empty
    cells.
  """
  if row.metric is None:
    reason = printable(row.problem)
    if row.problem != NOT_FINISHED:
      reason = f"failed: {reason}"
    return [printable(row.curve), reason, *[""] * (len(shown) - 2)]
  return [column.text(row) for column in shown]


def used(table: Sequence[TableRow]) -> list[Column]:
  """Return the columns that say something: not empty, an axis not constant."""
  rows = [row for row in table if row.metric is not None]

  def says(column: Column) -> bool:
    texts = {column.text(row) for row in rows} - {"", NOTHING}
    axis = column in (STRUCTURE, DISTRIBUTION, OPTIONS)
    # A global ranking beside a distribution is not an axis.
    return len(texts - {"global"}) > 1 if axis else bool(texts)

  return [c for c in COLUMNS if c in COLUMNS[:2] or says(c)]


def fitting(
  shown: Sequence[Column], size: Callable[[Column], int], width: int
) -> list[Column]:
  """Drop columns of low priority until the others fit.

  Args:
    shown: the columns.
    size: column -> its width in characters.
    width: the number of characters available.

  Returns:
    The columns that are shown.

  Example:
    >>> [c.name for c in fitting(COLUMNS, lambda column: 10, 40)]
    ['algorithm', 'metric', 'vs dense', 'sparsity']
  """
  kept = list(shown)
  while sum(map(size, kept)) > width:
    least = min(kept, key=lambda column: column.priority)
    if least.priority == ALWAYS:
      break
    kept.remove(least)
  return kept


class Block(NamedTuple):
  """The rows of one task at one sparsity."""

  title: str
  rows: list[TableRow]

  def names(self, shown: Sequence[Column]) -> list[str]:
    """Return the columns' names; the metric has its own."""
    metric = printable(self.rows[0].metric_name)
    return [metric if c is METRIC else c.name for c in shown]

  def groups(self) -> Iterator[tuple[str, list[TableRow]]]:
    """Yield (category, its rows) in order."""
    for group, rows in itertools.groupby(self.rows, lambda row: row.group):
      yield printable(group), list(rows)


def blocks(table: Sequence[TableRow]) -> list[Block]:
  """Split the rows by task and sparsity."""
  found: dict[tuple[str, float], list[TableRow]] = {}
  for row in table:
    found.setdefault((row.task, row.sparsity), []).append(row)
  return [
    Block(f"{printable(task)}, {percent(sparsity)} sparse", rows)
    for (task, sparsity), rows in found.items()
  ]


def percent(fraction: float) -> str:
  """Return a fraction in percent, without rounding it.

  Args:
    fraction: a number.

  Returns:
    The text, with a percent sign.

  Example:
    >>> percent(0.95), percent(0.9999991)
    ('95 %', '99.99991 %')
  """
  return f"{round(100 * fraction, 12):.12g} %"
