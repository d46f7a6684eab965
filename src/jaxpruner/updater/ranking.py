"""Global ranking: one order over the weights of all leaves together.

An updater with `ranking = "global"` has the fields `sparsity`, `filter_fn`,
`custom_sparsity_map` and `use_normalization` (see `GlobalPruning`); the
functions here are what these fields mean.
"""

import warnings
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import (
  _leaves,
  engine,
  mask_calculator,
  sparsity_distributions,
  sparsity_types,
)
from jaxpruner._leaves import PyTree
from jaxpruner.updater.prunable import UNSET, Prunable, given_topk_fn


def check_fields(updater: Any) -> None:
  """Raise if a field contradicts a global ranking; make `sparsity` a float."""
  name = type(updater).__name__
  updater.sparsity = sparsity_distributions.check_sparsity(updater.sparsity)
  if updater.sparsity_distribution_fn not in (None, UNSET):
    raise ValueError(
      f"{name}: sparsity_distribution_fn has no say in a global ranking; pass "
      "sparsity=, filter_fn=, custom_sparsity_map="
    )
  sparsity_distributions.check_filter(updater.filter_fn)
  sparsity_distributions.check_map(updater.custom_sparsity_map)
  if not isinstance(updater.use_normalization, bool):
    raise ValueError(
      f"{name}: use_normalization={updater.use_normalization!r} must be True "
      "or False"
    )
  plain = isinstance(updater.sparsity_type, sparsity_types.Unstructured)
  own = given_topk_fn(updater) is not None
  if own or not plain:
    wrong = "topk_fn" if own else "sparsity_type"
    raise ValueError(
      f"{name}: {wrong}={getattr(updater, wrong)!r}; a global ranking compares "
      "single weights: use Unstructured, or a pruner that works leaf by leaf"
    )


def distribute(updater: Any, params: PyTree) -> PyTree:
  """Return the sparsity each leaf heads for: the request, or its own."""
  shares = sparsity_distributions.uniform(
    params, updater.sparsity, updater.filter_fn, updater.custom_sparsity_map
  )
  leaves, treedef = _leaves.flatten_with_names(params)
  own = _own(updater, [names for names, _ in leaves])
  shares = _leaves.align(params, shares)
  # A ranked leaf heads for the request itself, not for a share rounded to its
  # size, or the ramp would end beside it.
  pairs = zip(shares, own, strict=True)
  return treedef.unflatten(
    [updater.sparsity if s is not None and not o else s for s, o in pairs]
  )


def _own(updater: Any, names: list[Any]) -> list[bool]:
  """Return, per leaf, whether it has a sparsity of its own."""
  custom = updater.custom_sparsity_map
  if not custom:
    return [False] * len(names)
  keys = _leaves.match_patterns(custom, names, "custom_sparsity_map")
  return [key is not None for key in keys]


def select_globally(
  updater: Any, view: Prunable, scores: list[Any], sparsities: list[Any]
) -> engine.Selection:
  """Keep the highest scores of all leaves together.

  Leaves of `custom_sparsity_map` are ranked by themselves.

  Args:
    updater: the updater, for its fields.
    view: the prunable leaves.
    scores: their scores, arrays or expressions.
    sparsities: the fraction removed; all ranked leaves have the same.

  Returns:
    A `Selection`.
  """
  table = dict(
    zip(view.all_names, _own(updater, [*view.all_names]), strict=True)
  )
  alone = [i for i, names in enumerate(view.names) if table[names]]
  ranked = [i for i, names in enumerate(view.names) if not table[names]]
  found = sparsity_types.select_masks(
    [view.kinds[i] for i in alone],
    [scores[i] for i in alone],
    [sparsities[i] for i in alone],
  )
  if not ranked:
    return found
  # float32 everywhere: leaves of several precisions must compare.
  units = [
    engine.apply(lambda x: x.astype(jnp.float32), scores[i]) for i in ranked
  ]
  if updater.use_normalization:
    norms = [jnp.linalg.norm(engine.value(u)) + 1e-8 for u in units]
    units = [
      *map(lambda u, norm: engine.apply(jnp.divide, u, norm), units, norms)
    ]
  ones = mask_calculator.num_ones(
    sum(u.size for u in units), sparsities[ranked[0]]
  )
  together = engine.select(units, ones, together=True)
  places = np.argsort([*alone, *ranked])
  masks = [[*found.masks, *together.masks][i] for i in places]
  # All ranked leaves or none: with the old mask of one leaf and the new masks
  # of the others, the total would not be what was asked for.
  finite = jnp.full_like(together.finite, jnp.all(together.finite))
  if alone:
    finite = jnp.concatenate([found.finite, finite])[places]
  warn_if_emptied(view, masks)
  return engine.Selection(masks, finite, None)


def warn_if_emptied(view: Prunable, masks: list[Any]) -> None:
  """Warn of masks without a single one, unless they are traced."""
  empty = [
    _leaves.join(names)
    for names, mask in zip(view.names, masks, strict=True)
    if not isinstance(mask, jax.core.Tracer) and not bool(jnp.any(mask))
  ]
  if empty:
    warnings.warn(
      f"global pruning removed every weight of {', '.join(empty)}: the layer "
      "has collapsed; lower the sparsity, normalise with "
      "use_normalization=True, or give these leaves a custom_sparsity_map",
      stacklevel=5,
    )
