"""Fill in the axes that a question needs, and show its answer."""

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpruner import plot
from jaxpruner.compare import questions, run_folder, settings, tasks
from jaxpruner.compare.questions import base


def with_axes(values: Mapping[str, Any]) -> dict[str, Any]:
  """Return settings with the axes of their question, where none are given.

  Args:
    values: what the user gave, by the names of `ComparisonSettings`.

  Returns:
    The settings; without a question, a copy.

  Raises:
    ValueError: the question or the task is unknown, or they do not fit.

  Example:
    >>> asked = with_axes({"question": "structure", "sparsity": (0.5,)})
    >>> asked["sparsity"], asked["type"]
    ((0.5,), ('unstructured', '2:4', '8x8', 'channels'))
  """
  result = dict(values)
  if not result.get("question"):
    return result
  question = questions.QUESTIONS.find(result["question"])
  options = dict(result.get("options") or {})
  single = {k: v for k, v in options.items() if not isinstance(v, list | tuple)}
  task = tasks.make_task(result.get("task") or "digits", single)
  for name, value in question.axes(task).items():
    if name == "options":
      result["options"] = {**value, **options}
    elif name == "type" and not result.get(name):
      result[name] = _possible(value, result.get("sparsity") or ())
    elif not result.get(name):
      result[name] = value
  return result


def _possible(
  types: Sequence[str], sparsity: float | Sequence[float]
) -> tuple[str, ...]:
  """Leave out types that dictate a sparsity which the user did not give."""
  given = (sparsity,) if isinstance(sparsity, int | float) else tuple(sparsity)
  return tuple(
    kind
    for kind in types
    if not given or settings.type_sparsity(kind) in (None, *given)
  )


@dataclasses.dataclass(frozen=True)
class Answer:
  """The answer of a run to its question: words, tables and pictures.

  Attributes:
    question: the question.
    found: the results of the run.
  """

  question: base.Question
  found: base.Findings

  @property
  def words(self) -> list[str]:
    """The sentences of the verdict."""
    return self.question.verdict(self.found)

  def figures(self) -> dict[str, Any]:
    """Draw the pictures; return name -> figure."""
    with plot.styled():
      drawn = self.question.pictures(self.found)
    return {name: figure for name, figure in drawn.items() if figure}


def answer_of(path: str) -> Answer | None:
  """Return the answer of a run, or None if it has no question.

  A question that is not registered is left out: a folder imports nothing.

  Args:
    path: the run folder.

  Returns:
    The answer.
  """
  name = run_folder.read_run(path).settings.get("question", "")
  if name not in questions.QUESTIONS:
    return None
  return Answer(questions.QUESTIONS.find(name), base.findings(path))


def as_html(answer: Answer, pictures: Mapping[str, str]) -> str:
  """Return the section of a report.

  Args:
    answer: the answer.
    pictures: name -> the drawing as HTML.

  Returns:
    HTML; all text is escaped.
  """
  escape = html.escape
  parts = [f"<h2>{escape(answer.question.asks)}</h2><ul class='verdict'>"]
  parts += [f"<li>{escape(sentence)}</li>" for sentence in answer.words]
  parts.append("</ul>")
  parts += pictures.values()
  for table in answer.question.tables(answer.found):
    head = "".join(f"<th>{escape(text)}</th>" for text in table.head)
    lines = "".join(
      f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in line)}</tr>"
      for line in table.lines
    )
    parts.append(
      f"<p class='meta'>{escape(table.title)}</p><div class='scroll'><table>"
      f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )
  return "".join(parts)
