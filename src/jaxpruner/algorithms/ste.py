"""Straight-through: dense parameters, a sparse forward pass."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import _checks, _leaves, base_updater
from jaxpruner.algorithms import pruners
from jaxpruner.engine import lazy as _lazy
from jaxpruner.engine import search as _selection
from jaxpruner.engine import warm_start as _trails


@jax.custom_vjp
def _straight_through(param, mask):
  return base_updater.apply_mask(param, mask)


def _forward(param, mask):
  return base_updater.apply_mask(param, mask), None


def _backward(_, cotangent):
  return cotangent, None


_straight_through.defvjp(_forward, _backward)


@dataclasses.dataclass(eq=False)
class StePruning(base_updater.BaseUpdater):
  """Base of the algorithms that mask the forward pass only.

  The masks are chosen anew from the parameters at every step, at the schedule's
  sparsity, and kept in the state: they are those the next forward pass uses,
  and those to export. Gradients pass to all weights as if nothing were masked.

  Where scores change little from step to step, the state's `stats` say where
  thresholds were and how they moved. The next ones are searched for from there:
  sooner found, never different.
  """

  holds_zeros: ClassVar[bool] = False
  # Whether the thresholds of the last steps tell where the next is.
  steady: ClassVar[bool] = False

  def init_stats(self, params, masks):
    """Return the trails of all thresholds; none has been left."""
    number = len(jax.tree.leaves(masks))
    return _trails.new(number) if self.steady and number else None

  def get_initial_masks(self, params, target_sparsities):
    if "gradients" in self.needs:  # known only after a first pass
      return super().get_initial_masks(params, target_sparsities)
    state = base_updater.SparseState(
      masks=None, target_sparsities=target_sparsities, count=0
    )
    scores = self.calculate_scores(params)
    return self.create_masks(scores, self.sparsities_at(state, params, 0))

  def update_state(self, sparse_state, params, grads):
    del params, grads
    return sparse_state

  def after_update(self, state, params, updates, grads=None):
    new_params = optax.apply_updates(params, updates)
    return super().update_state(state, new_params, grads)

  def _scores(self, state, params, grads):
    scores = super()._scores(state, params, grads)
    if self.steady:
      for row, entry in enumerate(self._held(scores, state.masks)[0]):
        if isinstance(entry, _lazy.Lazy):
          entry.trail = _selection.row_from([state.stats], row)[0]
    return scores

  def replace_masks(self, state, params, masks, *scores):
    if self.steady:
      held, _ = self._held(scores[0], state.masks)
      found: list[Any] = [getattr(entry, "trail", None) for entry in held]
      if found and all(trail is not None for trail in found):
        state = state._replace(stats=jnp.stack(found))
    return super().replace_masks(state, params, masks, *scores)

  def pre_forward_update(self, params: Any, opt_state: Any) -> Any:
    """Return sparse parameters whose gradient reaches every weight."""
    masks = base_updater.find_state(opt_state).masks

    def mask_leaf(_, param, mask):
      if mask is None:
        return param
      return _straight_through(param, self._unpack(mask, param))

    return _leaves.map_masks(mask_leaf, params, masks)


@dataclasses.dataclass(eq=False)
class SteMagnitudePruning(StePruning, pruners.MagnitudePruning):
  """Use the largest |w| forward, train all of them (Bengio et al., 2013).

  The loss sees `m·w`, with a mask `m` chosen at every step; the gradient
  `∂L/∂(m·w)` is given to `w` as it is, removed weights included. One that grows
  large again returns.
  """

  steady: ClassVar[bool] = True
  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    paper="Bengio et al., 2013; Zhou et al., 2021",
    cost="a dense step and one selection, every step",
  )


@dataclasses.dataclass(eq=False)
class SteSaliencyPruning(StePruning, pruners.SaliencyPruning):
  """Use the largest |w · ∂L/∂w| forward, train all weights.

  The gradient of the masked pass reaches the masked weights too, so a weight
  that would help is chosen again. The first pass is dense: nothing is known.
  """

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
    _checks.check_number(self, "mask_decay")

  def prepare_gradients(self, grads, state, params):
    grads = super().prepare_gradients(grads, state, params)

    def pull(_, param, grad, mask):
      if mask is None:
        return grad
      pulled = grad + jnp.asarray(self.mask_decay * param, grad.dtype)
      return jnp.where(self._unpack(mask, param), grad, pulled)

    return _leaves.map_masks(pull, params, grads, state.masks)


@dataclasses.dataclass(eq=False)
class SteRandomPruning(StePruning, pruners.RandomPruning):
  """Use random weights forward, train all of them: STE's baseline.

  As `magnitude_ste`, the loss sees `m·w` and `w` gets `∂L/∂(m·w)`, but `m` is
  drawn once: each weight keeps its score.
  """

  steady: ClassVar[bool] = True
  category: ClassVar[base_updater.Category] = base_updater.Category(
    needs=frozenset({"random"}),
    paper="baseline",
    cost="a dense step, one draw and selection, every step",
  )
