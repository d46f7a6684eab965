"""Turn unstructured masks into channels or blocks (Chen et al., 2022)."""

from typing import Any

import numpy as np

from jaxpruner import mask_calculator, sparsity_types


def refill(weights: Any, mask: Any, axis: int = -1) -> np.ndarray:
  """Return the mask of whole channels that an unstructured mask speaks for.

  The channels that kept the most `|w|` are filled up again, the others go, at
  the same sparsity: a winning ticket made structural.
  """
  kept, sparsity = _kept(weights, np.asarray(mask))
  return np.asarray(sparsity_types.Channel(axis).mask(kept, sparsity))


def regroup(
  weights: Any, mask: Any, block_shape: tuple[int, int] = (4, 4)
) -> tuple[np.ndarray, np.ndarray]:
  """Return a mask of blocks at the same sparsity, and the rows' new order.

  Rows that keep the same columns are brought together, then the blocks of the
  reordered matrix that hold the most of the kept `|w|` are filled up, the
  others go. Never keeps less of it than blocks of the rows as they come.

  Args:
    weights: a matrix.
    mask: its unstructured mask.
    block_shape: height and width of the blocks.

  Returns:
    `(mask, order)`: the mask of `weights` as it is, and the order in which
    `mask[order]` consists of whole blocks.
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
  """What a mask keeps of `|w|`, and its sparsity."""
  kept = np.where(mask, np.abs(np.asarray(weights, np.float32)), 0)
  return kept, 1 - np.count_nonzero(mask) / mask.size


def _similar_rows(mask: np.ndarray, height: int) -> np.ndarray:
  """Group rows: the fullest that is left, and those sharing most with it."""
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
