"""Iterative magnitude pruning inside one long training."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import base_updater
from jaxpruner.algorithms import global_pruners
from jaxpruner.updater import checks


def _rounds(sparsity: float) -> int:
  """Return the number of trainings that reach a sparsity at 20 % per round."""
  return 1 + math.ceil(math.log(1 - sparsity) / math.log(0.8) - 1e-9)


@dataclasses.dataclass(eq=False)
class IterativeMagnitudePruning(global_pruners.GlobalMagnitudePruning):
  """Prune a fifth of the weights, rewind, train again (Frankle et al., 2020).

  Each mask update removes the smallest |w| of all leaves together, so that
  after round `k` a share `0.8^k` of the weights remains. It also resets weights
  and optimizer state to their values after `rewind_step` steps; 0 is the
  initialization (Frankle & Carbin, 2019). A `GeometricSchedule` defines the
  rounds, and one training must be long enough for all of them.
  `tickets.find_ticket` does the same with your own training function. The other
  attributes are those of `GlobalPruning`.

  Attributes:
    rewind_step: the step to go back to, before the first mask update.

  Example:
    >>> import jax.numpy as jnp, jaxpruner, optax
    >>> pruner = jaxpruner.IterativeMagnitudePruning(
    ...   sparsity=0.5,
    ...   scheduler=jaxpruner.sparsity_schedules.OneShotSchedule(1))
    >>> tx = pruner.wrap_optax(optax.sgd(1.0))
    >>> params, grads = jnp.array([[4.0, 1.0]]), jnp.array([[1.0, 0.0]])
    >>> state = tx.init(params)
    >>> for _ in range(2):  # step 0 gives [[3, 1]], step 1 prunes and rewinds
    ...   updates, state = tx.update(grads, state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> params.tolist()
    [[4.0, 0.0]]
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
    checks.check_whole(self, "rewind_step", 0)

  def wrap_optax(self, inner):
    tx: Any = super().wrap_optax(inner)

    def init_fn(params):
      state = tx.init(params)
      params, inner_state = jax.tree.map(jnp.copy, (params, state.inner_state))
      return state._replace(stats={"params": params, "inner": inner_state})

    def update_fn(updates, state, params: Any = None, **extra):
      due = self.scheduler.is_mask_update_iter(state.count)
      updates, state = tx.update(updates, state, params, **extra)
      pick = lambda flag, new, old: jax.tree.map(
        lambda a, b: jnp.where(flag, a, b), new, old
      )
      moved: Any = optax.apply_updates(params, updates)
      now = {"params": moved, "inner": state.inner_state}
      early = pick(state.count == self.rewind_step, now, state.stats)

      def back(start, param, update):
        dtype = jnp.promote_types(param.dtype, update.dtype)
        return jnp.where(due, start.astype(dtype) - param, update)

      masked = self.apply_masks(early["params"], state.masks)
      updates = jax.tree.map(back, masked, params, updates)
      inner_state = pick(due, early["inner"], state.inner_state)
      return updates, state._replace(inner_state=inner_state, stats=early)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
