"""Straight-through: dense parameters, a sparse forward pass.

The masks are selected from the parameters after every update, at the schedule's
sparsity, and kept in the state: they are those the next forward pass uses, and
those to export. Gradients pass to all weights as if nothing were masked.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxpruner import _view, base_updater
from jaxpruner.algorithms import pruners


@dataclasses.dataclass(eq=False)
class SteMagnitudePruning(pruners.MagnitudePruning):
  """Use the largest |w| forward, train all of them (Bengio et al., 2013).

  The loss sees `m·w`, with a mask `m` chosen at every step; the gradient
  `∂L/∂(m·w)` is given to `w` as it is, removed weights included. One that grows
  large again returns.
  """

  holds_zeros: ClassVar[bool] = False
  straight_through: ClassVar[bool] = True
  steady: ClassVar[bool] = True
  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    paper="Bengio et al., 2013; Zhou et al., 2021",
    cost="a dense step and one selection, every step",
  )


@dataclasses.dataclass(eq=False)
class SteSaliencyPruning(pruners.SaliencyPruning):
  """Use the largest |w · ∂L/∂w| forward, train all weights.

  The gradient of the masked pass reaches the masked weights too, so a weight
  that would help is chosen again. The first pass is dense: nothing is known.
  """

  holds_zeros: ClassVar[bool] = False
  straight_through: ClassVar[bool] = True
  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    needs=frozenset({"gradients"}),
    paper="Bengio et al., 2013; Molchanov et al., 2016",
    cost="a dense step and one selection, every step",
  )


@dataclasses.dataclass(eq=False)
class SrStePruning(SteMagnitudePruning):
  """Straight-through, with masked weights pulled to zero (Zhou et al., 2021).

  The gradient of a masked weight becomes `∂L/∂w + λ·w`, which keeps the masks
  from flickering. Meant for N:M, works with every structure.

  Attributes:
    mask_decay: λ, the pull on masked weights.
  """

  mask_decay: float = 2e-4

  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    paper="Zhou et al., 2021",
    cost="a dense step and one selection, every step",
  )

  def __post_init__(self):
    super().__post_init__()
    _view.check_number(self, "mask_decay")

  def prepare_gradients(self, grads, state, params):
    grads = super().prepare_gradients(grads, state, params)

    def pull(grad, param, mask):
      pulled = grad + jnp.asarray(self.mask_decay * param, grad.dtype)
      return jnp.where(mask, grad, pulled)

    return self.view(params).map(pull, grads, params, state.masks)


@dataclasses.dataclass(eq=False)
class SteRandomPruning(pruners.RandomPruning):
  """Use random weights forward, train all of them: STE's baseline.

  As `magnitude_ste`, the loss sees `m·w` and `w` gets `∂L/∂(m·w)`, but `m` is
  drawn once: each weight keeps its score.
  """

  holds_zeros: ClassVar[bool] = False
  straight_through: ClassVar[bool] = True
  steady: ClassVar[bool] = True
  category: ClassVar[base_updater.Category] = base_updater.Category(
    needs=frozenset({"random"}),
    paper="baseline",
    cost="a dense step, one draw and selection, every step",
  )
