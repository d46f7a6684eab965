"""Weights in the order in which one step of a decoder reads them.

A strip is 16 outputs with all their inputs, in groups of 64 inputs; a group is
16 words, a word 4 inputs of the 16 outputs. The bytes of a group follow each
other: for int8 the 16 scales, then a mask of 64 bits for each word unless all
weights are kept, then the kept weights. Nothing points anywhere: a strip is
read front to back, as fast as memory delivers it.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import _int8

LANES, STEPS, GROUP = 16, 4, 64  # outputs, inputs of a word, of a group
WORDS = GROUP // STEPS
SLACK = 128  # whole vectors are read, also behind the last weight
# Kept weights below which a mask pays: its bit against the bits it saves.
_MOST = {4: 31 / 32, 2: 15 / 16, 1: 7 / 8}
SIZES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclasses.dataclass(frozen=True)
class Strips:
  """A matrix as strips.

  Attributes:
    data: all bytes, strip after strip.
    starts: the first byte of each strip.
    size: bytes of a weight: 4 for float32, 2 for bfloat16, 1 for int8.
    masked: whether zeros are left out.
    shape: (outputs, inputs).
  """

  data: np.ndarray
  starts: np.ndarray
  size: int
  masked: bool
  shape: tuple[int, int]


def pack(weights: np.ndarray, values: str, kept: np.ndarray | None) -> Strips:
  """Return a matrix (outputs, inputs) as strips.

  Args:
    weights: floating.
    values: "float32", "bfloat16" or "int8".
    kept: 1 where a weight is kept; None for all. Others count as zeros.
  """
  size = SIZES[values]
  if kept is None:
    kept = np.ones(weights.shape, bool)
  kept = kept.astype(bool)
  weights = np.where(kept, weights, 0).astype(np.float32)
  masked = bool(kept.mean() < _MOST[size])
  outputs, inputs = weights.shape
  strips, groups = -(-outputs // LANES), -(-inputs // GROUP)
  scales = None
  if size == 1:
    weights, scales = _int8.encode(weights, "weights")
    scales = _padded(scales, strips * LANES, groups)
    scales = scales.reshape(strips, LANES, groups).swapaxes(1, 2)
  elif size == 2:
    weights = weights.astype(jnp.bfloat16)
  order = (0, 2, 3, 1, 4) if size == 1 else (0, 2, 3, 4, 1)
  by_word = lambda a: np.ascontiguousarray(
    _padded(a, strips * LANES, groups * GROUP)
    .reshape(strips, LANES, groups, WORDS, STEPS)
    .transpose(order)
  ).reshape(strips * groups, WORDS, -1)
  weights, kept = by_word(weights), by_word(kept)
  head = 2 * LANES if size == 1 else 0
  if masked:
    head += 8 * WORDS
    counts = kept.sum(axis=(1, 2))
  else:
    counts = np.full(strips * groups, WORDS * LANES * STEPS)
  lengths = head + size * counts
  ends = np.cumsum(lengths)
  begins = ends - lengths
  data = np.zeros(int(ends[-1]) + SLACK if len(ends) else SLACK, np.uint8)
  is_value = np.ones(data.size - SLACK, bool)
  heads = []
  if scales is not None:
    heads.append(np.ascontiguousarray(scales).view(np.uint8))
  if masked:
    heads.append(np.packbits(kept, axis=-1, bitorder="little"))
  if heads:
    flat = np.concatenate([h.reshape(len(begins), -1) for h in heads], axis=1)
    place = begins[:, None] + np.arange(head)
    data[place] = flat
    is_value[place] = False
  found = weights[kept] if masked else weights.reshape(-1)
  data[:-SLACK][is_value] = found.view(np.uint8)
  return Strips(
    data, begins[::groups].astype(np.int64), size, masked, (outputs, inputs)
  )


def _padded(array: np.ndarray, rows: int, cols: int) -> np.ndarray:
  found = np.zeros((rows, cols), array.dtype)
  found[: array.shape[0], : array.shape[1]] = array
  return found
