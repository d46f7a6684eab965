"""Batches that are drawn on the host during training, and their checks."""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner.compare.tasks.base import Task
from jaxpruner.inspect import cost

PyTree = Any
# The bytes of batches, over all seeds, that go to the device in one block.
BLOCK_BYTES = 64 * 1024 * 1024
SAMPLE = 4096  # bytes at both ends of a leaf that its checksum reads


class StreamError(ValueError):
  """A stream of batches breaks its contract; the message names the place."""


def arrays(batch: PyTree, where: str) -> PyTree:
  """Return a batch as NumPy arrays of the dtypes that JAX uses.

  Args:
    batch: a tree of arrays or tensors of any library.
    where: the name of the batch, for error messages.

  Returns:
    The same tree of NumPy arrays.

  Raises:
    StreamError: a leaf is not numeric.

  Example:
    >>> arrays({"x": [1.0, 2.0]}, "batch 0")["x"][0].dtype
    dtype('float32')
  """

  def leaf(path, value):
    array = np.asarray(value)
    if array.dtype.kind in "OSUMm":
      raise StreamError(
        f"{where}: leaf {cost.path_name(path) or 'itself'} is "
        f"{array.dtype}, which no device holds; return numbers only"
      )
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)

  found = jax.tree_util.tree_map_with_path(leaf, batch)
  if not jax.tree.leaves(found):
    raise StreamError(f"{where}: is empty")
  return found


def first_batches(task: Task, seed: int, step: int, count: int) -> list[PyTree]:
  """Return `count` batches of a seed from a step on."""
  found = []
  for i, batch in enumerate(itertools.islice(task.stream(seed, step), count)):
    found.append(arrays(batch, _place(seed, step + i)))
  if len(found) < count:
    raise StreamError(
      f"{_place(seed, step + len(found))} is missing: the stream of "
      f"{task.name or type(task).__name__} ended; training needs "
      f"{task.steps} batches per seed: repeat the data"
    )
  return found


def check(task: Task) -> list[PyTree]:
  """Draw the first batches twice, and once from the second step on.

  Args:
    task: a streamed task.

  Returns:
    The first two batches of seed 0, and the first of seed 1.

  Raises:
    StreamError: two draws differ; the message names leaf, seed and step.
  """
  once = first_batches(task, 0, 0, 2)
  again = first_batches(task, 0, 0, 2)
  for step, (one, other) in enumerate(zip(once, again, strict=True)):
    _same(
      one,
      other,
      f"{_place(0, step)} is not deterministic: two draws differ",
      "take every random choice (shuffling, augmentation, workers) from `seed` "
      "and `step`",
    )
  _same(
    once[1],
    first_batches(task, 0, 1, 1)[0],
    f"{_place(0, 1)} depends on where the stream starts",
    "a run that resumes at step 1 must get the batch that an uninterrupted run "
    "gets",
  )
  return [*once, *first_batches(task, 1, 0, 1)]


def _place(seed: int, step: int) -> str:
  return f"the batch of seed {seed}, step {step}"


def _same(one: PyTree, other: PyTree, problem: str, cure: str) -> None:
  named = jax.tree_util.tree_flatten_with_path(one)[0]
  if jax.tree.structure(one) != jax.tree.structure(other):
    raise StreamError(f"{problem} in structure; {cure}")
  for (path, a), b in zip(named, jax.tree.leaves(other), strict=True):
    shape = a.shape != b.shape or a.dtype != b.dtype
    if shape or a.tobytes() != b.tobytes():
      part = f"shape {a.shape} and {b.shape}" if shape else _gap(a, b)
      name = cost.path_name(path)
      leaf = f" in leaf {name}" if name else ""
      raise StreamError(f"{problem}{leaf} ({part}); {cure}")


def _gap(a: np.ndarray, b: np.ndarray) -> str:
  different = np.mean(a.reshape(-1) != b.reshape(-1))
  return f"{100 * float(different):.3g} % of its values differ"


class Block(NamedTuple):
  """The batches of several steps and all seeds.

  Attributes:
    batches: a tree of arrays of shape (seeds, steps, ...).
    first: the first step.
    length: the number of steps; later ones repeat the last batch.
    checksum: of all batches since the first block.
  """

  batches: PyTree
  first: int
  length: int
  checksum: int


class Stream:
  """The batches of all seeds of a cell, in blocks.

  Args:
    task: a streamed task.
    seeds: the numbers of the seeds.

  Attributes:
    template: the first batch of the first seed.
  """

  def __init__(self, task: Task, seeds: Sequence[int]):
    self._task, self._seeds = task, seeds
    self.template = first_batches(task, seeds[0], 0, 1)[0]

  def start(self) -> PyTree:
    """Return the first batch of every seed: (seeds, ...)."""
    firsts = [first_batches(self._task, s, 0, 1)[0] for s in self._seeds]
    return jax.tree.map(_stack, *firsts)

  def steps_per_block(self, length: int) -> int:
    """Return the number of steps in a block, at most `length`."""
    size = sum(x.nbytes for x in jax.tree.leaves(self.template))
    return max(1, min(length, BLOCK_BYTES // (size * len(self._seeds))))

  def blocks(
    self, first: int, last: int, length: int, checksum: int
  ) -> Iterator[Block]:
    """Yield blocks from step `first` to `last`, cut at multiples of `length`.

    Args:
      first: the first step, a multiple of `length`.
      last: the step after the last one.
      length: the number of steps in a chunk of the training.
      checksum: that of the steps before the first.
    """
    per_block = self.steps_per_block(length)
    sources = [self._task.stream(seed, first) for seed in self._seeds]
    while first < last:
      end = min(last, first - first % length + length)
      count = min(per_block, end - first)
      rows: list[list[PyTree]] = [[] for _ in sources]
      for step in range(first, first + count):
        for row, seed, source in zip(rows, self._seeds, sources, strict=True):
          row.append(self._next(source, seed, step))
          checksum = _checksum(row[-1], checksum)
      full = [row + row[-1:] * (per_block - count) for row in rows]
      stacked = [jax.tree.map(_stack, *row) for row in full]
      batches = jax.tree.map(_stack, *stacked)
      yield Block(batches, first, count, checksum)
      first += count

  def _next(self, source: Iterator[PyTree], seed: int, step: int) -> PyTree:
    where = _place(seed, step)
    found = next(source, None)
    if found is None:
      raise StreamError(
        f"{where} is missing: the stream ended; repeat the data"
      )
    found = arrays(found, where)
    if jax.tree.map(_kind, found) != jax.tree.map(_kind, self.template):
      raise StreamError(
        f"{where} has other shapes or dtypes than the first batch "
        f"({_shapes(found)} and {_shapes(self.template)}); drop or fill an "
        "incomplete last batch"
      )
    return found


def _stack(*leaves: np.ndarray) -> np.ndarray:
  return np.stack(leaves)


def _kind(x: np.ndarray) -> tuple:
  return (x.shape, str(x.dtype))


def _shapes(batch: PyTree) -> str:
  kinds = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(batch)]
  return ", ".join(kinds)


def _checksum(batch: PyTree, checksum: int) -> int:
  """Return a checksum of both ends of every leaf; whole leaves cost time."""
  for leaf in jax.tree.leaves(batch):
    flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    checksum = zlib.crc32(flat[:SAMPLE].tobytes(), checksum)
    checksum = zlib.crc32(flat[-SAMPLE:].tobytes(), checksum)
  return checksum
