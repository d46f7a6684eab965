"""Recognise the structure of a mask: N:M, blocks, removed slices."""

import math

import numpy as np

_GROUPS = (2, 4, 8, 16, 32)
# Fewer groups than this fit a pattern by chance.
_EVIDENCE = 8


def describe(mask: np.ndarray) -> str:
  """Say in words which structure the kept weights of a tensor have.

  Args:
    mask: true or 1 where a weight is kept.

  Example:
    >>> describe(np.tile(np.eye(4), (2, 2)))
    'exactly 1:4 along axis 0, exactly 1:4 along axis 1'
    >>> describe(np.kron(np.eye(3), np.ones((4, 2))))
    'blocks of 4x2'
  """
  mask = np.asarray(mask) != 0
  if mask.all():
    return "dense"
  if not mask.any():
    return "all zero"
  found = _slices(mask) or []
  if not found or not found[0].startswith("only"):
    found += _blocks(mask) or _groups(mask)
  return ", ".join(found) or "unstructured"


def _slices(mask: np.ndarray) -> list[str]:
  """Name the axes along which whole slices are gone."""
  found = []
  for axis in range(mask.ndim):
    others = tuple(a for a in range(mask.ndim) if a != axis)
    alive = mask.any(others)
    empty = int(alive.size - alive.sum())
    if not empty:
      continue
    text = f"{empty} of {alive.size} slices along axis {axis} removed"
    if mask.sum() * alive.size == mask.size * int(alive.sum()):
      return ["only " + text]
    found.append(text)
  return found


def _blocks(mask: np.ndarray) -> list[str]:
  """Find the largest block of the last two axes that is kept or removed whole.

  A block height fits exactly if neighbouring rows differ only at multiples of
  it, so the greatest common divisor of those positions is the answer.
  """
  if mask.ndim < 2:
    return []
  sides = []
  for axis in (mask.ndim - 2, mask.ndim - 1):
    moved = np.moveaxis(mask, axis, 0)
    changes = (moved[1:] != moved[:-1]).any(tuple(range(1, mask.ndim)))
    sides.append(
      math.gcd(*(np.flatnonzero(changes) + 1).tolist()) or len(moved)
    )
  if sides == [1, 1] or mask.size < _EVIDENCE * math.prod(sides):
    return []
  return [f"blocks of {sides[0]}x{sides[1]}"]


def _groups(mask: np.ndarray) -> list[str]:
  """Find N:M groups, smallest M first, along every axis."""
  for m in _GROUPS:
    found = []
    for axis, size in enumerate(mask.shape):
      if size % m or mask.size < _EVIDENCE * m:
        continue
      moved = np.moveaxis(mask, axis, -1)
      counts = moved.reshape(-1, m).sum(1, dtype=np.int64)
      n = int(counts.max())
      if n == m:
        continue
      if counts.min() == n:
        found.append(f"exactly {n}:{m} along axis {axis}")
      elif counts.mean() > 0.9 * n:
        found.append(f"at most {n}:{m} along axis {axis}")
    if found:
      return found
  return []
