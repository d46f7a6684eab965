"""Global pruning: one ranking over all leaves together."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax

from jaxpruner import _leaves, base_updater, sparsity_distributions
from jaxpruner.algorithms import pruners
from jaxpruner.sparsity_distributions import allocation


@dataclasses.dataclass(eq=False)
class GlobalPruning(base_updater.BaseUpdater):
  """Rank the weights of all leaves together; the base of global algorithms.

  Attributes:
    sparsity: the fraction removed of all pruned leaves together.
    filter_fn: `(names, param) -> bool`, selects the leaves to prune.
    custom_sparsity_map: maps an exact path or a glob to a sparsity; each of
      these leaves is ranked alone.
    use_normalization: divide the scores of each leaf by their L2 norm first.
      The norm is a sum of floats: its last bit, and so a weight at the
      threshold, may depend on how the leaf is spread over devices.

  Example:
    >>> import dataclasses, jax.numpy as jnp
    >>> from jaxpruner.algorithms.global_pruners import GlobalPruning
    >>> @dataclasses.dataclass(eq=False)
    ... class LargestWeights(GlobalPruning):
    ...   def calculate_scores(self, params, sparse_state=None, grads=None):
    ...     return params
    >>> params = {"u": jnp.array([[1.0, 2]]), "v": jnp.array([[-3.0, 4]])}
    >>> masks = LargestWeights(sparsity=0.5).instant_sparsify(params)[1]
    >>> masks["u"].tolist(), masks["v"].tolist()
    ([[0, 1]], [[0, 1]])
  """

  sparsity: float = 0.0
  filter_fn: Callable[..., bool] = sparsity_distributions.default_filter
  custom_sparsity_map: Mapping[Any, float | None] | None = None
  use_normalization: bool = False

  ranking: ClassVar[str] = "global"


@dataclasses.dataclass(eq=False)
class GlobalMagnitudePruning(GlobalPruning):
  """Keep the largest |w| of all leaves together.

  One threshold `τ` applies to the whole network: `m = [|w| > τ]`. The sparsity
  of each leaf follows from its weights. A leaf of small weights may lose all of
  them; a warning names it. `use_normalization=True` ranks `|w| / ‖w‖` of each
  leaf instead.

  Attributes:
    sparsity: the fraction removed of all pruned leaves together.
    filter_fn: `(names, param) -> bool`, selects the leaves to prune.
    custom_sparsity_map: maps an exact path or a glob to a sparsity; each of
      these leaves is ranked alone.
    use_normalization: divide the scores of each leaf by their L2 norm first.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> params = {"u": jnp.array([[1.0, 4]]), "v": jnp.array([[3.0, -5]])}
    >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.25)
    >>> masks = pruner.instant_sparsify(params)[1]
    >>> masks["u"].tolist(), masks["v"].tolist()
    ([[0, 1]], [[1, 1]])
  """

  category: ClassVar[base_updater.Category] = pruners.MagnitudePruning.category

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return pruners.magnitude_scores(params)


@dataclasses.dataclass(eq=False)
class GlobalSaliencyPruning(GlobalPruning):
  """Keep the largest |w · ∂L/∂w| of all leaves together.

  The score is the change of the loss, to first order, if the weight were
  removed. Unlike magnitudes, these changes have the same unit in every leaf, so
  one ranking over the whole network is meaningful.

  Attributes:
    sparsity: the fraction removed of all pruned leaves together.
    filter_fn: `(names, param) -> bool`, selects the leaves to prune.
    custom_sparsity_map: maps an exact path or a glob to a sparsity; each of
      these leaves is ranked alone.
    use_normalization: divide the scores of each leaf by their L2 norm first.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> params = {"u": jnp.array([[1.0, 4]]), "v": jnp.array([[3.0, -5]])}
    >>> grads = {"u": jnp.array([[9.0, 1]]), "v": jnp.array([[0.0, 1]])}
    >>> pruner = jaxpruner.GlobalSaliencyPruning(sparsity=0.5)
    >>> masks = pruner.instant_sparsify(params, grads)[1]
    >>> masks["u"].tolist(), masks["v"].tolist()
    ([[1, 0]], [[0, 1]])
  """

  category: ClassVar[base_updater.Category] = pruners.SaliencyPruning.category

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state
    return pruners.saliency_scores(params, grads, type(self).__name__)


@dataclasses.dataclass(eq=False)
class LampPruning(GlobalPruning):
  """Keep the largest LAMP scores of all leaves together (Lee et al., 2021).

  The score of a weight is `w² / Σ u²`, where the sum runs over all weights `u`
  of its leaf with `|u| ≥ |w|`. The largest weight of each leaf has the score 1,
  so no leaf is removed completely while others have smaller scores.

  Attributes:
    sparsity: the fraction removed of all pruned leaves together.
    filter_fn: `(names, param) -> bool`, selects the leaves to prune.
    custom_sparsity_map: maps an exact path or a glob to a sparsity; each of
      these leaves is ranked alone.
    use_normalization: divide the scores of each leaf by their L2 norm first.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> params = {"u": jnp.array([[1.0, 2]]), "v": jnp.array([[30.0, 40]])}
    >>> masks = jaxpruner.LampPruning(sparsity=0.5).instant_sparsify(params)[1]
    >>> masks["u"].tolist(), masks["v"].tolist()
    ([[0, 1]], [[0, 1]])
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
