"""Powerpropagation: a parameterization that makes weights sparse."""

import dataclasses
from typing import ClassVar

from jaxpruner import _view, base_updater
from jaxpruner.algorithms import pruners, transforms


@dataclasses.dataclass(eq=False)
class PowerPropagation(pruners.MagnitudePruning):
  """Prune by |w| while the optimizer trains θ, `w = θ·|θ|^(α-1)`.

  Powerpropagation (Schwarz et al., 2021): the gradient of a weight is scaled by
  its size, so large ones grow and small ones stay behind, ready to go. Your
  parameters remain `w`: the change of variables happens inside the optimizer.

  Attributes:
    alpha: the power; 1 is plain training.
  """

  alpha: float = 2.0

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Schwarz et al., 2021",
    cost="a dense step and two powers per weight; one selection per update",
  )

  def __post_init__(self):
    super().__post_init__()
    _view.check_number(self, "alpha")

  def wrap_optax(self, inner):
    return super().wrap_optax(
      transforms.powerpropagation(inner, self.alpha, self.target_sparsities)
    )
