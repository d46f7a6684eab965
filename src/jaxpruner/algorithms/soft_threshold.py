"""Soft thresholds, one per leaf, learnt with the weights."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import _checks, _leaves, base_updater
from jaxpruner.algorithms import global_pruners, ste


@dataclasses.dataclass(eq=False)
class SoftThresholdPruning(global_pruners.GlobalPruning, ste.StePruning):
  """Learn how the layers share the budget (STR; Kusupati et al., 2020).

  The forward pass sees `sign(w) · relu(|w| - T)` with a threshold `T` for each
  leaf. Its part `sigmoid(s)` is learnt: `∂L/∂s = -sigmoid'(s) · Σ ∂L/∂w' ·
  sign(w)` over the kept weights, plus weight decay. The paper tunes that decay
  until the sparsity is right; here all thresholds move together by as much as
  the schedule's total asks for, so that what is learnt is their difference.

  Attributes:
    threshold_rate: learning rate of `s`.
    threshold_decay: weight decay of `s`.
    initial: where every `s` starts; sigmoid(-3) = 0.05.
  """

  is_sparse_gradients: bool = True
  threshold_rate: float = 0.1
  threshold_decay: float = 1e-4
  initial: float = -3.0

  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    needs=frozenset({"gradients"}),
    paper="Kusupati et al., 2020",
    cost="a dense step and one selection, every step",
  )

  def __post_init__(self):
    super().__post_init__()
    _checks.check_number(self, "threshold_rate")
    _checks.check_number(self, "threshold_decay", above=-1e-30)
    _checks.check_number(self, "initial", above=-float("inf"))

  def init_stats(self, params, masks):
    return _leaves.map_masks(
      lambda _, p, m: None if m is None else jnp.float32(self.initial),
      params,
      masks,
    )

  def observe(self, state, params, grads):
    def learn(_, param, grad, mask, s):
      if s is None:
        return None
      kept = self._unpack(mask, param)
      pull = grad.astype(jnp.float32) * jnp.sign(param.astype(jnp.float32))
      slope = jax.nn.sigmoid(s) * (1 - jax.nn.sigmoid(s))
      grad_s = -slope * jnp.sum(jnp.where(kept, pull, 0))
      return s - self.threshold_rate * (grad_s + self.threshold_decay * s)

    learnt = _leaves.map_masks(learn, params, grads, state.masks, state.stats)
    return state._replace(stats=learnt)

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del grads
    return _leaves.map_masks(
      lambda _, p, s: (
        jnp.abs(p.astype(jnp.float32)) - (0 if s is None else jax.nn.sigmoid(s))
      ),
      params,
      None if sparse_state is None else sparse_state.stats,
    )

  def pre_forward_update(self, params, opt_state):
    """Return the kept weights, nearer to zero by their leaf's threshold."""
    seen = super().pre_forward_update(params, opt_state)

    def shrink(_, param, masked, mask):
      if mask is None:
        return masked
      # The largest weight left out is where the leaf was cut.
      out = jnp.where(self._unpack(mask, param), 0, jnp.abs(param))
      shift = jnp.sign(masked) * jnp.max(out)
      return masked - jax.lax.stop_gradient(shift)

    masks = base_updater.find_state(opt_state).masks
    return _leaves.map_masks(shrink, params, seen, masks)
