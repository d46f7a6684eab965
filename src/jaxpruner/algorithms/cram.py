"""Compression-aware minimization."""

import dataclasses
from typing import ClassVar

from jaxpruner import _view, base_updater
from jaxpruner.algorithms import pruners, transforms


@dataclasses.dataclass(eq=False)
class CrAM(pruners.MagnitudePruning):
  """Prune by |w| a network trained to bear it (Peste et al., 2022).

  Each step uses the gradient at the pruned ascent point `C(w + rho·∇L(w))`,
  `C` being the largest |w| at the target sparsity, and with `dense_gradient`
  (CrAM+) the one at `w` too. Pass the gradient function along:
  `tx.update(grads, state, params, grad_fn=jax.grad(loss))`. The paper prunes
  once after training: a `OneShotSchedule` at the last step does.

  Attributes:
    rho: length of the ascent step.
    dense_gradient: whether the gradient at the parameters themselves is added.
  """

  rho: float = 0.05
  dense_gradient: bool = True

  category: ClassVar[base_updater.Category] = base_updater.Category(
    needs=frozenset({"gradients"}),
    paper="Peste et al., 2022",
    cost="two dense gradients and one selection, every step",
    gradients_per_step=2,
  )

  def __post_init__(self):
    super().__post_init__()
    _view.check_number(self, "rho")

  def compress(self, params):
    """Return the parameters as they would be pruned now."""
    scores = self.calculate_scores(params)
    masks = self.create_masks(scores, self.target_sparsities(params))
    return self.apply_masks(params, masks, is_packed=False)

  def wrap_optax(self, inner):
    return super().wrap_optax(
      transforms.compression_aware(
        inner, self.compress, self.rho, dense_gradient=self.dense_gradient
      )
    )
