"""Movement pruning: keep the weights that training moves away from zero."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater, sparsity_distributions
from jaxpruner.updater import checks


@dataclasses.dataclass(eq=False)
class MovementPruning(base_updater.BaseUpdater):
  """Keep the weights that moved away from zero (Sanh et al., 2020).

  The score of a weight is `S = -Σ w · ∂L/∂w`, a sum over the steps so far. The
  gradient is that of the masked forward pass and reaches masked weights too.
  Masked weights may return: their own gradient is set to zero, so plain SGD
  leaves them as they are; momentum and weight decay still move them. The method
  is designed for fine-tuning, where |w| reflects the earlier training.

  Attributes:
    is_sparse_gradients: whether gradients of pruned weights are set to zero
      before the optimizer sees them; the scores use the full gradients.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.MovementPruning(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> grads = jnp.array([[1.0, 1, -1, -1]])
    >>> pruner.instant_sparsify(params, grads)[1].tolist()
    [[0, 1, 1, 0]]
  """

  is_sparse_gradients: bool = True

  straight_through: ClassVar[bool] = True
  reselects: ClassVar[bool] = True
  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    needs=frozenset({"gradients"}),
    paper="Sanh et al., 2020",
    cost="a dense step, one float32 per weight and one selection, every step",
  )

  def init_extra(self, params, masks):
    view = self.view(params)
    zeros = [jnp.zeros_like(p, dtype=jnp.float32) for p in view.leaves]
    return {"scores": view.store(zeros)}

  def descend(self, scores, slope):
    """Return the scores after a step; only their order matters here.

    Args:
      scores: the scores of a leaf before the step.
      slope: `w · ∂L/∂w` of the leaf.

    Returns:
      The scores after the step.
    """
    return scores - slope

  def on_gradients(self, state, params, grads):
    view = self.view(params)

    def move(scores, param, grad):
      slope = param.astype(jnp.float32) * grad.astype(jnp.float32)
      return self.descend(scores, slope)

    scores = view.of(state.stats["scores"], "scores")
    moved = map(move, scores, view.leaves, view.of(grads, "grads"))
    return state._replace(stats={"scores": view.store(moved)})

  def calculate_scores(self, params, sparse_state=None, grads=None):
    if sparse_state is None:  # pruning at once: the movement of one step
      stats = self.init_extra(params, None)
      sparse_state = base_updater.SparseState(stats=stats)
      sparse_state = self.on_gradients(sparse_state, params, grads)
    view = self.view(params)
    dense = jax.tree.map(jnp.zeros_like, params)
    return view.put(dense, view.of(sparse_state.stats["scores"]))


@dataclasses.dataclass(eq=False)
class SoftMovementPruning(MovementPruning):
  """Keep the weights whose movement score is above one global threshold.

  Soft movement pruning (Sanh et al., 2020): the scores `S` follow the gradient
  of `L + penalty · Σ sigmoid(S)`, and all leaves are ranked together, so the
  sparsity of each leaf is learnt. The paper fixes the threshold and tunes the
  penalty until the sparsity is right; here the threshold is the one that gives
  the schedule's sparsity exactly.

  Attributes:
    sparsity: as in `GlobalPruning`.
    filter_fn: as in `GlobalPruning`.
    custom_sparsity_map: as in `GlobalPruning`.
    use_normalization: as in `GlobalPruning`.
    penalty: weight of the sigmoid penalty.
    score_rate: learning rate of the scores.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SoftMovementPruning(sparsity=0.5)
    >>> params = {"u": jnp.array([[3.0, -1]]), "v": jnp.array([[2.0, -4]])}
    >>> grads = {"u": jnp.array([[1.0, 1]]), "v": jnp.array([[-1.0, -1]])}
    >>> masks = pruner.instant_sparsify(params, grads)[1]
    >>> masks["u"].tolist(), masks["v"].tolist()
    ([[0, 1]], [[1, 0]])
  """

  sparsity: float = 0.0
  filter_fn: Callable[..., bool] = sparsity_distributions.default_filter
  custom_sparsity_map: Mapping[Any, float | None] | None = None
  use_normalization: bool = False
  penalty: float = 1e-3
  score_rate: float = 0.1

  ranking: ClassVar[str] = "global"

  def __post_init__(self):
    super().__post_init__()
    checks.check_number(self, "penalty")
    checks.check_number(self, "score_rate")

  def descend(self, scores, slope):
    open_ = jax.nn.sigmoid(scores)
    return scores - self.score_rate * (
      slope + self.penalty * open_ * (1 - open_)
    )
