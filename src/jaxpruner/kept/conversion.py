"""Store the kept entries of dense weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.kept import blocks, layouts
from jaxpruner.kept.blocks import BlockLayout
from jaxpruner.kept.places import fold
from jaxpruner.kept.tensors import KeptTensor, as_block, check_form, restack
from jaxpruner.sparsity_types import Block


def from_dense(
  weight: Any,
  mask: Any = None,
  *,
  split: int | None = None,
  block: Block | tuple[int, int] | None = None,
  axis: int | None = None,
  name: str = "",
) -> KeptTensor:
  """Store the kept entries of a dense weight.

  Args:
    weight: a dense array with at least 2 axes.
    mask: 1 = kept; by default nonzero entries are kept.
    split: how many leading axes form the rows of the folded matrix; a product
      contracts these axes or all the others. By default all but the last.
    block: rows and columns of the blocks that are kept whole, or the sparsity
      type `Block`; None: single weights.
    axis: the axis that numbers the layers of a stack, which `split` does not
      count; every layer keeps as many weights, and where rounding gave one
      layer one less, it gets one more, of value zero. None: no stack.
    name: the path of the weight, for errors.

  Returns:
    A `KeptTensor`; its slots are in row-major order.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> w = kept.from_dense(jnp.eye(4))
    >>> w.values.size, w.todense().tolist() == jnp.eye(4).tolist()
    (4, True)
  """
  weight = np.asarray(weight)
  chosen = weight != 0 if mask is None else np.asarray(mask) != 0
  if chosen.shape != weight.shape:
    raise ValueError(
      f"mask has shape {chosen.shape}, weight has {weight.shape}; they must "
      "agree (unpack packed masks first)"
    )
  block = as_block(block)
  split = check_form(weight.shape, weight.dtype, split, name, block, axis)
  strict = mask is not None
  if axis is None:
    return _layer(weight, chosen, split, block, strict, name)
  weights = np.moveaxis(weight, axis, 0)
  wanted = np.moveaxis(chosen, axis, 0)
  even = _evened(wanted.reshape(len(wanted), *fold(wanted.shape[1:], split)),
                 block, name).reshape(wanted.shape)  # fmt: skip
  weights = np.where(wanted, weights, np.zeros((), weights.dtype))
  parts = [
    _layer(w, c, split, block, strict, name)
    for w, c in zip(weights, even, strict=True)
  ]
  stacked: Any = jax.tree.map(lambda *a: jnp.stack(a), *parts)
  return KeptTensor(stacked.values, restack(stacked.layout, weight.shape, axis))


def _evened(chosen: np.ndarray, block: Block | None, name: str) -> np.ndarray:
  """Return masks of layers (layers, rows, columns) that keep as many units.

  Rounding may leave layers that differ by one unit: the smaller ones get one
  more, of weight zero, at their lowest free place.
  """
  units, grid = chosen, chosen.shape[1:]
  if block is not None:
    pool = lambda layer: blocks.tiled(layer, block.block_shape).any((2, 3))
    units = np.asarray(jax.vmap(pool)(jnp.asarray(chosen)))
    grid = units.shape[1:]
  units = units.reshape(len(chosen), -1)
  counts = units.sum(1)
  if counts.max() - counts.min() > 1:
    raise ValueError(
      f"params leaf {name!r}: the layers of this stack keep {counts.min()} to "
      f"{counts.max()} weights or blocks; a kept stack keeps as many in each: "
      "prune with one sparsity per leaf (uniform or erk), or leave it out with "
      "filter_fn"
    )
  units = units.copy()
  for layer in np.flatnonzero(counts < counts.max()):
    units[layer, np.argmin(units[layer])] = True
  if block is None:
    return units.reshape(chosen.shape)
  wide = units.reshape(len(chosen), *grid)
  for axis, side in enumerate(block.block_shape):
    wide = np.repeat(wide, side, axis + 1)
  return chosen | (
    wide[:, : chosen.shape[1], : chosen.shape[2]]
    & (counts < counts.max())[:, None, None]
  )


def _layer(weight, chosen, split, block, strict, name) -> KeptTensor:
  """Store one layer."""
  matrix = fold(weight.shape, split)
  weight, chosen, shape = (
    weight.reshape(matrix),
    chosen.reshape(matrix),
    weight.shape,
  )
  if not chosen.any():
    raise ValueError(
      f"params leaf {name!r}: the mask keeps no weight; keep at least one"
    )
  if block is None:
    positions = np.flatnonzero(chosen).astype(np.int32)
    layout: Any = layouts.from_sorted(positions, shape, split, name)
    return KeptTensor(jnp.asarray(weight.reshape(-1)[positions]), layout)
  found = np.asarray(blocks.tiled(jnp.asarray(chosen), block.block_shape)).any(
    (2, 3)
  )
  rows, columns = (jnp.asarray(a.astype(np.int32)) for a in np.nonzero(found))
  layout = BlockLayout(rows, columns, tuple(shape), split, name, block)
  if strict and np.any(np.asarray(layout.mask()).reshape(matrix) != chosen):
    raise ValueError(
      f"params leaf {name!r}: the mask does not consist of whole blocks of "
      f"{block.block_shape}; prune with sparsity_type={block!r}, or store "
      "single weights"
    )
  return KeptTensor(layout.gather(jnp.asarray(weight)), layout)
