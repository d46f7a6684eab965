"""Find, for each weight of a model, which axes its products contract."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner.sparse import _rewrite


class Fold(NamedTuple):
  """How a weight is folded to a matrix.

  Attributes:
    split: how many leading axes form the rows.
    fan_in: the length of the contracted side.
  """

  split: int
  fan_in: int


def find(
  apply_fn: Callable[..., Any] | None,
  params: Any,
  inputs: Sequence[Any],
  axes: Sequence[int | None],
) -> list[Fold]:
  """Return the fold of each leaf; by default the last axis is the output.

  Args:
    apply_fn: `apply_fn(params, *inputs)`, or None if it is not known.
    params: the parameters, or their shapes.
    inputs: examples, or their shapes.
    axes: per leaf, the axis that numbers the layers of a stack; None if it is
      none. A fold is that of one layer.

  Returns:
    One fold per leaf.
  """
  leaves = jax.tree.leaves(params)
  shapes = [
    tuple(d for i, d in enumerate(np.shape(leaf)) if i != axis)
    for leaf, axis in zip(leaves, axes, strict=True)
  ]
  uses: list[list[Any]] = [[] for _ in leaves]
  if apply_fn is not None:

    def look(inputs):
      nonlocal uses
      uses = _rewrite.find_uses(apply_fn, params, inputs)

    jax.eval_shape(look, tuple(inputs))
  return [
    _fold(shape, [use for use in own if use.stacked == (axis is not None)])
    for shape, own, axis in zip(shapes, uses, axes, strict=True)
  ]


def _fold(shape: tuple[int, ...], uses: list[Any]) -> Fold:
  ndim = len(shape)
  for use in uses:
    if use.operation == "take":
      continue  # a lookup says nothing of products
    axes = set(use.contract)
    for split in range(1, ndim):
      if axes in (set(range(split)), set(range(split, ndim))):
        return Fold(split, int(np.prod([shape[d] for d in axes])))
  split = max(ndim - 1, 1)
  return Fold(split, int(np.prod(shape[:split])))
