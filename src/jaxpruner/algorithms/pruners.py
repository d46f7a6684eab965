"""Gradual pruning, leaf by leaf: magnitude, saliency, random."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import (
  _leaves,
  _legacy,
  base_updater,
  sparsity_distributions,
)
from jaxpruner._leaves import PyTree


def magnitude_scores(params: PyTree) -> PyTree:
  """Return the scores |w|.

  Args:
    params: the parameters.

  Returns:
    A tree like `params`.
  """
  return jax.tree.map(jnp.abs, params)


def saliency_scores(params: PyTree, grads: PyTree, caller: str) -> PyTree:
  """Return the scores |w · ∂L/∂w|, in float32: half-precision products vanish.

  Args:
    params: the parameters.
    grads: their gradients, None for leaves that have none.
    caller: the name of the algorithm, for the message.

  Returns:
    A tree like `params`; leaves without a gradient stay as they are.
  """
  if grads is None:
    raise ValueError(
      f"{caller}: grads=None; saliency is |w · grad|, pass grads"
    )

  def score(_, weight, grad):
    if grad is None or not sparsity_distributions.is_floating(weight):
      return weight
    return jnp.abs(weight.astype(jnp.float32) * grad.astype(jnp.float32))

  return _leaves.map_masks(score, params, grads, name="grads")


@dataclasses.dataclass(eq=False)
class MagnitudePruning(base_updater.BaseUpdater):
  """Keep the largest |w| of each leaf (Han et al., 2015).

  With a `PolynomialSchedule` this is gradual magnitude pruning (Zhu & Gupta,
  2017): from step `t₀` to `t₁` the sparsity is
  `s(t) = S·(1 − (1 − (t − t₀)/(t₁ − t₀))³)`. A small weight contributes little
  to the output, and the weights that remain are trained further after each
  removal. The attributes are those of `BaseUpdater`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.MagnitudePruning(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params, masks = pruner.instant_sparsify(jnp.array([[3.0, -1, 2, -4]]))
    >>> masks.tolist()
    [[1, 0, 0, 1]]
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Han et al., 2015; Zhu & Gupta, 2017",
    cost="a dense step; one selection per mask update",
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return magnitude_scores(params)


@dataclasses.dataclass(eq=False)
class SaliencyPruning(base_updater.BaseUpdater):
  """Keep the largest |w · ∂L/∂w| of each leaf (Molchanov et al., 2016).

  The score is the change of the loss, to first order, if the weight were
  removed. It is computed in float32, because half-precision products underflow
  or overflow. The attributes are those of `BaseUpdater`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SaliencyPruning(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> grads = jnp.array([[0.0, 9, 5, 1]])
    >>> pruner.instant_sparsify(params, grads)[1].tolist()
    [[0, 1, 1, 0]]
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    needs=frozenset({"gradients"}),
    paper="Mozer & Smolensky, 1989; Molchanov et al., 2016",
    cost="a dense step; one selection per mask update",
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state
    return saliency_scores(params, grads, type(self).__name__)


@dataclasses.dataclass(eq=False)
class RandomPruning(base_updater.BaseUpdater):
  """Keep weights at random, as a baseline.

  The score of each weight is drawn once, so the mask of a higher sparsity is a
  subset of the mask of a lower one. The attributes are those of `BaseUpdater`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.RandomPruning(
    ...   rng_seed=0, sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.75))
    >>> params, masks = pruner.instant_sparsify(jnp.ones((4, 4)))
    >>> int(masks.sum())
    4
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    needs=frozenset({"random"}),
    paper="baseline",
    cost="a dense step; one draw and selection per mask update",
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del grads
    return self.random_scores(params, sparse_state)


__getattr__ = _legacy.old_names(__name__)
