"""Structured against unstructured at equal cost (handbook, 3.2 to 3.6)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpruner.compare import spelling
from jaxpruner.compare.cells import BASELINES, Cell
from jaxpruner.compare.columns import percent
from jaxpruner.compare.questions import drawing
from jaxpruner.compare.questions.base import (
  Findings,
  Question,
  Table,
  judged,
  signed,
)
from jaxpruner.compare.statistics import Estimate, estimate

NARROWER = "narrower dense"


def axes(task: Any) -> dict[str, Any]:
  """Return four structures and four sparsities of one algorithm."""
  del task
  return {
    "algorithms": ("magnitude",),
    "sparsity": (0.5, 0.75, 0.9, 0.95),
    "type": ("unstructured", "2:4", "8x8", "channels"),
  }


def structure_of(cell: Cell) -> str:
  """Return the structure of a cell's masks; "" for dense."""
  if cell.name == "dense":
    return ""
  return NARROWER if cell.name == "small_dense" else cell.type or "unstructured"


def families(found: Findings) -> dict[str, Findings]:
  """Return one set of findings for each algorithm, distribution and options.

  Structures are compared inside of each, with the baselines of its options.

  Args:
    found: the findings.

  Returns:
    What tells a family from the others ("" if there is one) -> its findings.
  """
  sparse = [cell for cell in found.cells if cell.name not in BASELINES]
  several = len({cell.distribution for cell in sparse if cell.distribution}) > 1
  # Without its structure; a single distribution may be that of 2:4 alone.
  plain = lambda cell: cell._replace(
    type="", distribution=cell.distribution if several else ""
  )
  names = dict.fromkeys(plain(cell).label for cell in sparse)
  if len(names) < 2:
    return {"": found}
  result = {}
  for name in names:
    mine = [cell for cell in sparse if plain(cell).label == name]
    baselines = [
      cell
      for cell in found.cells
      if cell.name in BASELINES and cell.options == mine[0].options
    ]
    result[name] = dataclasses.replace(found, cells=baselines + mine)
  return result


def bytes_of(cell: Cell, found: Findings) -> float:
  """Return the bytes of a network, its positions stored as its type allows.

  A record counts one bit per prunable weight. A type with groups needs one bit
  per group, N:M the smallest number of bits that names one of its patterns.

  Args:
    cell: the cell.
    found: the findings.

  Returns:
    The bytes.
  """
  record = found.records[cell.id]
  if cell.name in ("dense", "small_dense") or not cell.type:
    return record.bytes
  return record.bytes - record.prunable / 8 * (1 - bits_per_weight(cell.type))


def bits_per_weight(kind: str) -> float:
  """Return the bits that a sparsity type needs per weight for positions.

  Args:
    kind: the name of the type.

  Returns:
    At most 1, the cost of a bitmap.

  Example:
    >>> bits_per_weight("2:4"), bits_per_weight("8x8"), bits_per_weight("")
    (0.75, 0.015625, 1.0)
  """
  parsed = spelling.parse_type(kind)
  name = type(parsed).__name__
  if name == "NByM":
    patterns = math.comb(parsed.m, parsed.n)
    return math.ceil(math.log2(patterns)) / parsed.m
  if name == "Block":
    return 1 / math.prod(parsed.block_shape)
  return 0.0 if name == "Channel" else 1.0


COSTS: dict[str, Callable[[Cell, Findings], float]] = {
  "weights": lambda cell, found: found.records[cell.id].weights,
  "FLOPs": lambda cell, found: found.records[cell.id].inference_flops,
  "bytes": bytes_of,
}


def curve_points(
  found: Findings, cost: str
) -> dict[str, list[tuple[float, list[float], Cell]]]:
  """Return structure -> (cost relative to dense, numbers, cell), from dense on.

  Args:
    found: the findings.
    cost: a key of `COSTS`, or "latency".

  Returns:
    The points of each structure's curve, the cheapest first.
  """
  result: dict[str, list] = {}
  for cell in found.cells:
    kind, values = structure_of(cell), found.values(cell)
    if not kind or values is None or cell.dense.id not in found.records:
      continue
    if cost == "latency":
      place = found.latency.get(cell.id)
    else:
      place = COSTS[cost](cell, found) / COSTS[cost](cell.dense, found)
    if place is not None:
      result.setdefault(kind, []).append((place, values, cell))
  for kind, points in result.items():
    dense = points[0][2].dense
    start = found.values(dense)
    if start is not None:
      points.append((1.0, start, dense))
    result[kind] = sorted(points, key=lambda point: point[0])
  return result


