"""Generated tasks: their problems are right, and the held-out ones are new."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner.compare import tasks
from jaxpruner.compare.tasks import (
  algorithmic,
  long_tail,
  sequences,
  translation,
)
from jaxpruner.compare.tasks import word_problems as stories


def read(row):
  """Return a row of `addition` as text."""
  signs = "".join(
    {1: "=", 13: "+"}.get(int(t), str(int(t) - 3))
    for t in row
    if t not in (0, 2)
  )
  left, total = signs.split("=")
  one, two = left.split("+")
  return int(one[::-1]), int(two[::-1]), int(total[::-1])


@pytest.mark.parametrize("part", ["train", "test", "longer"])
def test_sums_are_right_and_as_long_as_promised(part):
  task = tasks.make_task("addition", {"digits": 3})
  for row in task.load()[part][:300]:
    one, two, total = read(row)
    assert one + two == total
    assert len(str(one)) == 4 if part == "longer" else one < 1000


def test_long_test_problems_are_not_in_the_training():
  data = tasks.make_task("addition").load()
  seen = {tuple(row) for row in data["train"]}
  large = [row for row in data["test"] if max(read(row)[:2]) >= 100]
  assert large and not any(tuple(row) in seen for row in large)


def test_copies_are_copies():
  data = tasks.make_task("copy", {"letters": 5}).load()
  for row in [*data["test"][:100], *data["longer"][:100]]:
    word, _, rest = bytes(row).partition(bytes([sequences.EQUALS]))
    assert rest.rstrip(b"\0") == word + bytes([sequences.END])


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_problem_spells_its_sum(one, two):
  assert read(algorithmic.problem(one, two)) == (one, two, one + two)


def values_of(text, equation, numbers):
  """Evaluate an equation in prefix form."""
  signs = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
  }
  stack = []
  for sign in reversed(equation):
    if sign in signs:
      stack.append(signs[sign](stack.pop(), stack.pop()))
    else:
      stack.append(numbers[int(sign[1:])] if sign[0] == "N" else float(sign))
  (result,) = stack
  return result


@pytest.mark.parametrize("place", range(len(stories.TEMPLATES)))
def test_a_variation_changes_the_text_and_not_the_answer(place):
  template = stories.TEMPLATES[place]
  facts = {"swapped": 0, "extra": 0}
  for asked in range(len(template.asks)):
    answers = set()
    for variation in stories.VARIATIONS:
      rng = np.random.default_rng(5)
      text, equation = stories.problem(template, asked, variation, rng)
      # The number of each fact, by its place in the plain text.
      swapped, _, extra = variation
      counts = [fact.count("#") for fact in template.facts]
      order = [
        [2.0, 3, 5, 7][sum(counts[:i]) :][:n] for i, n in enumerate(counts)
      ]
      order = order[::-1] if swapped else order
      if extra:
        order.insert(1, [1000.0])
      numbers = [x for part in order for x in part]
      names = [word for word in text if word[0] == "N"]
      assert names == [f"N{i}" for i in range(len(numbers))]
      answers.add(float(values_of(text, equation, numbers)))
      facts["swapped"] += swapped
      facts["extra"] += extra
    assert len(answers) == 1 and max(answers) < 1000
  assert facts["swapped"] and facts["extra"]


def test_held_out_variations_are_in_no_training_problem():
  task = tasks.make_task("word-problems")
  data = task.load()
  words = stories.words()
  assert (words[sequences.EQUALS], words[sequences.END]) == ("=", "end")
  assert max(max(row) for row in data["train"]) < task.vocabulary
  skeleton = lambda row: stories.form([words[t] for t in row if t])
  trained = {skeleton(row) for row in data["train"]}
  varied = {skeleton(row) for row in data["varied"]}
  assert varied and not varied & trained
  assert {skeleton(row) for row in data["test"]} <= trained


def test_an_answer_is_right_if_all_its_tokens_are():
  task = tasks.make_task("addition", {"digits": 2})
  rows = jnp.asarray(task.load()["test"][:20])

  class Oracle(type(task)):
    def apply(self, params, inputs):
      told = jax.nn.one_hot(rows[:, 1:], self.vocabulary)
      return told.at[0, 3:].set(0) if params else told

  with pytest.raises(ValueError, match="at least 2"):
    tasks.make_task("addition", {"digits": 1}).load()
  oracle = Oracle(digits=2)
  assert float(oracle.right(None, rows)) == 1
  assert float(oracle.right({"w": 1}, rows)) == pytest.approx(0.95)


def test_the_loss_counts_the_answer_only():
  task = tasks.make_task("copy", {"width": 8, "letters": 3})
  batch = jnp.asarray(task.load()["test"][:4]).astype(jnp.int32)
  params = task.init(jax.random.key(0))
  shifted = jax.jit(task.shifted, static_argnums=2)
  logits = np.asarray(shifted(params, batch[:, :-1], 0))
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  total, count = 0.0, 0
  for i, row in enumerate(np.asarray(batch)):
    start = row.tolist().index(sequences.EQUALS)
    for t in range(start + 1, row.tolist().index(sequences.END) + 1):
      total, count = total - logp[i, t - 1, row[t]], count + 1
  context = jnp.sum(batch != 0, -1).max()
  key = next(
    key
    for key in map(jax.random.key, range(99))
    if jax.random.randint(key, (), 0, task.context - context + 1) == 0
  )
  assert float(jax.jit(task.loss)(params, batch, key)) == pytest.approx(
    total / count, rel=1e-5
  )


def test_the_tail_is_rare_in_training_and_not_in_the_test():
  data = tasks.make_task("digits-longtail", {"imbalance": 20.0}).load()
  counts = np.bincount(data["train_y"])
  assert counts[0] / counts[9] == pytest.approx(20, rel=0.2)
  assert np.bincount(data["test_y"]).min() > 20
  assert set(data["tail_y"].tolist()) == {7, 8, 9}
  with pytest.raises(ValueError, match="at least 1"):
    long_tail.imbalanced(data, 0.5)


def test_a_translation_is_learnt_and_counted_letter_by_letter(monkeypatch):
  pairs = [(f"{a}{b}", f"{b}{a}") for a in "abcdefghij" for b in "klmnopqrst"]
  pairs.append(("x" * 40, "too long"))
  monkeypatch.setattr(translation.datasets, "load_names", lambda _: pairs)
  monkeypatch.setattr(translation, "TEST", 20)
  task = tasks.make_task("translation", {"width": 8, "depth": 1})
  data = task.load()
  assert len(data["train"]) == 80 and len(data["test"]) == 20
  found = jax.jit(lambda key: task.evaluate(task.init(key), data))(
    jax.random.key(0)
  )
  assert set(found) == {"letters", "exact match"}
  assert 0 <= float(found["exact match"]) <= float(found["letters"]) <= 100
