"""A law of scale of our own: loss from sparsity, weights and data.

    python benchmarks/scaling_law.py [--plan PLAN] [--runs FOLDER] [--jobs N]

trains byte-level transformers on speeches over three widths, four sparsities
(dense is one) and three lengths, fits the joint law of `jaxpruner.scaling` to
them, predicts trainings that are wider and longer than all of these, and writes
`docs/results/scaling_law.md`, its picture and its records. The plans differ in
widths, lengths and learning rate: `scaled`, whose rate falls with the width,
takes about 6 minutes of one core alone, `short`, 10, and `long`, 20. Stop it
and call it again, and it continues. With `--records` it trains nothing, and
fits the published records again. The plan `short` in commands::

    cd benchmarks
    jaxpruner compare --task speeches:Speeches --algorithms magnitude \\
      --sparsity 0.5,0.75,0.875 --seeds 1 --set width=16,32,64 \\
      --set steps=300,600,1200 --out runs/speeches-law
    jaxpruner compare --task speeches:Speeches --algorithms magnitude \\
      --sparsity 0.75 --seeds 1 --set width=96 --set steps=1800 \\
      --out runs/speeches-larger
    jaxpruner fit runs/speeches-law runs/speeches-larger --hold-out larger
"""

import argparse
import pathlib
from typing import Any, NamedTuple

import numpy as np
import page
import scaled_speeches
import speeches

from jaxpruner import scaling
from jaxpruner.compare import fit_command, from_python, record_files


class Plan(NamedTuple):
  """The trainings of a law, and the larger ones that it is asked for.

  Attributes:
    name: of the files.
    widths: of the networks that are fitted.
    steps: their lengths.
    larger: the width that is predicted.
    longer: its length.
    options: of the task, for all of them.
    kind: the task, in a module of its own name.
  """

  name: str
  widths: tuple[int, ...]
  steps: tuple[int, ...]
  larger: int
  longer: int
  options: dict[str, Any]
  kind: type[speeches.Speeches] = speeches.Speeches

  @property
  def names(self) -> list[str]:
    return [f"{self.name}-law", f"{self.name}-larger"]

  @property
  def task(self) -> speeches.Speeches:
    return self.kind(**self.options)

  def settings(self) -> list[dict[str, Any]]:
    """Return the comparisons to fit, and to predict."""
    some = self.options | {"width": self.widths, "steps": self.steps}
    more = self.options | {"width": self.larger, "steps": self.longer}
    return [
      {"sparsity": (0.5, 0.75, 0.875), "options": some},
      {"sparsity": (0.75,), "options": more},
    ]


PLANS = {
  "short": Plan("speeches", (16, 32, 64), (300, 600, 1200), 96, 1800, {}),
  "long": Plan(
    "speeches-long",
    (16, 32, 64),
    (1000, 2000, 4000),
    96,
    6000,
    {"learning_rate": 5e-3},
  ),
  "scaled": Plan(
    "speeches-scaled",
    (12, 24, 48),
    (400, 800, 1600),
    64,
    2400,
    {},
    scaled_speeches.ScaledSpeeches,
  ),
}


def train(
  plan: Plan, folder: pathlib.Path, records: pathlib.Path, jobs: int
) -> None:
  """Train what is missing, and publish the records."""
  for name, settings in zip(plan.names, plan.settings(), strict=True):
    from_python.run(
      f"{plan.kind.__module__}:{plan.kind.__name__}",
      algorithms=["magnitude"],
      seeds=1,
      out=str(folder / name),
      jobs=jobs,
      **settings,
    )
    found = record_files.load(str(folder / name))
    record_files.save(found, str(records / f"{name}.jsonl"))


def gap(fit: scaling.Fit, training: fit_command.Training) -> float:
  """Return the relative error of a prediction."""
  return fit_command.predicted(fit, training).loss / training.loss - 1


INTRO = """
{count} trainings of byte-level transformers on State of the Union speeches,
widths {widths}; dense and 50, 75 and 87.5 % of magnitude pruning; {steps}
steps of {batch} × {context} bytes at a learning rate of {rate}; one seed
each. The law was then asked for trainings that it had not seen: width {larger},
{longer} steps, dense and 75 %. They were chosen before anything was fitted. Its
largest error on them is {worst} (on those it was fitted to, the root of the
mean square is {error}).

{verdict}
"""
HOLDS = """
That is within the 3 % that we ask of a law.
"""
MISSES = """
That is beyond the 3 % that we ask of a law, so this is not one to plan with.
"""
# What is known of the trainings of a plan.
KNOWN = {
  "speeches": """
These trainings are too short for it: a network of width 16 still knows little
more than the frequencies of letters (4.37 bits per byte) after 600 steps and
then improves at once, which no sum of powers describes. Neither leaving out the
shortest trainings mends it, nor counting the weights averaged over training:
+10.5 % and +11.2 % for the dense network.
""",
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs"))
  parser.add_argument("--records", action="store_true")
  parser.add_argument("--plan", choices=PLANS, default="short")
  parser.add_argument("--jobs", type=int, default=1)
  parser.add_argument("--resamples", type=int, default=200)
  args = parser.parse_args()
  records = page.RESULTS / "records"
  plan = PLANS[args.plan]
  if not args.records:
    train(plan, args.runs, records, args.jobs)
  files = [str(records / f"{name}.jsonl") for name in plan.names]
  with record_files.as_folders(files) as folders:
    inside, outside = (fit_command.trainings(f, "magnitude") for f in folders)
  fit = fit_command.fitted(inside, resamples=args.resamples)
  picture = page.RESULTS / "scaling_law.png"
  fit_command.draw(fit, inside, outside, picture)
  published = [record_files.read(file) for file in files]
  seconds = sum(r.seconds for one in published for r in one.records.values())
  worst = max(abs(gap(fit, t)) for t in outside)
  intro = INTRO.format(
    count=len(inside),
    steps=", ".join(f"{n:,}" for n in plan.steps),
    widths=", ".join(map(str, plan.widths)),
    larger=plan.larger,
    longer=f"{plan.longer:,}",
    batch=plan.task.batch_size,
    context=plan.task.context,
    rate=plan.task.learning_rate,
    worst=f"{worst:.1%}",
    error=f"{fit.error:.1%}",
    verdict=((HOLDS if worst <= 0.03 else MISSES) + KNOWN.get(plan.name, ""))
    .replace("\n\n", "\n")
    .strip(),
  ).strip()
  lines = "\n".join(fit_command.describe(fit, inside, outside))
  intro += f"\n\n![The law](scaling_law.png)\n\n```text\n{lines}\n```"
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
  raw = ", ".join(f"[{name}](records/{name}.jsonl)" for name in plan.names)
  notes = (
    f"Bits per byte on held-out speeches. Records of every training: {raw}."
  )
  page.write(
    "scaling_law",
    "A law of scale on speeches",
    [intro, shown, notes],
    seconds,
    [one.info for one in published],
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
