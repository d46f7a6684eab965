"""Slow, obvious NumPy definitions of what the library computes fast.

Written from the definitions, one element at a time where that is clearest.
Scores are ranked as Python numbers; counts are exact fractions.
"""

import fractions
import math

import numpy as np


def num_ones(size, sparsity):
  """`max(1, round_half_even(size * (1 - sparsity)))`, exactly."""
  kept = round(size * (1 - fractions.Fraction(float(sparsity))))
  return max(1, kept)


def ranking(scores):
  """Flat indices from best to worst; among equals the lower index first."""
  flat = [float(s) for s in np.asarray(scores).ravel()]
  return sorted(range(len(flat)), key=lambda i: (-flat[i], i))


def top_k(scores, k):
  scores = np.asarray(scores)
  mask = np.zeros(scores.size, np.uint8)
  mask[ranking(scores)[:k]] = 1
  return mask.reshape(scores.shape)


def unstructured(scores, sparsity):
  return top_k(scores, num_ones(np.size(scores), sparsity))


def n_by_m(scores, n, m, axis):
  moved = np.moveaxis(np.asarray(scores), axis, -1)
  mask = np.zeros(moved.shape, np.uint8)
  for index in np.ndindex(*moved.shape[:-1]):
    for start in range(0, moved.shape[-1], m):
      group = slice(start, start + m)
      mask[index][group] = top_k(moved[index][group], n)
  return np.moveaxis(mask, -1, axis)


def halving_sum(values):
  """Sum a list in float32 by adding its second half to its first."""
  values = [np.float32(v) for v in values]
  while len(values) & (len(values) - 1):
    values.append(np.float32(0))
  while len(values) > 1:
    half = len(values) // 2
    values = [values[i] + values[i + half] for i in range(half)]
  return values[0]


def _padded(rows, height, width):
  rows = [list(row) + [0.0] * (width - len(row)) for row in rows]
  return rows + [[0.0] * width] * (height - len(rows))


def block_scores(scores, block_shape, average):
  """One score per block of the last two dims; edge blocks are smaller."""
  scores = np.asarray(scores, np.float32)
  height, width = block_shape
  rows = math.ceil(scores.shape[-2] / height)
  columns = math.ceil(scores.shape[-1] / width)
  units = np.zeros((*scores.shape[:-2], rows, columns), np.float32)
  for index in np.ndindex(*units.shape):
    *lead, r, c = index
    block = scores[tuple(lead)][
      r * height : (r + 1) * height, c * width : (c + 1) * width
    ]
    if average:
      # Rows first, then the column of row sums, each by halving.
      sums = [halving_sum(row) for row in _padded(block, height, width)]
      units[index] = halving_sum(sums) / np.float32(block.size)
    else:
      units[index] = block.max()
  return units


def spread_blocks(units, shape, block_shape):
  mask = np.repeat(units, block_shape[0], axis=-2)
  mask = np.repeat(mask, block_shape[1], axis=-1)
  return mask[..., : shape[-2], : shape[-1]]


def block(scores, sparsity, block_shape, average):
  units = block_scores(scores, block_shape, average)
  chosen = unstructured(units, sparsity)
  return spread_blocks(chosen, np.shape(scores), block_shape)


def channel_scores(scores, axis):
  """The mean score of each slice along an axis, innermost dims first."""
  moved = np.moveaxis(np.asarray(scores, np.float32), axis, 0)

  def total(array):
    if array.ndim == 0:
      return np.float32(array)
    return halving_sum([total(part) for part in array])

  size = np.float32(moved[0].size)
  return np.array([total(part) / size for part in moved], np.float32)


def channel(scores, sparsity, axis):
  scores = np.asarray(scores)
  chosen = unstructured(channel_scores(scores, axis), sparsity)
  shape = [1] * scores.ndim
  shape[axis] = -1
  return np.broadcast_to(chosen.reshape(shape), scores.shape)


def together(leaves, sparsity):
  """One ranking over all leaves, earlier leaves first among equals."""
  flat = np.concatenate(
    [np.asarray(leaf).astype(np.float32).ravel() for leaf in leaves]
  )
  mask = unstructured(flat, sparsity)
  cuts = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
  parts = np.split(mask, cuts)
  return [p.reshape(np.shape(l)) for p, l in zip(parts, leaves, strict=True)]


