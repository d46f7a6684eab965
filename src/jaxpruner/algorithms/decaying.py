"""Masks that fade in."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater
from jaxpruner.algorithms import pruners


@dataclasses.dataclass(eq=False)
class DecayingMaskPruning(pruners.MagnitudePruning):
  """Fade the weights that will go, at the final sparsity (Kao et al., 2022).

  The forward pass sees `w` where the mask of the target keeps it and `β · w`
  elsewhere; `β` falls from 1 to 0 along the schedule (`power=1`: the paper's
  linear decay) and gradients flow accordingly. Until `β` is 0 every weight is
  in use, and `state.masks` says so. Meant for N:M; structure decay, the paper's
  other recipe, is `MagnitudePruning` with `NByM` and a ramp.
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Kao et al., 2022",
    cost="a dense step; one selection per mask update",
  )

  changes_stats: ClassVar[bool] = True

  def init_extra(self, params, masks):
    return self.view(params).store(map(jnp.ones_like, jax.tree.leaves(masks)))

  def fading(self, step: Any) -> jax.Array:
    """Return β, the part of a fading weight that is left at a step."""
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
    """Return the parameters, those that will go faded."""
    state = base_updater.find_state(opt_state)
    beta = self.fading(state.count)
    fade = lambda param, mask: jnp.where(
      mask, param, beta.astype(param.dtype) * param
    )
    return self.view(params).map(fade, params, state.stats)
