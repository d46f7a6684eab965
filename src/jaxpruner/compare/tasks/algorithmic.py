"""Addition and copying, with problems longer than those of the training.

Data: generated. `addition` adds two numbers of 1 to 4 digits, least
significant digit first; `copy` repeats 1 to 8 letters. The metric is the exact
match on problems of these lengths that were not trained on; `longer` is the
exact match on problems two tokens (`addition`: one digit) longer.
Model: 2 pre-norm blocks of width 64 with 4 heads, 0.1 M weights; ERK,
embeddings dense.
Command: `jaxpruner compare --task addition --question limits`.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from jaxpruner.compare.tasks import sequences
from jaxpruner.compare.tasks.sequences import END, EQUALS

TRAIN, TEST = 40_000, 1000
FIRST = 3  # the token of the digit 0, or of the letter a


@dataclasses.dataclass(frozen=True)
class Addition(sequences.Sequences):
  """Addition of two numbers, with a small transformer."""

  digits: int = 4
  name: ClassVar[str] = "addition"

  @property
  def vocabulary(self) -> int:
    return FIRST + 11  # ten digits and the plus sign

  @property
  def context(self) -> int:
    longest = self.digits + 1
    return 3 * longest + 4  # two numbers, the sum, and three signs

  def tokens(self) -> dict[str, list[list[int]]]:
    if self.digits < 2:
      raise ValueError(
        f"digits={self.digits}: need at least 2; there are few shorter sums"
      )
    rng = np.random.default_rng(0)
    kept: dict[tuple[int, int], None] = {}
    while len(kept) < TEST:
      kept[_pair(rng, int(rng.integers(1, self.digits + 1)))] = None
    train = []
    while len(train) < TRAIN:
      pair = _pair(rng, int(rng.integers(1, self.digits + 1)))
      # Short problems are few: they are all in the training.
      if pair not in kept or max(pair) < 100:
        train.append(problem(*pair))
    longer = [_pair(rng, self.digits + 1) for _ in range(TEST)]
    return {
      "train": train,
      "test": [problem(*pair) for pair in kept],
      "longer": [problem(*pair) for pair in longer],
    }


def _pair(rng: np.random.Generator, digits: int) -> tuple[int, int]:
  low = 10 ** (digits - 1) if digits > 1 else 0
  one, two = rng.integers(low, 10**digits, 2)
  return int(one), int(two)


def problem(one: int, two: int) -> list[int]:
  """Return the tokens of `one + two = sum`, least significant digit first.

  Args:
    one: a number.
    two: a number.

  Returns:
    The tokens.

  Example:
    >>> problem(12, 9) == [5, 4, 13, 12, EQUALS, 4, 5, END]
    True
  """
  spell = lambda number: [FIRST + int(digit) for digit in str(number)[::-1]]
  plus = [FIRST + 10]
  return [*spell(one), *plus, *spell(two), EQUALS, *spell(one + two), END]


@dataclasses.dataclass(frozen=True)
class Copy(sequences.Sequences):
  """Copying of letters, with a small transformer."""

  letters: int = 8
  steps: int = 1500
  name: ClassVar[str] = "copy"

  @property
  def vocabulary(self) -> int:
    return FIRST + 26

  @property
  def context(self) -> int:
    return 2 * (self.letters + 2) + 2

  def tokens(self) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng(0)

    def made(count: int, low: int, high: int) -> list[list[int]]:
      rows = []
      for length in rng.integers(low, high + 1, count):
        word = rng.integers(FIRST, FIRST + 26, length).tolist()
        rows.append([*word, EQUALS, *word, END])
      return rows

    test = made(TEST, 3, self.letters)
    held = {tuple(row) for row in test}
    train = [r for r in made(TRAIN, 1, self.letters) if tuple(r) not in held]
    beyond = self.letters + 2
    return {"train": train, "test": test, "longer": made(TEST, beyond, beyond)}
