"""Qualities beyond accuracy, for any classifier (handbook, 3.5 and 3.10)."""

from typing import Any

import numpy as np

from jaxpruner import plot
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.columns import percent
from jaxpruner.compare.questions import drawing
from jaxpruner.compare.questions.base import (
  Findings,
  Question,
  Table,
  counted,
  judged,
  signed,
)
from jaxpruner.compare.questions.measuring import Store
from jaxpruner.compare.questions.qualities import QUALITIES, program
from jaxpruner.compare.statistics import estimate
from jaxpruner.compare.tasks.base import Classification


def axes(task: Any) -> dict[str, Any]:
  """Return two algorithms, two sparsities, and two amounts of data."""
  if not isinstance(task, Classification):
    raise ValueError(
      f"--question robustness: task {task.name!r} is not a classifier of "
      "arrays (jaxpruner.compare.Classification)"
    )
  return {
    "algorithms": ("magnitude", "rigl"),
    "sparsity": (0.8, 0.95),
    "options": {"share": (0.1, 1.0)},
  }


def measure(cell: Cell, store: Store) -> dict[str, list[float]]:
  """Measure all qualities of a cell's networks, seed by seed."""
  trained = store.load(cell)
  task: Any = trained.task
  masked = trained.masks is not None and cell.name not in (
    "dense",
    "small_dense",
  )
  run = program(task, masked)
  found: dict[str, list[float]] = {name: [] for name in QUALITIES}
  for number in range(trained.seeds):
    params, masks, _ = trained.seed(number)
    for name, value in run(params, masks, trained.data).items():
      found[name].append(float(value))
  return found


def _full(found: Findings) -> list[Cell]:
  """Return the sparse cells that were trained on all data."""
  return [
    cell
    for cell in found.cells
    if cell.name != "dense"
    and ("share" not in cell.options or "share=1.0" in cell.options)
    and cell.id in found.measures
  ]


def verdict(found: Findings) -> list[str]:
  """Say which qualities a sparse network gains or loses against dense."""
  sentences = []
  for cell in _full(found):
    gains = {
      name: found.better(cell, cell.dense, name, higher)
      for name, higher in QUALITIES.items()
    }
    told = [
      f"{name} {signed(gain)}"
      for name, gain in gains.items()
      if judged(gain) != "not told apart"
    ]
    sentences.append(
      f"{cell.method} at {percent(cell.sparsity)}, against dense: "
      f"{counted([*gains.values()])}"
      + (f" ({', '.join(told)})." if told else ".")
    )
  return [*sentences, *_data_words(found)]


def _data_words(found: Findings) -> list[str]:
  """Say what less training data changes."""
  sentences = []
  few = [c for c in found.cells if "share=0.1" in c.options]
  for cell in [c for c in few if c.name not in ("dense", "small_dense")]:
    full = cell._replace(options=cell.options.replace("share=0.1", "share=1.0"))
    less, all_ = found.better(cell, cell.dense), found.better(full, full.dense)
    if less is not None and all_ is not None:
      sentences.append(
        f"{cell.method} at {percent(cell.sparsity)}, against dense: with "
        f"10 % of the training data {signed(less)}, with all {signed(all_)}"
        f"{found.suffix}."
      )
  return sentences


def tables(found: Findings) -> list[Table]:
  """Return network × quality: the mean, and the gain over dense."""
  lines = []
  measured = [cell for cell in found.cells if cell.id in found.measures]
  dense = [cell for cell in measured if cell.name == "dense"]
  for cell in [*dense, *_full(found)]:
    title = cell.method
    if cell.name != "dense":
      title += f" {percent(cell.sparsity)}"
    if cell.options:
      title += f" ({cell.options})"
    texts = []
    for name, higher in QUALITIES.items():
      values = found.values(cell, name)
      text = f"{estimate(values).mean:.2f}" if values else "–"
      gain = found.better(cell, cell.dense, name, higher)
      shown = cell.name != "dense" and gain is not None
      texts.append(f"{text} ({signed(gain)})" if shown else text)
    lines.append([title, *texts])
  arrows = {True: "↑", False: "↓"}
  head = ["network", *(f"{k} {arrows[up]}" for k, up in QUALITIES.items())]
  title = "Qualities, and the gain over dense by seed (positive is better)"
  return [Table(title, head, lines)] if lines else []


def pictures(found: Findings) -> dict[str, Any]:
  """Draw the gain of each network in each quality, in units of its interval."""
  cells = _full(found)
  if not cells:
    return {}
  names = list(QUALITIES)
  figure, grid = drawing.plt.subplots(
    2,
    4,
    figsize=(8.0, 1.6 + 0.5 * len(cells)),
    sharey=True,
    layout="constrained",
  )
  labels = [f"{c.method} {percent(c.sparsity)}" for c in cells]
  styles = drawing.styles(labels)
  for axis in grid.flat[len(names) :]:
    axis.set_axis_off()
  for axis, name in zip(grid.flat, names, strict=False):
    axis.axvline(0, color="black", lw=0.8)
    for y, (cell, label) in enumerate(zip(cells, labels, strict=True)):
      gain = found.better(cell, cell.dense, name, QUALITIES[name])
      if gain is None:
        continue
      colour = styles[label]["color"]
      if not np.isnan(gain.low):
        axis.plot([gain.low, gain.high], [y, y], color=colour, lw=1.2)
      axis.plot([gain.mean], [y], "o", color=colour, ms=4)
    axis.set_title(name, fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
  grid[0][0].set_yticks(range(len(cells)), map(plot.plain, labels))
  grid[0][0].set_ylim(len(cells) - 0.5, -0.5)
  figure.suptitle("Gain over dense (right of the line is better)", fontsize=10)
  return {"robustness": figure}


QUESTION = Question(
  name="robustness",
  asks="Which qualities beyond accuracy does sparsity change?",
  section="3.5",
  axes=axes,
  verdict=verdict,
  measure=measure,
  tables=tables,
  pictures=pictures,
  captions={
    "robustness": "Each network against dense, paired by seed, with 95 % "
    "intervals. Corrupted: mean accuracy under noise, impulses, brightness, "
    "contrast and blur. Attacked: projected gradient ascent. Outside AUROC: "
    "telling other data apart by confidence. NLL and ECE: lower is better, so "
    "that their gain is the decrease. Transfer: a second task after 100 steps "
    "with the mask held."
  },
)
