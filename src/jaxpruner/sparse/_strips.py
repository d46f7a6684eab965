"""Weights in the order in which one step of a decoder reads them.

A strip is 16 outputs with all their inputs, in groups of 64 inputs; a group is
16 words, a word 4 inputs of the 16 outputs. The bytes of a group follow each
other: for int8 the 16 scales, then a mask of 64 bits for each word unless all
weights are kept, then the kept weights. Nothing points anywhere: a strip is
read front to back, as fast as memory delivers it.

A tile is 128 outputs, input by input, so that inputs can be skipped: a number
of inputs, of vectors of 16 outputs and of the first of these, where each input
begins, and for each input a bit per output and the kept weights.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import _int8

LANES, STEPS, GROUP = 16, 4, 64  # outputs, inputs of a word, of a group
WORDS = GROUP // STEPS
# What a strip's kind means: bytes of a weight, plus 8 if zeros are left out,
# plus 16 if it is a tile, of which inputs are skipped.
MASKED, SKIPS = 8, 16
TILE, TILE_HEAD = 8, 3  # vectors of a tile, numbers that begin it
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
  if masked:
    counts = kept.sum(axis=(1, 2))
  else:
    counts = np.full(strips * groups, WORDS * LANES * STEPS)
  parts = []
  if scales is not None:
    parts.append(np.ascontiguousarray(scales).view(np.uint8))
  if masked:
    parts.append(np.packbits(kept, axis=-1, bitorder="little"))
  rows = strips * groups
  heads = [part.reshape(rows, -1) for part in parts]
  heads = np.concatenate([np.zeros((rows, 0), np.uint8), *heads], axis=1)
  found = weights[kept] if masked else weights.reshape(-1)
  data, begins = _interleaved(heads, found, counts)
  return Strips(
    data, begins[::groups].astype(np.int64), size, masked, (outputs, inputs)
  )


def tiles(
  weights: np.ndarray, values: str, kept: np.ndarray
) -> list[np.ndarray]:
  """Return a matrix (outputs, inputs) as tiles, the bytes of each.

  Args:
    weights: floating; outputs are a multiple of 16.
    values: "float32" or "bfloat16".
    kept: 1 where a weight is kept.
  """
  kind = np.float32 if values == "float32" else jnp.bfloat16
  found = []
  for first in range(0, len(weights), TILE * LANES):
    own = kept[first : first + TILE * LANES].astype(bool).T
    part = weights[first : first + TILE * LANES].T[own].astype(kind)
    heads = np.packbits(own, axis=1, bitorder="little")
    data, begins = _interleaved(heads, part, own.sum(axis=1))
    inputs, outputs = own.shape
    begins = np.append(begins, data.size - SLACK) + 4 * (TILE_HEAD + inputs + 1)
    sizes = [inputs, outputs // LANES, first // LANES]
    head = np.array([*sizes, *begins], np.int32)
    found.append(np.concatenate([head.view(np.uint8), data[:-SLACK]]))
  return found


def _interleaved(
  heads: np.ndarray, values: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Return the bytes of each head and its values, and where they begin."""
  width = heads.shape[1]
  lengths = width + values.itemsize * counts
  ends = np.cumsum(lengths)
  begins = ends - lengths
  data = np.zeros(int(ends[-1]) + SLACK if len(ends) else SLACK, np.uint8)
  is_value = np.ones(data.size - SLACK, bool)
  place = begins[:, None] + np.arange(width)
  data[place] = heads
  is_value[place.reshape(-1)] = False
  data[:-SLACK][is_value] = values.view(np.uint8)
  return data, begins


def _padded(array: np.ndarray, rows: int, cols: int) -> np.ndarray:
  found = np.zeros((rows, cols), array.dtype)
  found[: array.shape[0], : array.shape[1]] = array
  return found
