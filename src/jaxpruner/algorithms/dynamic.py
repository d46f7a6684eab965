"""Dynamic sparse training, put together from the parts of `Rewiring`."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater, engine, mask_calculator, sparsity_types
from jaxpruner.algorithms import criteria, redistribution, sparse_trainers


def _category(paper: str, cost: str, *needs: str, **changes: Any):
  return base_updater.Category(
    **{"start": "sparse-to-sparse", "dynamic": True, **changes},
    needs=frozenset({"random", *needs}),
    paper=paper,
    cost=cost,
  )


@dataclasses.dataclass(eq=False)
class SNFS(sparse_trainers.Rewiring):
  """Drop the smallest |w|, grow and share out by momentum (Dettmers &
  Zettlemoyer, 2019).

  Weights grow where the running mean of the gradient is largest, and leaves
  whose weights have a larger mean get more of what all dropped.
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
class ITOP(sparse_trainers.RigL):
  """RigL that explores more, and measures it (Liu et al., 2021).

  The share of weights ever trained decides how good sparse training gets: half
  of the kept weights are replaced at first, and the union of all masks is
  tracked (`state_metrics(opt_state)["exploration"]`). Update rarely, so that
  grown weights have time to matter. To measure any other trainer's
  exploration, give it `track_exploration=True`.
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

  Elastic mutation: the fraction replaced falls in a straight line to none at
  the end of the schedule. λ is `drop=criteria.MagnitudeGradient(weight=λ)`.
  """

  drop: Callable[[criteria.Seen], Any] = criteria.MagnitudeGradient()

  category: ClassVar[base_updater.Category] = _category(
    "Yuan et al., 2021",
    "a sparse step; two selections per mask update",
    "gradients",
  )

  def drop_fraction_at(self, step):
    end = getattr(self.scheduler, "update_end_step", None)
    if self.drop_fraction_fn is not None or not end:
      return super().drop_fraction_at(step)
    passed = jnp.clip(jnp.asarray(step, jnp.float32) / end, 0, 1)
    return self.drop_fraction * (1 - passed)


@dataclasses.dataclass(eq=False)
class SRigL(sparse_trainers.RigL):
  """RigL in which every neuron keeps equally many inputs (Lasby et al., 2023).

  Constant fan-in: the smallest |w| of the leaf are dropped, then each neuron is
  refilled to its own number by the largest gradients. Neurons are not ablated.
  """

  sparsity_type: Any = sparsity_types.ConstantFanIn()

  category: ClassVar[base_updater.Category] = _category(
    "Lasby et al., 2023",
    "a sparse step; dense gradients and a sort per mask update",
    "gradients",
  )


@dataclasses.dataclass(eq=False)
class GraNet(sparse_trainers.RigL):
  """Prune gradually, and regrow at each step of it (Liu et al., 2021).

  At each update the smallest |w| are pruned to the schedule's sparsity; of what
  remains, another fraction of the smallest is replaced by the weights with the
  largest |∂L/∂w|.

  Attributes:
    start_share: the share of the target sparsity in force from the start, at
      random: 0 starts dense; 0.55 starts at 50 % for a target of 90 %.
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
    if not 0 <= self.start_share <= 1:
      raise ValueError(
        f"GraNet: start_share={self.start_share!r} must lie between 0 and 1"
      )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return jax.tree.map(jnp.abs, params)

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
  """Drop |w| below one threshold for all leaves, grow at random where weights
  survive (Mostafa & Wang, 2019).

  The threshold doubles when an update dropped too few weights and halves when
  it dropped too many, measured against `drop_fraction` of all. What was dropped
  is shared out in proportion to what each leaf has left.

  Attributes:
    threshold: |w| below which weights drop, at first.
    tolerance: relative deviation that leaves the threshold alone.
  """

  redistribute: Callable[..., Any] | None = redistribution.BySurvivors()
  threshold: float = 1e-3
  tolerance: float = 0.1

  category: ClassVar[base_updater.Category] = _category(
    "Mostafa & Wang, 2019", "a sparse step; two selections per mask update"
  )

  changes_stats: ClassVar[bool] = True

  def init_extra(self, params, masks):
    stats = super().init_extra(params, masks) or {}
    return {**stats, "threshold": jnp.asarray(self.threshold, jnp.float32)}

  def survivors(self, state, totals, active, scores):
    limit = state.stats["threshold"]
    left = [
      # One stays, or the leaf would never get a weight again.
      jnp.maximum(1, jnp.sum(a & (engine.value(s) >= limit), dtype=jnp.int32))
      for a, s in zip(active, scores, strict=True)
    ]
    return jnp.where(state.count == 0, totals, jnp.stack(left))

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

  Every connection has a sign of its own, that of its initial weight. A weight
  that an update would carry past zero stops there, is dropped at the next mask
  update, and another connection grows in its place. A penalty pulls weights to
  zero and noise makes them wander: both are what one step adds to a weight, the
  paper's `ηα` and `√(2ηT)`.

  Attributes:
    penalty: by how much each step moves a kept weight towards zero.
    noise: standard deviation of what each step adds to a kept weight.
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
      jnp.sum(a & (engine.value(s) > 0), dtype=jnp.int32)
      for a, s in zip(active, scores, strict=True)
    ]
    return jnp.where(state.count == 0, totals, jnp.stack(left))

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
