"""Questions: a comparison with its own measurements, pictures and verdict.

`jaxpruner compare --question NAME` fills in the axes that the question needs,
measures the trained networks, and puts the answer in words before the table.
Each question is one file with one `Question` object; the table is open.

base        what a question is, what it reads, and the words of a verdict
measuring   run a question's measurements on the trained networks of a run
drawing     curves with intervals, for the questions' pictures
"""

from jaxpruner.api import Registry
from jaxpruner.compare.questions.base import Question as Question

_HERE = "jaxpruner.compare.questions"

QUESTIONS: Registry[Question] = Registry(
  "question",
  "jaxpruner.compare.register_question",
  {
    "small-dense": f"{_HERE}.small_dense:QUESTION",
    "structure": f"{_HERE}.structure:QUESTION",
    "training-cost": f"{_HERE}.training_cost:QUESTION",
    "ensemble": f"{_HERE}.ensemble:QUESTION",
    "tickets": f"{_HERE}.tickets:QUESTION",
    "robustness": f"{_HERE}.robustness:QUESTION",
    "limits": f"{_HERE}.limits:QUESTION",
    "distribution": f"{_HERE}.distribution:QUESTION",
  },
  # A question is known by the function that answers it.
  owner=lambda question: getattr(question, "verdict", question),
)


def register_question(question: Question) -> Question:
  """Add a question to those that `jaxpruner compare --question` knows.

  Args:
    question: the question; a name that is taken is refused.

  Returns:
    The same question.

  Raises:
    ValueError: it is not a `Question`, or its name is taken.

  Example:
    >>> lost = Question(
    ...   name="lost", asks="How much does pruning cost?",
    ...   axes=lambda task: {"algorithms": ("magnitude",)},
    ...   verdict=lambda found: [f"{len(found.cells)} cells were compared."])
    >>> register_question(lost).name
    'lost'
  """
  if not isinstance(question, Question):
    raise ValueError(
      f"question={question!r:.60} must be a jaxpruner.compare.Question"
    )
  QUESTIONS.register(question.name, question)
  return question
