"""Dynamic sparse training, put together from the parts of `Rewiring`."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater, engine, mask_calculator, sparsity_types
from jaxpruner.algorithms import (
  criteria,
  pruners,
  redistribution,
  sparse_trainers,
)
from jaxpruner.updater import checks


def _category(paper: str, cost: str, *needs: str, **changes: Any):
  return base_updater.Category(
    **{"start": "sparse-to-sparse", "dynamic": True, **changes},
    needs=frozenset({"random", *needs}),
    paper=paper,
    cost=cost,
  )


@dataclasses.dataclass(eq=False)
class SNFS(sparse_trainers.Rewiring):
  """Drop the smallest |w|, grow by momentum (Dettmers & Zettlemoyer, 2019).

  Sparse networks from scratch: weights grow where `|E[∂L/∂w]|`, the running
  mean of the gradient, is largest. All leaves drop weights into one budget; a
  leaf gets a share of it in proportion to the mean |momentum| of the weights
  that it kept before the update, the dropped ones included. The other
  attributes are those of `Rewiring`.

  Attributes:
    drop_fraction: fraction of the kept weights dropped at the first update.
    grow: scores of the weights that are not kept; the highest grow.
    redistribute: each leaf's share of the dropped weights.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SNFS(
    ...   continue_sparse=True, sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params, grads = jnp.array([[4.0, 3, 0, 0]]), jnp.array([[0.0, 0, 1, 5]])
    >>> state = pruner.init_state(params)._replace(count=1)
    >>> state = pruner.on_gradients(state, params, grads)
    >>> pruner.update_state(state, params, grads).masks.tolist()
    [[1, 0, 0, 1]]
  """

  drop_fraction: float = 0.5
  grow: Callable[[criteria.Seen], Any] = criteria.Momentum()
  redistribute: Callable[..., Any] | None = redistribution.ByMomentum()

  category: ClassVar[base_updater.Category] = _category(
    "Dettmers & Zettlemoyer, 2019",
    "dense gradients and their mean every step; two selections per mask update",
    "gradients",
  )


@dataclasses.dataclass(eq=False)
class SignalRigL(sparse_trainers.RigL):
  """Drop the smallest |w|, grow the largest |mean g| / √(mean g²).

  `RigL` for Adam and its kin, `g = ∂L/∂w` over the last `window` steps before a
  mask update. RigL's |g| ranks weights by how fast SGD would move them; Adam
  moves a weight by the ratio of the mean of its gradient to its root mean
  square. The method is our own and on trial: `docs/results/rewiring.md` has its
  figures. Set the window by `grow=criteria.SignalToNoise(window=…)`. The other
  attributes are those of `Rewiring`.

  Attributes:
    grow: scores of the weights that are not kept; the highest grow.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SignalRigL(
    ...   scheduler=jaxpruner.sparsity_schedules.PeriodicSchedule(2, 2),
    ...   drop_fraction=0.5, continue_sparse=True,
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = jnp.array([[4.0, 3, 0, 0]])
    >>> state = pruner.init_state(params)
    >>> for step, noise in ((1, 9.0), (2, -9.0)):
    ...   grads = jnp.array([[0.0, 0, noise, 1]])
    ...   state = state._replace(count=step)
    ...   state = pruner.on_gradients(state, params, grads)
    >>> pruner.update_state(state, params, grads).masks.tolist()
    [[1, 0, 0, 1]]
  """

  grow: Callable[[criteria.Seen], Any] = criteria.SignalToNoise()

  category: ClassVar[base_updater.Category] = _category(
    "this library, after Evci et al., 2020",
    "a sparse step; dense gradients and two sums of them in the last 16 steps "
    "before a mask update; two selections per mask update",
    "gradients",
  )


@dataclasses.dataclass(eq=False)
class ITOP(sparse_trainers.RigL):
  """Explore more weights than RigL does, and measure it (Liu et al., 2021).

  `RigL` with a larger `drop_fraction`. The quality of sparse training depends
  on the share of weights that were ever trained: `|m₀ ∪ m₁ ∪ …| / |w|`. The
  union of all masks is kept in the state, and `state_metrics(opt_state)`
  returns that share as "exploration". Update masks rarely, so that grown
  weights have time to become large. `track_exploration=True` measures the
  exploration of any other algorithm. The other attributes are those of
  `Rewiring`.

  Attributes:
    drop_fraction: fraction of the kept weights dropped at the first update.
    track_exploration: whether the union of all masks is kept.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.ITOP(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.75))
    >>> state = pruner.init_state(jnp.ones((4, 4)))
    >>> float(jaxpruner.state_metrics(state)["exploration"])
    0.25
  """

  drop_fraction: float = 0.5
  track_exploration: bool = True

  category: ClassVar[base_updater.Category] = _category(
    "Liu et al., 2021",
    "as RigL; another mask in memory",
    "gradients",
  )


@dataclasses.dataclass(eq=False)
class MEST(sparse_trainers.Rewiring):
  """Drop the smallest |w| + λ|∂L/∂w|, grow at random (Yuan et al., 2021).

  Elastic mutation: at step `t` of `T` the fraction `α·(1 − t/T)` of the kept
  weights is replaced, where `α` is `drop_fraction`. λ is set by
  `drop=criteria.MagnitudeGradient(weight=λ)`. The other attributes are those of
  `Rewiring`.

  Attributes:
    drop: scores of the kept weights; the lowest are dropped.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.MEST(
    ...   continue_sparse=True, sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params, grads = jnp.array([[4.0, 3, 0, 0]]), jnp.array([[0.0, 5, 0, 0]])
    >>> state = pruner.init_state(params)
    >>> pruner.drop_scores(params, state, grads).tolist()
    [[4.0, 8.0, 0.0, 0.0]]
  """

  drop: Callable[[criteria.Seen], Any] = criteria.MagnitudeGradient()

  category: ClassVar[base_updater.Category] = _category(
    "Yuan et al., 2021",
    "a sparse step; two selections per mask update",
    "gradients",
  )

  def drop_fraction_at(self, step):
    """Return the fraction of kept weights to replace at a step.

    Args:
      step: the step, may be traced.

    Returns:
      A scalar that falls linearly to 0 at the end of the schedule, or the value
      of `drop_fraction_fn`.
    """
    end = getattr(self.scheduler, "update_end_step", None)
    if self.drop_fraction_fn is not None or not end:
      return super().drop_fraction_at(step)
    passed = jnp.clip(jnp.asarray(step, jnp.float32) / end, 0, 1)
    return self.drop_fraction * (1 - passed)


@dataclasses.dataclass(eq=False)
class SRigL(sparse_trainers.RigL):
  """Drop |w|, grow |∂L/∂w| at constant fan-in (Lasby et al., 2023).

  RigL in which every neuron keeps the same number of inputs: the smallest |w|
  of the leaf are dropped, then each neuron grows its weights with the largest
  |∂L/∂w| until it has its `k = (1 − s)·fan_in` inputs again. The paper also
  removes whole neurons; this class does not. The other attributes are those of
  `Rewiring`.

  Attributes:
    sparsity_type: the structure of the masks.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SRigL(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> masks = pruner.init_state(jnp.ones((4, 3))).masks
    >>> masks.sum(0).tolist()  # of 4 inputs each
    [2, 2, 2]
  """

  sparsity_type: Any = sparsity_types.ConstantFanIn()

  category: ClassVar[base_updater.Category] = _category(
    "Lasby et al., 2023",
    "a sparse step; dense gradients and a sort per mask update",
    "gradients",
  )


@dataclasses.dataclass(eq=False)
class GraNet(sparse_trainers.RigL):
  """Prune gradually, and regrow weights at each mask update (Liu et al., 2021).

  Each mask update has two parts. It prunes the smallest |w| until the leaf has
  the schedule's sparsity `s(t)`. Then it drops a further fraction of the
  smallest |w| and grows the same number of weights, those with the largest
  |∂L/∂w|. The other attributes are those of `Rewiring`.

  Attributes:
    skip_gradients: whether the optimizer rests on steps that update masks.
    start_share: the share of the target sparsity that is in force from the
      start, with random masks: 0 starts dense; 0.55 starts at 50 % for a target
      of 90 %.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.create_updater_from_config(
    ...   {"algorithm": "granet", "sparsity": 0.8, "total_steps": 100,
    ...    "start_share": 0.5})
    >>> int(pruner.init_state(jnp.ones((10, 10))).masks.sum())
    60
  """

  skip_gradients: bool = False
  start_share: float = 0.0

  category: ClassVar[base_updater.Category] = _category(
    "Liu et al., 2021 (GraNet)",
    "a step as sparse as the schedule; two selections per mask update",
    "gradients",
    start="dense-to-sparse",
  )

  def __post_init__(self):
    super().__post_init__()
    checks.check_share(self, "start_share")

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return pruners.magnitude_scores(params)

  def sparsities_at(self, view, state, step):
    def lift(sparsity):
      if not isinstance(sparsity, mask_calculator.AtStep):
        return sparsity
      value, target = sparsity
      share = value + self.start_share * (target - value)
      return mask_calculator.AtStep(share, target)

    return [lift(s) for s in super().sparsities_at(view, state, step)]

  def get_initial_masks(self, params, target_sparsities):
    view = self.view(params, target_sparsities)
    start = base_updater.SparseState(
      None, target_sparsities=target_sparsities, count=0
    )
    now = view.put(None, self.sparsities_at(view, start, 0))
    return super().get_initial_masks(params, now)

  def goals(self, view, state, counts):
    del counts
    now = self.sparsities_at(view, state, state.count)
    shapes = [p.shape for p in view.leaves]
    ones = sparsity_types.ones_each(view.kinds, shapes, now)
    return jnp.stack([jnp.asarray(n, jnp.int32) for n in ones])


@dataclasses.dataclass(eq=False)
class DSR(sparse_trainers.Rewiring):
  """Drop |w| below one global threshold, grow at random (Mostafa & Wang, 2019).

  Dynamic sparse reparameterization: a weight is dropped if `|w| < H`. The
  threshold `H` doubles when an update dropped too few weights and halves when
  it dropped too many, compared with `drop_fraction` of all kept weights. The
  dropped weights of all leaves form one budget, and a leaf grows a share of it
  in proportion to its remaining weights. The other attributes are those of
  `Rewiring`.

  Attributes:
    redistribute: each leaf's share of the dropped weights.
    threshold: the first value of `H`.
    tolerance: relative deviation up to which `H` does not change.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.DSR(
    ...   threshold=3.5, continue_sparse=True,
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = jnp.array([[4.0, 3, 0, 0]])
    >>> state = pruner.init_state(params)._replace(count=1)
    >>> new = pruner.update_state(state, params, None)
    >>> float(new.stats["threshold"])  # 1 of 2 dropped, more than 30 %
    1.75
  """

  redistribute: Callable[..., Any] | None = redistribution.BySurvivors()
  threshold: float = 1e-3
  tolerance: float = 0.1

  category: ClassVar[base_updater.Category] = _category(
    "Mostafa & Wang, 2019", "a sparse step; two selections per mask update"
  )

  changes: ClassVar[tuple[str, ...]] = ("stats",)

  def init_extra(self, params, masks):
    stats = super().init_extra(params, masks) or {}
    return {**stats, "threshold": jnp.asarray(self.threshold, jnp.float32)}

  def survivors(self, state, totals, active, scores):
    limit = state.stats["threshold"]
    left = [
      # Keep one: the share of a leaf without weights would stay 0.
      jnp.maximum(1, engine.count_true(a & (engine.value(s) >= limit)))
      for a, s in zip(active, scores, strict=True)
    ]
    left = jnp.stack(left).astype(jnp.int32)
    return jnp.where(state.count == 0, totals, left)

  def update_state(self, sparse_state, params, grads, **extra):
    new = super().update_state(sparse_state, params, grads, **extra)
    limit, view = sparse_state.stats["threshold"], self.view(params)
    kept = dropped = jnp.zeros([], jnp.float32)
    for leaf, mask in zip(
      view.leaves, view.of(sparse_state.masks), strict=True
    ):
      mask = mask == 1
      kept += jnp.sum(mask, dtype=jnp.float32)
      dropped += jnp.sum(mask & (jnp.abs(leaf) < limit), dtype=jnp.float32)
    aim = self.drop_fraction_at(sparse_state.count) * kept
    factor = jnp.where(
      dropped < (1 - self.tolerance) * aim,
      2.0,
      jnp.where(dropped > (1 + self.tolerance) * aim, 0.5, 1.0),
    )
    factor = jnp.where(sparse_state.count == 0, 1.0, factor)
    return new._replace(stats={**new.stats, "threshold": limit * factor})


@dataclasses.dataclass(eq=False)
class DeepR(sparse_trainers.Rewiring):
  """Drop weights that would change sign, grow at random (Bellec et al., 2018).

  Deep rewiring: every weight has a fixed sign, that of its initial value. If an
  optimizer step would move a weight past zero, the weight becomes zero; the
  next mask update drops it and grows another one at random. Each step adds
  `−ηα·sign(w) + √(2ηT)·ε` to a kept weight: a penalty that moves it towards
  zero and normal noise. The other attributes are those of `Rewiring`.

  Attributes:
    skip_gradients: whether the optimizer rests on steps that update masks.
    penalty: distance that each step moves a kept weight towards zero, the
      paper's `ηα`.
    noise: standard deviation of the noise that each step adds to a kept weight,
      the paper's `√(2ηT)`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner, optax
    >>> pruner = jaxpruner.DeepR(
    ...   scheduler=jaxpruner.sparsity_schedules.PeriodicSchedule(10, 5),
    ...   penalty=0.0, noise=0.0, continue_sparse=True,
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params, grads = jnp.array([[4.0, 3, 0, 0]]), jnp.array([[5.0, 1, 1, 1]])
    >>> tx = pruner.wrap_optax(optax.sgd(1.0))
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> optax.apply_updates(params, updates).tolist()  # 4 - 5 stops at zero
    [[0.0, 2.0, 0.0, 0.0]]
  """

  skip_gradients: bool = False
  penalty: float = 1e-5
  noise: float = 3e-6

  category: ClassVar[base_updater.Category] = _category(
    "Bellec et al., 2018",
    "a sparse step, a draw, and two selections every step",
    update_every=1,
  )

  def init_extra(self, params, masks):
    view = self.view(params)
    signs = [(p >= 0).astype(mask_calculator.MASK_DTYPE) for p in view.leaves]
    stats = super().init_extra(params, masks) or {}
    return {**stats, "signs": view.store(signs)}

  def _signs(self, view, state) -> list[Any]:
    bits = view.of(state.stats["signs"], "signs")
    return [jnp.where(b == 1, 1.0, -1.0) for b in bits]

  def drop_scores(self, params, sparse_state, grads):
    del grads
    view = self.view(params)
    signs = self._signs(view, sparse_state)
    return view.put(params, map(jnp.multiply, view.leaves, signs))

  def survivors(self, state, totals, active, scores):
    left = [
      engine.count_true(a & (engine.value(s) > 0))
      for a, s in zip(active, scores, strict=True)
    ]
    left = jnp.stack(left).astype(jnp.int32)
    return jnp.where(state.count == 0, totals, left)

  def hold_zeros(self, updates, state, params):
    view = self.view(params)
    # Salts of mask updates are positive.
    drawn = self.random_scores(params, state, -1 - state.count)

    def wander(update, param, uniform, sign):
      centred = jnp.clip(2 * uniform - 1, -1 + 1e-6, 1 - 1e-6)
      normal = jnp.sqrt(2.0) * jax.lax.erf_inv(centred)
      step = update - self.penalty * sign + self.noise * normal
      return jnp.where((param + step) * sign < 0, -param, step).astype(
        update.dtype
      )

    columns = view.of(updates, "updates"), view.leaves, view.of(drawn, "draws")
    moved = map(wander, *columns, self._signs(view, state))
    return super().hold_zeros(view.put(updates, moved), state, params)
