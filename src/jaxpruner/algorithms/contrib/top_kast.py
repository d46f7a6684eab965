"""Top-KAST: one mask forward, a larger mask backward."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxpruner import base_updater, mask_calculator
from jaxpruner.algorithms import pruners


@dataclasses.dataclass(eq=False)
class TopKAST(pruners.MagnitudePruning):
  """Use the largest |w| forward, train a larger set (Jayakumar et al., 2020).

  The forward pass uses the fraction `D = 1 − s` of largest |w|. The gradient
  reaches a larger fraction `M > D`, and a weight of that set can enter the
  forward set when it becomes large. The values of all other weights do not
  change. Each mask update selects both sets again. Weight decay is stronger by
  1/D outside the forward set, which favours the exchange of weights.

  Attributes:
    backward_factor: M / D, at least 1.
    regularization: the weight decay of the forward set, as a gradient.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.TopKAST(
    ...   regularization=0.0, sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.75))
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> state = pruner.init_state(params)
    >>> pruner.post_gradient_update(params, state).tolist()
    [[0.0, 0.0, 0.0, -4.0]]
    >>> pruner.prepare_gradients(jnp.ones((1, 4)), state, params).tolist()
    [[1.0, 0.0, 0.0, 1.0]]
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
  straight_through: ClassVar[bool] = True
  changes: ClassVar[tuple[str, ...]] = ("stats",)

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
    # Neither set of a leaf with non-finite scores changes.
    wider = map(jnp.where, found.finite, found.masks, old)
    return new._replace(stats={"backward": view.store(wider)})

  def backward(self, grads, state, params):
    reach = state.stats["backward"]
    return self.view(params).map(base_updater.apply_mask, grads, reach)

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
    """Return updates that do not change weights outside the backward set.

    Args:
      updates: the updates of the optimizer.
      state: the state, with the masks in force.
      params: the parameters.

    Returns:
      A tree like `updates`; updates outside the backward set are zero.
    """
    return self.view(params).map(
      base_updater.apply_mask, updates, state.stats["backward"]
    )
