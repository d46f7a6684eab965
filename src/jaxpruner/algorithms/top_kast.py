"""Top-KAST: one mask forward, a larger one backward."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxpruner import base_updater, mask_calculator
from jaxpruner.algorithms import pruners


@dataclasses.dataclass(eq=False)
class TopKAST(pruners.MagnitudePruning):
  """Use the largest |w| forward, train some more (Jayakumar et al., 2020).

  The forward pass sees the top D of the weights. The gradient reaches a larger
  set, the top M > D, whose members can so enter the first; all others rest
  at their value. Both are chosen anew at each mask update. A penalty on the
  weights, stronger by 1/D outside the forward set, makes room for newcomers.

  Attributes:
    backward_factor: M / D, at least 1.
    regularization: the weight decay of the forward set, as a gradient.
  """

  backward_factor: float = 2.0
  regularization: float = 1e-4

  category: ClassVar[base_updater.Category] = base_updater.Category(
    start="sparse-to-sparse",
    dynamic=True,
    paper="Jayakumar et al., 2020",
    cost="a sparse step, its backward pass less so; two selections per update",
    trained="backward",
  )
  holds_zeros: ClassVar[bool] = False
  changes_stats: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    if not self.backward_factor >= 1:
      raise ValueError(
        f"TopKAST: backward_factor={self.backward_factor!r} must be at least "
        "1: the backward set holds the forward set"
      )

  def get_initial_masks(self, params, target_sparsities):
    return self.create_masks(self.calculate_scores(params), target_sparsities)

  def init_extra(self, params, masks):
    view = self.view(params)
    wider = [self._widen(s) for s in view.targets]
    scores = view.of(self.calculate_scores(params), "scores")
    return {"backward": view.store(self._select(view, scores, wider).masks)}

  def _widen(self, sparsity):
    widen = lambda s: 1 - self.backward_factor * (1 - s)
    if isinstance(sparsity, mask_calculator.AtStep):
      value = jnp.maximum(widen(sparsity.value), 0)
      return mask_calculator.AtStep(value, max(widen(sparsity.target), 0.0))
    if isinstance(sparsity, float):
      return max(widen(sparsity), 0.0)
    return jnp.maximum(widen(sparsity), 0)

  def update_state(self, sparse_state, params, grads, **extra):
    new = super().update_state(sparse_state, params, grads, **extra)
    view = self.view(params)
    if not view.names:
      return new
    now = self.sparsities_at(view, sparse_state, sparse_state.count)
    scores = view.of(self.calculate_scores(params), "scores")
    found = self._select(view, scores, [self._widen(s) for s in now])
    old = view.of(sparse_state.stats["backward"])
    # Where a score is not finite, neither set changes.
    wider = map(jnp.where, found.finite, found.masks, old)
    return new._replace(stats={"backward": view.store(wider)})

  def pre_forward_update(self, params: Any, opt_state: Any) -> Any:
    """Return sparse parameters whose gradient reaches the backward set."""
    state = base_updater.find_state(opt_state)
    return self.view(params).map(
      base_updater.masked_forward, params, state.masks, state.stats["backward"]
    )

  def prepare_gradients(self, grads, state, params):
    def decay(grad, param, mask, wider, target):
      rate = jnp.where(mask == 1, 1.0, 1 / (1 - target)) * self.regularization
      grad = (grad + rate * param).astype(grad.dtype)
      return base_updater.apply_mask(grad, wider)

    return self.view(params).map(
      decay,
      grads,
      params,
      state.masks,
      state.stats["backward"],
      state.target_sparsities,
    )

  def hold_zeros(self, updates, state, params):
    """Return updates that leave what is not trained as it is."""
    return self.view(params).map(
      base_updater.apply_mask, updates, state.stats["backward"]
    )
