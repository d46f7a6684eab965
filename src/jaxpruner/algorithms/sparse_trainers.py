"""Sparse training: start sparse, stay sparse, perhaps rewire."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, base_updater, mask_calculator, sparsity_types
from jaxpruner.algorithms import criteria, redistribution
from jaxpruner.engine import lazy as _lazy
from jaxpruner.engine import search as _selection


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

  def instant_sparsify(self, params, grads=None) -> tuple[Any, Any]:
    del params, grads
    raise RuntimeError(
      f"{type(self).__name__} trains sparse from the start, it prunes nothing "
      "at once: use wrap_optax, and params = pruner.post_gradient_update("
      "params, opt_state) after init; for a random mask use RandomPruning"
    )


@dataclasses.dataclass(eq=False)
class Rewiring(StaticRandomSparse):
  """Drop some of the kept weights and grow as many others.

  The mechanism of dynamic sparse training, put together from parts: what is
  dropped, what grows, and which leaf gets how many back. At each mask update a
  fraction of the kept weights is dropped and as many grow, so the count never
  changes. Grown weights start at zero with fresh optimizer moments. The
  fraction is annealed by a cosine to the end of the schedule. Nothing is
  rewired at step 0, when nothing is learnt yet.

  Attributes:
    drop_fraction: fraction of the kept weights dropped at the first update.
    drop_fraction_fn: `step -> fraction`, instead of the cosine.
    drop: scores of the kept weights; the lowest are dropped.
    grow: scores of the others; the highest grow.
    redistribute: how dropped weights are shared out over the leaves; None gives
      each leaf its own back.
    momentum_decay: of the running mean of gradients that parts may need.
  """

  skip_gradients: bool = True
  drop_fraction: float = 0.3
  drop_fraction_fn: Callable[[Any], Any] | None = None
  drop: Callable[[criteria.Seen], Any] = criteria.Magnitude()
  grow: Callable[[criteria.Seen], Any] = criteria.Random()
  redistribute: Callable[..., Any] | None = None
  momentum_decay: float = 0.9

  regrows: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    for name in ("drop_fraction", "momentum_decay"):
      value = getattr(self, name)
      if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= 1
      ):
        raise ValueError(
          f"{type(self).__name__}: {name}={value!r} must lie between 0 and 1, "
          "such as 0.3"
        )
    if self.drop_fraction_fn is not None and not callable(
      self.drop_fraction_fn
    ):
      raise ValueError(
        f"{type(self).__name__}: drop_fraction_fn={self.drop_fraction_fn!r} "
        "must be a function of the step"
      )
    for name in ("drop", "grow", "redistribute"):
      part = getattr(self, name)
      if isinstance(part, type) or not (part is None or callable(part)):
        raise ValueError(
          f"{type(self).__name__}: {name}={part!r} must be a part such as "
          "jaxpruner.criteria.Gradient() or jaxpruner.redistribution."
          "ByMomentum(); names are for create_updater_from_config"
        )

  @property
  def needs(self):
    parts = (self.drop, self.grow, self.redistribute)
    return self.category.needs.union(
      *(getattr(part, "needs", ()) for part in parts)
    )

  def init_stats(self, params, masks):
    if "momentum" not in self.needs:
      return None
    start = lambda _, param, mask: (
      None
      if mask is None
      else _leaves.shard_like(jnp.zeros(param.shape, jnp.float32), param)
    )
    return {"momentum": _leaves.map_masks(start, params, masks)}

  def observe(self, state, params, grads):
    if "momentum" not in self.needs:
      return state

    def step(_, grad, mean):
      if mean is None:
        return None
      new = self.momentum_decay * mean + (1 - self.momentum_decay) * grad
      # One bad batch must not spoil the mean for ever.
      return jnp.where(jnp.isfinite(new), new, mean).astype(mean.dtype)

    grads = jax.tree.structure(params).unflatten(_leaves.align(params, grads))
    momentum = _leaves.map_masks(step, grads, state.stats["momentum"])
    return state._replace(stats={**state.stats, "momentum": momentum})

  def drop_fraction_at(self, step: Any) -> Any:
    """Return the fraction of kept weights to replace at a step."""
    if self.drop_fraction_fn is not None:
      return self.drop_fraction_fn(step)
    end = getattr(self.scheduler, "update_end_step", None)
    if not end:
      return self.drop_fraction
    passed = jnp.clip(jnp.asarray(step, jnp.float32) / end, 0, 1)
    return self.drop_fraction * (1 + jnp.cos(jnp.pi * passed)) / 2

  def see(self, params, sparse_state, grads) -> criteria.Seen:
    """Return what the parts look at."""
    return criteria.Seen(
      params,
      grads,
      (sparse_state.stats or {}).get("momentum"),
      lambda: self.random_scores(params, sparse_state, sparse_state.count + 1),
    )

  def drop_scores(self, params, sparse_state, grads):
    """Score the kept weights; the lowest are dropped."""
    return self.drop(self.see(params, sparse_state, grads))

  def grow_scores(self, params, sparse_state, grads):
    """Score the weights not kept; the highest grow."""
    return self.grow(self.see(params, sparse_state, grads))

  def goals(self, sparse_state, params, kinds, shapes, counts):
    """Return how many units each leaf's groups are to have: as they have."""
    del sparse_state, params
    return -(-counts // _groups(kinds, shapes))

  def survivors(self, sparse_state, totals, active, scores):
    """Return, per leaf, how many of its units are not dropped.

    Args:
      sparse_state: the state.
      totals: int32 per leaf, how many units it is to have after growing.
      active: per leaf, which units are kept now.
      scores: per leaf, the drop scores of its units.
    """
    del active, scores
    fraction = self.drop_fraction_at(sparse_state.count)
    fraction = jnp.where(sparse_state.count == 0, 0, fraction)
    dropped = jnp.floor(fraction * totals).astype(jnp.int32)
    return totals - jnp.clip(dropped, 0, totals)

  def update_state(self, sparse_state, params, grads):
    drop = _lazy.defer(self.drop_scores, params, sparse_state, grads)
    grow = _lazy.defer(self.grow_scores, params, sparse_state, grads)
    leaves, treedef = _leaves.flatten_with_names(params)
    masks = _leaves.align(params, sparse_state.masks)
    picked = [i for i, mask in enumerate(masks) if mask is not None]
    if not picked:
      return sparse_state
    drop_entries = _leaves.align(params, drop, "scores")
    grow_entries = _leaves.align(params, grow, "scores")
    for entries in (drop_entries, grow_entries):
      base_updater.refuse_nan([(leaves[i][0], entries[i]) for i in picked])
    kinds = self._types([leaves[i] for i in picked], among=leaves)
    self._check_kinds(kinds, [leaves[i][0] for i in picked])
    active, drop_units, grow_units = [], [], []
    for kind, i in zip(kinds, picked, strict=True):
      mask = self._unpack(masks[i], leaves[i][1])
      # The mask of a block is constant on it: its mean is the block's own bit.
      active.append(sparsity_types.pool(kind, mask))
      drop_units.append(sparsity_types.pool(kind, drop_entries[i]))
      grow_units.append(sparsity_types.pool(kind, grow_entries[i]))
    # Counts stay one array: leaf by leaf, each would have kernels of its own.
    counts = jnp.stack([_selection.total(a > 0) for a in active])
    counts = counts.astype(jnp.int32)
    shapes = [leaves[i][1].shape for i in picked]
    goals = self.goals(sparse_state, params, kinds, shapes, counts)
    totals = goals * _groups(kinds, shapes)
    # A mask that lost units (a sparse model's zeros) has fewer to keep.
    left = jnp.minimum(
      self.survivors(sparse_state, totals, [a > 0 for a in active], drop_units),
      counts,
    )
    kept = mask_calculator.topk_masks(
      [
        _lazy.lift(lambda s, a=a: jnp.where(a > 0, s, -jnp.inf), scores)
        for a, scores in zip(active, drop_units, strict=True)
      ],
      left,
    )
    # Random numbers are finite; to look would be to draw them once more.
    judged = [drop] if type(self.grow) is criteria.Random else [drop, grow]
    if self.redistribute is not None:
      momentum = (sparse_state.stats or {}).get("momentum")
      momentum = _leaves.align(params, momentum, "momentum")
      room = jnp.array([a.size for a in active], jnp.int32) - left
      shares = self.redistribute(kept, [momentum[i] for i in picked])
      grown = redistribution.allocate(shares, jnp.sum(totals - left), room)
      goals = left + grown
      judged.append(self._one_for_all(judged, params, picked))
    chosen = sparsity_types.select(
      kinds,
      [
        _lazy.lift(lambda s, k=k: jnp.where(k == 1, jnp.inf, s), scores)
        for k, scores in zip(kept, grow_units, strict=True)
      ],
      goals,
    )
    new: list[Any] = [None] * len(leaves)
    for kind, i, units in zip(kinds, picked, chosen, strict=True):
      new[i] = sparsity_types.expand(kind, units, leaves[i][1])
    return self.replace_masks(
      sparse_state, params, treedef.unflatten(new), *judged
    )

  def _check_kinds(self, kinds, names) -> None:
    for kind, name in zip(kinds, names, strict=True):
      if not isinstance(kind, sparsity_types.SparsityType):
        raise ValueError(
          f"params leaf {_leaves.join(name)!r}: {type(self).__name__} "
          f"cannot drop and grow under {kind!r}; use a sparsity type with pool "
          "and expand"
        )
      if self.redistribute is not None and not isinstance(
        kind, sparsity_types.Unstructured
      ):
        raise ValueError(
          f"params leaf {_leaves.join(name)!r}: {self.redistribute!r} moves "
          f"single weights between leaves, which {kind!r} does not allow; use "
          "Unstructured, or redistribute=None"
        )

  def _one_for_all(self, judged, params, picked):
    """Return scores that are not finite in any leaf if they are not in one.

    Leaves that trade weights must all be updated, or none.
    """
    columns = [_leaves.align(params, tree, "scores") for tree in judged]
    finite = jnp.array(True)
    for i in picked:
      for column in columns:
        finite &= _lazy.finite(column[i])
    flag = jnp.where(finite, 0.0, jnp.nan)
    return jax.tree.map(lambda _: flag, params)


def _groups(kinds, shapes) -> np.ndarray:
  """Return into how many groups each leaf's units fall."""
  pairs = zip(kinds, shapes, strict=True)
  return np.array([kind.groups(shape) for kind, shape in pairs], np.int32)


@dataclasses.dataclass(eq=False)
class SET(Rewiring):
  """Drop the smallest |w|, grow at random (Mocanu et al., 2018).

  At step `t` of `T` the fraction `α/2 · (1 + cos(π·t/T))` of the kept weights
  is exchanged, `α` being `drop_fraction`; their count never changes. A weight
  grows at zero, with fresh optimizer moments. Gradients of removed weights are
  never asked for, so a sparse machine need not compute them.
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    start="sparse-to-sparse",
    dynamic=True,
    needs=frozenset({"random"}),
    paper="Mocanu et al., 2018",
    cost="a sparse step; two selections per mask update",
  )


@dataclasses.dataclass(eq=False)
class RigL(Rewiring):
  """Drop the smallest |w|, grow the largest |∂L/∂w| (Evci et al., 2020).

  At step `t` of `T` the fraction `α/2 · (1 + cos(π·t/T))` of the kept weights
  is exchanged, `α` being `drop_fraction`; their count never changes. A weight
  grows at zero, with fresh optimizer moments: where the loss would fall fastest
  if it were there. Only mask updates need the gradient of removed weights.
  """

  grow: Callable[[criteria.Seen], Any] = criteria.Gradient()

  category: ClassVar[base_updater.Category] = base_updater.Category(
    start="sparse-to-sparse",
    dynamic=True,
    needs=frozenset({"gradients", "random"}),
    paper="Evci et al., 2020",
    cost="a sparse step; dense gradients and two selections per mask update",
  )
