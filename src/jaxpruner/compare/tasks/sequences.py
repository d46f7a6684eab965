"""Base class of tasks that answer in a few tokens, judged by exact match.

A row of tokens is a problem, the token `=`, the answer, and padding. The
network is a decoder-only transformer; the loss counts the answer only. An
answer is right if all its tokens are. With the right tokens as context the most
likely token is right everywhere exactly if greedy decoding is right.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.compare import layers
from jaxpruner.compare.tasks import base

PAD, EQUALS, END = 0, 1, 2  # the first three tokens of every vocabulary


@dataclasses.dataclass(frozen=True)
class Sequences(base.Task):
  """Problems with short answers, with a small transformer.

  A subclass defines `tokens`, `vocabulary` and `context`.
  """

  width: int = 64
  steps: int = 3000
  batch_size: int = 64
  learning_rate: float = 2e-3
  depth: int = 2
  heads: int = 4

  metric: ClassVar[str] = "exact match"
  width_multiple: ClassVar[int] = 4
  batching: ClassVar[str] = "auto"
  pruning: ClassVar[dict[str, Any]] = {
    "custom_sparsity_map": {"embedding": None, "positions": None}
  }

  @property
  def vocabulary(self) -> int:
    """The number of tokens."""
    raise NotImplementedError

  @property
  def context(self) -> int:
    """The length of the longest row."""
    raise NotImplementedError

  def tokens(self) -> dict[str, list[list[int]]]:
    """Return "train", "test" and further sets: rows of tokens, unpadded."""
    raise NotImplementedError

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    del folder
    return {k: padded(v, self.context) for k, v in self.tokens().items()}

  def init(self, key: jax.Array) -> Any:
    keys = jax.random.split(key, self.depth + 2)
    table = lambda key, rows: 0.02 * jax.random.normal(key, (rows, self.width))
    return {
      "embedding": table(keys[0], self.vocabulary),
      "positions": table(keys[1], self.context),
      "norm": layers.norm_init(self.width),
      **{
        f"block_{i}": layers.block_init(keys[2 + i], self.width)
        for i in range(self.depth)
      },
    }

  def apply(self, params: Any, inputs: jax.Array) -> jax.Array:
    return self.shifted(params, inputs, 0)

  def shifted(self, params: Any, inputs: jax.Array, first: Any) -> jax.Array:
    """Return the outputs with positions counted from `first`."""
    place = jnp.arange(inputs.shape[-1]) + first
    x = params["embedding"][inputs] + params["positions"][place % self.context]
    for i in range(self.depth):
      x = layers.block(params[f"block_{i}"], x, self.heads, causal=True)
    return layers.layer_norm(params["norm"], x) @ params["embedding"].T

  def loss(self, params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
    # Positions start anywhere, so that those of longer problems are trained.
    longest = jnp.max(jnp.sum(batch != PAD, axis=-1))
    room = jnp.maximum(self.context - longest, 0)
    first = jax.random.randint(key, (), 0, room + 1)
    logp = jax.nn.log_softmax(self.shifted(params, batch[:, :-1], first))
    picked = jnp.take_along_axis(logp, batch[:, 1:, None], -1)[..., 0]
    counted = answers(batch)[:, 1:]
    return -(picked * counted).sum() / counted.sum()

  def batches(self, data: Any, key: jax.Array, step: jax.Array) -> jax.Array:
    key = jax.random.fold_in(key, step)
    size = (self.batch_size,)
    rows = jax.random.randint(key, size, 0, data["train"].shape[0])
    return data["train"][rows].astype(jnp.int32)

  def inputs(self, batch: jax.Array) -> jax.Array:
    return batch[:, :-1]

  def example(self, data: Any) -> jax.Array:
    return data["test"][: self.batch_size, :-1].astype(jnp.int32)

  def evaluate(self, params: Any, data: Any) -> dict[str, jax.Array]:
    """Return the share of right answers, in percent, for each set."""
    sets = [name for name in data if name != "train"]
    found = {name: 100 * self.right(params, data[name]) for name in sets}
    return {self.metric: found.pop("test"), **found}

  def right(self, params: Any, rows: jax.Array) -> jax.Array:
    """Return the share of rows whose answer is right."""

    def piece(rows):
      rows = rows.astype(jnp.int32)
      guess = self.apply(params, rows[:, :-1]).argmax(-1)
      same = (guess == rows[:, 1:]) | ~answers(rows)[:, 1:]
      return same.all(-1)

    pieces = rows.reshape(-1, min(250, len(rows)), rows.shape[-1])
    return jax.lax.map(piece, pieces).mean()


def answers(rows: jax.Array) -> jax.Array:
  """Return where the tokens of the answers are: after `=`, with the end.

  Args:
    rows: rows of tokens.

  Returns:
    True at the tokens of the answer.

  Example:
    >>> answers(jnp.array([[5, EQUALS, 6, END, PAD]])).tolist()
    [[False, False, True, True, False]]
  """
  after = jnp.cumsum(rows == EQUALS, axis=-1) - (rows == EQUALS)
  return (after > 0) & (rows != PAD)


def padded(rows: list[list[int]], length: int) -> np.ndarray:
  """Return rows of tokens as an array, filled up with `PAD`.

  Args:
    rows: lists of tokens.
    length: the length of the array's rows.

  Returns:
    The array, uint8.

  Example:
    >>> padded([[3, 4], [5]], 3).tolist()
    [[3, 4, 0], [5, 0, 0]]
  """
  table = np.zeros((len(rows), length), np.uint8)
  for i, row in enumerate(rows):
    table[i, : len(row)] = row
  return table