def at_cost(points: list, cost: float) -> list[float]:
  """Return each seed's metric at a cost, on the line between its neighbours."""
  places = np.array([place for place, *_ in points])
  table = np.array([values for _, values, *_ in points])
  return [float(np.interp(cost, places, column)) for column in table.T]


def compared(
  found: Findings, cost: str
) -> tuple[float, dict[str, tuple[Estimate, Estimate | None]]]:
  """Return the cheapest cost that all reach, and what each structure is there.

  Types with one sparsity, such as 2:4, are left out where others go further.

  Args:
    found: the findings.
    cost: a key of `COSTS`.

  Returns:
    (cost relative to dense, structure -> (metric, its advantage over
    unstructured, paired by seed)).
  """
  points = curve_points(found, cost)
  several = {k: v for k, v in points.items() if len(v) > 2} or points
  if not several:
    return 1.0, {}
  level = max(v[0][0] for v in several.values())
  values = {kind: at_cost(v, level) for kind, v in several.items()}
  others = {k: v for k, v in values.items() if k != "unstructured"}
  plain = values.get("unstructured")
  gains = {k: found.gain(v, plain) for k, v in others.items()}
  return level, {k: (estimate(v), gains.get(k)) for k, v in values.items()}


def verdict(found: Findings) -> list[str]:
  """Say for each cost which structure is best, and what the others lose."""
  sentences = []
  parts = families(found)
  for name, part in parts.items():
    start = f"{name}: " if name else ""
    sentences += [start + text for text in _family_words(part)]
  return sentences + _between_words(parts)


def _between_words(parts: dict[str, Findings]) -> list[str]:
  """Hold each algorithm against the first, structure by structure."""
  (first, base), *others = parts.items()
  place = lambda cell: (cell.sparsity, cell.type, cell.distribution)
  sparse = lambda part: [c for c in part.cells if c.name not in BASELINES]
  theirs = {place(cell): cell for cell in sparse(base)}
  sentences = []
  for name, part in others:
    lines: dict[float, list[str]] = {}
    for cell in sparse(part):
      other = theirs.get(place(cell))
      gain = part.better(cell, other) if other else None
      if gain is not None:
        text = f"{structure_of(cell)} {signed(gain)} ({judged(gain)})"
        lines.setdefault(cell.sparsity, []).append(text)
    sentences += [
      f"{name} against {first} at {percent(level)}: {', '.join(texts)}."
      for level, texts in lines.items()
    ]
  return sentences


def _family_words(found: Findings) -> list[str]:
  sentences = []
  for cost in COSTS:
    level, kinds = compared(found, cost)
    if not kinds:
      continue
    sign = -1 if found.higher_is_better else 1
    order = sorted(kinds, key=lambda kind: sign * kinds[kind][0].mean)
    others = ", ".join(
      f"{kind} {signed(gain)} ({judged(gain)})"
      for kind in order
      if (gain := kinds[kind][1])
    )
    sentences.append(
      f"At equal {cost} ({level:.2f} of dense) {order[0]} is best "
      f"({kinds[order[0]][0].mean:.2f}{found.suffix}). Against unstructured: "
      f"{others or 'nothing to compare'}."
    )
  return [*sentences, *_single_words(found), *_latency_words(found)]


def _single_words(found: Findings) -> list[str]:
  """Compare types with one sparsity, such as 2:4, at their own cost."""
  sentences = []
  every = {cost: curve_points(found, cost) for cost in COSTS}
  plain = {c: points.get("unstructured", []) for c, points in every.items()}
  alone = [kind for kind, v in every["weights"].items() if len(v) == 2]
  if len(alone) == len(every["weights"]) or not all(plain.values()):
    return []  # all are compared at one cost already
  for kind in alone:
    if kind == "unstructured":
      continue
    parts = []
    for cost, points in every.items():
      place, values, _ = points[kind][0]
      gain = found.gain(values, at_cost(plain[cost], place))
      parts.append(f"{cost} ({place:.2f} of dense) {signed(gain)}")
    sentences.append(
      f"{kind} has one sparsity. Against unstructured at its own "
      f"{', '.join(parts)}."
    )
  return sentences


