"""Masks that fade in."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import _leaves, base_updater
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

  def init_stats(self, params, masks):
    del params
    return self._pack(jax.tree.map(jnp.ones_like, masks))

  def fading(self, step: Any) -> jax.Array:
    """Return β, the part of a fading weight that is left at a step."""
    return 1 - self.scheduler.get_sparsity_at_step(jnp.float32(1), step)

  def update_state(self, sparse_state, params, grads):
    scores = self.calculate_scores(params, sparse_state, grads)
    masks = self.create_masks(scores, self.targets(params))
    faint = self.replace_masks(sparse_state, params, masks, scores)
    beta = self.fading(sparse_state.count)
    now = jax.tree.map(
      lambda m: jnp.where(beta > 0, jnp.ones_like(m), m), masks
    )
    state = self.replace_masks(sparse_state, params, now, scores)
    return state._replace(stats=faint.masks)

  def pre_forward_update(self, params, opt_state):
    """Return the parameters, those that will go faded."""
    state = base_updater.find_state(opt_state)
    beta = self.fading(state.count)

    def fade(_, param, mask):
      if mask is None:
        return param
      kept = self._unpack(mask, param)
      return jnp.where(kept, param, beta.astype(param.dtype) * param)

    return _leaves.map_masks(fade, params, state.stats)
