"""Arithmetic word problems, answered by an equation in prefix form.

Data: generated from templates. Numbers are masked as N0, N1, N2 in the order of
the text, as is usual for this task; the answer is such as `- N0 N1`. Every
template comes in variations (after Patel et al., "Are NLP Models really able to
Solve Simple Math Word Problems?", 2021): another thing is asked, a number that
does not matter is added, sentences change places, the question comes first.
Held out: one variation of every question, if no training problem has its form;
the exact match on these is `varied`. The metric is the exact match on new
fillings of trained variations.
Model: 2 pre-norm blocks of width 64 with 4 heads; ERK, embeddings dense.
Command: `jaxpruner compare --task word-problems --question limits`.
Number: dense 88.1 %, `varied` 74.6 % (one seed).
"""

import dataclasses
import functools
import itertools
from typing import ClassVar, NamedTuple

import numpy as np

from jaxpruner.compare.tasks import sequences
from jaxpruner.compare.tasks.sequences import END

NAMES = "anna ben carla dan eva finn gina hugo ida jon kim lea".split()
THINGS = "apples books cards coins eggs pens shells stamps stones toys".split()
PLACES = "box bag basket drawer jar".split()
TRAIN, TEST = 20_000, 1000


class Template(NamedTuple):
  """Sentences with facts, and questions with their equations.

  Slots: {a}, {b} people, {x}, {y} things, {p} a place; # is a number. An
  equation names the numbers by their place among the facts.
  """

  facts: tuple[str, ...]
  asks: tuple[tuple[str, str], ...]


TEMPLATES = (
  Template(
    ("{a} has # {x} .", "{b} gives {a} # more {x} ."),
    (
      ("how many {x} does {a} have now ?", "+ 0 1"),
      ("how many {x} did {a} have at first ?", "0"),
    ),
  ),
  Template(
    ("{a} has # {x} .", "{a} gives # of them to {b} ."),
    (
      ("how many {x} does {a} have left ?", "- 0 1"),
      ("how many {x} did {b} get ?", "1"),
    ),
  ),
  Template(
    ("{a} has # {p} .", "each {p} holds # {x} ."),
    (
      ("how many {x} does {a} have ?", "* 0 1"),
      ("how many {x} are in one {p} ?", "1"),
    ),
  ),
  Template(
    ("{a} has # {x} .", "{a} puts them into # equal rows ."),
    (
      ("how many {x} are in a row ?", "/ 0 1"),
      ("how many rows are there ?", "1"),
    ),
  ),
  Template(
    ("{a} has # {x} .", "{b} has # {x} ."),
    (
      ("how many {x} do they have together ?", "+ 0 1"),
      ("how many more {x} does {a} have than {b} ?", "- 0 1"),
      ("how many more {x} does {b} have than {a} ?", "- 1 0"),
    ),
  ),
  Template(
    ("{a} has # {p} with # {x} each .", "{a} loses # {x} ."),
    (
      ("how many {x} are left ?", "- * 0 1 2"),
      ("how many {x} were there at first ?", "* 0 1"),
    ),
  ),
  Template(
    ("{a} buys # {x} and # {y} .", "{b} buys # {x} ."),
    (
      ("how many {x} do they have together ?", "+ 0 2"),
      ("how many things does {a} have ?", "+ 0 1"),
      ("how many things do they have together ?", "+ + 0 1 2"),
    ),
  ),
  Template(
    ("{a} and {b} share # {x} equally .", "then {a} finds # more {x} ."),
    (
      ("how many {x} does {a} have ?", "+ / 0 2 1"),
      ("how many {x} does {b} have ?", "/ 0 2"),
    ),
  ),
)
# Of a text: facts in order or swapped, the question last or first, with a
# number that does not matter or without.
_SWITCH = (False, True)
VARIATIONS = tuple(itertools.product(_SWITCH, _SWITCH, _SWITCH))


@functools.cache
def words() -> tuple[str, ...]:
  """Return the vocabulary; the first three tokens are signs."""
  texts = [s for t in TEMPLATES for s in (*t.facts, *(q for q, _ in t.asks))]
  plain = {w for text in texts for w in text.split() if not w.startswith("{")}
  plain |= {*NAMES, *THINGS, *PLACES, *"there are also on the table .".split()}
  numbers = ["N0", "N1", "N2", "N3", "2"]
  return ("", "=", "end", *"+-*/", *numbers, *sorted(plain - {"#", "2"}))


