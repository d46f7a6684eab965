"""Soft thresholds, one per leaf, learnt together with the weights."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater
from jaxpruner.algorithms import global_pruners
from jaxpruner.updater import checks


@dataclasses.dataclass(eq=False)
class SoftThresholdPruning(global_pruners.GlobalPruning):
  """Learn the threshold of each leaf (STR; Kusupati et al., 2020).

  The forward pass uses `sign(w) · relu(|w| - T)` with a threshold `T` per leaf.
  Its component `sigmoid(s)` is learnt by `∂L/∂s = -sigmoid'(s) · Σ ∂L/∂w' ·
  sign(w)`, a sum over the kept weights, plus weight decay. The paper tunes the
  weight decay until the sparsity is right. This class shifts all thresholds by
  the same amount until the total sparsity is that of the schedule, so only the
  differences between leaves are learnt. The other attributes are those of
  `GlobalPruning`.

  Attributes:
    is_sparse_gradients: whether gradients of pruned weights are set to zero
      before the optimizer sees them.
    threshold_rate: learning rate of `s`.
    threshold_decay: weight decay of `s`.
    initial: the first value of every `s`; sigmoid(-3) = 0.05.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SoftThresholdPruning(sparsity=0.5)
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> state = pruner.update_state(pruner.init_state(params), params, None)
    >>> pruner.forward(params, state).tolist()  # T = 2
    [[1.0, 0.0, 0.0, -2.0]]
  """

  is_sparse_gradients: bool = True
  threshold_rate: float = 0.1
  threshold_decay: float = 1e-4
  initial: float = -3.0

  straight_through: ClassVar[bool] = True
  reselects: ClassVar[bool] = True
  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    needs=frozenset({"gradients"}),
    paper="Kusupati et al., 2020",
    cost="a dense step and one selection, every step",
  )

  def __post_init__(self):
    super().__post_init__()
    checks.check_number(self, "threshold_rate")
    checks.check_number(self, "threshold_decay", above=-1e-30)
    checks.check_number(self, "initial", above=-float("inf"))

  def init_extra(self, params, masks):
    view = self.view(params)
    start = [jnp.full([], self.initial, jnp.float32) for _ in view.names]
    return {"thresholds": view.store(start)}

  def on_gradients(self, state, params, grads):
    view = self.view(params)

    def learn(s, param, grad, mask):
      pull = grad.astype(jnp.float32) * jnp.sign(param.astype(jnp.float32))
      slope = jax.nn.sigmoid(s) * (1 - jax.nn.sigmoid(s))
      grad_s = -slope * jnp.sum(jnp.where(mask, pull, 0))
      return s - self.threshold_rate * (grad_s + self.threshold_decay * s)

    trees = (state.stats["thresholds"], params, grads, state.masks)
    learnt = map(learn, *map(view.of, trees))
    return state._replace(stats={"thresholds": view.store(learnt)})

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del grads
    view = self.view(params)
    scores = jax.tree.map(lambda p: jnp.abs(p.astype(jnp.float32)), params)
    if sparse_state is None:
      return scores
    excess = lambda score, s: score - jax.nn.sigmoid(s)
    return view.map(excess, scores, sparse_state.stats["thresholds"])

  def forward(self, params, state):
    """Return the kept weights, moved towards zero by the leaf's threshold.

    Args:
      params: the dense weights.
      state: the state, with the masks in force.

    Returns:
      A tree like `params`; removed weights are zero.
    """

    def shrink(param, mask):
      seen = base_updater.apply_mask(param, mask)
      return seen - jnp.sign(seen) * _threshold(param, mask)

    return self.view(params).map(shrink, params, state.masks)

  def invert_forward(self, params, state):
    def grow(param, hidden, mask):
      return param + jnp.sign(param) * _threshold(hidden, mask)

    return self.view(params).map(grow, params, state.hidden, state.masks)


def _threshold(param, mask):
  """Return the threshold of a leaf: its largest removed |w|."""
  return jnp.max(jnp.where(mask, 0, jnp.abs(param)))
