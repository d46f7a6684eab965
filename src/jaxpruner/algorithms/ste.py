"""Straight-through estimators: sparse parameters, dense weights in the state.

After every update the masks are selected from the dense weights, at the
schedule's sparsity. The parameters that a trainer holds are the masked ones, so
the gradient it takes is the straight-through gradient: that of the masked
weights, for all of them. Evaluation and export see the sparse model.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxpruner import base_updater, engine
from jaxpruner.algorithms import pruners
from jaxpruner.updater import checks


def _first_hint(view: Any) -> dict[str, Any] | None:
  """Return the hint for thresholds that change little from step to step."""
  number = len(view.names)
  return {"hint": engine.new_hint(number)} if number else None


@dataclasses.dataclass(eq=False)
class SteMagnitudePruning(pruners.MagnitudePruning):
  """Use the largest |w| forward, train all of them (Bengio et al., 2013).

  The loss is computed at `m·w`, with a mask `m` selected at every step. The
  gradient `∂L/∂(m·w)` is applied to `w` unchanged, including removed weights. A
  removed weight that becomes large returns. The attributes are those of
  `BaseUpdater`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner, optax
    >>> pruner = jaxpruner.SteMagnitudePruning(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> tx = pruner.wrap_optax(optax.sgd(1.0))
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> state = tx.init(params)
    >>> params = pruner.post_gradient_update(params, state)
    >>> params.tolist()
    [[3.0, 0.0, 0.0, -4.0]]
    >>> grads = jnp.array([[0.0, 4, 0, -2]])  # -1 becomes -5, -4 becomes -2
    >>> updates, state = tx.update(grads, state, params)
    >>> optax.apply_updates(params, updates).tolist()
    [[3.0, -5.0, 0.0, 0.0]]
  """

  straight_through: ClassVar[bool] = True
  reselects: ClassVar[bool] = True
  changes: ClassVar[tuple[str, ...]] = ("stats",)
  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    paper="Bengio et al., 2013; Zhou et al., 2021",
    cost="a dense step and one selection, every step",
  )

  def init_extra(self, params, masks):
    return _first_hint(self.view(params))


@dataclasses.dataclass(eq=False)
class SteSaliencyPruning(pruners.SaliencyPruning):
  """Use the largest |w · ∂L/∂w| forward, train all weights.

  The gradient of the masked forward pass reaches the masked weights too, so a
  masked weight with a large score returns. The first forward pass is dense,
  because no gradient is known yet. The attributes are those of `BaseUpdater`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SteSaliencyPruning(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> grads = jnp.array([[0.0, 9, 5, 1]])
    >>> state = pruner.update_state(pruner.init_state(params), params, grads)
    >>> pruner.pre_forward_update(params, state).tolist()
    [[0.0, -1.0, 2.0, 0.0]]
  """

  straight_through: ClassVar[bool] = True
  reselects: ClassVar[bool] = True
  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    needs=frozenset({"gradients"}),
    paper="Bengio et al., 2013; Molchanov et al., 2016",
    cost="a dense step and one selection, every step",
  )


@dataclasses.dataclass(eq=False)
class SrStePruning(SteMagnitudePruning):
  """Use the largest |w| forward, decay the masked weights (Zhou et al., 2021).

  SR-STE: the gradient of a masked weight becomes `∂L/∂w + λ·w`, which makes the
  masks change less often. The method is designed for N:M sparsity and works
  with every sparsity type.

  Attributes:
    mask_decay: λ, the weight decay of masked weights.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SrStePruning(
    ...   mask_decay=0.5, sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> state = pruner.init_state(params)
    >>> pruner.prepare_gradients(jnp.zeros((1, 4)), state, params).tolist()
    [[0.0, -0.5, 1.0, 0.0]]
  """

  mask_decay: float = 2e-4

  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    paper="Zhou et al., 2021",
    cost="a dense step and one selection, every step",
  )

  def __post_init__(self):
    super().__post_init__()
    checks.check_number(self, "mask_decay")

  def prepare_gradients(self, grads, state, params):
    grads = super().prepare_gradients(grads, state, params)

    def pull(grad, param, mask):
      pulled = grad + jnp.asarray(self.mask_decay * param, grad.dtype)
      return jnp.where(mask, grad, pulled)

    return self.view(params).map(pull, grads, params, state.masks)


@dataclasses.dataclass(eq=False)
class SteRandomPruning(pruners.RandomPruning):
  """Use random weights forward, train all of them: the baseline of STE.

  As in `SteMagnitudePruning`, the loss is computed at `m·w` and `w` gets
  `∂L/∂(m·w)`. The scores that select `m` are drawn once. The attributes are
  those of `BaseUpdater`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SteRandomPruning(
    ...   rng_seed=0, sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.75))
    >>> params = jnp.ones((4, 4))
    >>> state = pruner.init_state(params)
    >>> float(pruner.pre_forward_update(params, state).sum())
    4.0
  """

  straight_through: ClassVar[bool] = True
  reselects: ClassVar[bool] = True
  changes: ClassVar[tuple[str, ...]] = ("stats",)
  category: ClassVar[base_updater.Category] = base_updater.Category(
    needs=frozenset({"random"}),
    paper="baseline",
    cost="a dense step, one draw and selection, every step",
  )

  def init_extra(self, params, masks):
    return _first_hint(self.view(params))