def problem(
  template: Template,
  asked: int,
  variation: tuple[bool, bool, bool],
  rng: np.random.Generator,
) -> tuple[list[str], list[str]]:
  """Return the words of a problem, and its equation in prefix form.

  Args:
    template: the template.
    asked: the number of its question.
    variation: (swapped facts, question first, a further number).
    rng: chooses what fills the slots.

  Returns:
    The words with numbers masked, and the equation.

  Example:
    >>> rng = np.random.default_rng(0)
    >>> text, equation = problem(TEMPLATES[1], 0, (True, False, False), rng)
    >>> " ".join(equation)
    '- N1 N0'
  """
  swapped, first, extra = variation
  a, b = rng.choice(NAMES, 2, replace=False)
  x, y = rng.choice(THINGS, 2, replace=False)
  filling = {"a": a, "b": b, "x": x, "y": y, "p": rng.choice(PLACES)}
  question, equation = template.asks[asked]
  facts = [fact.format(**filling) for fact in template.facts]
  counts = [fact.count("#") for fact in facts]
  starts = [sum(counts[:i]) for i in range(len(facts))]
  parts = list(zip(starts, counts, facts, strict=True))
  if swapped:
    parts = parts[::-1]
  if extra:
    other = rng.choice([thing for thing in THINGS if thing not in (x, y)])
    parts.insert(1, (-1, 1, f"there are also # {other} on the table ."))
  # Numbers are named in the order of the text; the equation follows.
  places: dict[int, int] = {}
  text: list[str] = []
  seen = 0
  for start, count, sentence in parts:
    for offset in range(count):
      if start >= 0:
        places[start + offset] = seen + offset
    for word in sentence.split():
      text.append(f"N{seen}" if word == "#" else word)
      seen += word == "#"
  asks = question.format(**filling).split()
  text = [*asks, *text] if first else [*text, *asks]
  known = sum(counts)
  named = [
    f"N{places[int(sign)]}" if sign.isdigit() and int(sign) < known else sign
    for sign in equation.split()
  ]
  return text, named


def form(text: list[str]) -> tuple[str, ...]:
  """Return a text with fillings named by the order of their appearance.

  Args:
    text: the words of a problem.

  Returns:
    The same for two texts that differ in their fillings only.

  Example:
    >>> form("anna has N0 eggs . ben gives anna N1 more eggs .".split())[:4]
    ('name0', 'has', 'N0', 'thing0')
  """
  seen: dict[str, dict[str, str]] = {"name": {}, "thing": {}, "place": {}}
  kinds = {"name": NAMES, "thing": THINGS, "place": PLACES}
  found = []
  for word in text:
    for kind, members in kinds.items():
      if word in members:
        word = seen[kind].setdefault(word, f"{kind}{len(seen[kind])}")
        break
    found.append(word)
  return tuple(found)


def _form(kind: tuple[int, int, tuple[bool, bool, bool]]) -> tuple[str, ...]:
  place, asked, variation = kind
  rng = np.random.default_rng(0)
  return form(problem(TEMPLATES[place], asked, variation, rng)[0])


@dataclasses.dataclass(frozen=True)
class WordProblems(sequences.Sequences):
  """Word problems to prefix equations, with a small transformer."""

  name: ClassVar[str] = "word-problems"

  @property
  def vocabulary(self) -> int:
    return len(words())

  @property
  def context(self) -> int:
    return 48

  def tokens(self) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng(0)
    number = {word: i for i, word in enumerate(words())}
    kinds = [
      (t, asked, variation)
      for t, template in enumerate(TEMPLATES)
      for asked in range(len(template.asks))
      for variation in VARIATIONS
    ]
    # Every question loses one variation to the test, each another one.
    held = {k for i, k in enumerate(kinds) if i % 8 == (3 * (i // 8)) % 8}
    known = [kind for kind in kinds if kind not in held]
    # Two facts of one form may change places and stay the same text.
    seen = {_form(kind) for kind in known}
    held = {kind for kind in held if _form(kind) not in seen}

    def rows(kinds: list, count: int) -> list[list[int]]:
      found = []
      for i in rng.integers(0, len(kinds), count):
        t, asked, variation = kinds[i]
        text, equation = problem(TEMPLATES[t], asked, variation, rng)
        spelled = [number[word] for word in (*text, "=", *equation)]
        found.append([*spelled, END])
      return found

    return {
      "train": rows(known, TRAIN),
      "test": rows(known, TEST),
      "varied": rows(sorted(held), TEST),
    }
