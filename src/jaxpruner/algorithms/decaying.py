"""Masks that take effect gradually."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import _leaves, base_updater
from jaxpruner.algorithms import pruners


@dataclasses.dataclass(eq=False)
class DecayingMaskPruning(pruners.MagnitudePruning):
  """Scale the weights to be removed gradually to zero (Kao et al., 2022).

  The mask `m` has the target sparsity from the start. The forward pass uses `w`
  where `m = 1` and `β · w` where `m = 0`; gradients are scaled in the same way.
  `β` falls from 1 to 0 along the schedule; `power=1` is the paper's linear
  decay. While `β` is above 0, every weight is used, and `state.masks` contains
  ones only. The method is designed for N:M sparsity. The paper's other method,
  structure decay, is `MagnitudePruning` with `NByM` and a gradual schedule. The
  attributes are those of `BaseUpdater`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.DecayingMaskPruning(
    ...   scheduler=jaxpruner.sparsity_schedules.PolynomialSchedule(
    ...     1, 0, 4, power=1),
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> state = pruner.init_state(params)._replace(count=2)
    >>> state = pruner.update_state(state, params, None)
    >>> pruner.pre_forward_update(params, state).tolist()  # β = 1/2
    [[3.0, -0.5, 1.0, -4.0]]
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Kao et al., 2022",
    cost="a dense step; one selection per mask update",
  )

  changes_stats: ClassVar[bool] = True

  def init_extra(self, params, masks):
    view = self.view(params)
    ones = map(jnp.ones_like, view.split(_leaves.align(params, masks)))
    return view.store(ones)

  def fading(self, step: Any) -> jax.Array:
    """Return β, the factor of the weights to be removed.

    Args:
      step: the step, may be traced.

    Returns:
      A float32 scalar from 1 to 0.
    """
    return 1 - self.scheduler.get_sparsity_at_step(jnp.float32(1), step)

  def update_state(self, sparse_state, params, grads, **extra):
    view = self.view(params)
    if not view.names:
      return sparse_state
    scores = self._scores(view, sparse_state, grads, extra)
    found = self._select(view, scores, view.targets)
    fading = self.fading(sparse_state.count) > 0
    now = [jnp.where(fading, jnp.ones_like(m), m) for m in found.masks]
    faint = self._replace_masks(
      view, sparse_state, found.masks, found.finite
    ).masks
    state = self._replace_masks(view, sparse_state, now, found.finite)
    return state._replace(stats=faint)

  def pre_forward_update(self, params, opt_state):
    """Return the parameters; weights to be removed are multiplied by β.

    Args:
      params: the parameters.
      opt_state: the optimizer's state, which holds a `SparseState`.

    Returns:
      A tree like `params`.
    """
    state = base_updater.find_state(opt_state)
    beta = self.fading(state.count)
    fade = lambda param, mask: jnp.where(
      mask, param, beta.astype(param.dtype) * param
    )
    return self.view(params).map(fade, params, state.stats)
