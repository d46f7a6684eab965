"""The questions of the handbook, answered on Fashion-MNIST.

    python benchmarks/questions.py [QUESTION …] [--task NAME] [--runs FOLDER]

trains the comparisons of `small-dense`, `structure`, `tickets` and `robustness`
(or those that are named), three seeds each, and writes the verdicts, tables and
pictures to `docs/results/questions.md`. Stop it and call it again, and it
continues. The page contains every run that is finished in the folder, and those
of which the records are published.
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
from jaxpruner.compare.columns import percent
from jaxpruner.compare.questions import asking, structure
from jaxpruner.compare.questions.base import signed

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
  "of a machine with other load; those of speeches (`sotu`) and of tickets, of "
  "the machine alone. The machine above wrote this page; runs of 2026-11-18 "
  "are of a Xeon at 2.50 GHz, those of 2026-11-19 of an AMD EPYC, both with 2 "
  "cores. Federated and reinforcement learning are shorter still: 80 rounds of "
  "4 clients; and 1,000 steps, after which the dense agent has a return of 1.6 "
  "and the seeds differ more than the rows."
)
DEFAULT = ("small-dense", "structure", "tickets", "robustness")


ALONE = " --jobs 1"  # one process; two otherwise, on machines of two cores


def _processes(found: record_files.Records) -> int:
  return 1 if ALONE in found.info.command else 2


def _seconds(path: pathlib.Path) -> float:
  """Return the time that the cells of a run took."""
  found = record_files.load(str(path))
  spent = sum(record.seconds for record in found.records.values())
  return spent / _processes(found)


def _command(found: record_files.Records) -> str:
  """Return the command of a run, without places of this machine."""
  settings: Mapping[str, Any] = found.info.settings
  text = f"jaxpruner compare --question {settings['question']} --task "
  text += settings["task"] + (ALONE if _processes(found) == 1 else "")
  asked = asking.with_axes(
    {key: settings[key] for key in ("question", "task", "options")}
  )
  if tuple(settings["algorithms"]) != tuple(asked["algorithms"]):
    text += f" --algorithms {','.join(settings['algorithms'])}"
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
  command, processes = _command(found), _processes(found)
  plain = dataclasses.replace(found.info, command=command)
  if (path / "report.html").exists():  # trained here, not restored
    record_files.save(dataclasses.replace(found, info=plain), str(records))
  parts = [
    f"## {answer.question.asks}",
    f"`{command}`, {info.settings['seeds']} seeds, {info.started[:10]}; "
    f"{_seconds(path) / 60:.0f} minutes in "
    f"{'two processes' if processes == 2 else 'one process'}. "
    f"All numbers: [records](records/{records.name}).",
    "\n".join(f"- {sentence}" for sentence in answer.words),
  ]
  for table in answer.question.tables(answer.found):
    parts.append(f"{table.title}:\n\n" + page.table(table.head, table.lines))
  task = info.settings["task"]
  for name, figure in answer.figures().items():
    own = path.name.removeprefix("fashion-" if task == "fashion" else "")
    picture = f"question-{own}.png"
    figure.savefig(page.RESULTS / picture, dpi=100)
    parts.append(f"![{name}]({picture})\n\n{answer.question.captions[name]}")
  return "\n\n".join(parts)


DOMAINS = {
  "fashion": "vision",
  "sotu": "language",
  "fed-fashion": "federated",
  "dqn-minatar": "reinforcement",
}


def domains(paths: list[pathlib.Path], sparsity: float = 0.5) -> str:
  """Return one table of structures in all domains, at one sparsity."""
  lines = []
  kinds = ("unstructured", "2:4", "8x8", "channels")
  for path in paths:
    answer = asking.answer_of(str(path))
    task = run_folder.read_run(path).settings["task"]
    if answer is None or path.name != f"{task}-structure":
      continue
    found = answer.found
    mine = {
      structure.structure_of(cell): cell
      for cell in found.cells
      if cell.sparsity == sparsity and cell.name != "small_dense"
    }
    texts = []
    for kind in kinds:
      cell = mine.get(kind)
      gain = found.better(cell, cell.dense) if cell else None
      ratio = found.latency.get(cell.id) if cell else None
      place = f"; {ratio:.2f} ×" if ratio else ""
      texts.append(f"{signed(gain)}{place}" if gain else "–")
    sign = "↑" if found.higher_is_better else "↓"
    domain = f"{DOMAINS.get(task, task)}: `{task}`, {found.metric} {sign}"
    lines.append([domain, *texts])
  if len(lines) < 2:
    return ""
  return (
    f"## Structures in {len(lines)} domains, at {percent(sparsity)}\n\n"
    "The gain over dense, paired by seed, positive is better; and the measured "
    "latency of the network relative to dense, through the library's kernels. "
    "The first and the output layer stay dense in structured rows.\n\n"
    + page.table(["domain", *kinds], lines)
  )


def published(folder: pathlib.Path) -> None:
  """Restore the runs whose records are published, where there are none."""
  for file in sorted((page.RESULTS / "records").glob("question-*.jsonl")):
    target = folder / file.stem.removeprefix("question-")
    if not (target / "run.json").exists():
      record_files.restore(record_files.load(str(file)), str(target))


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
  runs = pathlib.Path(args.runs)
  published(runs)
  paths = sorted(file.parent for file in runs.glob("*/run.json"))
  sections = [domains(paths), *map(section, paths)]
  # The time of the trainings, not of writing the page: runs are resumed.
  seconds = sum(map(_seconds, paths))
  sections = [NOTE, *(s for s in sections if s)]
  page.write("questions", "Questions", sections, seconds)


if __name__ == "__main__":
  main()
