"""A budget of kept weights, divided among leaves with an exact total."""

import fractions
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.core
import numpy as np

from jaxpruner import _leaves, mask_calculator
from jaxpruner.sparsity_distributions.filters import (
  FilterFn,
  check_filter,
  default_filter,
  is_floating,
  judge,
)
from jaxpruner.sparsity_types import check_sparsity

PyTree: TypeAlias = Any
# Exact path or glob -> sparsity; None keeps the leaf dense.
SparsityMap: TypeAlias = Mapping[Any, float | None]


def check_map(custom_sparsity_map: Any) -> None:
  """Raise if a custom map is neither a mapping nor `None`.

  Args:
    custom_sparsity_map: path or glob -> sparsity, or None.

  Raises:
    ValueError: the argument is something else.

  Example:
    >>> check_map({"*/embed/*": None, "head/kernel": 0.5})
    >>> check_map(0.5)
    Traceback (most recent call last):
    ValueError: custom_sparsity_map=0.5 must map paths or globs to sparsities
  """
  custom = custom_sparsity_map
  if custom is not None and not isinstance(custom, Mapping):
    raise ValueError(
      f"custom_sparsity_map={custom!r} must map paths or globs to sparsities"
    )


def check_size(name: str, leaf: Any) -> None:
  """Raise if a leaf has more weights than a mask can count.

  Args:
    name: the leaf, for the message.
    leaf: an array or its shape.

  Raises:
    ValueError: it has 2**32 weights or more.
  """
  size = math.prod(leaf.shape)
  if size >= 1 << 32:
    raise ValueError(
      f"{name}: shape {tuple(leaf.shape)} holds {size:,} weights, 2**32 or "
      "more; split it, say which axis stacks layers with stacked_axis, or "
      "leave it out with filter_fn"
    )


class Budget:
  """The number of weights that all prunable leaves keep together.

  A new distribution reads the free leaves from it, computes a density for each,
  and calls `fill`, which rounds the densities so that the total is exact.

  Args:
    params: tree of parameters (or of their shapes).
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: exact path or glob -> the sparsity of these leaves,
      `None` to keep them dense; they do not count towards the total.

  Attributes:
    leaves: `(names, leaf)` of every leaf.
    free: the indices of the prunable leaves without a fixed sparsity.
    fixed: index -> the sparsity from `custom_sparsity_map`.
    roles: whether the filter takes each leaf, and why.
    sizes: index -> the number of weights, for the free leaves.
    size: the number of weights in all free leaves.

  Example:
    >>> import fractions, jax.numpy as jnp
    >>> budget = Budget({"in": jnp.ones((4, 4)), "out": jnp.ones((2, 8))})
    >>> budget.fill(0.5, {0: fractions.Fraction(3, 4),
    ...                   1: fractions.Fraction(1, 4)})
    {'in': 0.25, 'out': 0.75}
  """

  def __init__(
    self,
    params: PyTree,
    filter_fn: FilterFn = default_filter,
    custom_sparsity_map: SparsityMap | None = None,
  ):
    check_filter(filter_fn)
    check_map(custom_sparsity_map)
    self.leaves, self.treedef = _leaves.flatten_with_names(params)
    self.fixed = _fixed(self.leaves, custom_sparsity_map or {})
    self.roles = judge(filter_fn, self.leaves)
    self.free = [
      i
      for i, role in enumerate(self.roles)
      if i not in self.fixed and role.prunable
    ]
    self._check()
    self.sizes = {i: math.prod(self.leaves[i][1].shape) for i in self.free}
    self.size = sum(self.sizes.values())

  def _check(self) -> None:
    if self.leaves and not self.free and not self.fixed:
      names = [_leaves.join(name) for name, _ in self.leaves]
      raise ValueError(
        "filter_fn matches no leaf of params, so nothing would be pruned; "
        f"choose some of {', '.join(names[:6])}"
        f"{', …' if len(names) > 6 else ''}"
      )
    pruned = [i for i, sparsity in self.fixed.items() if sparsity is not None]
    for i in (*self.free, *pruned):
      name, leaf = self.leaves[i]
      if not is_floating(leaf) or math.prod(leaf.shape) == 0:
        raise ValueError(
          f"params leaf {_leaves.join(name)!r} cannot be pruned: it is "
          f"{_describe(leaf)}, not a non-empty array of floats; leave it out "
          "with filter_fn"
        )
      check_size(f"params leaf {_leaves.join(name)!r}", leaf)

  def fill(
    self, sparsity: float, densities: Mapping[int, fractions.Fraction]
  ) -> PyTree:
    """Round densities to counts with an exact total; return sparsities.

    The largest remainders are rounded up.

    Args:
      sparsity: the fraction removed from all free leaves together.
      densities: index of a free leaf -> the fraction to keep.

    Returns:
      The tree of sparsities, `None` where a leaf stays dense.
    """
    total = round(self.size * (1 - fractions.Fraction(sparsity)))
    quotas = {i: densities[i] * self.sizes[i] for i in self.free}
    counts = {i: max(1, math.floor(q)) for i, q in quotas.items()}
    # Order by remainder, then by path: independent of the order of leaves.
    order = sorted(
      self.free, key=lambda i: (counts[i] - quotas[i], self.leaves[i][0])
    )
    missing = total - sum(counts.values())
    while missing and order:
      sign = 1 if missing > 0 else -1
      movable = [
        i
        for i in (order if sign > 0 else reversed(order))
        if 1 <= counts[i] + sign <= self.sizes[i]
      ][: abs(missing)]
      if not movable:
        break  # every leaf keeps one weight: fewer are not possible
      for i in movable:
        counts[i] += sign
      missing -= sign * len(movable)
    result: list[float | None] = [None] * len(self.leaves)
    for i in self.free:
      exact = mask_calculator.num_ones(self.sizes[i], sparsity)
      result[i] = (
        sparsity
        if densities[i] == 1 - fractions.Fraction(sparsity)
        and counts[i] == exact
        else 1 - counts[i] / self.sizes[i]
      )
    for i, fixed in self.fixed.items():
      result[i] = fixed
    return self.treedef.unflatten(result)


