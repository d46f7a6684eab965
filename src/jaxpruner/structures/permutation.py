"""Reorder channels so that N:M groups keep a larger sum of magnitudes."""

from typing import Any

import numpy as np


def _columns(matrix: Any, axis: int) -> np.ndarray:
  """Return |matrix| as (channels, everything else), in float64."""
  matrix = np.abs(np.asarray(matrix, np.float64))
  moved = np.moveaxis(matrix, axis, 0)
  return moved.reshape(len(moved), -1)


def _kept(channels: np.ndarray, n: int, m: int) -> np.ndarray:
  """Return the sum of magnitudes that each group keeps."""
  groups = np.sort(channels.reshape(-1, m, channels.shape[1]), axis=1)
  return groups[:, m - n :].sum((1, 2))


def kept_magnitude(
  matrix: Any, n: int, m: int, axis: int = -2, order: Any = None
) -> float:
  """Return the sum of |w| that N:M along an axis keeps.

  Args:
    matrix: weights, or any scores.
    n: weights kept of every `m`.
    m: size of a group.
    axis: the axis along which groups run.
    order: reorder the channels of `axis` first, as `permutation` returns it.

  Returns:
    The sum over all groups of the `n` largest magnitudes.

  Example:
    >>> w = np.array([[4.0], [4.0], [0.1], [0.2]])
    >>> kept_magnitude(w, 1, 2), kept_magnitude(w, 1, 2, order=[0, 2, 1, 3])
    (4.2, 8.0)
  """
  channels = _columns(matrix, axis)
  if order is not None:
    channels = channels[np.asarray(order)]
  return float(_kept(channels, n, m).sum())


def permutation(
  matrix: Any, n: int, m: int, axis: int = -2, max_rounds: int = 100
) -> np.ndarray:
  """Return an order of channels in which N:M keeps more of |w|.

  Starts from the given order and swaps channels between groups while a swap
  raises the kept sum (Pool & Yu, 2021), so the result never keeps less than the
  given order. The outputs of the preceding layers must be reordered in the
  same way; `permute` does both.

  Args:
    matrix: weights, or any scores.
    n: weights kept of every `m`.
    m: size of a group.
    axis: the axis along which groups run.
    max_rounds: largest number of rounds; a round swaps disjoint groups.

  Returns:
    Indices: `np.take(matrix, order, axis)` is the reordered matrix.

  Example:
    >>> import numpy as np
    >>> w = np.array([[4.0], [4.0], [0.1], [0.2]])  # 1:2 must drop a 4
    >>> order = permutation(w, 1, 2)
    >>> kept_magnitude(w, 1, 2), kept_magnitude(w, 1, 2, order=order)
    (4.2, 8.0)
  """
  channels = _columns(matrix, axis)
  size = len(channels)
  if size % m or not 0 < n <= m:
    raise ValueError(
      f"permutation: axis {axis} has length {size}, which {n}:{m} cannot "
      "group; it needs 0 < n <= m and a length divisible by m"
    )
  order, group = np.arange(size), np.arange(size) // m
  if n == m or size == m:
    return order
  for _ in range(max_rounds):
    now = channels[order]
    kept = _kept(now, n, m)
    value = _with_one_replaced(now, n, m)
    gain = value + value.T - kept[group][:, None] - kept[group][None, :]
    gain[group[:, None] >= group[None, :]] = -np.inf
    best = np.argsort(gain, axis=None)[::-1][: size * 4]
    swapped: set[int] = set()
    for i, j in zip(*np.unravel_index(best, gain.shape), strict=True):
      if gain[i, j] <= 1e-9 * kept.sum():
        break
      # A gain is exact as long as neither group has changed this round.
      pair = {int(i) // m, int(j) // m}
      if pair & swapped:
        continue
      order[i], order[j] = order[j], order[i]
      swapped |= pair
    if not swapped:
      break
  before, after = _kept(channels, n, m).sum(), _kept(channels[order], n, m)
  return order if after.sum() >= before else np.arange(size)


def _with_one_replaced(channels: np.ndarray, n: int, m: int) -> np.ndarray:
  """Return, for all i and j, the sum i's group keeps if j replaces i.

  Without i a column keeps its n largest magnitudes. Channel j adds the amount
  by which it exceeds the smallest of these.
  """
  size, width = channels.shape
  groups = channels.reshape(-1, m, width)
  result = np.empty((size, size))
  for slot in range(m):
    rest = np.sort(np.delete(groups, slot, axis=1), axis=1)[:, m - 1 - n :]
    for index, (least, total) in enumerate(
      zip(rest[:, 0], rest.sum((1, 2)), strict=True)
    ):
      excess = np.maximum(channels - least, 0).sum(1)
      result[index * m + slot] = total + excess
  return result
