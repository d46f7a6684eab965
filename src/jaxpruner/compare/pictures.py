"""The pictures of a comparison: layers, masks over time, losses."""

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

from jaxpruner import plot
from jaxpruner.compare import metric_picture, plan
from jaxpruner.compare.table import Row

Steps = dict[str, list[dict[str, Any]]]


def draw_all(table: Sequence[Row], steps: Steps) -> dict[str, Any]:
  """Return name -> figure for everything the rows and steps allow."""
  with plt.rc_context(plot.STYLE):
    figures = {
      "metric": metric_picture.draw_metric(table),
      "layers": draw_layers(table, steps),
      "masks": draw_masks(table, steps),
      "loss": draw_loss(table, steps),
    }
  return {name: figure for name, figure in figures.items() if figure}


def draw_layers(table: Sequence[Row], steps: Steps) -> Any:
  """Sparsity of each layer at the end, one line of cells per algorithm."""
  lines = []
  for row in table:
    stretches = steps.get(_cell(row))
    if stretches and stretches[-1]["density"]:
      label = f"{row.algorithm}, {100 * row.sparsity:g} %"
      lines.append((label, stretches[-1]["density"]))
  names = sorted({name for _, density in lines for name in density})
  if not names:
    return None
  grid = np.array(
    [[100 * (1 - d.get(name, 1.0)) for name in names] for _, d in lines]
  )
  short = [name.removesuffix("/kernel") for name in names]
  # Slanted names need room below, algorithm names on the left.
  below = 0.05 * max(map(len, short))
  left = 0.08 * max(len(label) for label, _ in lines)
  figure, axis = plt.subplots(
    figsize=(
      1.5 + left + below + max(2.5, 0.62 * len(names)),
      1.0 + below + 0.24 * len(lines),
    ),
    layout="constrained",
  )
  image = axis.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=100)
  axis.grid(False)
  axis.set_xticks(
    range(len(names)), map(plot.plain, short), rotation=40, ha="right"
  )
  axis.set_yticks(range(len(lines)), [plot.plain(label) for label, _ in lines])
  if len(names) <= 12:
    for i, j in np.ndindex(*grid.shape):
      tone = "white" if grid[i, j] < 60 else "black"
      axis.text(
        j,
        i,
        f"{grid[i, j]:.0f}",
        ha="center",
        va="center",
        color=tone,
        fontsize=7,
      )
  figure.colorbar(image, ax=axis, label="sparsity (%)", shrink=0.8)
  axis.set_title("Sparsity per layer after training (mean over seeds)")
  return figure


def draw_masks(table: Sequence[Row], steps: Steps) -> Any:
  """Mask churn and exploration over training, one row per sparsity."""
  return _curves(
    table,
    steps,
    (
      ("churn", "weights swapped in\n(% of kept, per 1/20 of training)"),
      ("explored", "weights active so far (%)"),
    ),
    "Masks over training: churn, and exploration",
  )


def draw_loss(table: Sequence[Row], steps: Steps) -> Any:
  """Training loss, averaged over each stretch of steps and over seeds."""
  return _curves(table, steps, (("loss", "training loss"),), "Training loss")


def _curves(table, steps, columns, title) -> Any:
  levels = sorted({row.sparsity for row in table})
  look = plot.look(metric_picture.algorithms(table))
  look["dense"] = {"color": "black", "marker": None}
  look["small_dense"] = {"color": "#777777", "marker": None}
  # Losses run side by side; pairs of curves one pair per line.
  tall = len(columns) > 1
  shape = (len(levels), len(columns)) if tall else (1, len(levels))
  figure, axes = plt.subplots(
    *shape,
    figsize=(3.6 * shape[1] + 1.4, 2.6 * shape[0] + 0.5),
    squeeze=False,
    sharex=True,
    sharey="col" if tall else "row",
    layout="constrained",
  )
  drawn = {}
  for i, level in enumerate(levels):
    for j, (key, label) in enumerate(columns):
      axis = axes[i][j] if tall else axes[0][i]
      for row in (r for r in table if r.sparsity == level):
        stretches = steps.get(_cell(row))
        if not stretches or (key != "loss" and not stretches[-1]["density"]):
          continue
        x = [s["start"] + s["count"] for s in stretches]
        values = [np.array(s[key], float) for s in stretches]
        mean = np.array([np.mean(v) for v in values])
        scale = 1 if key == "loss" else 100
        style = look[row.algorithm]
        (line,) = axis.plot(x, scale * mean, lw=1.2, ms=3, markevery=4, **style)
        drawn[row.algorithm] = line
      axis.set_title(f"{100 * level:g} % sparse")
      axis.set_xlabel("training step" if i == shape[0] - 1 or not tall else "")
      if tall or i == 0:
        axis.set_ylabel(label)
      if key == "loss" and drawn:
        axis.set_yscale("log")
        for part in (
          axis.yaxis.set_major_formatter,
          axis.yaxis.set_minor_formatter,
        ):
          part(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
  if not drawn:
    plt.close(figure)
    return None
  figure.legend(
    drawn.values(),
    map(plot.plain, drawn),
    loc="outside right upper",
    handlelength=1.8,
  )
  figure.suptitle(title, fontsize=10)
  return figure


def _cell(row: Row) -> str:
  sparsity = 0.0 if row.algorithm == "dense" else row.sparsity
  return plan.Cell(row.algorithm, sparsity).id
