"""Global pruning: one ranking over all leaves together."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp

from jaxpruner import (
  _leaves,
  base_updater,
  mask_calculator,
  sparsity_distributions,
  sparsity_types,
)
from jaxpruner.algorithms import pruners
from jaxpruner.engine import lazy as _lazy
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

  def __post_init__(self):
    super().__post_init__()
    self.sparsity = sparsity_distributions.check_sparsity(self.sparsity)
    if self.sparsity_distribution_fn not in (None, base_updater.UNSET):
      raise ValueError(
        f"{type(self).__name__}: sparsity_distribution_fn has no say in a "
        "global ranking; pass sparsity=, filter_fn=, custom_sparsity_map="
      )
    sparsity_distributions.check_filter(self.filter_fn)
    sparsity_distributions.check_map(self.custom_sparsity_map)
    if not isinstance(self.use_normalization, bool):
      raise ValueError(
        f"{type(self).__name__}: use_normalization={self.use_normalization!r} "
        "must be True or False"
      )
    plain = isinstance(self.sparsity_type, sparsity_types.Unstructured)
    if self.topk_fn is not None or not plain:
      wrong = "sparsity_type" if self.topk_fn is None else "topk_fn"
      raise ValueError(
        f"{type(self).__name__}: {wrong}={getattr(self, wrong)!r}; a global "
        "ranking compares single weights: use Unstructured, or a pruner that "
        "works leaf by leaf"
      )

  def distribute(self, params):
    shares = sparsity_distributions.uniform(
      params, self.sparsity, self.filter_fn, self.custom_sparsity_map
    )
    leaves, treedef = _leaves.flatten_with_names(params)
    # A ranked leaf heads for the request itself, not for a share rounded to
    # its size, or the ramp would end beside it.
    return treedef.unflatten(
      [
        self.sparsity if share is not None and own is None else share
        for share, own in zip(
          _leaves.align(params, shares), self._own(leaves), strict=True
        )
      ]
    )

  def _own(self, leaves) -> list[Any]:
    """Return, per leaf, the key of its own sparsity, or `None`."""
    if not self.custom_sparsity_map:
      return [None] * len(leaves)
    names = [name for name, _ in leaves]
    return _leaves.match_patterns(
      self.custom_sparsity_map, names, "custom_sparsity_map"
    )

  def create_masks(self, scores, sparsities):
    leaves, treedef = _leaves.flatten_with_names(scores)
    wanted = _leaves.align(scores, sparsities, "sparsities")
    custom = self._own(leaves)
    ranked = [
      i for i, s in enumerate(wanted) if s is not None and custom[i] is None
    ]
    alone = treedef.unflatten(
      [s if custom[i] is not None else None for i, s in enumerate(wanted)]
    )
    masks = _leaves.align(scores, super().create_masks(scores, alone))
    base_updater.refuse_nan([leaves[i] for i in ranked])
    if ranked:
      # float32 everywhere: leaves of several precisions must compare.
      units = [
        _lazy.lift(lambda x: x.astype(jnp.float32), leaves[i][1])
        for i in ranked
      ]
      if self.use_normalization:
        norms = [jnp.linalg.norm(_lazy.value(u)) + 1e-8 for u in units]
        units = [
          _lazy.lift(lambda x, norm=norm: x / norm, u)
          for u, norm in zip(units, norms, strict=True)
        ]
      # All ranked leaves head for one request, and a schedule moves them alike.
      ones = mask_calculator.num_ones(
        sum(u.size for u in units), wanted[ranked[0]]
      )
      chosen = mask_calculator.topk_masks(units, ones, together=True)
      for i, mask in zip(ranked, chosen, strict=True):
        masks[i] = mask
      wiped = treedef.unflatten(masks)
      say_if_wiped_out(wiped, wiped)
    return treedef.unflatten(masks)

  create_masks.takes_lazy = True  # pyright: ignore[reportFunctionMemberAccess]


def say_if_wiped_out(params: Any, masks: Any) -> None:
  """Warn of masks without a single one, unless they are traced."""
  empty = [
    _leaves.join(names)
    for (names, _), mask in zip(
      _leaves.flatten_with_names(params)[0],
      _leaves.align(params, masks),
      strict=True,
    )
    if mask is not None
    and not isinstance(mask, jax.core.Tracer)
    and not bool(jnp.any(mask))
  ]
  if empty:
    warnings.warn(
      f"global pruning removed every weight of {', '.join(empty)}: the layer "
      "has collapsed; lower the sparsity, normalise with "
      "use_normalization=True, or give these leaves a custom_sparsity_map",
      stacklevel=4,
    )


@dataclasses.dataclass(eq=False)
class GlobalMagnitudePruning(GlobalPruning, pruners.MagnitudePruning):
  """Keep the largest |w| of all leaves together.

  One threshold `τ` for the whole network, `m = [|w| > τ]`: each leaf gives what
  it can spare, and a leaf of small weights may give everything, which is
  reported. `use_normalization=True` ranks `|w| / ‖w‖` of each leaf instead.
  """

  category: ClassVar[base_updater.Category] = pruners.MagnitudePruning.category


@dataclasses.dataclass(eq=False)
class GlobalSaliencyPruning(GlobalPruning, pruners.SaliencyPruning):
  """Keep the largest |w · ∂L/∂w| of all leaves together.

  The first-order change of the loss if a weight were removed, ranked over the
  whole network: unlike magnitudes, such changes can be compared across leaves.
  """

  category: ClassVar[base_updater.Category] = pruners.SaliencyPruning.category


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
