"""Powerpropagation: a parameterization that makes weights sparse."""

import dataclasses
from typing import ClassVar

from jaxpruner import base_updater
from jaxpruner.algorithms import pruners
from jaxpruner.algorithms.contrib import transforms
from jaxpruner.updater import checks


@dataclasses.dataclass(eq=False)
class PowerPropagation(pruners.MagnitudePruning):
  """Prune by |w| while the optimizer trains θ, `w = θ·|θ|^(α-1)`.

  Powerpropagation (Schwarz et al., 2021): the gradient of a weight is
  multiplied by a power of its size. Large weights grow and small weights stay
  small, so pruning them changes little. The parameters that you see remain `w`;
  the change of variables is inside the optimizer.

  Attributes:
    alpha: the power; 1 is plain training.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner, optax
    >>> pruner = jaxpruner.PowerPropagation(
    ...   alpha=2.0, scheduler=jaxpruner.sparsity_schedules.OneShotSchedule(9),
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> tx = pruner.wrap_optax(optax.sgd(0.5))
    >>> params, grads = jnp.array([[4.0, 1.0]]), jnp.array([[0.5, 0.5]])
    >>> tx.update(grads, tx.init(params), params)[0].tolist()
    [[-3.0, -0.75]]
  """

  alpha: float = 2.0

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Schwarz et al., 2021",
    cost="a dense step and two powers per weight; one selection per update",
  )

  def __post_init__(self):
    super().__post_init__()
    checks.check_number(self, "alpha")

  def wrap_optax(self, inner):
    return super().wrap_optax(
      transforms.powerpropagation(inner, self.alpha, self.target_sparsities)
    )
