"""Iterative magnitude pruning inside one long training."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import _view, base_updater
from jaxpruner.algorithms import global_pruners


def _rounds(sparsity: float) -> int:
  """Return the trainings until a sparsity is reached, 20 % off in each."""
  return 1 + math.ceil(math.log(1 - sparsity) / math.log(0.8) - 1e-9)


@dataclasses.dataclass(eq=False)
class IterativeMagnitudePruning(global_pruners.GlobalMagnitudePruning):
  """Prune a fifth of what is left, rewind, train again (Frankle et al., 2020).

  At every mask update the smallest |w| of all leaves go, and weights and
  optimizer return to what they were after `rewind_step` steps: 0 is the
  initialization (Frankle & Carbin, 2019). A `GeometricSchedule` gives the
  rounds; the training must be as long as all of them. `tickets.find_ticket`
  does the same around a training function of your own.

  Attributes:
    rewind_step: the step to go back to, before the first mask update.
  """

  rewind_step: int = 0

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Frankle & Carbin, 2019; Frankle et al., 2020",
    cost="a training per round; early weights and optimizer state in memory",
    trainings=_rounds,
    default_schedule="geometric",
  )

  def __post_init__(self):
    super().__post_init__()
    _view.check_whole(self, "rewind_step", 0)

  def wrap_optax(self, inner):
    tx: Any = super().wrap_optax(inner)

    def init_fn(params):
      state = tx.init(params)
      early = jax.tree.map(jnp.copy, (params, state.inner_state))
      return state._replace(stats=early)

    def update_fn(updates, state, params: Any = None, **extra):
      due = self.scheduler.is_mask_update_iter(state.count)
      updates, state = tx.update(updates, state, params, **extra)
      pick = lambda flag, new, old: jax.tree.map(
        lambda a, b: jnp.where(flag, a, b), new, old
      )
      moved: Any = optax.apply_updates(params, updates)
      now = moved, state.inner_state
      early = pick(state.count == self.rewind_step, now, state.stats)

      def back(start, param, update):
        dtype = jnp.promote_types(param.dtype, update.dtype)
        return jnp.where(due, start.astype(dtype) - param, update)

      masked = self.apply_masks(early[0], state.masks)
      updates = jax.tree.map(back, masked, params, updates)
      inner_state = pick(due, early[1], state.inner_state)
      return updates, state._replace(inner_state=inner_state, stats=early)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