def explain(
  leaves: list[tuple[_leaves.Names, Any]],
  filter_fn: FilterFn,
  custom_sparsity_map: SparsityMap | None,
) -> list[str]:
  """Return, per leaf, why a distribution prunes it or not."""
  roles = judge(filter_fn, leaves)
  fixed = _fixed(leaves, custom_sparsity_map or {})
  return [
    "custom_sparsity_map" if i in fixed else role.reason
    for i, role in enumerate(roles)
  ]


def _fixed(
  leaves: list[tuple[_leaves.Names, Any]], custom: SparsityMap
) -> dict[int, float | None]:
  """Return leaf index -> sparsity, for the leaves that a map names."""
  names = [name for name, _ in leaves]
  if not custom or not names:
    return {}
  keys = _leaves.match_patterns(custom, names, "custom_sparsity_map")
  return {
    i: None
    if custom[key] is None
    else check_sparsity(custom[key], f"custom_sparsity_map[{key!r}]")
    for i, key in enumerate(keys)
    if key is not None
  }


def _describe(leaf: Any) -> str:
  if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
    return f"{leaf.dtype}{list(leaf.shape)}"
  return f"{type(leaf).__name__} {leaf!r}"[:60]


def values(budget: Budget, name: str) -> dict[int, np.ndarray]:
  """Return the weights of the free leaves as float64; raise for tracers."""
  for i in budget.free:
    if isinstance(budget.leaves[i][1], jax.core.Tracer):
      raise ValueError(
        f"{name} reads the weights, which jit hides; call it once outside, "
        "sparsities = …, and pass sparsity_distribution_fn=functools.partial("
        "jaxpruner.allocation.fixed, sparsities=sparsities)"
      )
  return {i: np.asarray(budget.leaves[i][1], np.float64) for i in budget.free}
