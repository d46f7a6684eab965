"""Masks of many leaves at once: pool scores to units, select units, expand.

A unit is the smallest part of a leaf that a sparsity type keeps or removes: a
weight, a block, a channel.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, engine, mask_calculator
from jaxpruner.sparsity_types.base import Array, Shape, SparsityType


def select_units(
  units: Sequence[Any],
  ones: Any,
  hint: Array | None = None,
  stacks: Sequence[Sequence[int]] = (),
) -> engine.Selection:
  """Keep the highest scores of each entry; the layers of stacks as rows.

  What XLA does: it compiles a kernel for each slice of an array. What this
  does: layers of stacks of equal height are selected by one mapped search. What
  it saves: the time to compile, which does not grow with the layers.

  Args:
    units: scores, arrays or expressions.
    ones: the number that each keeps: a list, or one int32 array.
    hint: as in `engine.select`.
    stacks: the places of entries that are the layers of one leaf, in order.

  Returns:
    A `Selection` in the order of `units`.
  """
  by_height: dict[int, list[Sequence[int]]] = {}
  for places in stacks:
    by_height.setdefault(len(places), []).append(places)
  inside = {i for places in stacks for i in places}
  rest = [i for i in range(len(units)) if i not in inside]
  parts = [(rest, _select_rest(units, ones, hint, rest))] if rest else []
  for runs in by_height.values():
    ids = [i for places in zip(*runs, strict=True) for i in places]
    rows = [
      jnp.stack([engine.value(units[i]) for i in places]) for places in runs
    ]
    count = jnp.stack([jnp.asarray(ones[i]).astype(jnp.uint32) for i in ids])
    near = None if hint is None else hint[np.array(ids)]
    shape = (len(runs[0]), len(runs))
    found = _select_rows(
      rows,
      count.reshape(shape),
      None if near is None else near.reshape(*shape, -1),
    )
    masks = [
      found.masks[n][k] for k in range(shape[0]) for n in range(shape[1])
    ]
    near = None
    if found.hint is not None:
      near = found.hint.reshape(-1, found.hint.shape[-1])
    parts.append((ids, engine.Selection(masks, found.finite.reshape(-1), near)))
  order = np.argsort([i for ids, _ in parts for i in ids])
  masks = [mask for _, found in parts for mask in found.masks]
  finite = jnp.concatenate([found.finite for _, found in parts])[order]
  hints = [found.hint for _, found in parts if found.hint is not None]
  if hint is not None:
    hint = jnp.concatenate(hints)[order]
  return engine.Selection([masks[i] for i in order], finite, hint)


def _select_rest(
  units: Sequence[Any], ones: Any, hint: Array | None, rest: list[int]
) -> engine.Selection:
  near = hint
  if hint is not None and len(rest) < len(units):
    near = hint[np.array(rest)]
  some = mask_calculator.pick(ones, rest)
  return engine.select([units[i] for i in rest], some, hint=near)


def _is_placed(scores: Any) -> bool:
  """Tell whether an explicit mesh shards an array or expression."""
  if isinstance(scores, engine.ScoreExpr):
    spec = scores.aval.sharding.spec
  else:
    spec = jax.typeof(scores).sharding.spec
  return any(axis is not None for axis in spec)


@jax.jit
def _select_rows(
  rows: list[Array], ones: Array, hint: Array | None
) -> engine.Selection:
  select_layer = lambda scores, count, near: engine.select(
    scores, count, hint=near
  )
  return jax.vmap(select_layer)(rows, ones, hint)


def select(
  types: Sequence[SparsityType],
  units: Sequence[Any],
  ones: Any,
  hint: Array | None = None,
  stacks: Sequence[Sequence[int]] = (),
) -> engine.Selection:
  """Keep the units with the highest scores in each leaf.

  All leaves without groups are selected in one search. A type with groups ranks
  each group alone, in its method `choose`.

  Args:
    types: the sparsity type of each leaf.
    units: the scores of its units, arrays or expressions.
    ones: the number of units that each leaf (each of its groups) keeps: a list,
      or one int32 array.
    hint: as in `engine.select`; used if no type has groups.
    stacks: the places of leaves that are the layers of one stacked leaf; used
      if no type has groups.

  Returns:
    A `Selection` of units.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparsity_types
    >>> kinds = [sparsity_types.Unstructured()]
    >>> units = [jnp.array([1.0, 3.0, 2.0])]
    >>> sparsity_types.select(kinds, units, [2]).masks[0].tolist()
    [0, 1, 1]
  """
  free = [i for i, kind in enumerate(types) if not hasattr(kind, "choose")]
  if len(free) == len(types):
    # Under an explicit mesh a mapped search does not trace.
    if stacks and not any(map(_is_placed, units)):
      return select_units(units, ones, hint, stacks)
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
  """Return the scores of a leaf's units.

  Args:
    kind: the sparsity type of the leaf.
    scores: a score for every weight, an array or expression.

  Returns:
    An array of scores; if a unit is one weight, `scores` unchanged.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparsity_types
    >>> scores = jnp.array([[1.0, 3.0], [2.0, 4.0]])
    >>> sparsity_types.pool(sparsity_types.Block((2, 1)), scores).tolist()
    [[1.5, 3.5]]
  """
  if type(kind).pool is SparsityType.pool:
    return scores
  return _leaves.with_auto_axes(kind.pool, engine.value(scores))


def expand(kind: SparsityType, units: Array, like: Any) -> Array:
  """Return the mask of a leaf from the mask of its units.

  Args:
    kind: the sparsity type of the leaf.
    units: the mask of the units.
    like: the leaf, for its shape and sharding.

  Returns:
    A mask of the leaf's shape; if a unit is one weight, `units` unchanged.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparsity_types
    >>> kind, units = sparsity_types.Block((2, 1)), jnp.array([[0, 1]])
    >>> sparsity_types.expand(kind, units, jnp.ones((2, 2))).tolist()
    [[0, 1], [0, 1]]
  """
  if type(kind).expand is SparsityType.expand:
    return units
  return _leaves.with_auto_axes(
    lambda units: kind.expand(units, like.shape),
    units,
    like=engine.value(like),
  )


def ones_each(
  types: Sequence[SparsityType], shapes: Sequence[Shape], sparsities: Any
) -> Any:
  """Return the number of units that each leaf keeps.

  Scheduled counts are computed in one array, because separate scalar kernels
  per leaf would make the program larger.

  Args:
    types: the sparsity type of each leaf.
    shapes: the shape of each leaf.
    sparsities: the fraction removed of each: floats, arrays or `AtStep`.

  Returns:
    An int or an integer scalar per leaf; for types with groups, per group.

  Example:
    >>> from jaxpruner import sparsity_types
    >>> kinds = [sparsity_types.Unstructured(), sparsity_types.Block((2, 2))]
    >>> sparsity_types.ones_each(kinds, [(4, 4), (4, 4)], [0.5, 0.5])
    [8, 2]
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
    if len(plain) == len(types):
      return each  # taken apart, each leaf would add a kernel
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
  stacks: Sequence[Sequence[int]] = (),
) -> engine.Selection:
  """Return the masks of the leaves at given sparsities.

  A sparsity type that overrides `mask` computes the mask of its leaf itself;
  all other leaves are selected together.

  Args:
    types: the sparsity type of each leaf.
    scores: its scores, an array or expression of its shape.
    sparsities: the fraction removed of each: floats, arrays or `AtStep`.
    hint: as in `engine.select`.
    stacks: as in `select`.

  Returns:
    A `Selection` with masks of the leaves' shapes.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparsity_types
    >>> kinds = [sparsity_types.Unstructured()]
    >>> scores = [jnp.array([1.0, jnp.inf])]
    >>> found = sparsity_types.select_masks(kinds, scores, [0.5])
    >>> found.masks[0].tolist(), found.finite.tolist()
    ([0, 1], [False])
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
  given = hint
  if own:
    hint, stacks = None, ()
  found = select(kinds, units, ones, hint, stacks)
  if not own and all(u is s for u, s in zip(units, scores, strict=True)):
    return found
  masks = {i: _own_mask(types[i], scores[i], sparsities[i]) for i in own}
  for row, i in enumerate(rest):
    masks[i] = expand(types[i], found.masks[row], scores[i])
  # Finiteness comes from the scores: pooling may hide a non-finite one.
  finite = jnp.stack([engine.all_finite(s) for s in scores])
  return engine.Selection(
    [masks[i] for i in range(len(types))], finite, given if own else found.hint
  )


def _own_mask(kind: Any, scores: Any, sparsity: Any) -> Array:
  if isinstance(sparsity, mask_calculator.AtStep):
    sparsity = sparsity.value
  mask = kind.mask(engine.value(scores), sparsity)
  return mask.astype(mask_calculator.MASK_DTYPE)


def create_masks(
  types: Sequence[Any], scores: Sequence[Array], sparsities: Sequence[Any]
) -> list[Array]:
  """Return the masks of the leaves at given sparsities, as a list.

  Args:
    types: the sparsity type of each leaf.
    scores: its scores, of its shape.
    sparsities: the fraction removed of each: floats, arrays or `AtStep`.

  Returns:
    A uint8 mask per leaf, 1 = kept.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparsity_types
    >>> kinds = [sparsity_types.Block((1, 2))]
    >>> scores = [jnp.array([[1.0, 1.0, 0.0, 3.0]])]
    >>> sparsity_types.create_masks(kinds, scores, [0.5])[0].tolist()
    [[0, 0, 1, 1]]
  """
  return select_masks(types, scores, sparsities).masks
