"""Global pruning: one ranking over all leaves together."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import _leaves, base_updater, sparsity_distributions
from jaxpruner.algorithms import pruners
from jaxpruner.sparsity_distributions import allocation


@dataclasses.dataclass(eq=False)
class GlobalPruning(base_updater.BaseUpdater):
  """Base of the algorithms that rank the weights of all leaves together.

  Attributes:
    sparsity: fraction removed of all pruned leaves together.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: exact path or glob to a sparsity of its own; these
      leaves are ranked by themselves.
    use_normalization: divide each leaf's scores by their L2 norm first.
  """

  sparsity: float = 0.0
  filter_fn: Callable[..., bool] = sparsity_distributions.default_filter
  custom_sparsity_map: Mapping[Any, float | None] | None = None
  use_normalization: bool = False

  ranking: ClassVar[str] = "global"


@dataclasses.dataclass(eq=False)
class GlobalMagnitudePruning(GlobalPruning):
  """Keep the largest |w| of all leaves together.

  One threshold `τ` for the whole network, `m = [|w| > τ]`: each leaf gives what
  it can spare, and a leaf of small weights may give everything, which is
  reported. `use_normalization=True` ranks `|w| / ‖w‖` of each leaf instead.
  """

  category: ClassVar[base_updater.Category] = pruners.MagnitudePruning.category

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return jax.tree.map(jnp.abs, params)


@dataclasses.dataclass(eq=False)
class GlobalSaliencyPruning(GlobalPruning):
  """Keep the largest |w · ∂L/∂w| of all leaves together.

  The first-order change of the loss if a weight were removed, ranked over the
  whole network: unlike magnitudes, such changes can be compared across leaves.
  """

  category: ClassVar[base_updater.Category] = pruners.SaliencyPruning.category

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state
    return pruners.saliency_scores(self, params, grads)


@dataclasses.dataclass(eq=False)
class LampPruning(GlobalPruning):
  """Keep the largest LAMP scores of all leaves together (Lee et al., 2021).

  `w²` over the sum of the leaf's squares that are not smaller: the change of
  the layer's output, to which no layer is ever sacrificed whole.
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Lee et al., 2021",
    cost="a dense step; one sort and selection per mask update",
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return jax.tree.map(
      lambda p: (
        _leaves.with_auto_axes(allocation.lamp_scores, p, like=p)
        if sparsity_distributions.is_floating(p)
        else p
      ),
      params,
    )
