"""Compression-aware minimization."""

import dataclasses
from typing import ClassVar

from jaxpruner import base_updater
from jaxpruner.algorithms import pruners
from jaxpruner.algorithms.contrib import transforms
from jaxpruner.updater import checks


@dataclasses.dataclass(eq=False)
class CrAM(pruners.MagnitudePruning):
  """Prune by |w| a network that was trained for it (Peste et al., 2022).

  Compression-aware minimization: each step uses the gradient at the point `C(w
  + rho·∇L(w))`, where `C` keeps the largest |w| at the target sparsity.
  `dense_gradient` (CrAM+) adds the gradient at `w`. Pass the gradient function
  to each update: `tx.update(grads, state, params, grad_fn=jax.grad(loss))`. The
  paper prunes once after training, for which a `OneShotSchedule` at the last
  step is suitable.

  Attributes:
    rho: length of the ascent step.
    dense_gradient: whether the gradient at `w` is added.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.CrAM(
    ...   rho=0.1, sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> pruner.compress(jnp.array([[3.0, -1, 2, -4]])).tolist()
    [[3.0, 0.0, 0.0, -4.0]]
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
    checks.check_number(self, "rho")

  def compress(self, params):
    """Return the parameters pruned to the target sparsity.

    Args:
      params: the parameters.

    Returns:
      A tree like `params`; removed weights are zero.
    """
    scores = self.calculate_scores(params)
    masks = self.create_masks(scores, self.target_sparsities(params))
    return self.apply_masks(params, masks, is_packed=False)

  def wrap_optax(self, inner):
    return super().wrap_optax(
      transforms.compression_aware(
        inner, self.compress, self.rho, dense_gradient=self.dense_gradient
      )
    )
