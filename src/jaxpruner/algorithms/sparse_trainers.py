"""Sparse training: start sparse, stay sparse, replace weights if wanted."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import (
  _leaves,
  _legacy,
  base_updater,
  engine,
  mask_calculator,
  sparsity_types,
)
from jaxpruner.algorithms import criteria, redistribution
from jaxpruner.updater import checks
from jaxpruner.updater.state import refuse_nan

# What a part needs -> the names in `state.stats` of what is kept for it.
_STATISTICS = {"momentum": ("momentum",), "sums": ("sum", "squares")}


@dataclasses.dataclass(eq=False)
class StaticRandomSparse(base_updater.BaseUpdater):
  """Keep a random mask from start to end (Mocanu et al., 2016).

  The mask `m` is drawn at `init`, and the network is `m·w` throughout training.
  To start sparse, call `params = pruner.post_gradient_update(params,
  opt_state)` after `opt_state = tx.init(params)`.

  Attributes:
    is_sparse_gradients: whether gradients of pruned weights are set to zero
      before the optimizer sees them.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner, optax
    >>> pruner = jaxpruner.StaticRandomSparse(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.75))
    >>> params = jnp.ones((4, 4))
    >>> state = pruner.wrap_optax(optax.sgd(0.1)).init(params)
    >>> float(pruner.post_gradient_update(params, state).sum())
    4.0
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
    scores = self.random_scores(params, None)
    return self.create_masks(scores, target_sparsities)


