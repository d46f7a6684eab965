"""Top-KAST: one mask forward, a larger one backward."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import _leaves, base_updater, mask_calculator
from jaxpruner.algorithms import pruners, sparse_trainers
from jaxpruner.engine import lazy as _lazy


@jax.custom_vjp
def _two_masks(param, forward, backward):
  del backward
  return base_updater.apply_mask(param, forward)


def _forward(param, forward, backward):
  return base_updater.apply_mask(param, forward), backward


def _backward(backward, cotangent):
  return base_updater.apply_mask(cotangent, backward), None, None


_two_masks.defvjp(_forward, _backward)


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
  )
  holds_zeros: ClassVar[bool] = False
  instant_sparsify = sparse_trainers.StaticRandomSparse.instant_sparsify

  def __post_init__(self):
    super().__post_init__()
    if not self.backward_factor >= 1:
      raise ValueError(
        f"TopKAST: backward_factor={self.backward_factor!r} must be at least "
        "1: the backward set holds the forward set"
      )

  def get_initial_masks(self, params, target_sparsities):
    return self.create_masks(self.calculate_scores(params), target_sparsities)

  def init_stats(self, params, masks):
    del masks
    wider = jax.tree.map(self._widen, self.targets(params))
    scores = self.calculate_scores(params)
    return {"backward": self._pack(self.create_masks(scores, wider))}

  def _widen(self, sparsity):
    widen = lambda s: 1 - self.backward_factor * (1 - s)
    if isinstance(sparsity, mask_calculator.AtStep):
      value = jnp.maximum(widen(sparsity.value), 0)
      return mask_calculator.AtStep(value, max(widen(sparsity.target), 0.0))
    if isinstance(sparsity, float):
      return max(widen(sparsity), 0.0)
    return jnp.maximum(widen(sparsity), 0)

  def update_state(self, sparse_state, params, grads):
    new = super().update_state(sparse_state, params, grads)
    wider = jax.tree.map(
      self._widen,
      self.sparsities_at(sparse_state, params, sparse_state.count),
      is_leaf=lambda x: isinstance(x, mask_calculator.AtStep),
    )
    scores = self.calculate_scores(params)
    masks = self._pack(self.create_masks(scores, wider))
    # Where a score is not finite, neither set changes.
    masks = _leaves.map_masks(
      lambda _, score, mask, old: (
        None if mask is None else jnp.where(_lazy.finite(score), mask, old)
      ),
      scores,
      masks,
      sparse_state.stats["backward"],
    )
    return new._replace(stats={"backward": masks})

  def trained_masks(self, state):
    return state.stats["backward"]

  def pre_forward_update(self, params: Any, opt_state: Any) -> Any:
    """Return sparse parameters whose gradient reaches the backward set."""
    state = base_updater.find_state(opt_state)

    def mask_leaf(_, param, mask, wider):
      if mask is None:
        return param
      return _two_masks(
        param, self._unpack(mask, param), self._unpack(wider, param)
      )

    return _leaves.map_masks(
      mask_leaf, params, state.masks, state.stats["backward"]
    )

  def prepare_gradients(self, grads, state, params):
    def decay(_, param, grad, mask, wider, target):
      if mask is None:
        return grad
      inside = self._unpack(mask, param) == 1
      rate = jnp.where(inside, 1.0, 1 / (1 - target)) * self.regularization
      grad = (grad + rate * param).astype(grad.dtype)
      return base_updater.apply_mask(grad, self._unpack(wider, param))

    grads = jax.tree.structure(params).unflatten(
      _leaves.align(params, grads, "grads")
    )
    return _leaves.map_masks(
      decay,
      params,
      grads,
      state.masks,
      state.stats["backward"],
      state.target_sparsities,
    )

  def confine(self, updates, state, params):
    """Return updates that leave what is not trained as it is."""
    return _leaves.map_masks(
      lambda _, param, update, wider: (
        update
        if wider is None
        else base_updater.apply_mask(update, self._unpack(wider, param))
      ),
      params,
      jax.tree.structure(params).unflatten(
        _leaves.align(params, updates, "updates")
      ),
      state.stats["backward"],
    )
