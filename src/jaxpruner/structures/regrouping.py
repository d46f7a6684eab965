"""Turn unstructured masks into channels or blocks (Chen et al., 2022)."""

from typing import Any

import numpy as np

from jaxpruner import mask_calculator, sparsity_types


def refill(weights: Any, mask: Any, axis: int = -1) -> np.ndarray:
  """Turn an unstructured mask into a mask of whole channels.

  Keeps the channels with the largest sum of kept `|w|`, all their weights
  included, and removes the other channels, at the same sparsity (Chen et al.,
  2022).

  Args:
    weights: an array of weights.
    mask: its unstructured mask, 1 = kept.
    axis: the axis of the channels.

  Returns:
    A mask of the same shape in which each channel is kept or removed whole.

  Example:
    >>> weights = np.array([[3.0, 1.0], [2.0, 4.0]])
    >>> refill(weights, [[1, 0], [1, 0]]).tolist()
    [[1, 0], [1, 0]]
    >>> refill(weights, [[1, 0], [0, 1]]).tolist()
    [[0, 1], [0, 1]]
  """
  kept, sparsity = _kept(weights, np.asarray(mask))
  return np.asarray(sparsity_types.Channel(axis).mask(kept, sparsity))


def regroup(
  weights: Any, mask: Any, block_shape: tuple[int, int] = (4, 4)
) -> tuple[np.ndarray, np.ndarray]:
  """Turn an unstructured mask into a mask of blocks, with reordered rows.

  Puts rows that keep the same columns next to each other. Keeps the blocks of
  the reordered matrix with the largest sum of kept `|w|`, all their weights
  included, and removes the other blocks, at the same sparsity (Chen et al.,
  2022). The kept sum is never smaller than with the rows in their given order.

  Args:
    weights: a matrix.
    mask: its unstructured mask, 1 = kept.
    block_shape: height and width of the blocks.

  Returns:
    `(mask, order)`: a mask for `weights` in its given order, and the order of
    rows in which `mask[order]` consists of whole blocks.

  Example:
    >>> mask = np.array([[1, 1, 0, 0], [0, 0, 1, 1]] * 2)
    >>> blocks, order = regroup(np.ones((4, 4)), mask, block_shape=(2, 2))
    >>> order.tolist(), (blocks == mask).all().item()
    ([0, 2, 1, 3], True)
  """
  mask = np.asarray(mask)
  if mask.ndim != 2:
    raise ValueError(
      f"regroup: mask has shape {mask.shape}; rows are regrouped in a matrix, "
      "reshape it to two dimensions"
    )
  kept, sparsity = _kept(weights, mask)
  kind = sparsity_types.Block(block_shape)
  best = None
  for order in (np.arange(len(mask)), _similar_rows(mask, block_shape[0])):
    blocks = np.asarray(kind.mask(kept[order], sparsity))
    held = float((kept[order] * blocks).sum(dtype=np.float64))
    if best is None or held > best[0]:
      best = held, order, blocks
  assert best is not None
  _, order, blocks = best
  result = np.empty(mask.shape, mask_calculator.MASK_DTYPE)
  result[order] = blocks
  return result, order


def _kept(weights: Any, mask: np.ndarray) -> tuple[Any, float]:
  """Return `|w|` with zeros where removed, and the sparsity of the mask."""
  kept = np.where(mask, np.abs(np.asarray(weights, np.float32)), 0)
  return kept, 1 - np.count_nonzero(mask) / mask.size


def _similar_rows(mask: np.ndarray, height: int) -> np.ndarray:
  """Order rows in groups that keep similar columns.

  A group starts with the row that keeps the most among the rows left, and takes
  the rows that share the most kept columns with it.
  """
  bits = mask.astype(np.float32)
  shared, left = bits @ bits.T, np.ones(len(mask), bool)
  order: list[int] = []
  while left.any():
    seed = int(np.argmax(np.where(left, np.diag(shared), -1)))
    closest = np.argsort(-np.where(left, shared[seed], -1), kind="stable")
    group = [seed, *(int(i) for i in closest if i != seed)]
    group = group[: min(height, int(left.sum()))]
    left[group] = False
    order += group
  return np.array(order)
