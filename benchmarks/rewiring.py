"""Which weights should grow? SET, RigL and `signal_rigl`, to the plateau.

    python benchmarks/rewiring.py

writes `docs/results/rewiring.md` from all records in `docs/results/records/`
that have `signal_rigl`. It trains nothing: `trainings.sh` does.
"""

import argparse
import pathlib
from typing import NamedTuple

import further_seeds
import page

from jaxpruner.compare import files, record_files, run_folder, statistics

ALGORITHMS = ("static_sparse", "set", "rigl", "signal_rigl")
NAMES = ("static", "SET", "RigL", "signal")
PAIRS = (
  ("set", "static_sparse"),
  ("rigl", "set"),
  ("signal_rigl", "set"),
  ("signal_rigl", "rigl"),
)


class Run(NamedTuple):
  """A published comparison of rewiring.

  Attributes:
    name: of its file.
    found: its records.
    all_infos: of its runs: further seeds are runs of their own.
    values: algorithm -> the metric of each seed; more is better.
    costs: algorithm -> FLOPs of training, relative to dense.
    seconds: of all trainings.
  """

  name: str
  found: record_files.Records
  all_infos: list[run_folder.RunInfo]
  values: dict[str, list[float]]
  costs: dict[str, float]
  seconds: float

  @property
  def unit(self) -> str:
    info = self.found.info
    return "points" if info.unit == "%" else info.metric


def published(folder: pathlib.Path) -> list[Run]:
  """Return the comparisons with `signal_rigl`, further seeds joined."""
  runs = []
  for file in sorted(folder.glob("*.jsonl")):
    if further_seeds.is_further(file):
      continue
    files, numbers = further_seeds.joined(file)
    found = files[0]
    values, costs = {}, {}
    for cell, seeds in numbers.items():
      record = found.records[cell]
      values[record.algorithm] = [float(x or 0) for x in seeds]
      dense = record.training_flops_dense
      costs[record.algorithm] = record.training_flops / dense
    seconds = sum(r.seconds for one in files for r in one.records.values())
    if set(ALGORITHMS) <= set(values):
      infos = [one.info for one in files]
      runs.append(Run(file.stem, found, infos, values, costs, seconds))
  return runs


def compared(run: Run, better: str, other: str) -> statistics.Estimate:
  """Return the difference of two algorithms, paired by seed."""
  sign = 1 if run.found.info.higher_is_better else -1
  return statistics.paired_difference(
    [sign * x for x in run.values[better]],
    [sign * x for x in run.values[other]],
  )


def counts(runs: list[Run]) -> str:
  """Return how often each growth by gradient is above SET."""
  lines = []
  for name, title in (("rigl", "RigL"), ("signal_rigl", "`signal_rigl`")):
    found = [compared(run, name, "set") for run in runs]
    above = sum(d.mean > 0 for d in found)
    sure, below = sum(d.low > 0 for d in found), sum(d.high < 0 for d in found)
    lines.append(
      f"{title} is above SET in the mean in {above} of these {len(found)}\n"
      f"comparisons, decidedly in {sure}, and decidedly below it in {below}."
    )
  return "\n".join(lines)


def means(runs: list[Run]) -> str:
  """Return the table of means and costs."""
  head = ["records", "dense", *NAMES, "FLOPs: SET", "RigL", "signal"]
  rows = []
  for run in runs:
    digits = 2 if run.found.info.unit == "%" else 3
    mean = lambda name, run=run, digits=digits: (
      f"{statistics.estimate(run.values[name]).mean:.{digits}f}"
      if name in run.values
      else "–"
    )
    cost = [f"{run.costs[name]:.3f} ×" for name in ALGORITHMS[1:]]
    link = f"[{run.name}](records/{run.name}.jsonl)"
    rows.append([link, mean("dense"), *map(mean, ALGORITHMS), *cost])
  return page.table(head, rows)


def differences(runs: list[Run]) -> str:
  """Return the table of differences, paired by seed."""
  names = dict(zip(ALGORITHMS, NAMES, strict=True))
  head = [
    "records",
    "seeds",
    *(f"{names[a]} − {names[b]}" for a, b in PAIRS),
    "in",
  ]
  rows = []
  for run in runs:
    cells = []
    for better, other in PAIRS:
      d = compared(run, better, other)
      digits = 2 if run.found.info.unit == "%" else 3
      text = f"{d.mean:+.{digits}f} [{d.low:+.{digits}f}, {d.high:+.{digits}f}]"
      cells.append(f"**{text}**" if d.low > 0 or d.high < 0 else text)
    seeds = len(run.values["set"])
    rows.append([run.name, str(seeds), *cells, run.unit])
  return page.table(head, rows)


def draw(runs: list[Run], path: pathlib.Path) -> None:
  """Draw the training loss of each run, averaged over seeds."""
  from matplotlib import figure

  from jaxpruner import plot

  with plot.styled():
    height = 3 * -(-len(runs) // 2)
    picture = figure.Figure(figsize=(9, height), layout="constrained")
    axes = picture.subplots(-(-len(runs) // 2), 2, squeeze=False).ravel()
    for axis, run in zip(axes, runs, strict=False):
      for cell, training in run.found.trainings.items():
        name = run.found.records[cell].algorithm
        if name == "small_dense":
          continue
        curve = [
          sum(x or 0 for x in seeds) / len(seeds) for seeds in training.losses
        ]
        axis.plot(training.starts, curve, label=name)
      axis.set(title=run.name, xlabel="step", ylabel="training loss")
      axis.set_yscale("log")
    axes[0].legend()
    for axis in axes[len(runs) :]:
      axis.set_axis_off()
    files.write_atomic(path, plot.render(picture, path.suffix[1:]))


ABOUT = """
Dynamic sparse training drops the smallest weights and grows others: SET at
random, RigL where |∂L/∂w| of one batch is largest, `signal_rigl` where the mean
of the gradient is largest relative to its root mean square, over the 16 steps
before a mask update (which is also what moves a weight under Adam). Everything
else is equal: start, batches, schedule (a mask update every 100 steps or a
tenth of the training until 75 %), drop fraction 0.3, ERK, cosine decay to zero.
`digits` is a 64 - 256 - 256 - 10 perceptron, 1,000 steps of 64 images;
`fashion-mlp` is LeNet-300-100 on Fashion-MNIST, 10,000 steps of 64 images
(5,000 at 98 %); momentum is SGD with 0.9 at a rate of 0.05. Names say sparsity
and optimizer. FLOPs are those of training, relative to dense.
"""
DIFFERENCES = """
Paired by seed with 95 % intervals, the sign turned where less is better; bold
intervals leave out zero. A decision among many is a hint.
"""


def main() -> None:
  argparse.ArgumentParser(description=__doc__).parse_args()
  runs = published(page.RESULTS / "records")
  draw(runs, page.RESULTS / "rewiring.png")
  seconds = sum(run.seconds for run in runs)
  commits = ", ".join(
    f"{run.name} {run.found.info.commit} ({run.found.info.started[:10]})"
    for run in runs
  )
  page.write(
    "rewiring",
    "Rewiring, to the plateau",
    [
      ABOUT.strip(),
      means(runs),
      DIFFERENCES.strip(),
      differences(runs),
      counts(runs),
      "![Training loss](rewiring.png)",
      f"Commits of the records: {commits}. Each is made again by its command\n"
      "(`jaxpruner records FILE` prints it), and a cell of it is compared bit\n"
      "for bit by `jaxpruner reproduce FILE CELL`.",
    ],
    seconds,
    [info for run in runs for info in run.all_infos],
  )


if __name__ == "__main__":
  main()
