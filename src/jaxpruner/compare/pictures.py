"""The pictures of a comparison: layers, masks over time, losses."""

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

from jaxpruner.compare import metric_picture
from jaxpruner.compare.cells import DENSE, Cell
from jaxpruner.compare.columns import percent
from jaxpruner.compare.records import Chunk
from jaxpruner.compare.table import TableRow
from jaxpruner.inspect import plot

Steps = dict[str, list[Chunk]]


def draw_all(table: Sequence[TableRow], steps: Steps) -> dict[str, Any]:
  """Return name -> figure for everything the rows and steps allow."""
  with plt.rc_context(plot.STYLE):
    figures = {
      "metric": metric_picture.draw_metric(table),
      "layers": draw_layers(table, steps),
      "masks": draw_masks(table, steps),
      "loss": draw_loss(table, steps),
    }
  return {name: figure for name, figure in figures.items() if figure}


def draw_layers(table: Sequence[TableRow], steps: Steps) -> Any:
  """Sparsity of each layer at the end, one line of cells per algorithm."""
  lines = []
  for row in table:
    chunks = steps.get(_cell(row))
    if chunks and chunks[-1].density:
      label = f"{row.curve}, {percent(row.sparsity)}"
      lines.append((label, chunks[-1].density))
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
    _write_numbers(axis, grid)
  figure.colorbar(image, ax=axis, label="sparsity (%)", shrink=0.8)
  axis.set_title("Sparsity per layer after training (mean over seeds)")
  return figure


def _write_numbers(axis: Any, grid: np.ndarray) -> None:
  style = {"ha": "center", "va": "center", "fontsize": 7}
  for i, j in np.ndindex(*grid.shape):
    tone = "white" if grid[i, j] < 60 else "black"
    axis.text(j, i, f"{grid[i, j]:.0f}", color=tone, **style)


def draw_masks(table: Sequence[TableRow], steps: Steps) -> Any:
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


def draw_loss(table: Sequence[TableRow], steps: Steps) -> Any:
  """Training loss, averaged over each chunk of steps and over seeds."""
  return _curves(table, steps, (("loss", "training loss"),), "Training loss")


def _curves(table, steps, columns, title) -> Any:
  """Draw quantities over training: a panel per sparsity and quantity."""
  levels = sorted({row.sparsity for row in table})
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
  look = plot.look(metric_picture.algorithms(table))
  for name in ("dense", "small_dense"):
    look |= metric_picture.baseline_looks(table, name)
  drawn = {}
  for i, level in enumerate(levels):
    rows = [row for row in table if row.sparsity == level]
    for j, (key, label) in enumerate(columns):
      axis = axes[i][j] if tall else axes[0][i]
      drawn |= _draw_curves(axis, rows, steps, key, look)
      axis.set_title(f"{percent(level)} sparse")
      axis.set_xlabel("training step" if i == shape[0] - 1 or not tall else "")
      if tall or i == 0:
        axis.set_ylabel(label)
      if key == "loss" and drawn:
        _log_scale(axis)
  if not drawn:
    plt.close(figure)
    return None
  _legend(figure, drawn)
  # At the left, where no legend reaches it.
  figure.suptitle(title, fontsize=10, x=0.01, ha="left")
  return figure


def _legend(figure: Any, drawn: dict[str, Any]) -> None:
  """Name the curves beside the panels; below them, if the names are long."""
  longest = max(map(len, drawn))
  beside = longest <= 20
  columns = 1
  if not beside:
    wide, tall = figure.get_size_inches()
    columns = max(1, int(wide / (0.5 + 0.07 * longest)))
    lines = -(-len(drawn) // columns)
    figure.set_size_inches(wide, tall + 0.2 + 0.165 * lines)
  figure.legend(
    drawn.values(),
    map(plot.plain, drawn),
    loc="outside right upper" if beside else "outside lower left",
    handlelength=1.8,
    ncols=columns,
  )


def _draw_curves(axis, rows, steps: Steps, key, look) -> dict[str, Any]:
  """Draw one quantity of the rows; return algorithm -> line."""
  drawn = {}
  scale = 1 if key == "loss" else 100
  for row in rows:
    chunks = steps.get(_cell(row))
    if not chunks or (key != "loss" and not chunks[-1].density):
      continue
    x = [chunk.start + chunk.count for chunk in chunks]
    # A number that was not finite is stored as None, and read as NaN.
    mean = [np.mean(np.array(getattr(chunk, key), float)) for chunk in chunks]
    style = look[row.curve]
    (line,) = axis.plot(
      x, scale * np.array(mean), lw=1.2, ms=3, markevery=4, **style
    )
    drawn[row.curve] = line
  return drawn


def _log_scale(axis: Any) -> None:
  axis.set_yscale("log")
  axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
  axis.yaxis.set_minor_formatter(ticker.FormatStrFormatter("%g"))
  axis.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))


def _cell(row: TableRow) -> str:
  if row.cell:
    return row.cell
  dense = row.algorithm == DENSE.algorithm
  return DENSE.id if dense else Cell(row.algorithm, row.sparsity).id
