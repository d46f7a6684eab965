"""The k largest magnitudes of a file, without holding the file.

Magnitudes are compared as float32 bit patterns, which order as the numbers do.
Two counting passes find the exact threshold, 16 bits each; a third counts the
ties, so that the first of them in file order win.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np


class Threshold(NamedTuple):
  """Keep keys above `key`, and of each tensor its first `ties` equal to it."""

  key: int
  ties: Mapping[str, int]

  def masks(
    self, name: str, chunks: Iterable[np.ndarray]
  ) -> Iterator[np.ndarray]:
    """Yield which weights of a tensor are kept, chunk by chunk."""
    ties = self.ties[name]
    for chunk in chunks:
      found = keys(chunk, name)
      mask = found > self.key
      equal = np.flatnonzero(found == self.key)[:ties]
      mask[equal] = True
      ties -= equal.size
      yield mask

  def mask(self, name: str, array: np.ndarray) -> np.ndarray:
    """Return the uint8 mask of one whole tensor."""
    (mask,) = self.masks(name, [array.reshape(-1)])
    return mask.astype(np.uint8).reshape(array.shape)


def keys(chunk: np.ndarray, name: str) -> np.ndarray:
  """Return unsigned integers that order like |w|."""
  magnitudes = np.abs(chunk.astype(np.float32))
  if np.isnan(magnitudes).any():
    raise ValueError(f"tensor {name!r} holds NaN: magnitudes have no order")
  return magnitudes.view(np.uint32)


def find(
  names: Iterable[str],
  chunks: Callable[[str], Iterable[np.ndarray]],
  kept: int,
) -> Threshold:
  """Find the threshold that keeps exactly `kept` weights of all tensors.

  Args:
    names: the tensors that compete, in file order.
    chunks: yields a tensor flat, in pieces; called three times for each.
    kept: how many weights stay, at least 1.
  """
  names = list(names)

  def passes() -> Iterator[tuple[str, np.ndarray]]:
    for name in names:
      for chunk in chunks(name):
        yield name, keys(chunk, name)

  high = np.zeros(1 << 16, np.int64)
  for _, found in passes():
    high += np.bincount(found >> 16, minlength=high.size)
  top, kept = _cut(high, kept)
  low = np.zeros(1 << 16, np.int64)
  for _, found in passes():
    found = found[found >> 16 == top]
    low += np.bincount(found & 0xFFFF, minlength=low.size)
  bottom, kept = _cut(low, kept)
  key = top << 16 | bottom
  ties = dict.fromkeys(names, 0)
  for name, found in passes():
    ties[name] += int((found == key).sum())
  for name in names:
    ties[name] = min(ties[name], kept)
    kept -= ties[name]
  return Threshold(key, ties)


def _cut(counts: np.ndarray, kept: int) -> tuple[int, int]:
  """Return the bin the last kept key falls in, and how many it gives."""
  from_top = np.cumsum(counts[::-1])
  index = int(np.searchsorted(from_top, kept))
  above = int(from_top[index - 1]) if index else 0
  return counts.size - 1 - index, kept - above