def drop_and_grow(mask, drop_scores, grow_scores, dropped):
  """Drop the lowest of the kept, grow the highest of the others.

  What was just dropped may grow again. `dropped` is a number of units.
  """
  active = np.flatnonzero(np.asarray(mask).ravel())
  order = [i for i in ranking(drop_scores) if i in set(active)]
  kept = order[: len(active) - dropped]
  others = [i for i in ranking(grow_scores) if i not in set(kept)]
  new = np.zeros(np.size(mask), np.uint8)
  new[kept] = 1
  new[others[:dropped]] = 1
  return new.reshape(np.shape(mask))


def drop_and_grow_n_by_m(mask, drop_scores, grow_scores, dropped, m, axis):
  """Drop over the whole leaf, grow in each group what it lost."""
  mask = np.asarray(mask)
  active = set(np.flatnonzero(mask.ravel()))
  order = [i for i in ranking(drop_scores) if i in active]
  kept = np.zeros(mask.size, np.uint8)
  kept[order[: len(active) - dropped]] = 1
  kept = np.moveaxis(kept.reshape(mask.shape), axis, -1)
  old = np.moveaxis(mask, axis, -1)
  grow = np.moveaxis(np.asarray(grow_scores), axis, -1)
  new = kept.copy()
  for index in np.ndindex(*kept.shape[:-1]):
    for start in range(0, kept.shape[-1], m):
      group = slice(start, start + m)
      missing = int(old[index][group].sum() - kept[index][group].sum())
      order = [
        i for i in ranking(grow[index][group]) if not kept[index][group][i]
      ]
      for i in order[:missing]:
        new[index][start + i] = 1
  return np.moveaxis(new, -1, axis)


def zhu_gupta(target, step, start, end, power=3):
  """`S (1 - (1 - (t - start)/(end - start))^power)` as a fraction."""
  target = fractions.Fraction(float(target))
  if step >= end:
    return target
  if step <= start:
    return fractions.Fraction(0)
  left = fractions.Fraction(end - step, end - start)
  if isinstance(power, int):
    return target * (1 - left**power)
  return target * (1 - fractions.Fraction(float(left) ** power))


def update_steps(freq, start, end, horizon):
  """The steps below `horizon` at which masks are updated."""
  steps = set()
  step = start
  while step < horizon:
    if end is None or step <= end:
      steps.add(step)
    step += freq
  if end is not None and end < horizon:
    steps.add(end)
  return steps


def erk_densities(shapes, sparsity, power=1.0):
  """Densities in proportion to (sum/prod)^power, capped at 1, same total."""
  sizes = [math.prod(s) for s in shapes]
  raw = [fractions.Fraction((sum(s) / math.prod(s)) ** power) for s in shapes]
  budget = sum(sizes) * (1 - fractions.Fraction(float(sparsity)))
  dense = set()
  while True:
    rest = [i for i in range(len(shapes)) if i not in dense]
    if not rest:
      return [fractions.Fraction(1)] * len(shapes)
    left = budget - sum(sizes[i] for i in dense)
    scale = left / sum(raw[i] * sizes[i] for i in rest)
    top = max(rest, key=lambda i: raw[i])
    if raw[top] * scale <= 1:
      break
    dense |= {i for i in rest if raw[i] == raw[top]}
  return [
    fractions.Fraction(1) if i in dense else raw[i] * scale
    for i in range(len(shapes))
  ]


def largest_remainder(quotas, sizes, total, names):
  """Integers next to the quotas that add up to the total, each at least 1."""
  counts = [max(1, math.floor(q)) for q in quotas]
  while sum(counts) < total:
    open_ = [i for i in range(len(counts)) if counts[i] < sizes[i]]
    best = min(open_, key=lambda i: (counts[i] - quotas[i], names[i]))
    counts[best] += 1
  while sum(counts) > total:
    open_ = [i for i in range(len(counts)) if counts[i] > 1]
    if not open_:
      break
    best = max(open_, key=lambda i: (counts[i] - quotas[i], names[i]))
    counts[best] -= 1
  return counts
