"""Pictures of sparse networks; needs matplotlib (the extra `plot`).

Every function draws into `axis`, or makes a figure, and returns the figure.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

try:
  import matplotlib.pyplot as plt
except ImportError as error:
  raise ImportError(
    "jaxpruner.plot needs matplotlib: pip install 'jaxpruner[plot]'"
  ) from error

from jaxpruner import _leaves, _tools, mask_calculator
from jaxpruner._state import PyTree, find_state

# Okabe and Ito's palette, then Tol's: distinct to colour-blind readers.
COLOURS = (
  "#0072B2",
  "#D55E00",
  "#009E73",
  "#CC79A7",
  "#E69F00",
  "#56B4E9",
  "#8C6D1F",
  "#7F3C8D",
  "#332288",
  "#44AA99",
  "#882255",
  "#999933",
)
MARKERS = "osD^vPX*<>ph"
STYLE: Any = {
  "font.size": 9,
  "axes.titlesize": 9.5,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "grid.color": "#e6e6e6",
  "grid.linewidth": 0.6,
  "axes.axisbelow": True,
  "legend.frameon": False,
  "legend.fontsize": 8,
  "svg.fonttype": "none",
  "figure.dpi": 100,
}
_PIXELS = 64


def styled() -> Any:
  """Return the context in which pictures are drawn."""
  # Loads the backend: notebooks' turns interactive mode on as it loads, which
  # leaving the context would turn off again, and with it the next picture.
  plt.draw_if_interactive()
  return plt.rc_context(STYLE)


def look(names: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Return a colour and a marker for each name, in order."""
  return {
    name: {
      "color": COLOURS[i % len(COLOURS)],
      "marker": MARKERS[i % len(MARKERS)],
    }
    for i, name in enumerate(names)
  }


def plain(text: str) -> str:
  """Return text that matplotlib takes literally."""
  # A dollar sign would start a formula.
  return text.replace("$", r"\$")


def render(figure: Any, kind: str, salt: str = "") -> bytes:
  """Return a figure as "png" or "svg", the same bytes for the same figure."""
  buffer = io.BytesIO()
  metadata = {"Date": None} if kind == "svg" else {"Software": None}
  with plt.rc_context({**STYLE, "svg.hashsalt": salt or "jaxpruner"}):
    figure.savefig(
      buffer, format=kind, dpi=200, bbox_inches="tight", metadata=metadata
    )
  return buffer.getvalue()


def density(mask: np.ndarray, pixels: int = _PIXELS) -> np.ndarray:
  """Shrink a mask to a small picture of densities."""
  matrix = mask.reshape(-1, mask.shape[-1]) if mask.ndim else mask[None, None]
  for axis in (0, 1):
    edges = np.unique(
      np.linspace(0, matrix.shape[axis], pixels, endpoint=False).astype(int)
    )
    counts = np.diff(edges, append=matrix.shape[axis])
    total = np.add.reduceat(matrix, edges, axis, dtype=np.float32)
    matrix = total / (counts[:, None] if axis == 0 else counts)
  return matrix


def named_masks(tree: PyTree, params: PyTree = None) -> dict[str, np.ndarray]:
  """Return name -> NumPy mask from masks, an optimizer state, or parameters.

  Packed masks need `params`. Without masks, zeros of two-dimensional leaves
  count as removed.
  """
  try:
    tree = find_state(tree).masks
  except ValueError:
    pass  # masks or parameters themselves
  shapes = {}
  if params is not None:
    leaves = _leaves.flatten_with_names(params)[0]
    shapes = {_leaves.join(n): np.shape(x) for n, x in leaves}
  result = {}
  for names, leaf in _leaves.flatten_with_names(tree)[0]:
    name, array = _leaves.join(names), np.asarray(leaf)
    if shapes.get(name, array.shape) != array.shape:
      array = np.asarray(mask_calculator.unpack_mask(leaf, shapes[name]))
    if array.dtype != np.uint8:
      if array.ndim < 2:
        continue
      array = (array != 0).astype(np.uint8)
    result[name] = array
  if not result:
    raise ValueError(
      "there is no mask to draw; pass find_state(opt_state).masks, opt_state, "
      "or parameters with leaves of two dimensions"
    )
  return result


def bars(axis: Any, names: Sequence[str], sparsities: Sequence[float]) -> None:
  """Draw one horizontal bar per layer, the first on top."""
  axis.barh([plain(n) for n in names], [100 * s for s in sparsities])
  axis.invert_yaxis()
  axis.margins(y=0.01)
  axis.set(xlim=(0, 100), xlabel="sparsity, %")
  axis.tick_params("y", labelsize=7)


def image(axis: Any, picture: np.ndarray, title: str) -> None:
  """Draw densities, black where weights are kept."""
  axis.imshow(picture, vmin=0, vmax=1, cmap="gray_r", aspect="auto")
  axis.grid(False)
  axis.set_title(plain(title), fontsize=7)
  axis.set(xticks=[], yticks=[])


def sparsity(tree: PyTree, params: PyTree = None, axis: Any = None) -> Any:
  """Draw the sparsity of each layer as a bar."""
  masks = named_masks(tree, params)
  with styled():
    axis = axis or _axis(6, max(1.6, 0.3 * len(masks) + 0.8))
    bars(axis, list(masks), [1 - float(m.mean()) for m in masks.values()])
  return axis.figure


