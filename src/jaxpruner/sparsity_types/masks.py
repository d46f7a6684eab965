"""Masks of many leaves at once: pool scores to units, select, expand."""

from collections.abc import Sequence
from typing import Any

from jaxpruner import _leaves, mask_calculator
from jaxpruner.engine import lazy as _lazy
from jaxpruner.sparsity_types.base import Array, Shape, SparsityType


def select(
  types: Sequence[SparsityType], units: Sequence[Array], ones: Any
) -> list[Array]:
  """Choose the highest units of each leaf, `ones` of them: a list or an array.

  All leaves with a free choice go through one search; a type with groups ranks
  each by itself, in its own `choose`.
  """
  free = [i for i, kind in enumerate(types) if not hasattr(kind, "choose")]
  chosen: dict[int, Array] = dict(
    zip(
      free,
      mask_calculator.topk_masks(
        [units[i] for i in free], mask_calculator.pick(ones, free)
      ),
      strict=True,
    )
  )
  for i, kind in enumerate(types):
    if i not in chosen:
      scores = _lazy.value(units[i])
      chosen[i] = _leaves.with_auto_axes(
        kind.choose,  # pyright: ignore[reportAttributeAccessIssue]
        scores,
        ones[i],
        like=scores,
      )
  return [chosen[i] for i in range(len(types))]


def pool(kind: SparsityType, scores: Any) -> Any:
  """Return the scores of units; those of single weights stay lazy."""
  if type(kind).pool is SparsityType.pool:
    return scores
  return _leaves.with_auto_axes(kind.pool, _lazy.value(scores))


def expand(kind: SparsityType, units: Array, like: Any) -> Array:
  """Return the mask of a leaf, laid out like it."""
  if type(kind).expand is SparsityType.expand:
    return units
  return _leaves.with_auto_axes(
    lambda units: kind.expand(units, like.shape),
    units,
    like=_lazy.value(like),
  )


def ones_each(
  types: Sequence[SparsityType], shapes: Sequence[Shape], sparsities: Any
) -> list[Any]:
  """Return how many units each leaf keeps.

  Scheduled counts are computed side by side: one by one, each leaf would add
  its own scalar kernels to the program.
  """
  plain = [
    i
    for i, kind in enumerate(types)
    if type(kind).ones is SparsityType.ones
    and isinstance(sparsities[i], mask_calculator.AtStep)
  ]
  counts: dict[int, Any] = {}
  if plain:
    each = mask_calculator.num_ones_each(
      [types[i].units(shapes[i]) for i in plain],
      [sparsities[i] for i in plain],
    )
    counts = {i: each[row] for row, i in enumerate(plain)}
  return [
    counts[i] if i in counts else kind.ones(shapes[i], sparsities[i])
    for i, kind in enumerate(types)
  ]


def create_masks(
  types: Sequence[Any], scores: Sequence[Array], sparsities: Sequence[Any]
) -> list[Array]:
  """Return the mask of each leaf; a type's own `mask` method has the say."""
  own = {
    i
    for i, kind in enumerate(types)
    if getattr(type(kind), "mask", None) is not SparsityType.mask
  }
  rest = [i for i in range(len(types)) if i not in own]
  units = select(
    [types[i] for i in rest],
    [pool(types[i], scores[i]) for i in rest],
    ones_each(
      [types[i] for i in rest],
      [scores[i].shape for i in rest],
      [sparsities[i] for i in rest],
    ),
  )
  masks: dict[int, Array] = {
    i: expand(types[i], unit, scores[i])
    for i, unit in zip(rest, units, strict=True)
  }
  for i in own:
    sparsity = sparsities[i]
    if isinstance(sparsity, mask_calculator.AtStep):
      sparsity = sparsity.value
    mask = types[i].mask(_lazy.value(scores[i]), sparsity)
    masks[i] = mask.astype(mask_calculator.MASK_DTYPE)
  return [masks[i] for i in range(len(types))]
