"""The picture of a comparison: the metric of each algorithm, with intervals."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from jaxpruner.compare import cells
from jaxpruner.compare import groups as groups_lib
from jaxpruner.compare.columns import percent
from jaxpruner.compare.table import TableRow
from jaxpruner.inspect import plot

CROWD = 8  # curves in one panel that can still be told apart
LINES = ("-", "--", "-.", ":")


def algorithms(table: Sequence[TableRow]) -> list[str]:
  """Return the curves in some rows, in order, without baselines."""
  pruned = [row for row in table if row.algorithm not in cells.BASELINES]
  return list(dict.fromkeys(row.curve for row in pruned))


def draw_metric(table: Sequence[TableRow]) -> Any:
  """Draw the metric with 95 % intervals.

  The figure shows the metric against sparsity, one panel per category. If there
  is only one sparsity, or too many algorithms in a category, it is a list of
  algorithms instead, one panel per sparsity.

  Args:
    table: the rows.

  Returns:
    The figure, or None without results.
  """
  table = [row for row in table if row.metric is not None]
  groups = [g for g in dict.fromkeys(r.group for r in table)]
  groups = [g for g in groups if g != groups_lib.group("dense").title]
  if not groups:
    return None
  members = {g: algorithms([r for r in table if r.group == g]) for g in groups}
  single = len({row.sparsity for row in table}) == 1
  listed = single or max(map(len, members.values())) > CROWD
  figure = (_draw_list if listed else _draw_panels)(table, members)
  seeds = max(r.metric.n for r in table if r.metric)
  figure.suptitle(
    plot.plain(
      f"{table[0].task}: mean over {seeds} seeds, bars are 95 % intervals"
    ),
    fontsize=10,
  )
  return figure


def _metric_label(table: Sequence[TableRow]) -> str:
  unit = table[0].unit
  name = table[0].metric_name
  return plot.plain(f"{name} ({unit})" if unit else name)


class _Line(NamedTuple):
  """A line of the list: a category's title, or an algorithm."""

  text: str
  algorithm: str | None
  colour: str


def _draw_list(table: Sequence[TableRow], members: dict[str, list[str]]) -> Any:
  """One line per algorithm, best of its category first at the top sparsity."""
  levels = sorted({row.sparsity for row in table if row.sparsity})
  found = {(r.curve, r.sparsity): r for r in table}
  lines = _lines(table, members, levels[-1])
  figure, axes = plt.subplots(
    1,
    len(levels),
    figsize=(
      0.6 + _name_inches(lines) + 3.4 * len(levels),
      max(2.6, 1.2 + 0.19 * len(lines)),
    ),
    sharey=True,
    squeeze=False,
    layout="constrained",
  )
  for axis, level in zip(axes[0], levels, strict=True):
    for name in cells.BASELINES:
      _mark(axis.axvline, axis.axvspan, table, name, level)
    for y, line in enumerate(lines):
      row = found.get((line.algorithm or "", level))
      if row is not None:
        _draw_interval(axis, y, row.metric, line.colour)
    axis.set_title(f"{percent(level)} of weights removed")
    axis.set_xlabel(_metric_label(table))
    # Wide intervals of failed algorithms must not squeeze the others.
    means = [r.metric.mean for r in table if r.metric and r.sparsity == level]
    margin = 0.06 * (max(means) - min(means) or 1.0)
    axis.set_xlim(min(means) - margin, max(means) + margin)
  _name_lines(axes[0][0], lines)
  marks = axes[0][0].get_legend_handles_labels()
  # Below the panels: inside one, a long name would cover points.
  figure.legend(*marks, loc="outside lower right", handlelength=2.4)
  return figure


def _name_inches(lines: Sequence[_Line]) -> float:
  """Return the room that the names beside the panels need."""
  return 0.075 * max(len(line.text) for line in lines)


def _lines(
  table: Sequence[TableRow], members: dict[str, list[str]], level: float
) -> list[_Line]:
  """Return the lines of the list, from top to bottom."""
  means = {
    r.curve: r.metric.mean for r in table if r.metric and r.sparsity == level
  }
  sign = -1 if table[0].higher_is_better else 1
  order = lambda name: sign * means[name] if name in means else math.inf
  colours = itertools.cycle(plot.COLOURS)
  lines = []
  for (group, names), colour in zip(members.items(), colours, strict=False):
    lines.append(_Line(group.partition(": ")[0], None, "black"))
    lines += [_Line(n, n, colour) for n in sorted(names, key=order)]
  return lines


