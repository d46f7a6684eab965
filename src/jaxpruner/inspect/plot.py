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
from jaxpruner.updater.state import PyTree, find_state

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
  """Return a context manager that applies `STYLE` to matplotlib.

  Returns:
    The context manager; pictures drawn inside it have the library's style.

  Example:
    >>> with styled():
    ...   plt.rcParams["font.size"]
    9.0
  """
  # Loads the backend: notebooks' turns interactive mode on as it loads, which
  # leaving the context would turn off again, and with it the next picture.
  plt.draw_if_interactive()
  return plt.rc_context(STYLE)


def look(names: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Return a colour and a marker for each name, in order.

  Args:
    names: labels of the curves; after twelve the colours repeat, with other
      markers.

  Returns:
    name -> `{"color", "marker"}`, keyword arguments of `Axes.plot`.

  Example:
    >>> look(["rigl", "set"])["set"]
    {'color': '#D55E00', 'marker': 's'}
  """
  return {
    name: {
      "color": COLOURS[i % len(COLOURS)],
      "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)],
    }
    for i, name in enumerate(names)
  }


def plain(text: str) -> str:
  r"""Escape text so that matplotlib draws every character literally.

  A dollar sign would start a formula.

  Args:
    text: any label.

  Returns:
    The label with each dollar sign escaped.

  Example:
    >>> print(plain("cost in $"))
    cost in \$
  """
  return text.replace("$", r"\$")


def render(figure: Any, kind: str, salt: str = "") -> bytes:
  """Return a figure as PNG or SVG; equal figures give equal bytes.

  Args:
    figure: a matplotlib figure.
    kind: "png" or "svg".
    salt: seed of the identifiers inside an SVG; pictures embedded in one page
      need different ones.

  Returns:
    The content of the file, without a date.

  Example:
    >>> figure = sparsity({"w": np.eye(2, dtype=np.uint8)})
    >>> render(figure, "png") == render(figure, "png")
    True
    >>> plt.close(figure)
  """
  buffer = io.BytesIO()
  metadata = {"Date": None} if kind == "svg" else {"Software": None}
  with plt.rc_context({**STYLE, "svg.hashsalt": salt or "jaxpruner"}):
    figure.savefig(
      buffer, format=kind, dpi=200, bbox_inches="tight", metadata=metadata
    )
  return buffer.getvalue()


def density(mask: np.ndarray, pixels: int = _PIXELS) -> np.ndarray:
  """Reduce a mask to an image of at most `pixels` × `pixels` densities.

  Leading axes are joined into rows; a pixel is the mean of its part of the
  mask.

  Args:
    mask: 1 = kept, of any rank.
    pixels: largest height and width of the image.

  Returns:
    Densities between 0 and 1, float32 for a mask with at least one axis.

  Example:
    >>> density(np.array([[1, 1, 0, 0], [1, 0, 0, 0]]), pixels=2).tolist()
    [[1.0, 0.0], [0.5, 0.0]]
  """
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
  """Return the masks of a tree as NumPy arrays, by path.

  Args:
    tree: masks, an optimizer state, or parameters. In parameters, zeros of
      leaves with two or more dimensions count as removed.
    params: the parameters that packed masks belong to; unpacked masks need
      none.

  Returns:
    Path of the leaf -> uint8 mask, 1 = kept.

  Example:
    >>> tree = {"w": np.array([[0.0, 2.0]]), "bias": np.zeros(2)}
    >>> {path: mask.tolist() for path, mask in named_masks(tree).items()}
    {'w': [[0, 1]]}
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
  """Draw one horizontal bar per layer, the first layer on top.

  Args:
    axis: the matplotlib axes to draw into.
    names: labels of the layers.
    sparsities: fraction removed of each layer.

  Example:
    >>> figure, axis = plt.subplots()
    >>> bars(axis, ["encoder", "head"], [0.75, 0.5])
    >>> [float(bar.get_width()) for bar in axis.patches]
    [75.0, 50.0]
    >>> plt.close(figure)
  """
  axis.barh([plain(n) for n in names], [100 * s for s in sparsities])
  axis.invert_yaxis()
  axis.margins(y=0.01)
  axis.set(xlim=(0, 100), xlabel="sparsity, %")
  axis.tick_params("y", labelsize=7)


def image(axis: Any, picture: np.ndarray, title: str) -> None:
  """Draw an image of densities, black where weights are kept.

  Args:
    axis: the matplotlib axes to draw into.
    picture: densities between 0 and 1, as `density` returns them.
    title: text above the image.

  Example:
    >>> figure, axis = plt.subplots()
    >>> image(axis, np.eye(3), "identity")
    >>> axis.get_title(), axis.images[0].get_array().shape
    ('identity', (3, 3))
    >>> plt.close(figure)
  """
  axis.imshow(picture, vmin=0, vmax=1, cmap="gray_r", aspect="auto")
  axis.grid(False)
  axis.set_title(plain(title), fontsize=7)
  axis.set(xticks=[], yticks=[])


def sparsity(tree: PyTree, params: PyTree = None, axis: Any = None) -> Any:
  """Draw the sparsity of each layer as a bar.

  Args:
    tree: masks, an optimizer state, or parameters, see `named_masks`.
    params: the parameters that packed masks belong to.
    axis: the matplotlib axes to draw into; by default those of a new figure.

  Returns:
    The figure.

  Example:
    >>> figure = sparsity({"w": np.eye(4, dtype=np.uint8)})
    >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
    [75.0]
    >>> plt.close(figure)
  """
  masks = named_masks(tree, params)
  with styled():
    axis = axis or _axis(6, max(1.6, 0.3 * len(masks) + 0.8))
    bars(axis, list(masks), [1 - float(m.mean()) for m in masks.values()])
  return axis.figure


def acceleration(report: Any) -> Any:
  """Draw bytes and times of each kind of layer, before and after.

  Args:
    report: the report of `jaxpruner.sparse.accelerate`.

  Returns:
    A new figure: bytes on the left, times of the products on the right. Layers
    that were not timed have no bar there.

  Example:
    >>> from jaxpruner import sparse
    >>> layer = sparse.LayerReport(
    ...   "up", (64, 64), 0.9, "sell", "fastest of 2", 16384, 2560,
    ...   {"dense": 4e-5, "sell": 1e-5})
    >>> figure = acceleration(sparse.Report((layer,), 2e-3, 1e-3, ""))
    >>> [axis.get_xlabel() for axis in figure.axes]
    ['bytes', 'milliseconds']
    >>> plt.close(figure)
  """
  kinds = [k for k in report.kinds() if k.dense_bytes]
  count = [len(k.layers) for k in kinds]
  formats = [k.layers[0].format for k in kinds]
  seconds = [k.seconds for k in kinds]
  pairs = {
    "bytes": ([k.dense_bytes for k in kinds], [k.bytes for k in kinds]),
    "milliseconds": (
      [
        1e3 * n * t.get("dense", 0) for n, t in zip(count, seconds, strict=True)
      ],
      [
        1e3 * n * t.get(f, 0)
        for n, t, f in zip(count, seconds, formats, strict=True)
      ],
    ),
  }
  with styled():
    height = max(1.8, 0.4 * len(kinds) + 1)
    figure, axes = plt.subplots(
      1, 2, figsize=(9, height), sharey=True, layout="constrained"
    )
    for axis, (label, (before, after)) in zip(axes, pairs.items(), strict=True):
      places = np.arange(len(kinds))
      axis.barh(places - 0.2, before, 0.38, label="dense", color="#bbbbbb")
      axis.barh(places + 0.2, after, 0.38, label="now", color=COLOURS[0])
      axis.set_xlabel(label)
    names = [
      f"{plain(k.name)}: {f}" for k, f in zip(kinds, formats, strict=True)
    ]
    axes[0].set_yticks(np.arange(len(kinds)), names, fontsize=7)
    axes[0].invert_yaxis()
    axes[1].legend()
    figure.suptitle(
      f"whole function: {report.dense_seconds * 1e3:.3g} ms dense, "
      f"{report.seconds * 1e3:.3g} ms now",
      fontsize=9,
    )
  return figure


def masks(tree: PyTree, params: PyTree = None, columns: int = 4) -> Any:
  """Draw each mask as an image, black where weights are kept.

  Args:
    tree: masks, an optimizer state, or parameters, see `named_masks`.
    params: the parameters that packed masks belong to.
    columns: images per row of the figure.

  Returns:
    A new figure with one image per mask.

  Example:
    >>> figure = masks({"w": np.eye(4, dtype=np.uint8)})
    >>> print(figure.axes[0].get_title())
    w
    75.0% removed
    >>> plt.close(figure)
  """
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
  """Draw the sparsity over training for several schedules.

  Markers show the steps at which masks are updated.

  Args:
    table: label -> sparsity schedule.
    total_steps: the last training step to draw.
    target: the sparsity at the end of each schedule.
    axis: the matplotlib axes to draw into; by default those of a new figure.

  Returns:
    The figure.

  Example:
    >>> from jaxpruner import sparsity_schedules
    >>> table = {"once": sparsity_schedules.OneShotSchedule(target_step=2)}
    >>> figure = schedules(table, total_steps=3, target=0.5)
    >>> curve, markers = figure.axes[0].lines
    >>> curve.get_ydata().tolist(), markers.get_xdata().tolist()
    ([0.0, 0.0, 50.0, 50.0], [2])
    >>> plt.close(figure)
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
  """Draw one mask over training, and how far it moved from the first mask.

  The images show the mask at some of the steps. The curves show the share of
  the first mask that is still kept, and the share of all weights that was
  kept at any step so far.

  Args:
    history: training step -> masks (or optimizer state).
    leaf: path of the leaf to draw; the first by default.
    frames: how many of the steps are drawn as images.

  Returns:
    A new figure.

  Example:
    >>> history = {step: {"w": np.roll(np.eye(2, dtype=np.uint8), step, 0)}
    ...            for step in (0, 1)}
    >>> figure = evolution(history)
    >>> [line.get_ydata().tolist() for line in figure.axes[-1].lines]
    [[100.0, 0.0], [50.0, 100.0]]
    >>> plt.close(figure)
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
  """Draw one curve with an interval at each point.

  If the lower end of any interval is NaN, the curve is drawn without
  intervals.

  Args:
    axis: the matplotlib axes to draw into.
    x: positions of the points.
    mean: their values.
    low: lower ends of the intervals.
    high: upper ends of the intervals.
    **style: further keyword arguments of `Axes.errorbar`.

  Example:
    >>> figure, axis = plt.subplots()
    >>> errorbar(axis, [0, 1], [2, 3], [1, 2], [4, 5], label="rigl")
    >>> axis.containers[0].has_yerr
    True
    >>> plt.close(figure)
  """
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
    metric: name of the metric, the label of the vertical axis.
    axis: the matplotlib axes to draw into; by default those of a new figure.

  Returns:
    The figure.

  Example:
    >>> nan = float("nan")
    >>> points = [(0.9, 0.7, nan, nan), (0.5, 0.8, nan, nan)]
    >>> figure = tradeoff({"rigl": points})
    >>> figure.axes[0].lines[0].get_xydata().tolist()
    [[50.0, 0.8], [90.0, 0.7]]
    >>> plt.close(figure)
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