def _latency_words(found: Findings) -> list[str]:
  """Say what each structure gains in measured time, at its sparsest."""
  parts = []
  for kind, points in curve_points(found, "latency").items():
    ours = [point for point in points if structure_of(point[2])]
    place, _, cell = max(ours, key=lambda point: point[2].sparsity)
    loss = found.better(cell, cell.dense)
    parts.append(
      f"{kind} at {percent(cell.sparsity)} {place:.2f} × dense "
      f"({signed(loss)}{found.suffix})"
    )
  if not parts:
    return []
  return [
    "Measured latency on this machine, through the library's kernels, at the "
    f"highest sparsity of each: {'; '.join(parts)}."
  ]


def tables(found: Findings) -> list[Table]:
  """Return structure × cost: the metric at equal cost, for each algorithm."""
  made = [_table(name, part) for name, part in families(found).items()]
  return [table for table in made if table.lines]


def _table(name: str, found: Findings) -> Table:
  columns = {cost: compared(found, cost) for cost in COSTS}
  kinds = dict.fromkeys(k for _, row in columns.values() for k in row)
  head = ["structure"]
  head += [f"equal {c} ({level:.2f} ×)" for c, (level, _) in columns.items()]
  lines = []
  for kind in kinds:
    cells = []
    for _, row in columns.values():
      metric, gain = row.get(kind, (None, None))
      text = "–" if metric is None else f"{metric.mean:.2f}"
      cells.append(text if gain is None else f"{text} ({signed(gain)})")
    lines.append([kind, *cells])
  title = f"{found.metric} at equal cost, and the advantage over unstructured"
  return Table(f"{name}: {title}" if name else title, head, lines)


# The lines of the first algorithm, of the second, ...
LINES = ("-", "--", ":", "-.")


def pictures(found: Findings) -> dict[str, Any]:
  """Draw the metric against four costs, a curve per structure."""
  figure, grid = drawing.plt.subplots(
    2, 2, figsize=(8.4, 6.2), sharey=True, layout="constrained"
  )
  label = drawing.label_of(found.metric, found.unit)
  parts = families(found)
  drawn: dict[str, Any] = {}
  for axis, cost in zip(grid.flat, [*COSTS, "latency"], strict=True):
    curves: list[drawing.Curve] = []
    narrower: set[Cell] = set()  # algorithms of the same options share them
    for i, (name, part) in enumerate(parts.items()):
      points = curve_points(part, cost)
      styles = drawing.styles(list(points))
      for kind, places in points.items():
        words, baseline = f"{kind}, {name}" if name else kind, places[0][2]
        if kind == NARROWER:
          if baseline in narrower:
            continue
          narrower.add(baseline)
          words = f"{kind} {baseline.options}".strip()
        line = "" if cost == "latency" else LINES[i % len(LINES)]
        # Latency is not a function of sparsity: points, no lines.
        style = styles[kind] | ({"ls": line} if i or not line else {})
        curves.append(drawing.Curve(words, [p[:2] for p in places], style))
    words = "measured latency" if cost == "latency" else cost
    drawing.draw(axis, curves, f"{words}, relative to dense", label)
    handles, labels = axis.get_legend_handles_labels()
    drawn |= dict(zip(labels, handles, strict=True))
  if drawn:
    columns = min(len(drawn), 6 if len(parts) == 1 else 4)
    figure.legend(
      drawn.values(), drawn, loc="outside lower center", ncols=columns
    )
  figure.suptitle("Structures at equal cost", fontsize=10)
  return {"structure": figure}


QUESTION = Question(
  name="structure",
  asks="What does structure cost, and what does it buy, at equal weights, "
  "FLOPs, bytes and measured latency?",
  section="3.2 to 3.6",
  axes=axes,
  verdict=verdict,
  tables=tables,
  pictures=pictures,
  captions={
    "structure": "The metric over four costs. Every curve begins at the dense "
    "network on the right. Bytes count one bit per group for positions, N:M "
    "the bits of its patterns. Latency is measured through the library's "
    "kernels. Leaves that a structure leaves dense count in every cost."
  },
)
