"""Sparse training: start sparse, stay sparse, perhaps rewire."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import (
  _lazy,
  _tree,
  base_updater,
  mask_calculator,
  sparsity_types,
)


@dataclasses.dataclass(eq=False)
class StaticRandomSparse(base_updater.BaseUpdater):
  """Keep a random mask from start to end (Mocanu et al., 2016).

  Start sparse: `params = pruner.post_gradient_update(params, opt_state)` after
  `opt_state = tx.init(params)`.
  """

  is_sparse_gradients: bool = True

  category: ClassVar[base_updater.Category] = base_updater.Category(
    when="before",
    start="sparse-to-sparse",
    needs=frozenset({"random"}),
    paper="Mocanu et al., 2016; Liu et al., 2022",
    cost="a sparse step; masks never change",
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del grads
    return self.random_scores(params, sparse_state)

  def get_initial_masks(self, params, target_sparsities):
    return self.create_masks(
      self.random_scores(params, None), target_sparsities
    )

  def update_state(self, sparse_state, params, grads):
    del params, grads
    return sparse_state

  def instant_sparsify(self, params, grads=None):
    del params, grads
    raise RuntimeError(
      f"{type(self).__name__} trains sparse from the start, it prunes nothing "
      "at once: use wrap_optax, and params = pruner.post_gradient_update("
      "params, opt_state) after init; for a random mask use RandomPruning"
    )


@dataclasses.dataclass(eq=False)
class SET(StaticRandomSparse):
  """Drop the smallest |w|, grow at random (Mocanu et al., 2018).

  At each mask update a fraction of the kept weights is dropped and as many
  grow, so the count never changes. Grown weights start at zero with fresh
  optimizer moments. The fraction is annealed by a cosine to the end of the
  schedule. Nothing is rewired at step 0, when nothing is learnt yet.

  Attributes:
    drop_fraction: fraction of the kept weights dropped at the first update.
    drop_fraction_fn: `step -> fraction`, instead of the cosine.
  """

  skip_gradients: bool = True
  drop_fraction: float = 0.3
  drop_fraction_fn: Callable[[Any], Any] | None = None

  category: ClassVar[base_updater.Category] = base_updater.Category(
    start="sparse-to-sparse",
    dynamic=True,
    needs=frozenset({"random"}),
    paper="Mocanu et al., 2018",
    cost="a sparse step; two selections per mask update",
  )
  regrows: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    fraction = self.drop_fraction
    if (
      isinstance(fraction, bool)
      or not isinstance(fraction, int | float)
      or not 0 <= fraction <= 1
    ):
      raise ValueError(
        f"{type(self).__name__}: drop_fraction={fraction!r} must lie between 0 "
        "and 1, such as 0.3"
      )
    if self.drop_fraction_fn is not None and not callable(
      self.drop_fraction_fn
    ):
      raise ValueError(
        f"{type(self).__name__}: drop_fraction_fn={self.drop_fraction_fn!r} "
        "must be a function of the step"
      )

  def drop_fraction_at(self, step: Any) -> Any:
    """Return the fraction of kept weights to replace at a step."""
    if self.drop_fraction_fn is not None:
      return self.drop_fraction_fn(step)
    end = getattr(self.scheduler, "update_end_step", None)
    if not end:
      return self.drop_fraction
    passed = jnp.clip(jnp.asarray(step, jnp.float32) / end, 0, 1)
    return self.drop_fraction * (1 + jnp.cos(jnp.pi * passed)) / 2

  def drop_scores(self, params, sparse_state, grads):
    """Score the kept weights; the lowest are dropped."""
    del sparse_state, grads
    return jax.tree.map(jnp.abs, params)

  def grow_scores(self, params, sparse_state, grads):
    """Score the weights not kept; the highest grow."""
    del grads
    return self.random_scores(params, sparse_state, sparse_state.count + 1)

  def update_state(self, sparse_state, params, grads):
    drop = _lazy.defer(self.drop_scores, params, sparse_state, grads)
    grow = _lazy.defer(self.grow_scores, params, sparse_state, grads)
    leaves, treedef = _tree.flatten_with_names(params)
    masks = _tree.align(params, sparse_state.masks)
    picked = [i for i, mask in enumerate(masks) if mask is not None]
    if not picked:
      return sparse_state
    drop_entries = _tree.align(params, drop, "scores")
    grow_entries = _tree.align(params, grow, "scores")
    for entries in (drop_entries, grow_entries):
      base_updater.refuse_nan([(leaves[i][0], entries[i]) for i in picked])
    kinds = self._types([leaves[i] for i in picked], among=leaves)
    for kind, i in zip(kinds, picked, strict=True):
      if not isinstance(kind, sparsity_types.SparsityType):
        raise ValueError(
          f"params leaf {_tree.join(leaves[i][0])!r}: {type(self).__name__} "
          f"cannot drop and grow under {kind!r}; use a sparsity type with pool "
          "and expand"
        )
    fraction = jnp.where(
      sparse_state.count == 0, 0, self.drop_fraction_at(sparse_state.count)
    )
    active, counts, drop_units, grow_units = [], [], [], []
    for kind, i in zip(kinds, picked, strict=True):
      mask = self._unpack(masks[i], leaves[i][1])
      # The mask of a block is constant on it: its mean is the block's own bit.
      active.append(sparsity_types.pool(kind, mask) > 0)
      counts.append(jnp.sum(active[-1], dtype=jnp.int32))
      drop_units.append(sparsity_types.pool(kind, drop_entries[i]))
      grow_units.append(sparsity_types.pool(kind, grow_entries[i]))
    kept = mask_calculator.topk_masks(
      [
        _lazy.lift(lambda s, a=a: jnp.where(a, s, -jnp.inf), scores)
        for a, scores in zip(active, drop_units, strict=True)
      ],
      [
        count
        - jnp.clip(jnp.floor(fraction * count).astype(jnp.int32), 0, count)
        for count in counts
      ],
    )
    chosen = sparsity_types.select(
      kinds,
      [
        _lazy.lift(lambda s, k=k: jnp.where(k == 1, jnp.inf, s), scores)
        for k, scores in zip(kept, grow_units, strict=True)
      ],
      [
        kind.n if isinstance(kind, sparsity_types.NByM) else count
        for kind, count in zip(kinds, counts, strict=True)
      ],
    )
    new: list[Any] = [None] * len(leaves)
    for kind, i, units in zip(kinds, picked, chosen, strict=True):
      new[i] = sparsity_types.expand(kind, units, leaves[i][1])
    return self.replace_masks(
      sparse_state, params, treedef.unflatten(new), drop, grow
    )


@dataclasses.dataclass(eq=False)
class RigL(SET):
  """Drop the smallest |w|, grow the largest |∂L/∂w| (Evci et al., 2020)."""

  category: ClassVar[base_updater.Category] = base_updater.Category(
    start="sparse-to-sparse",
    dynamic=True,
    needs=frozenset({"gradients", "random"}),
    paper="Evci et al., 2020",
    cost="a sparse step; dense gradients and two selections per mask update",
  )

  def grow_scores(self, params, sparse_state, grads):
    del params, sparse_state
    return jax.tree.map(jnp.abs, grads)
