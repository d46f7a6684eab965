"""Masks in force: applied, held, replaced, and counted."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, engine, mask_calculator
from jaxpruner._leaves import ABSENT, PyTree
from jaxpruner.updater.prunable import Prunable
from jaxpruner.updater.state import (
  Array,
  Masks,
  SparseState,
  Tally,
  apply_mask,
  check_fit,
  unpack_mask,
)


def count_ones(mask: Array, axis: int | None = None) -> Array:
  """Return the number of ones in a mask, packed or not, as uint32.

  Args:
    mask: the mask.
    axis: the axis that numbers the layers of a stack, if it is one.

  Returns:
    A scalar; for a stack, a number per layer.
  """
  others = None if axis is None else (*range(axis), *range(axis + 1, mask.ndim))
  ones = jax.lax.population_count(mask)
  return jnp.sum(ones, axis=others, dtype=jnp.uint32)


def replace_masks(
  view: Prunable,
  state: SparseState,
  masks: list[Array],
  finite: Any,
  shrink: bool = False,
) -> SparseState:
  """Return the state with new masks, except where scores are non-finite.

  Args:
    view: the prunable leaves.
    state: the state before.
    masks: the new masks of the prunable leaves.
    finite: bool per leaf, whether all its scores are finite. If not, the leaf
      keeps its mask and `skipped` counts the refused update.
    shrink: also keep an old mask that has fewer ones than the new one.

  Returns:
    The state, its other fields unchanged.
  """
  if not masks:
    return state
  stored: list[Any] = [None] * jax.tree.structure(view.params).num_leaves
  new, old = view.per_leaf(masks), _stored(view, state.masks)
  first = 0
  for place, (before, axis) in old.items():
    mask = new[place]
    if axis is None:
      mask = _packed(mask) if view.packed else mask
      (ok,) = engine.row_from([finite], first)
    else:
      ok = jax.lax.slice_in_dim(finite, first, first + mask.shape[axis])
    if shrink:
      ok &= count_ones(mask, axis) <= count_ones(before, axis)
    if axis is not None:
      ok = jax.lax.broadcast_in_dim(ok, mask.shape, (axis,))
      where = jax.typeof(mask).sharding
      if any(name is not None for name in where.spec):
        ok = jax.sharding.reshard(ok, where)
    first += 1 if axis is None else mask.shape[axis]
    kept = jnp.where(ok, mask, before)
    stored[place] = _packed(kept) if view.packed and axis is not None else kept
  skipped = state.skipped
  if not _leaves.is_absent(skipped):
    skipped = skipped + (1 - finite.astype(jnp.int32))
  masks = _leaves.fill(view.params, stored)
  return state._replace(masks=masks, skipped=skipped)


def _packed(mask: Array) -> Array:
  return _leaves.with_auto_axes(mask_calculator.pack_mask, mask)


def _stored(
  view: Prunable, masks: Masks
) -> dict[int, tuple[Array, int | None]]:
  """Return place -> mask, and the axis of its layers if it is a stack.

  The mask of a stack is unpacked, so that its layers can be told apart.
  """
  entries = _leaves.align(view.params, masks)
  leaves = jax.tree.leaves(view.params)
  found: dict[int, tuple[Array, int | None]] = {}
  for place, cut in zip(view.places, view.cuts, strict=True):
    if cut is None:
      found[place] = entries[place], None
    elif place not in found:
      mask = entries[place]
      mask = unpack_mask(mask, leaves[place]) if view.packed else mask
      found[place] = mask, cut.axis
  return found


def _count_each(view: Prunable, masks: Masks) -> Array:
  """Return the number of ones of every prunable leaf, layers one by one."""
  counts = [count_ones(*pair) for pair in _stored(view, masks).values()]
  return jnp.concatenate([jnp.atleast_1d(count) for count in counts])


def check_masks(
  params: PyTree, masks: PyTree, is_packed: bool, targets: PyTree = None
) -> None:
  """Raise if a mask does not fit its parameter, or is missing."""
  for (names, param), mask, target in zip(
    _leaves.flatten_with_names(params)[0],
    _leaves.align(params, masks),
    _leaves.align(params, targets, "target_sparsities"),
    strict=True,
  ):
    if mask is not None:
      check_fit(mask, param.shape, is_packed, _leaves.join(names))
    elif target is not None:
      raise ValueError(
        f"params leaf {_leaves.join(names)!r}: the state holds a target "
        "sparsity but no mask; restore checkpoints into the structure that "
        "tx.init(params) gives"
      )


def masked(
  updater: Any, tree: PyTree, masks: Masks, is_packed: bool | None = None
) -> PyTree:
  """Return a masked tree; see `Hooks.apply_masks`."""
  packed: bool = updater.use_packed_masks if is_packed is None else is_packed
  check_masks(tree, masks, packed)
  return _leaves.map_masks(
    lambda _, param, mask: apply_mask(param, mask, packed), tree, masks
  )


def sparse_gradients(updater: Any, grads: PyTree, state: SparseState) -> PyTree:
  """Return the gradients; those of pruned weights are zero if asked for."""
  if not updater.is_sparse_gradients:
    return grads
  return updater.apply_masks(grads, state.masks)


def hold_at_zero(
  updater: Any, updates: Any, state: SparseState, params: Any
) -> Any:
  """Return updates whose sums with pruned weights are exactly +0.0."""

  def hold(_, param, update, mask):
    if mask is None:
      return update
    dtype = jnp.promote_types(param.dtype, update.dtype)
    mask = unpack_mask(mask, param) if updater.use_packed_masks else mask
    return jnp.where(mask, update.astype(dtype), -param.astype(dtype))

  updates = _leaves.like(params, updates, "updates")
  return _leaves.map_masks(hold, params, updates, state.masks)


def new_tally(view: Prunable, masks: Masks, tracked: bool) -> Tally:
  """Return the counts before the first update.

  Args:
    view: the prunable leaves.
    masks: their masks, as a state stores them.
    tracked: whether the union of all masks is tracked.

  Returns:
    A `Tally`.
  """
  sizes = [math.prod(leaf.shape) for leaf in view.leaves]
  size = jnp.asarray(np.array(sizes, np.uint32))
  kept = _count_each(view, masks)
  # Separate buffers: a donated state must not contain a buffer twice.
  grown, dropped, reset = (jnp.zeros_like(kept) for _ in range(3))
  explored = jnp.copy(kept) if tracked else ABSENT
  return Tally(size, kept, grown, dropped, reset, explored)


def count_changes(
  view: Prunable, old: SparseState, new: SparseState, fresh: bool
) -> SparseState:
  """Return the new state with its tally updated, if its masks changed.

  Args:
    view: the prunable leaves.
    old: the state before a mask update.
    new: the state after it.
    fresh: whether grown weights get fresh optimizer moments.

  Returns:
    The new state.
  """
  before, after = jax.tree.leaves(old.masks), jax.tree.leaves(new.masks)
  same = all(a is b for a, b in zip(before, after, strict=True))
  if _leaves.is_absent(old.tally) or same:
    return new
  if not _leaves.is_absent(new.explored):
    union = jax.tree.map(jnp.bitwise_or, new.explored, new.stored_masks)
    new = new._replace(explored=union)
  seen = ABSENT
  if not _leaves.is_absent(new.explored):
    seen = _count_each(view, new.explored)
  pairs = zip(
    _stored(view, old.masks).values(),
    _stored(view, new.masks).values(),
    strict=True,
  )
  counts = [_kept_and_grown(a, b, axis) for (a, axis), (b, _) in pairs]
  kept, grown = map(jnp.concatenate, zip(*counts, strict=True))
  return new._replace(
    tally=old.tally._replace(
      kept=kept,
      grown=grown,
      dropped=old.tally.kept + grown - kept,
      reset=grown if fresh else old.tally.reset,
      explored=seen,
    )
  )


@functools.partial(jax.jit, static_argnums=2)
def _kept_and_grown(old: Array, new: Array, axis: int | None) -> list[Array]:
  """Return the numbers of ones and of new ones, of each layer."""
  if axis is not None:
    return [count_ones(new, axis), count_ones(new & ~old, axis)]
  # Correct for packed bits and for bytes of 0 and 1.
  ones = [jax.lax.population_count(x) for x in (new, new & ~old)]
  values = [x.astype(jnp.uint32) for x in ones]
  return [total[None] for total in engine.totals(values)]
