"""A law of scale of our own: loss from sparsity, weights and data.

    python benchmarks/scaling_law.py [--runs FOLDER]

trains byte-level transformers on speeches over three widths, four sparsities
(dense is one) and three lengths, fits the joint law of `jaxpruner.scaling` to
them, predicts trainings that are wider and longer than all of these, and writes
`docs/results/scaling_law.md`, its picture and its records. About 10 minutes of
one core alone; stop it and call it again, and it continues. With `--records` it
trains nothing, and fits the published records again. The same in commands::

    cd benchmarks
    jaxpruner compare --task speeches:Speeches --algorithms magnitude \\
      --sparsity 0.5,0.75,0.875 --seeds 1 --set width=16,32,64 \\
      --set steps=300,600,1200 --out runs/speeches-law
    jaxpruner compare --task speeches:Speeches --algorithms magnitude \\
      --sparsity 0.75 --seeds 1 --set width=96 --set steps=1800 \\
      --out runs/speeches-larger
    jaxpruner fit runs/speeches-law runs/speeches-larger --hold-out width=96
"""

import argparse
import pathlib
import sys
from typing import Any

import numpy as np
import page

from jaxpruner import scaling
from jaxpruner.compare import fit_command, from_python, record_files

TASK = "speeches:Speeches"
RUNS: dict[str, dict[str, Any]] = {
  "speeches-law": {
    "sparsity": (0.5, 0.75, 0.875),
    "options": {"width": (16, 32, 64), "steps": (300, 600, 1200)},
  },
  "speeches-larger": {
    "sparsity": (0.75,),
    "options": {"width": (96,), "steps": (1800,)},
  },
}


def train(folder: pathlib.Path, records: pathlib.Path) -> None:
  """Train what is missing, and publish the records."""
  sys.path.insert(0, str(pathlib.Path(__file__).parent))
  for name, settings in RUNS.items():
    from_python.run(
      TASK,
      algorithms=["magnitude"],
      seeds=1,
      out=str(folder / name),
      jobs=1,
      **settings,
    )
    found = record_files.load(str(folder / name))
    record_files.save(found, str(records / f"{name}.jsonl"))


def gap(fit: scaling.Fit, training: fit_command.Training) -> float:
  """Return the relative error of a prediction."""
  return fit.predict(*training[1:4]).loss / training.loss - 1


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs"))
  parser.add_argument("--records", action="store_true")
  parser.add_argument("--resamples", type=int, default=200)
  args = parser.parse_args()
  records = page.RESULTS / "records"
  if not args.records:
    train(args.runs, records)
  files = [str(records / f"{name}.jsonl") for name in RUNS]
  with record_files.as_folders(files) as folders:
    inside, outside = (fit_command.trainings(f, "magnitude") for f in folders)
  columns = zip(*(t[1:] for t in inside), strict=True)
  fit = scaling.fit(scaling.Points(*columns), resamples=args.resamples)
  picture = page.RESULTS / "scaling_law.png"
  fit_command.draw(fit, inside, outside, picture)
  seconds = sum(
    record.seconds
    for file in files
    for record in record_files.read(file).records.values()
  )
  worst = max(abs(gap(fit, t)) for t in outside)
  held = "held out" if worst <= 0.03 else "missed"
  intro = (
    f"{len(inside)} trainings of byte-level transformers on speeches: widths "
    "16, 32 and 64;\ndense and 50, 75 and 87.5 % of magnitude pruning; 300, "
    "600 and 1,200 steps of 16 × 64\nbytes, one seed each. The larger ones, "
    "width 96 and 1,800 steps, were not fitted:\nthe law's largest error on "
    f"them is {worst:.1%} ({held} at 3 %).\n\n"
    "![The law](scaling_law.png)\n\n"
    "```text\n"
    + "\n".join(fit_command.describe(fit, inside, outside))
    + "\n```"
  )
  sizes = sorted({round(t.weights / (1 - t.sparsity)) for t in inside})
  lengths = sorted({t.data for t in inside})
  shown = page.table(
    ["prunable weights", "sparsity", *(f"{d:,.0f} examples" for d in lengths)],
    [
      [f"{n:,}", f"{s:.1%}", *(_loss(inside, n, s, d) for d in lengths)]
      for n in sizes
      for s in sorted({round(t.sparsity, 3) for t in inside})
    ],
  )
  raw = ", ".join(f"[{name}](records/{name}.jsonl)" for name in RUNS)
  notes = (
    f"Bits per byte on held-out speeches. Records of every training: {raw}."
  )
  page.write(
    "scaling_law",
    "A law of scale on speeches",
    [intro, shown, notes],
    seconds,
  )


def _loss(
  inside: list[fit_command.Training], size: int, sparsity: float, data: float
) -> str:
  near = [
    t.loss
    for t in inside
    if round(t.weights / (1 - t.sparsity)) == size
    and round(t.sparsity, 3) == sparsity
    and t.data == data
  ]
  return f"{np.mean(near):.3f}" if near else "–"


if __name__ == "__main__":
  main()
