"""Movement pruning: keep what training moves away from zero."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import _checks, _leaves, base_updater
from jaxpruner.algorithms import global_pruners, ste


@dataclasses.dataclass(eq=False)
class MovementPruning(ste.StePruning):
  """Keep the weights that moved away from zero (Sanh et al., 2020).

  The score of a weight is `S = -Σ w · ∂L/∂w` over the steps so far, the
  gradient taken where the forward pass is masked, for masked weights too. The
  weights themselves stay as they are while masked, and may return. Meant for
  fine-tuning, where |w| says little.
  """

  is_sparse_gradients: bool = True

  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    needs=frozenset({"gradients"}),
    paper="Sanh et al., 2020",
    cost="a dense step, one float32 per weight and one selection, every step",
  )

  def init_stats(self, params, masks):
    return _leaves.map_masks(
      lambda _, p, m: (
        None if m is None else jnp.zeros_like(p, dtype=jnp.float32)
      ),
      params,
      masks,
    )

  def descend(self, scores, slope):
    """Return the scores after a step; only their order matters here."""
    return scores - slope

  def observe(self, state, params, grads):
    def move(_, param, grad, scores):
      if scores is None:
        return None
      slope = param.astype(jnp.float32) * grad.astype(jnp.float32)
      return self.descend(scores, slope)

    moved = _leaves.map_masks(move, params, grads, state.stats, name="grads")
    return state._replace(stats=moved)

  def calculate_scores(self, params, sparse_state=None, grads=None):
    if sparse_state is None:  # pruning at once: the movement of one step
      stats = self.init_stats(params, params)
      sparse_state = base_updater.SparseState(masks=None, stats=stats)
      sparse_state = self.observe(sparse_state, params, grads)
    return _leaves.map_masks(
      lambda _, p, s: jnp.zeros_like(p) if s is None else s,
      params,
      sparse_state.stats,
    )


@dataclasses.dataclass(eq=False)
class SoftMovementPruning(global_pruners.GlobalPruning, MovementPruning):
  """Keep the weights whose movement score passes one threshold for all leaves.

  Soft movement (Sanh et al., 2020): the scores follow the gradient of
  `L + penalty · Σ sigmoid(S)`, and the layers share the budget by themselves.
  The paper fixes the threshold and tunes the penalty until the sparsity is
  right; here the threshold is the one that realises the schedule exactly.

  Attributes:
    penalty: weight of the sigmoid penalty.
    score_rate: learning rate of the scores.
  """

  is_sparse_gradients: bool = True
  penalty: float = 1e-3
  score_rate: float = 0.1

  category: ClassVar[base_updater.Category] = MovementPruning.category

  def __post_init__(self):
    super().__post_init__()
    _checks.check_number(self, "penalty")
    _checks.check_number(self, "score_rate")

  def descend(self, scores, slope):
    open_ = jax.nn.sigmoid(scores)
    return scores - self.score_rate * (
      slope + self.penalty * open_ * (1 - open_)
    )
