"""`jaxpruner fit`: a law of scale from the run folders of comparisons."""

import argparse
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from jaxpruner import api, scaling
from jaxpruner.compare import (
  files,
  groups,
  record_files,
  run_folder,
  spelling,
)
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.records import Record


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options."""
  parser.add_argument(
    "runs",
    nargs="+",
    metavar="RUN",
    help="run folders of `jaxpruner compare`, or files of records, with "
    "several widths and steps",
  )
  parser.add_argument(
    "--algorithm",
    default="magnitude",
    help="whose rows are fitted, with the dense ones (default: magnitude)",
  )
  parser.add_argument(
    "--law",
    choices=("joint", "average"),
    default="joint",
    help="joint: by sparsity and the weights at the end; average: by the "
    "weights averaged over training (default: joint)",
  )
  parser.add_argument(
    "--hold-out",
    metavar="TEXT",
    help="predict the trainings whose run, options or sparsity contain this "
    "text, such as width=192, instead of fitting them",
  )
  parser.add_argument(
    "--resamples", type=int, default=200, help="for the intervals"
  )
  parser.add_argument("--plot", metavar="FILE", help="draw the law")


_MOST = 2**24  # steps, and examples of one


class Training(NamedTuple):
  """A finished training of a run, as a point of a law.

  Attributes:
    name: of its cell.
    sparsity: the fraction removed at the end.
    weights: how many are not zero at the end.
    data: the number of examples.
    loss: the metric.
    average: the weights averaged over training; NaN if that is not known.
  """

  name: str
  sparsity: float
  weights: float
  data: float
  loss: float
  average: float = math.nan


def trainings(path: str, algorithm: str) -> list[Training]:
  """Return the dense and the pruned trainings of a run folder.

  Weights are those that have a mask in the pruned rows, so that embeddings are
  not counted. Data are examples: steps times batch size. The loss is the
  metric, averaged over seeds.

  Args:
    path: the run folder.
    algorithm: the algorithm of the pruned rows.

  Returns:
    The trainings.

  Raises:
    RunFolderError: the metric is not a loss, or no row is there.
  """
  info = run_folder.read_run(path)
  if info.higher_is_better:
    raise files.RunFolderError(
      f"{path}: a law is fitted to a loss, and {info.metric or 'the metric'} "
      "is better if it is higher; use a task with a loss, such as sotu"
    )
  results = run_folder.read_results(path)
  rows: list[tuple[Cell, Record]] = []
  for entry in run_folder.listed_cells(info, path):
    record = results.get(entry.cell.id)
    if not isinstance(record, Record) or record.problem:
      continue
    if entry.cell.algorithm in ("dense", algorithm):
      rows.append((entry.cell, record))
  sizes = {c.options: r.prunable for c, r in rows if c.algorithm == algorithm}
  if not sizes:
    raise files.RunFolderError(
      f"{path}: no finished row of {algorithm!r}; choose another --algorithm"
    )
  return [
    _training(cell, record, info, sizes[cell.options])
    for cell, record in rows
    if cell.options in sizes
  ]


def _training(
  cell: Cell, record: Record, info: run_folder.RunInfo, size: int
) -> Training:
  options: dict[str, Any] = info.task | spelling.options_of(cell.options)
  steps, rows = (
    _whole(cell, options, name) for name in ("steps", "batch_size")
  )
  values = record.metrics.get(info.metric) or []
  numbers = [value for value in values if value is not None]
  if not numbers or len(numbers) < len(values):
    raise files.RunFolderError(f"{cell.id}: {info.metric} is not finite")
  removed = [x for x in record.realised if x is not None]
  sparse = float(np.mean(removed)) if removed and record.prunable else 0.0
  kept = _kept_on_average(cell, steps, sparse)
  return Training(
    cell.id,
    sparse,
    size * (1 - sparse),
    float(steps * rows),
    float(np.mean(numbers)),
    size * kept,
  )


def _whole(cell: Cell, options: dict[str, Any], name: str) -> int:
  """Return a number of a task; a file may hold anything."""
  value = options.get(name)
  # Of every step, it is computed how many weights are kept.
  if type(value) is not int or not 1 <= value <= _MOST:
    raise files.RunFolderError(
      f"{cell.id}: {name} of the task is {value!r:.40}, but the law needs the "
      f"amount of data: a whole number from 1 to {_MOST}"
    )
  return value


def _kept_on_average(cell: Cell, steps: int, sparsity: float) -> float:
  """Return the share of weights that training used, averaged over its steps.

  It follows the schedule of the algorithm. NaN for algorithms that train more
  than once, or prune when training is over.
  """
  order = groups.group(cell.algorithm).order
  if not sparsity or order in groups.SPARSE_FROM_THE_START:
    return 1 - sparsity
  if order != groups.DENSE_TO_SPARSE or groups.costs_of(cell).trainings > 1:
    return math.nan
  name, options = spelling.algorithm_of(cell.algorithm)
  for key in spelling.OURS:
    options.pop(key, None)
  config = {"algorithm": name, "sparsity": sparsity, "total_steps": steps}
  schedule = api.create_updater_from_config(config | options).scheduler
  step = np.arange(steps)
  wanted = np.asarray(schedule.get_sparsity_at_step(sparsity, step))
  removed = np.where(schedule.is_mask_update_iter(step), wanted, 0)
  return 1 - float(np.maximum.accumulate(removed).mean())


def run(args: argparse.Namespace) -> int:
  """Fit the law, print it, and draw it."""
  try:
    for name, value in (("plot", args.plot), ("hold-out", args.hold_out)):
      if value == "":
        raise ValueError(f"--{name} '': is empty; give a value")
    if args.plot and pathlib.Path(args.plot).suffix not in (".png", ".svg"):
      raise ValueError(f"--plot {args.plot}: must end in .png or .svg")
    inside, outside = [], []
    with record_files.as_folders(args.runs) as runs:
      for run, path in zip(args.runs, runs, strict=True):
        for training in trainings(path, args.algorithm):
          where = f"{run} {training.name}"
          is_out = bool(args.hold_out) and args.hold_out in where
          (outside if is_out else inside).append(training)
    if args.hold_out and not outside:
      raise ValueError(
        f"--hold-out {args.hold_out!r}: no training has it; there are "
        + ", ".join(sorted({t.name for t in inside}))[:300]
      )
    if args.law == "average":
      _check_averages(inside + outside)
    fit = fitted(inside, args.law, args.resamples)
    print("\n".join(describe(fit, inside, outside)))
    if args.plot:
      draw(fit, inside, outside, pathlib.Path(args.plot))
  except (files.RunFolderError, ValueError, OSError) as error:
    files.say(str(error), "fit")
    return 2
  return 0


def _check_averages(points: list[Training]) -> None:
  for training in points:
    if math.isnan(training.average):
      raise ValueError(
        f"{training.name}: it is not known how many weights it had at each "
        "step of one training, as the average law needs; use --law joint"
      )


def fitted(
  inside: list[Training], law: str = "joint", resamples: int = 200
) -> scaling.Fit:
  """Return the law of some trainings.

  Args:
    inside: the trainings.
    law: "joint" or "average".
    resamples: for the intervals.

  Returns:
    The fit.
  """
  columns = zip(*(t[1:] for t in inside), strict=True) if inside else [()] * 5
  return scaling.fit(scaling.Points(*columns), law, resamples=resamples)


def _place(law: scaling.JointLaw | scaling.AverageLaw, training: Training):
  """Return the sparsity, weights and data where a law has a training."""
  average = isinstance(law, scaling.AverageLaw)
  weights = training.average if average else training.weights
  return training.sparsity, weights, training.data


def predicted(fit: scaling.Fit, training: Training) -> scaling.Prediction:
  """Return the loss that a fitted law predicts for a training.

  Args:
    fit: the law.
    training: the training.

  Returns:
    The prediction.
  """
  return fit.predict(*_place(fit.law, training))


def describe(
  fit: scaling.Fit, inside: list[Training], outside: list[Training]
) -> list[str]:
  """Return the lines that `jaxpruner fit` prints."""
  joint = isinstance(fit.law, scaling.JointLaw)
  factor = "(a_s (1-S)^b_s + c_s)" if joint else "a_n"
  lines = [
    f"loss = {factor} N^-b_n + (a_d/D)^b_d + c, fitted to "
    f"{len(inside)} trainings",
    f"error {fit.error:.2%} of the loss; {fit.agreed} of {fit.starts} starts "
    "found this optimum",
    "",
  ]
  for name, (low, high) in fit.intervals().items():
    value = getattr(fit.law, name)
    lines.append(f"  {name:4} {value:10.4g}   [{low:.4g}, {high:.4g}]")
  if outside:
    lines += ["", "held out:"]
  for training in outside:
    name = files.printable(training.name)
    new = predicted(fit, training)
    gap = new.loss / training.loss - 1
    lines.append(
      f"  {name}: predicted {new.loss:.4f} [{new.low:.4f}, "
      f"{new.high:.4f}], measured {training.loss:.4f} ({gap:+.2%})"
    )
  if isinstance(fit.law, scaling.JointLaw):
    lines += [
      "",
      "best sparsity, at equal training cost:",
      *_best(fit.law, inside),
    ]
  return lines


def _best(law: scaling.JointLaw, inside: list[Training]) -> list[str]:
  weights, data = {t.weights for t in inside}, {t.data for t in inside}
  ends = lambda values: sorted({min(values), max(values)})
  return [
    f"  {number:,.0f} non-zero weights, {amount:,.0f} examples if dense: "
    f"{scaling.optimal_sparsity(law, number, amount):.0%}"
    for number in ends(weights)
    for amount in ends(data)
  ]


def draw(
  fit: scaling.Fit,
  inside: list[Training],
  outside: list[Training],
  path: pathlib.Path,
) -> None:
  """Draw measured against predicted losses, and the law over the weights."""
  from matplotlib import figure

  from jaxpruner.inspect import plot

  with plot.styled():
    picture = figure.Figure(figsize=(9, 4), layout="constrained")
    left, right = picture.subplots(1, 2)
    law = fit.law.loss
    groups = (("fitted", inside, "o"), ("held out", outside, "D"))
    for label, group, mark in groups:
      if group:
        found = [law(*_place(fit.law, t)) for t in group]
        left.plot(found, [t.loss for t in group], mark, label=label)
    ends = [min(t.loss for t in inside), max(t.loss for t in inside)]
    left.plot(ends, ends, "--", color="gray")
    left.set(xlabel="predicted loss", ylabel="measured loss")
    left.legend()
    most = max(t.data for t in inside)
    for sparsity in sorted({round(t.sparsity, 4) for t in inside}):
      near = [
        t
        for t in (*inside, *outside)
        if round(t.sparsity, 4) == sparsity and t.data == most
      ]
      if not near:
        continue
      sizes = [_place(fit.law, t)[1] for t in near]
      grid = np.geomspace(min(sizes), max(sizes))
      curve = law(sparsity, grid, most)
      (line,) = right.plot(grid, curve, label=f"{sparsity:.1%}")
      right.plot(sizes, [t.loss for t in near], "o", color=line.get_color())
    right.set(
      xscale="log",
      xlabel="non-zero weights"
      + ("" if isinstance(fit.law, scaling.JointLaw) else ", on average"),
      ylabel="loss",
      title=f"{most:,.0f} examples",
    )
    right.legend(title="sparsity")
    files.write_atomic(path, plot.render(picture, path.suffix[1:]))