def masks(tree: PyTree, params: PyTree = None, columns: int = 4) -> Any:
  """Draw each mask as an image, black where weights are kept."""
  found = named_masks(tree, params)
  columns = min(columns, len(found))
  rows = -(-len(found) // columns)
  with styled():
    figure, axes = plt.subplots(
      rows,
      columns,
      figsize=(2.2 * columns, 2.3 * rows),
      squeeze=False,
      layout="constrained",
    )
    for axis in axes.flat[len(found) :]:
      axis.set_visible(False)
    for axis, (name, mask) in zip(axes.flat, found.items(), strict=False):
      image(axis, density(mask), f"{name}\n{1 - mask.mean():.1%} removed")
  return figure


def schedules(
  table: Mapping[str, Any],
  total_steps: int,
  target: float = 0.9,
  axis: Any = None,
) -> Any:
  """Draw the sparsity over training for each `name -> schedule`.

  Marks are the steps at which masks are updated.
  """
  steps = np.arange(total_steps + 1)
  with styled():
    axis = axis or _axis(6, 3)
    for name, style in look(list(table)).items():
      values = table[name].get_sparsity_at_step(target, steps)
      values = 100 * np.broadcast_to(np.asarray(values), steps.shape)
      due = table[name].is_mask_update_iter(steps)
      due = np.broadcast_to(np.asarray(due), steps.shape)
      axis.plot(steps, values, lw=1.2, color=style["color"], label=plain(name))
      axis.plot(
        steps[due], values[due], style["marker"], ms=3.5, color=style["color"]
      )
    axis.set(xlabel="training step", ylabel="sparsity, %", ylim=(-2, 102))
    axis.legend()
  return axis.figure


def evolution(
  history: Mapping[int, PyTree], leaf: str | None = None, frames: int = 6
) -> Any:
  """Draw one mask over training, and what of it changed since the start.

  Args:
    history: training step -> masks (or optimizer state).
    leaf: path of the leaf to draw; the first by default.
    frames: how many of the steps are drawn.
  """
  series = {step: named_masks(tree) for step, tree in sorted(history.items())}
  first = next(iter(series.values()))
  if leaf is not None and leaf not in first:
    raise ValueError(
      f"leaf={leaf!r} has no mask; {_tools.nearest(leaf, first)}"
    )
  leaf = leaf or next(iter(first))
  steps = list(series)
  shown = sorted(
    {steps[int(i)] for i in np.linspace(0, len(steps) - 1, frames)}
  )
  with styled():
    figure = plt.figure(figsize=(1.7 * len(shown), 4.0), layout="constrained")
    grid = figure.add_gridspec(2, len(shown))
    for i, step in enumerate(shown):
      axis = figure.add_subplot(grid[0, i])
      image(axis, density(series[step][leaf]), f"step {step}")
    axis = figure.add_subplot(grid[1, :])
    start = first[leaf].astype(bool)
    ever = np.zeros_like(start)
    kept, explored = [], []
    for step in steps:
      mask = series[step][leaf].astype(bool)
      ever |= mask
      kept.append(100 * (mask & start).sum() / max(1, start.sum()))
      explored.append(100 * ever.mean())
    for (label, values), style in zip(
      {
        "of the first mask still kept": kept,
        "active so far, of all weights": explored,
      }.items(),
      look(["kept", "explored"]).values(),
      strict=True,
    ):
      axis.plot(steps, values, ms=3, lw=1.2, label=label, **style)
    axis.set(xlabel="training step", ylabel="%", ylim=(-2, 102))
    axis.legend()
    figure.suptitle(plain(leaf), fontsize=9.5)
  return figure


def errorbar(
  axis: Any, x: Any, mean: Any, low: Any, high: Any, **style
) -> None:
  """Draw one curve with its intervals; without, where one is unknown."""
  mean, low, high = (np.asarray(v, float) for v in (mean, low, high))
  spread = None if np.isnan(low).any() else np.array([mean - low, high - mean])
  axis.errorbar(
    x, mean, spread, lw=1.1, ms=4.5, capsize=2.5, elinewidth=1, **style
  )


def tradeoff(
  curves: Mapping[str, Sequence[tuple[float, float, float, float]]],
  metric: str = "accuracy",
  axis: Any = None,
) -> Any:
  """Draw a metric against sparsity, a curve per algorithm with intervals.

  Args:
    curves: name -> `(sparsity, mean, low, high)` per point; NaN for `low` and
      `high` draws no interval.
    metric: what the means measure.
    axis: where to draw.
  """
  with styled():
    axis = axis or _axis(6, 3.6)
    for name, style in look(list(curves)).items():
      points = sorted(curves[name])
      x, mean, low, high = zip(*points, strict=True)
      x = [100 * s for s in x]
      errorbar(axis, x, mean, low, high, label=plain(name), **style)
    axis.set(xlabel="weights removed, %", ylabel=plain(metric))
    axis.legend()
  return axis.figure


def _axis(width: float, height: float) -> Any:
  return plt.subplots(figsize=(width, height), layout="constrained")[1]
