"""`jaxpruner inspect CHECKPOINT`: how sparse it is, in which structure."""

import argparse
import pathlib
import sys
from typing import NamedTuple

import numpy as np

from jaxpruner._tools import atomic
from jaxpruner.sparse import _layouts, checkpoints, structure
from jaxpruner.sparse._progress import track
from jaxpruner.sparse._table import size, table

_PICTURES = 12  # tensors drawn; more would be too small to see


class Row(NamedTuple):
  """One row of the table: a tensor, its kept weights and its structure."""

  tensor: _layouts.Tensor
  kept: int
  structure: str
  packed: int
  picture: np.ndarray | None

  @property
  def sparsity(self) -> float:
    return 1 - self.kept / max(self.tensor.size, 1)


def look(
  file: checkpoints.Checkpoint, tensor: _layouts.Tensor, draw: bool = False
) -> Row:
  """Measure one tensor; keep a small picture of its mask to draw."""
  array, mask = file.read(tensor.name)
  # -0.0 counts as zero for the eye, but is kept in a file.
  kept = np.asarray(array != 0) if mask is None else mask.astype(np.bool_)
  stored = int(_layouts.keep(array, mask).sum())
  packed = _layouts.packed_bytes(tensor, stored)
  if mask is None:
    packed = min(packed, array.nbytes)
  picture = None
  if draw and kept.size:
    picture = _plot().density(kept)
  return Row(tensor, int(kept.sum()), structure.describe(kept), packed, picture)


def inspect(path: str, draw: bool = False) -> tuple[str, list[Row]]:
  """Return what a checkpoint is and a row for each of its tensors."""
  with checkpoints.open_checkpoint(path) as file:
    tensors = track(file.tensors.values(), "inspecting")
    what = f"{file.kind}, {file.layout}"
    return what, [look(file, t, draw) for t in tensors]


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "file",
    metavar="CHECKPOINT",
    help="a Hugging Face folder, a .safetensors file of any layout, an Orbax "
    "checkpoint, a Flax msgpack file or an .npz",
  )
  parser.add_argument(
    "--plot", metavar="PICTURE", help="also draw sparsities and masks (PNG, …)"
  )


def run(args: argparse.Namespace) -> int:
  try:
    if args.plot is not None:
      _check_picture(args.plot)
    layout, rows = inspect(args.file, draw=args.plot is not None)
  except (ValueError, OSError) as e:
    print(e, file=sys.stderr)
    return 1
  cells = [
    (
      row.tensor.name,
      "x".join(map(str, row.tensor.shape)) or "scalar",
      str(row.tensor.dtype),
      f"{100 * row.sparsity:.2f} %",
      row.structure,
      size(row.tensor.stored_bytes),
      size(row.packed),
    )
    for row in rows
  ]
  head = (
    "tensor",
    "shape",
    "dtype",
    "sparsity",
    "structure",
    "bytes",
    "packed",
  )
  print(table(head, cells))
  weights = sum(row.tensor.size for row in rows)
  kept = sum(row.kept for row in rows)
  dense = sum(row.tensor.size * row.tensor.dtype.itemsize for row in rows)
  print(
    f"\n{len(rows)} tensors ({layout}), {weights:,} weights, {kept:,} kept: "
    f"sparsity {100 * (1 - kept / max(weights, 1)):.2f} %\n"
    f"dense {size(dense)}, now "
    f"{size(sum(row.tensor.stored_bytes for row in rows))}, packed "
    f"{size(sum(row.packed for row in rows))}"
  )
  if args.plot is not None:
    try:
      _draw(rows, args.plot)
    except OSError as e:
      print(e, file=sys.stderr)
      return 1
    print(f"picture: {args.plot}")
  return 0


def _ending(path: str) -> str:
  return pathlib.Path(path).suffix.removeprefix(".").lower() or "png"


def _check_picture(path: str) -> None:
  """Refuse a picture that cannot be written, before the file is read."""
  _plot()
  from matplotlib.backend_bases import FigureCanvasBase

  atomic.check_target(path)
  known = sorted(FigureCanvasBase.get_supported_filetypes())
  if _ending(path) not in known:
    raise ValueError(
      f"--plot {path}: no pictures are drawn as .{_ending(path)}; choose one "
      f"of {', '.join(known)}"
    )


def _plot():
  try:
    from jaxpruner.inspect import plot
  except ImportError as e:
    raise SystemExit(
      "--plot needs matplotlib: pip install 'jaxpruner[plot]'"
    ) from e
  return plot


def _draw(rows: list[Row], path: str) -> None:
  plot = _plot()
  from matplotlib import figure

  shown = [row for row in rows if len(row.tensor.shape) > 1 and row.tensor.size]
  sparse = sorted(
    (row for row in shown if 0 < row.kept < row.tensor.size),
    key=lambda row: -row.tensor.size,
  )[:_PICTURES]
  height = max(3.0, 0.18 * len(shown), 2.2 * -(-len(sparse) // 3))
  fig = figure.Figure(figsize=(15, height), layout="constrained")
  spec = fig.add_gridspec(int(height / 2.2), 5)
  plot.bars(
    fig.add_subplot(spec[:, :2]),
    [row.tensor.name for row in shown],
    [row.sparsity for row in shown],
  )
  for i, row in enumerate(sparse):
    axes = fig.add_subplot(spec[i // 3, 2 + i % 3])
    assert row.picture is not None  # drawn: it was asked for
    plot.image(axes, row.picture, f"{row.tensor.name}\n{row.structure}")
  with atomic.replacing(path) as file:
    fig.savefig(file, dpi=120, format=_ending(path))
