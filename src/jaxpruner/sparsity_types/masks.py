"""Masks of many leaves at once: pool scores to units, select, expand."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner import _leaves, engine, mask_calculator
from jaxpruner.sparsity_types.base import Array, Shape, SparsityType


def select(
  types: Sequence[SparsityType],
  units: Sequence[Any],
  ones: Any,
  hint: Array | None = None,
) -> engine.Selection:
  """Keep the highest units of each leaf.

  All leaves with a free choice go through one search; a type with groups ranks
  each by itself, in its own `choose`.

  Args:
    types: the sparsity type of each leaf.
    units: the scores of its units, arrays or expressions.
    ones: how many units each leaf (each of its groups) keeps: a list, or one
      int32 array.
    hint: as `engine.select` takes it; used if all leaves have a free choice.

  Returns:
    A `Selection` of units.
  """
  free = [i for i, kind in enumerate(types) if not hasattr(kind, "choose")]
  if len(free) == len(types):
    return engine.select(units, ones, hint=hint)
  found = engine.select(
    [units[i] for i in free], mask_calculator.pick(ones, free)
  )
  masks = dict(zip(free, found.masks, strict=True))
  finite = {i: found.finite[row] for row, i in enumerate(free)}
  for i, kind in enumerate(types):
    if i not in masks:
      scores = engine.value(units[i])
      masks[i] = _leaves.with_auto_axes(
        kind.choose,  # pyright: ignore[reportAttributeAccessIssue]
        scores,
        ones[i],
        like=scores,
      )
      finite[i] = engine.all_finite(scores)
  order = range(len(types))
  judged = jnp.stack([finite[i] for i in order])
  return engine.Selection([masks[i] for i in order], judged, hint)


def pool(kind: SparsityType, scores: Any) -> Any:
  """Return the scores of units; those of single weights stay expressions."""
  if type(kind).pool is SparsityType.pool:
    return scores
  return _leaves.with_auto_axes(kind.pool, engine.value(scores))


def expand(kind: SparsityType, units: Array, like: Any) -> Array:
  """Return the mask of a leaf, laid out like it."""
  if type(kind).expand is SparsityType.expand:
    return units
  return _leaves.with_auto_axes(
    lambda units: kind.expand(units, like.shape),
    units,
    like=engine.value(like),
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


def select_masks(
  types: Sequence[Any],
  scores: Sequence[Any],
  sparsities: Sequence[Any],
  hint: Array | None = None,
) -> engine.Selection:
  """Return the masks of the leaves; a type's own `mask` method has the say.

  Args:
    types: the sparsity type of each leaf.
    scores: its scores, an array or expression of its shape.
    sparsities: the fraction removed of each: floats, arrays or `AtStep`.
    hint: as `engine.select` takes it.

  Returns:
    A `Selection` with masks of the leaves' shapes.
  """
  own = {
    i
    for i, kind in enumerate(types)
    if getattr(type(kind), "mask", None) is not SparsityType.mask
  }
  rest = [i for i in range(len(types)) if i not in own]
  kinds = [types[i] for i in rest]
  ones = ones_each(
    kinds, [scores[i].shape for i in rest], [sparsities[i] for i in rest]
  )
  units = [pool(types[i], scores[i]) for i in rest]
  found = select(kinds, units, ones, None if own else hint)
  if not own and all(u is s for u, s in zip(units, scores, strict=True)):
    return found
  masks = {i: _own_mask(types[i], scores[i], sparsities[i]) for i in own}
  for row, i in enumerate(rest):
    masks[i] = expand(types[i], found.masks[row], scores[i])
  # Pooling may hide a score that is not finite.
  finite = jnp.stack([engine.all_finite(s) for s in scores])
  return engine.Selection(
    [masks[i] for i in range(len(types))], finite, hint if own else found.hint
  )


def _own_mask(kind: Any, scores: Any, sparsity: Any) -> Array:
  if isinstance(sparsity, mask_calculator.AtStep):
    sparsity = sparsity.value
  mask = kind.mask(engine.value(scores), sparsity)
  return mask.astype(mask_calculator.MASK_DTYPE)


def create_masks(
  types: Sequence[Any], scores: Sequence[Array], sparsities: Sequence[Any]
) -> list[Array]:
  """Return the masks of `select_masks` alone."""
  return select_masks(types, scores, sparsities).masks
