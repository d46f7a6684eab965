"""The questions of the handbook, answered on Fashion-MNIST.

    python benchmarks/questions.py [QUESTION …] [--task NAME] [--runs FOLDER]

trains the comparisons of `small-dense`, `structure`, `tickets` and `robustness`
(or those that are named), three seeds each, and writes the verdicts, tables and
pictures to `docs/results/questions.md`. Stop it and call it again, and it
continues. The page contains every run that is finished in the folder.
"""

import argparse
import pathlib
import shutil
import time
from typing import Any

import page

from jaxpruner.compare import from_python, questions, run_folder
from jaxpruner.compare.questions import asking

# Shorter trainings of a narrower network than the task's own: each question
# took 20 minutes on two cores that six other jobs shared.
SHORT: dict[str, Any] = {"width": 8, "steps": 300}
SETTINGS: dict[str, dict[str, Any]] = {
  "small-dense": {"options": {"steps": 300}, "sparsity": (0.8, 0.9, 0.95)},
  "structure": {"options": SHORT},
  "training-cost": {"options": SHORT, "sparsity": 0.9},
  "tickets": {"options": SHORT | {"steps": 150}},
  "robustness": {"options": SHORT},
  "limits": {"options": SHORT, "sparsity": (0.8, 0.9, 0.95, 0.98)},
}
DEFAULT = ("small-dense", "structure", "tickets", "robustness")


def section(path: pathlib.Path) -> str:
  """Return the answer of a run in Markdown; copy its pictures."""
  answer = asking.answer_of(str(path))
  if answer is None:
    return ""
  info = run_folder.read_run(path)
  parts = [
    f"## {answer.question.asks}",
    f"`jaxpruner compare --question {answer.question.name} --task "
    f"{info.settings['task']}`, {info.settings['seeds']} seeds, "
    f"{info.task['steps']} steps.",
    "\n".join(f"- {sentence}" for sentence in answer.words),
  ]
  for table in answer.question.tables(answer.found):
    parts.append(f"{table.title}:\n\n" + page.table(table.head, table.lines))
  for name, caption in answer.question.captions.items():
    if (path / f"{name}.png").exists():
      shutil.copy(path / f"{name}.png", page.RESULTS / f"question-{name}.png")
      parts.append(f"![{name}](question-{name}.png)\n\n{caption}")
  return "\n\n".join(parts)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("questions", nargs="*", metavar="QUESTION")
  parser.add_argument("--task", default="fashion")
  parser.add_argument("--steps", type=int)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--runs", default="runs/questions")
  args = parser.parse_args()
  began = time.perf_counter()
  for name in args.questions or DEFAULT:
    questions.QUESTIONS.find(name)  # refuses an unknown one before the others
  for name in args.questions or DEFAULT:
    options = dict(SETTINGS.get(name, {}))
    if args.steps:
      options["steps"] = args.steps
    from_python.run(
      args.task,
      question=name,
      seeds=args.seeds,
      options=options,
      out=f"{args.runs}/{args.task}-{name}",
    )
  page.RESULTS.mkdir(parents=True, exist_ok=True)
  runs = sorted(pathlib.Path(args.runs).glob("*/report.html"))
  sections = [section(report.parent) for report in runs]
  seconds = time.perf_counter() - began
  page.write("questions", "Questions", [s for s in sections if s], seconds)


if __name__ == "__main__":
  main()
