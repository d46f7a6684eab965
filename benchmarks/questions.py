"""The questions of the handbook, answered on Fashion-MNIST.

    python benchmarks/questions.py [QUESTION …] [--task NAME] [--runs FOLDER]

trains the comparisons of `small-dense`, `structure`, `tickets` and `robustness`
(or those that are named), three seeds each, and writes the verdicts, tables and
pictures to `docs/results/questions.md`. Stop it and call it again, and it
continues. The page contains every run that is finished in the folder.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import page

from jaxpruner.compare import (
  from_python,
  questions,
  record_files,
  run_folder,
)
from jaxpruner.compare.questions import asking

# Shorter trainings of a narrower network than the task's own: each question
# took 20 minutes on two cores that six other jobs shared.
SHORT: dict[str, Any] = {"width": 8, "steps": 300}
SETTINGS: dict[str, dict[str, Any]] = {
  "small-dense": {
    "options": {"width": (2, 4, 8), "steps": 300},
    "sparsity": (0.8, 0.95),
  },
  "structure": {"options": SHORT},
  "training-cost": {"options": SHORT, "sparsity": 0.9},
  "tickets": {"options": SHORT | {"steps": 150}},
  "robustness": {"options": SHORT},
  "limits": {"options": SHORT, "sparsity": (0.8, 0.9, 0.95, 0.98)},
}
# The same question in other domains: language, federated, reinforcement.
OTHERS: dict[str, Any] = {"options": {"steps": 200}, "sparsity": (0.5, 0.8)}
NOTE = (
  "These are short trainings of a narrow network, chosen so that a question "
  "takes minutes on two cores: dense is some points below its plateau, and "
  "gradual pruning had 150 steps. The answers hold for this budget; at high "
  "sparsity it favours networks that start small. Latency and step time are "
  "of a machine with other load."
)
DEFAULT = ("small-dense", "structure", "tickets", "robustness")


def _seconds(path: pathlib.Path) -> float:
  """Return the time of all cells of a run; two ran at a time."""
  found = record_files.load(str(path)).records.values()
  return sum(record.seconds for record in found) / 2


def _command(settings: Mapping[str, Any]) -> str:
  """Return the command of a run, without places of this machine."""
  text = f"jaxpruner compare --question {settings['question']} --task "
  text += settings["task"]
  for name, value in settings["options"].items():
    several = value if isinstance(value, list | tuple) else [value]
    text += f" --set {name}={','.join(map(str, several))}"
  return text + f" --sparsity {','.join(map(str, settings['sparsity']))}"


def section(path: pathlib.Path) -> str:
  """Return the answer of a run in Markdown; copy its pictures."""
  answer = asking.answer_of(str(path))
  if answer is None:
    return ""
  info = run_folder.read_run(path)
  records = page.RESULTS / "records" / f"question-{path.name}.jsonl"
  found = record_files.load(str(path))
  # The command that was typed names a folder of one machine.
  plain = dataclasses.replace(found.info, command=_command(info.settings))
  record_files.save(dataclasses.replace(found, info=plain), str(records))
  parts = [
    f"## {answer.question.asks}",
    f"`{_command(info.settings)}`, {info.settings['seeds']} seeds; "
    f"{_seconds(path) / 60:.0f} minutes in two processes. All numbers: "
    f"[records](records/{records.name}).",
    "\n".join(f"- {sentence}" for sentence in answer.words),
  ]
  for table in answer.question.tables(answer.found):
    parts.append(f"{table.title}:\n\n" + page.table(table.head, table.lines))
  task = info.settings["task"]
  for name, figure in answer.figures().items():
    picture = f"question-{name if task == 'fashion' else f'{task}-{name}'}.png"
    figure.savefig(page.RESULTS / picture, dpi=100)
    parts.append(f"![{name}]({picture})\n\n{answer.question.captions[name]}")
  return "\n\n".join(parts)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("questions", nargs="*", metavar="QUESTION")
  parser.add_argument("--task", default="fashion")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--runs", default="runs/questions")
  parser.add_argument(
    "--page", action="store_true", help="write the page, train nothing"
  )
  args = parser.parse_args()
  names = () if args.page else args.questions or DEFAULT
  for name in names:
    questions.QUESTIONS.find(name)  # refuses an unknown one before the others
  for name in names:
    from_python.run(
      args.task,
      question=name,
      seeds=args.seeds,
      out=f"{args.runs}/{args.task}-{name}",
      **(SETTINGS.get(name, {}) if args.task == "fashion" else OTHERS),
    )
  page.RESULTS.mkdir(parents=True, exist_ok=True)
  runs = sorted(pathlib.Path(args.runs).glob("*/report.html"))
  sections = [section(report.parent) for report in runs]
  # The time of the trainings, not of writing the page: runs are resumed.
  seconds = sum(_seconds(report.parent) for report in runs)
  sections = [NOTE, *(s for s in sections if s)]
  page.write("questions", "Questions", sections, seconds)


if __name__ == "__main__":
  main()
