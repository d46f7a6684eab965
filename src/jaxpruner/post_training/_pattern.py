"""Sparsity types as they look on a weight laid out as (inputs, outputs)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator, sparsity_types
from jaxpruner.sparsity_types import Block, NByM, Unstructured


class Pattern(NamedTuple):
  """What a mask of an (inputs, outputs) matrix may look like.

  `n` of `m` inputs are kept for each output; or blocks of `block` inputs ×
  outputs are kept whole; or, with neither, single weights.
  """

  n: int = 0
  m: int = 0
  block: tuple[int, int] | None = None
  use_avg_pooling: bool = True

  def mask(
    self, scores: jax.Array, sparsity: float, per_output: bool = False
  ) -> jax.Array:
    """Keep the highest scores of a (groups, inputs, outputs) array."""
    if self.m:
      return mask_calculator.n_by_m_mask(scores, self.n, self.m, axis=-2)
    if self.block:
      kind = Block(self.block, self.use_avg_pooling)
      return jax.vmap(lambda s: kind.mask(s, sparsity))(scores)
    if per_output:
      ones = mask_calculator.num_ones(scores.shape[-2], sparsity)
      choose = lambda s: mask_calculator.topk_masks([s], [ones])[0]
      return jax.vmap(jax.vmap(choose, -1, -1))(scores)
    return mask_calculator.topk_mask_calculator(scores, sparsity)


FREE = Pattern()  # single weights, anywhere


def of(kind: object, indices: np.ndarray, shape: tuple, run: int, name: str):
  """Translate a sparsity type for a weight of a given layout.

  Args:
    kind: Unstructured, NByM or Block.
    indices: which element of the leaf each element of the matrix is.
    shape: the leaf's shape.
    run: how many inputs lie in one run.
    name: the leaf, for errors.
  """
  if type(kind) is Unstructured:
    return Pattern()
  if isinstance(kind, NByM):
    if run % kind.m:
      raise ValueError(
        f"params leaf {name!r}: {kind.n}:{kind.m} groups run along the inputs "
        f"of a product, here {run}, which {kind.m} does not divide; leave the "
        "leaf out with filter_fn"
      )
    return Pattern(n=kind.n, m=kind.m)
  if isinstance(kind, Block):
    if len(shape) >= 2:
      # A step along an axis of the matrix tells which axis of the leaf it is.
      steps = [
        int(indices[0, 1, 0]) - int(indices[0, 0, 0])
        if indices.shape[1] > 1
        else 0,
        int(indices[0, 0, 1]) - int(indices[0, 0, 0])
        if indices.shape[2] > 1
        else 0,
      ]
      height, width = kind.block_shape
      if steps == [shape[-1], 1] and not run % height:
        return Pattern(
          block=(height, width), use_avg_pooling=kind.use_avg_pooling
        )
      if steps == [1, shape[-1]] and not run % width:
        return Pattern(
          block=(width, height), use_avg_pooling=kind.use_avg_pooling
        )
    raise ValueError(
      f"params leaf {name!r} of shape {shape}: blocks must lie on its inputs "
      "and outputs as last two axes and divide the inputs; leave the leaf out "
      "with filter_fn or choose another block shape"
    )
  raise ValueError(
    f"sparsity_type={kind!r} for params leaf {name!r}: pruning after training "
    "knows Unstructured, NByM and Block"
  )


def panel_units(
  pattern: Pattern, scores: jax.Array, ones: jax.Array
) -> jax.Array:
  """Choose `ones` units of an (inputs, outputs) panel by their scores."""
  if not pattern.block:
    return mask_calculator.topk_masks([scores], [ones])[0]
  kind = Block(pattern.block, pattern.use_avg_pooling)
  units = mask_calculator.topk_masks([kind.pool(scores)], [ones])[0]
  return kind.expand(units, scores.shape).astype(jnp.uint8)


def units(pattern: Pattern, shape: tuple[int, int]) -> int:
  """Return among how many units of a panel the choice is made."""
  if not pattern.block:
    return shape[0] * shape[1]
  return sparsity_types.Block(pattern.block).units(shape)
