"""Masks that take effect gradually."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater
from jaxpruner.algorithms import pruners
from jaxpruner.updater import selecting


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
    >>> pruner.forward(params, state).tolist()  # β = 1/2
    [[3.0, -0.5, 1.0, -4.0]]
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Kao et al., 2022",
    cost="a dense step; one selection per mask update",
  )

  changes: ClassVar[tuple[str, ...]] = ("stats",)
  straight_through: ClassVar[bool] = True

  def init_extra(self, params, masks):
    view = self.view(params)
    ones = map(jnp.ones_like, view.of(masks, packed=False))
    return {"faint": view.store(ones)}

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
    scores = selecting.scores_of(self, view, sparse_state, grads, extra)
    found = self._select(view, scores, view.targets)
    fading = self.fading(sparse_state.count) > 0
    now = [jnp.where(fading, jnp.ones_like(m), m) for m in found.masks]
    faint = self._replace_masks(view, sparse_state, found.masks, found.finite)
    state = self._replace_masks(view, sparse_state, now, found.finite)
    return state._replace(stats={"faint": faint.stored_masks})

  def _fade(self, tree, state):
    beta = self.fading(state.count)
    fade = lambda x, mask: jnp.where(mask, x, beta.astype(x.dtype) * x)
    return self.view(tree).map(fade, tree, state.stats["faint"])

  def forward(self, params, state):
    """Return the weights; those to be removed are multiplied by β.

    Args:
      params: the dense weights.
      state: the state.

    Returns:
      A tree like `params`.
    """
    return self.apply_masks(self._fade(params, state), state.masks)

  def invert_forward(self, params, state):
    """Return dense weights; a change of a faint one is added to its own."""
    view = self.view(params)
    dense = view.of(state.hidden, "hidden")
    seen = view.of(self.forward(view.put(params, dense), state), "params")
    faint = view.of(state.stats["faint"], "faint")
    add = lambda p, w, s, mask: jnp.where(mask, p, w + (p - s))
    return view.put(params, map(add, view.leaves, dense, seen, faint))

  def hold_zeros(self, updates, state, params):
    return base_updater.hold_at_zero(self, updates, state, params)

  def backward(self, grads, state, params):
    del params
    return self._fade(grads, state)