def _name_lines(axis: Any, lines: Sequence[_Line]) -> None:
  axis.set_yticks(range(len(lines)), [plot.plain(line.text) for line in lines])
  axis.set_ylim(len(lines) - 0.5, -0.5)
  for label, line in zip(axis.get_yticklabels(), lines, strict=True):
    label.set_color(line.colour)
    if line.algorithm is None:
      label.set_fontweight("bold")


def _draw_interval(axis: Any, y: int, metric: Any, colour: str) -> None:
  if not math.isnan(metric.low):
    axis.plot([metric.low, metric.high], [y, y], color=colour, lw=1.1)
  axis.plot([metric.mean], [y], "o", color=colour, ms=4)


def baseline_looks(
  table: Sequence[TableRow], name: str
) -> dict[str, dict[str, Any]]:
  """Return a colour and a line style for each network of a baseline.

  Args:
    table: the rows.
    name: `dense` or `small_dense`; it has a network for each value of the
      task's options.

  Returns:
    curve -> `{"color", "ls", "marker"}`, keyword arguments of `Axes.plot`.

  Example:
    >>> baseline_looks([], "dense")
    {}
  """
  curves = dict.fromkeys(r.curve for r in table if r.algorithm == name)
  first, colour = (0, "black") if name == "dense" else (1, "#777777")
  return {
    curve: {
      "color": colour,
      "ls": LINES[(first + i) % len(LINES)],
      "marker": None,
    }
    for i, curve in enumerate(curves)
  }


def _words(curve: str) -> str:
  return plot.plain(curve.replace("small_dense", "small dense"))


def _mark(
  line: Any, span: Any, table: Sequence[TableRow], name: str, level: float
) -> None:
  """Draw a baseline's mean as a line; as a band its interval, if it is alone.

  Bands of several networks lie on each other, and none can be read.
  """
  looks = baseline_looks(table, name)
  for row in table:
    if row.algorithm != name or row.sparsity != level or row.metric is None:
      continue
    look = looks[row.curve]
    line(
      row.metric.mean,
      lw=1,
      color=look["color"],
      ls=look["ls"],
      label=_words(row.curve),
    )
    if len(looks) == 1 and not math.isnan(row.metric.low):
      span(
        row.metric.low, row.metric.high, color=look["color"], alpha=0.08, lw=0
      )


def _draw_panels(
  table: Sequence[TableRow], members: dict[str, list[str]]
) -> Any:
  """Metric against sparsity, one panel per category."""
  levels = sorted({row.sparsity for row in table})
  figure, axes = plt.subplots(
    1,
    len(members),
    figsize=(1.2 + 3.3 * len(members), 3.6),
    sharey=True,
    squeeze=False,
    layout="constrained",
  )
  look = plot.look(algorithms(table))
  for axis, (group, names) in zip(axes[0], members.items(), strict=True):
    _mark(axis.axhline, axis.axhspan, table, "dense", levels[0])
    for curve, own in baseline_looks(table, "small_dense").items():
      points = _points(table, curve, levels)
      own = own | {"marker": "_"}
      _errorbar(axis, points, 0.0, label=_words(curve), **own)
    width = 0.5 / max(1, len(names))
    for i, name in enumerate(names):
      offset = (i - (len(names) - 1) / 2) * width
      points = _points(table, name, levels)
      _errorbar(axis, points, offset, ls="-", label=name, **look[name])
    head, _, tail = group.partition(": ")
    axis.set_title(plot.plain(f"{head}\n{tail}" if tail else f"{head}\n"))
    axis.set_xticks(range(len(levels)), [percent(s) for s in levels])
    axis.set_xlim(-0.5, len(levels) - 0.5)
    axis.set_xlabel("weights removed")
    axis.grid(axis="x", visible=False)
    axis.legend(loc="best", handlelength=1.6, borderaxespad=0.2)
  axes[0][0].set_ylabel(_metric_label(table))
  return figure


def _points(
  table: Sequence[TableRow], name: str, levels: Sequence[float]
) -> list[TableRow | None]:
  """Return an algorithm's row at each sparsity."""
  found = {r.sparsity: r for r in table if r.curve == name}
  return [found.get(level) for level in levels]


def _errorbar(axis: Any, points: Sequence[TableRow | None], offset, **look):
  found = [
    (i + offset, p.metric)
    for i, p in enumerate(points)
    if p is not None and p.metric is not None
  ]
  if not found:
    return
  x, metrics = zip(*found, strict=True)
  columns = [[getattr(m, k) for m in metrics] for k in ("mean", "low", "high")]
  plot.errorbar(axis, x, *columns, **look)
