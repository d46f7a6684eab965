"""The picture of a comparison: the metric of each algorithm, with intervals."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

from jaxpruner import plot
from jaxpruner.compare import plan
from jaxpruner.compare.table import Row

CROWD = 8  # curves in one panel that can still be told apart


def algorithms(table: Sequence[Row]) -> list[str]:
  """Return the algorithms of some rows in order, baselines apart."""
  names = dict.fromkeys(row.algorithm for row in table)
  return [name for name in names if name not in plan.BASELINES]


def draw_metric(table: Sequence[Row]) -> Any:
  """Metric with 95 % intervals: against sparsity, one panel per category.

  Where there is one sparsity only, or so many algorithms in a category that
  they would hide each other, they are listed below each other instead, one
  panel per sparsity.
  """
  table = [row for row in table if row.metric is not None]
  groups = [g for g in dict.fromkeys(r.group for r in table)]
  groups = [g for g in groups if g != plan.group("dense").title]
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


def _metric_label(table: Sequence[Row]) -> str:
  unit = _task(table[0].task).unit
  name = table[0].metric_name
  return plot.plain(f"{name} ({unit})" if unit else name)


def _draw_list(table: Sequence[Row], members: dict[str, list[str]]) -> Any:
  """One line per algorithm, best of its category first at the top sparsity."""
  levels = sorted({row.sparsity for row in table if row.sparsity})
  found = {(r.algorithm, r.sparsity): r for r in table}
  best = -1 if _task(table[0].task).higher_is_better else 1

  def order(name):
    row = found.get((name, levels[-1]))
    return best * row.metric.mean if row and row.metric else math.inf

  lines: list[tuple[str, str | None]] = []
  for group, names in members.items():
    lines.append((group.partition(": ")[0], None))
    lines += [(name, name) for name in sorted(names, key=order)]
  figure, axes = plt.subplots(
    1,
    len(levels),
    figsize=(1.8 + 3.6 * len(levels), max(2.6, 1.0 + 0.19 * len(lines))),
    sharey=True,
    squeeze=False,
    layout="constrained",
  )
  colours = dict(zip(members, plot.COLOURS, strict=False))
  group_of = {n: g for g, names in members.items() for n in names}
  dense = next((r for r in table if r.algorithm == "dense"), None)
  for axis, level in zip(axes[0], levels, strict=True):
    for row, style in (
      (dense, {"color": "black", "label": "dense"}),
      (
        found.get(("small_dense", level)),
        {"color": "#777777", "ls": "--", "label": "small dense"},
      ),
    ):
      if row and row.metric:
        axis.axvline(row.metric.mean, lw=1, **style)
        if not math.isnan(row.metric.low):
          shade = {"color": style["color"], "alpha": 0.08, "lw": 0}
          axis.axvspan(row.metric.low, row.metric.high, **shade)
    for y, (_, name) in enumerate(lines):
      row = found.get((name, level)) if name else None
      if row is None or row.metric is None:
        continue
      m, colour = row.metric, colours[group_of[row.algorithm]]
      if not math.isnan(m.low):
        axis.plot([m.low, m.high], [y, y], color=colour, lw=1.1)
      axis.plot([m.mean], [y], "o", color=colour, ms=4)
    axis.set_title(f"{100 * level:g} % of weights removed")
    axis.set_xlabel(_metric_label(table))
    # Wide intervals of what failed must not squeeze the rest.
    means = [r.metric.mean for r in table if r.metric and r.sparsity == level]
    margin = 0.06 * (max(means) - min(means) or 1.0)
    axis.set_xlim(min(means) - margin, max(means) + margin)
    axis.legend(loc="best", handlelength=1.6, borderaxespad=0.2)
  first = axes[0][0]
  first.set_yticks(range(len(lines)), [plot.plain(t) for t, _ in lines])
  first.set_ylim(len(lines) - 0.5, -0.5)
  for label, (_, name) in zip(first.get_yticklabels(), lines, strict=True):
    if name is None:
      label.set_fontweight("bold")
    else:
      label.set_color(colours[group_of[name]])
  return figure


def _draw_panels(table: Sequence[Row], members: dict[str, list[str]]) -> Any:
  """Metric against sparsity, one panel per category."""
  groups = list(members)
  levels = sorted({row.sparsity for row in table})
  figure, axes = plt.subplots(
    1,
    len(groups),
    figsize=(1.2 + 3.3 * len(groups), 3.6),
    sharey=True,
    squeeze=False,
    layout="constrained",
  )
  look = plot.look(algorithms(table))
  dense = next((r for r in table if r.algorithm == "dense"), None)
  small = {r.sparsity: r for r in table if r.algorithm == "small_dense"}
  for axis, group in zip(axes[0], groups, strict=True):
    if dense and dense.metric:
      axis.axhline(dense.metric.mean, color="black", lw=1, label="dense")
      if not math.isnan(dense.metric.low):
        axis.axhspan(
          dense.metric.low, dense.metric.high, color="black", alpha=0.08, lw=0
        )
    if small:
      _errorbar(
        axis,
        levels,
        [small.get(s) for s in levels],
        0.0,
        color="#777777",
        marker="_",
        ls="--",
        label="small dense",
      )
    names = members[group]
    width = 0.5 / max(1, len(names))
    for i, name in enumerate(names):
      points = {r.sparsity: r for r in table if r.algorithm == name}
      offset = (i - (len(names) - 1) / 2) * width
      _errorbar(
        axis,
        levels,
        [points.get(s) for s in levels],
        offset,
        ls="-",
        label=name,
        **look[name],
      )
    head, _, tail = group.partition(": ")
    axis.set_title(plot.plain(f"{head}\n{tail}" if tail else f"{head}\n"))
    axis.set_xticks(range(len(levels)), [f"{100 * s:g} %" for s in levels])
    axis.set_xlim(-0.5, len(levels) - 0.5)
    axis.set_xlabel("weights removed")
    axis.grid(axis="x", visible=False)
    axis.legend(loc="best", handlelength=1.6, borderaxespad=0.2)
  axes[0][0].set_ylabel(_metric_label(table))
  return figure


def _task(name: str) -> Any:
  """Return the task's class; what all tasks share for one not known here."""
  from jaxpruner.compare import tasks

  return tasks.task_class(name) if name in tasks.TASKS else tasks.Task


def _errorbar(axis, levels, points, offset, **look) -> None:
  found = [
    (i + offset, p.metric)
    for i, p in zip(range(len(levels)), points, strict=True)
    if p is not None and p.metric is not None
  ]
  if not found:
    return
  x, points = zip(*found, strict=True)
  columns = [[getattr(m, k) for m in points] for k in ("mean", "low", "high")]
  plot.errorbar(axis, x, *columns, **look)