@dataclasses.dataclass(eq=False)
class Rewiring(_legacy.OldHooks, StaticRandomSparse):
  """Drop some of the kept weights and grow the same number of others.

  This is the mechanism of dynamic sparse training. Three parts configure it:
  the criterion that drops, the criterion that grows, and the redistribution
  between leaves. A mask update drops a fraction of the kept weights and grows
  the same number, so the number of kept weights is constant. Grown weights
  start at zero with fresh optimizer moments. The fraction falls along a cosine
  to 0 at the end of the schedule. Step 0 changes no mask, because the weights
  are not trained yet.

  Attributes:
    skip_gradients: whether the optimizer rests on steps that update masks.
    drop_fraction: fraction of the kept weights dropped at step 0 of the cosine,
      which ends with the schedule; of a schedule without an end, at all steps.
    drop_fraction_fn: `step -> fraction`, replaces the cosine.
    drop: scores of the kept weights; the lowest are dropped.
    grow: scores of the weights that are not kept; the highest grow.
    redistribute: each leaf's share of the dropped weights; None means that each
      leaf grows the number that it dropped.
    momentum_decay: decay of the running mean of gradients, if a part needs it.
    is_debug: has no effect; accepted because the paper's library has it.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.Rewiring(
    ...   grow=jaxpruner.criteria.Gradient(), drop_fraction=0.5,
    ...   continue_sparse=True, sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params, grads = jnp.array([[4.0, 3, 0, 0]]), jnp.array([[0.0, 0, 1, 5]])
    >>> state = pruner.init_state(params)._replace(count=1)
    >>> pruner.update_state(state, params, grads).masks.tolist()
    [[1, 0, 0, 1]]
  """

  skip_gradients: bool = True
  drop_fraction: float = 0.3
  drop_fraction_fn: Callable[[Any], Any] | None = None
  drop: Callable[[criteria.Seen], Any] = criteria.Magnitude()
  grow: Callable[[criteria.Seen], Any] = criteria.Random()
  redistribute: Callable[..., Any] | None = None
  momentum_decay: float = 0.9
  is_debug: bool = False

  regrows: ClassVar[bool] = True
  changes: ClassVar[tuple[str, ...]] = ()

  def __post_init__(self):
    super().__post_init__()
    cls = type(self)
    if (
      self.category.start == "sparse-to-sparse"
      and cls.calculate_scores is not Rewiring.calculate_scores
      and cls.update_state is Rewiring.update_state
    ):
      raise TypeError(
        f"{cls.__name__}.calculate_scores would never be called: this "
        "algorithm drops and grows; override drop_scores and grow_scores, or "
        "pass drop= and grow= criteria"
      )
    checks.check_share(self, "drop_fraction")
    checks.check_share(self, "momentum_decay")
    if self.drop_fraction_fn is not None and not callable(
      self.drop_fraction_fn
    ):
      raise ValueError(
        f"{type(self).__name__}: drop_fraction_fn={self.drop_fraction_fn!r} "
        "must be a function of the step"
      )
    for name in ("drop", "grow", "redistribute"):
      part = getattr(self, name)
      left_out = part is None and name == "redistribute"
      if isinstance(part, type) or not (left_out or callable(part)):
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

  def init_extra(self, params, masks):
    kept = [*_STATISTICS["momentum"]] if "momentum" in self.needs else []
    kept += _STATISTICS["sums"] if "sums" in self.needs else []
    if not kept:
      return None
    view = self.view(params)
    start = lambda p: _leaves.shard_like(jnp.zeros(p.shape, jnp.float32), p)
    return {name: view.put(None, map(start, view.leaves)) for name in kept}

  def on_gradients(self, state, params, grads):
    steps = {}
    if "momentum" in self.needs:
      decay = self.momentum_decay
      steps["momentum"] = lambda mean, g: decay * mean + (1 - decay) * g
    if "sums" in self.needs:
      fresh, near = self._window(state.count)
      add = lambda total, g: jnp.where(fresh, 0, total) + jnp.where(near, g, 0)
      steps["sum"], steps["squares"] = add, lambda total, g: add(total, g * g)
    if not steps:
      return state
    view, stats = self.view(params), {**state.stats}
    grads = [g.astype(jnp.float32) for g in view.of(grads, "grads")]
    for name, step in steps.items():
      old = view.of(state.stats[name], name)
      new = map(step, old, grads)
      # Non-finite gradients of one batch must not stay in the statistics.
      keep = lambda new, old: jnp.where(jnp.isfinite(new), new, old)
      stats[name] = view.put(None, map(keep, new, old))
    return state._replace(stats=stats)

  def _window(self, step):
    """Return whether sums start anew at a step, and whether they count it."""
    parts = (self.drop, self.grow, self.redistribute)
    length = max(getattr(part, "window", 1) for part in parts)
    due = self.scheduler.is_mask_update_iter
    fresh = jnp.asarray(due(step - 1)) | (step == 0)
    near = jnp.stack([jnp.asarray(due(step + k)) for k in range(length)])
    return fresh, jnp.any(near)

  def drop_fraction_at(self, step: Any) -> Any:
    """Return the fraction of kept weights to replace at a step.

    Args:
      step: the step, may be traced.

    Returns:
      A scalar that falls along a cosine to 0 at the end of the schedule, or the
      value of `drop_fraction_fn`.
    """
    if self.drop_fraction_fn is not None:
      return self.drop_fraction_fn(step)
    end = getattr(self.scheduler, "update_end_step", None)
    if not end:
      return self.drop_fraction
    passed = jnp.clip(jnp.asarray(step, jnp.float32) / end, 0, 1)
    return self.drop_fraction * (1 + jnp.cos(jnp.pi * passed)) / 2

  def see(self, params, sparse_state, grads) -> criteria.Seen:
    """Return the arrays that the criteria read at a mask update.

    Args:
      params: the parameters.
      sparse_state: the state.
      grads: the gradients of this step.

    Returns:
      A `Seen`.
    """
    stats = sparse_state.stats or {}
    return criteria.Seen(
      params,
      grads,
      stats.get("momentum"),
      lambda: self.random_scores(params, sparse_state, sparse_state.count + 1),
      (stats["sum"], stats["squares"]) if "sum" in stats else None,
    )

  def drop_scores(self, params, sparse_state, grads):
    """Score the kept weights; the lowest are dropped.

    Args:
      params: the parameters.
      sparse_state: the state.
      grads: the gradients of this step.

    Returns:
      A tree of scores like `params`.
    """
    return self.drop(self.see(params, sparse_state, grads))

  def grow_scores(self, params, sparse_state, grads):
    """Score the weights that are not kept; the highest grow.

    Args:
      params: the parameters.
      sparse_state: the state.
      grads: the gradients of this step.

    Returns:
      A tree of scores like `params`.
    """
    return self.grow(self.see(params, sparse_state, grads))

  def goals(self, view, state, counts):
    """Return the number of units in each group of a leaf after growing.

    Args:
      view: the prunable leaves.
      state: the state.
      counts: int32 per leaf, its number of units now.

    Returns:
      int32 per leaf; by default the number of units per group now.
    """
    del state
    return -(-counts // _groups(view))

  def survivors(self, state, totals, active, scores):
    """Return, per leaf, the number of units that are not dropped.

    Args:
      state: the state.
      totals: int32 per leaf, its number of units after growing.
      active: bool per unit of each leaf, whether it is kept now.
      scores: the drop scores of the units of each leaf.

    Returns:
      int32 per leaf.
    """
    del active, scores
    fraction = self.drop_fraction_at(state.count)
    fraction = jnp.where(state.count == 0, 0, fraction)
    dropped = _floor(fraction * totals.astype(jnp.float32)).astype(jnp.int32)
    return totals - jnp.clip(dropped, 0, totals)

  def update_state(self, sparse_state, params, grads, **extra):
    view, state = self.view(params), sparse_state
    if not view.names:
      return state
    drop, grow = self._parts(view, state, grads)
    pool = lambda scores: [*map(sparsity_types.pool, view.kinds, scores)]
    # A mask is constant on a block, so its mean is the block's bit.
    active = [a > 0 for a in pool(view.of(state.masks))]
    drop_units, grow_units = pool(drop), pool(grow)
    counts, finite = self._look(active, drop, grow)
    goals = self.goals(view, state, counts)
    totals = goals * _groups(view)
    # A mask may have fewer units than its target (`continue_sparse`).
    left = self.survivors(state, totals, active, drop_units)
    left = jnp.minimum(left, counts)
    if self.redistribute is not None:
      # Leaves that exchange weights are updated all together or not at all.
      finite = jnp.broadcast_to(jnp.all(finite), finite.shape)

    start = [a.astype(mask_calculator.MASK_DTYPE) for a in active]

    def turn(is_growing: Any, kept: list[Any]) -> list[Any]:
      """Return the units that survive, or these and the grown ones."""
      ones = goals
      if self.redistribute is not None:
        early = getattr(self.redistribute, "before_dropping", False)
        seen = start if early else kept
        ones = left + self._shares(view, state, seen, left, totals)
      rank = lambda *args: engine.apply(_rank, *args, jnp.asarray(is_growing))
      scores = [*map(rank, drop_units, grow_units, kept)]
      if is_growing is True:
        return sparsity_types.select(view.kinds, scores, ones).masks
      ones = jnp.where(is_growing, ones, left)
      return engine.select(scores, ones).masks

    def once(i: Any, kept: list[Any]) -> list[Any]:
      # Out of a conditional XLA moves nothing: |w| and |g| are not stored.
      return jax.lax.cond(i < 2, lambda k: turn(i == 1, k), lambda k: k, kept)

    grouped = any(hasattr(kind, "choose") for kind in view.kinds)
    if grouped or not isinstance(counts, jax.core.Tracer):
      chosen = turn(True, turn(False, start))
    else:  # both turns are one compiled search
      chosen = jax.lax.fori_loop(0, 2, once, start)
    masks = [*map(sparsity_types.expand, view.kinds, chosen, view.leaves)]
    return self._replace_masks(view, state, masks, finite)

  def _parts(self, view, state, grads) -> tuple[list[Any], list[Any]]:
    """Return the drop and grow scores of the prunable leaves."""
    self._check_kinds(view)
    found = []
    for part in (self.drop_scores, self.grow_scores):
      scores = engine.defer(part, view.params, state, grads)
      scores = view.of(scores, "scores")
      refuse_nan(list(zip(view.names, scores, strict=True)))
      found.append(scores)
    return found[0], found[1]

  def _look(self, active, drop, grow) -> tuple[Any, Any]:
    """Return each leaf's number of units, and whether its scores are finite."""
    # Random numbers are finite; a check would draw them a second time.
    checked = [drop] if type(self.grow) is criteria.Random else [drop, grow]
    finite = [engine.all_finite(*s) for s in zip(*checked, strict=True)]
    counts = jnp.stack([engine.count_true(a) for a in active])
    return counts.astype(jnp.int32), jnp.stack(finite)

  def _shares(self, view, state, masks, left, totals) -> Any:
    """Return how many units each leaf grows, redistributed."""
    assert self.redistribute is not None
    momentum = (state.stats or {}).get("momentum")
    none: list[Any] = [None] * len(masks)
    momentum = none if momentum is None else view.of(momentum, "momentum")
    room = jnp.array([m.size for m in masks], jnp.int32) - left
    shares = self.redistribute(masks, momentum)
    return redistribution.allocate(shares, jnp.sum(totals - left), room)

  def _check_kinds(self, view) -> None:
    for kind, name in zip(view.kinds, view.names, strict=True):
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


def _rank(drop: Any, grow: Any, kept: Any, is_growing: Any) -> Any:
  """Score kept units among themselves; growing, kept ones above all others."""
  survive = jnp.where(kept == 1, drop, -jnp.inf)
  return jnp.where(is_growing, jnp.where(kept == 1, jnp.inf, grow), survive)


def _floor(number: Any) -> Any:
  """Round down, where float32 errors do not count.

  Half-way along the cosine, 30 % of 40 weights are 6, but in float32 they are
  5.9999995.
  """
  near = jnp.round(number)
  exact = jnp.abs(number - near) <= 1e-6 * number
  return jnp.where(exact, near, jnp.floor(number))


def _groups(view) -> np.ndarray:
  """Return the number of groups of each leaf's units."""
  pairs = zip(view.kinds, view.leaves, strict=True)
  return np.array([kind.groups(p.shape) for kind, p in pairs], np.int32)


@dataclasses.dataclass(eq=False)
class SET(Rewiring):
  """Drop the smallest |w|, grow at random (Mocanu et al., 2018).

  At step `t` of `T` the fraction `α/2 · (1 + cos(π·t/T))` of the kept weights
  is replaced, where `α` is `drop_fraction`; the number of kept weights is
  constant. A weight grows at zero, with fresh optimizer moments. The gradients
  of removed weights are never read, so sparse hardware need not compute them.
  The attributes are those of `Rewiring`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SET(
    ...   drop_fraction=0.5, continue_sparse=True,
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = jnp.array([[4.0, 3, 0, 0]])
    >>> state = pruner.init_state(params)._replace(count=1)
    >>> masks = pruner.update_state(state, params, None).masks
    >>> int(masks[0, 0]), int(masks.sum())  # 4 is kept, another one grew
    (1, 2)
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
  is replaced, where `α` is `drop_fraction`; the number of kept weights is
  constant. A weight grows at zero, with fresh optimizer moments, where its
  gradient says that the loss would fall fastest. Only mask updates read the
  gradients of removed weights. The other attributes are those of `Rewiring`.

  Attributes:
    grow: scores of the weights that are not kept; the highest grow.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.RigL(
    ...   drop_fraction=0.5, continue_sparse=True,
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params, grads = jnp.array([[4.0, 3, 0, 0]]), jnp.array([[0.0, 0, 1, 5]])
    >>> state = pruner.init_state(params)._replace(count=1)
    >>> pruner.update_state(state, params, grads).masks.tolist()
    [[1, 0, 0, 1]]
  """

  grow: Callable[[criteria.Seen], Any] = criteria.Gradient()

  category: ClassVar[base_updater.Category] = base_updater.Category(
    start="sparse-to-sparse",
    dynamic=True,
    needs=frozenset({"gradients", "random"}),
    paper="Evci et al., 2020",
    cost="a sparse step; dense gradients and two selections per mask update",
  )


__getattr__ = _legacy.old_names(__name__)
