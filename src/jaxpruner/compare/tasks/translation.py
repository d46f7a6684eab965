"""Names translated from English to French, letter by letter.

Data: names of languages, countries and regions from the translation catalogues
in PyPI's `pycountry`: some 4,500 pairs of at most 28 letters, 500 of them held
out. Endings, articles and the order of words change by rule, names by habit.
The metric is the share of right letters, each with the right letters before it;
`exact match` is the share of names that are right as a whole.
Model: 2 pre-norm blocks of width 64 with 4 heads; ERK, embeddings dense.
Command: `jaxpruner compare --task translation --question limits`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import datasets
from jaxpruner.compare.tasks import sequences
from jaxpruner.compare.tasks.sequences import END, EQUALS

LONGEST = 28  # letters of a name
TEST = 500
FIRST, LETTERS = 4, 252  # the first letter's token; rarer letters are token 3


@dataclasses.dataclass(frozen=True)
class Translation(sequences.Sequences):
  """Names from English to French, with a small transformer."""

  name: ClassVar[str] = "translation"
  metric: ClassVar[str] = "letters"

  @property
  def vocabulary(self) -> int:
    return FIRST + LETTERS

  @property
  def context(self) -> int:
    return 2 * LONGEST + 2  # two names and two signs

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    rows = spelled(datasets.load_names(folder))
    sets = {"train": rows[TEST:], "test": rows[:TEST]}
    return {k: sequences.padded(v, self.context) for k, v in sets.items()}

  def evaluate(self, params: Any, data: Any) -> dict[str, jax.Array]:
    """Return the shares of right letters and of right names, in percent."""
    rows = data["test"].astype(jnp.int32)
    guess = self.apply(params, rows[:, :-1]).argmax(-1)
    counted = sequences.answers(rows)[:, 1:]
    right = (guess == rows[:, 1:]) & counted
    whole = (right == counted).all(-1)
    return {
      "letters": 100 * right.sum() / counted.sum(),
      "exact match": 100 * whole.mean(),
    }


def spelled(pairs: list[tuple[str, str]]) -> list[list[int]]:
  """Return pairs of names as rows of tokens, in a fixed random order.

  Args:
    pairs: (name, its translation); longer ones than `LONGEST` are left out.

  Returns:
    Rows: the name, `=`, the translation, the end.

  Example:
    >>> spelled([("ab", "b")])
    [[5, 4, 1, 4, 2]]
  """
  short = [p for p in pairs if max(map(len, p)) <= LONGEST]
  counts: dict[str, int] = {}
  for letter in "".join(one + other for one, other in short):
    counts[letter] = counts.get(letter, 0) + 1
  common = sorted(counts, key=lambda letter: (-counts[letter], letter))
  number = {letter: FIRST + i for i, letter in enumerate(common[:LETTERS])}
  spell = lambda text: [number.get(letter, FIRST - 1) for letter in text]
  order = np.random.default_rng(0).permutation(len(short))
  return [
    [*spell(short[i][0]), EQUALS, *spell(short[i][1]), END] for i in order
  ]
