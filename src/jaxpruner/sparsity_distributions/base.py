"""Distributions: how much does each leaf give?

A distribution is a function `(params, …) -> tree of float or None`: the
sparsity of each leaf, `None` where it stays dense. Those here return sparsities
whose exact counts add up to the request, whatever the order of the leaves.
"""

import fractions
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp

from jaxpruner import _leaves, mask_calculator
from jaxpruner.sparsity_types import check_sparsity

PyTree: TypeAlias = Any
FilterFn: TypeAlias = Callable[[_leaves.Names, Any], bool]
# Exact path or glob -> sparsity; None keeps the leaf dense.
SparsityMap: TypeAlias = Mapping[Any, float | None]

_NOT_WEIGHTS = frozenset(
  "b bias biases scale offset beta gamma mean var count alpha".split()
)
_NORMS = ("norm", "ln_", "bn_")


def default_filter(names: _leaves.Names, param: Any) -> bool:
  """Take floating leaves of 2 or more dims but biases and norm scales.

  Names matter because the scale of a layer norm in a scanned stack is 2-D.
  """
  if getattr(param, "ndim", 0) < 2 or not is_floating(param):
    return False
  last = names[-1].lower()
  if last in _NOT_WEIGHTS:
    return False
  in_norm = any(norm in name.lower() for name in names[:-1] for norm in _NORMS)
  return not (in_norm and last in ("weight", "w"))


# The names the paper's library gave to its filters.
NOT_DIM_ONE_FILTER_FN = default_filter


def KERNEL_FILTER_FN(names: _leaves.Names, param: Any) -> bool:
  """Take the leaves called `kernel`."""
  del param
  return names[-1] == "kernel"


def is_floating(param: Any) -> bool:
  """Tell whether a leaf is an array of floats."""
  dtype = getattr(param, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def uniform(
  params: PyTree,
  sparsity: float,
  filter_fn: FilterFn = default_filter,
  custom_sparsity_map: SparsityMap | None = None,
) -> PyTree:
  """Give every leaf the same sparsity.

  Args:
    params: tree of parameters (or of their shapes).
    sparsity: fraction removed, `0 <= sparsity < 1`.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: exact path or glob to the sparsity of these leaves,
      `None` to keep them dense; they do not count towards the total.

  Returns:
    A tree of floats and `None`. Where the rounded counts of the leaves do not
    add up to the rounded total, single leaves differ by one weight.
  """
  sparsity = check_sparsity(sparsity)
  plan = Plan(params, filter_fn, custom_sparsity_map)
  return plan.fill(
    sparsity, {i: 1 - fractions.Fraction(sparsity) for i in plan.free}
  )


def erk(
  params: PyTree,
  sparsity: float,
  filter_fn: FilterFn = default_filter,
  custom_sparsity_map: SparsityMap | None = None,
  erk_power_scale: float = 1.0,
) -> PyTree:
  """Keep more of small leaves: Erdős–Rényi-Kernel (Evci et al., 2020).

  The density of a leaf is proportional to `(sum(shape)/prod(shape))^scale`,
  capped at 1; what a capped leaf cannot give, the others do.

  Args:
    params: tree of parameters (or of their shapes).
    sparsity: fraction removed of all leaves together, `0 <= sparsity < 1`.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: as in `uniform`.
    erk_power_scale: below 1 is closer to uniform; 0 is uniform.

  Returns:
    A tree of floats and `None`.
  """
  sparsity = check_sparsity(sparsity)
  check_power_scale(erk_power_scale)
  plan = Plan(params, filter_fn, custom_sparsity_map)
  raw = {}
  for i in plan.free:
    shape = plan.leaves[i][1].shape
    ratio = sum(shape) / math.prod(shape)
    raw[i] = fractions.Fraction(ratio**erk_power_scale)
  dense: set[int] = set()
  budget = plan.size * (1 - fractions.Fraction(sparsity))
  scale = fractions.Fraction(0)
  while len(dense) < len(raw):
    rest = [i for i in raw if i not in dense]
    left = budget - sum(plan.sizes[i] for i in dense)
    scale = left / sum(raw[i] * plan.sizes[i] for i in rest)
    over = {i for i in rest if raw[i] * scale > 1}
    if not over:
      break
    highest = max(raw[i] for i in over)
    dense |= {i for i in over if raw[i] == highest}
  return plan.fill(
    sparsity,
    {i: fractions.Fraction(1) if i in dense else raw[i] * scale for i in raw},
  )


def check_filter(filter_fn: Any) -> None:
  """Raise if a filter is no function."""
  if not callable(filter_fn):
    raise ValueError(
      f"filter_fn={filter_fn!r} must be a function (names, param) -> bool"
    )


def check_map(custom_sparsity_map: Any) -> None:
  """Raise if a custom map is neither a mapping nor `None`."""
  custom = custom_sparsity_map
  if custom is not None and not isinstance(custom, Mapping):
    raise ValueError(
      f"custom_sparsity_map={custom!r} must map paths or globs to sparsities"
    )


def check_power_scale(erk_power_scale: Any) -> None:
  """Raise if ERK's exponent is no number of at least 0."""
  if (
    isinstance(erk_power_scale, bool)
    or not isinstance(erk_power_scale, int | float)
    or not 0 <= erk_power_scale < math.inf
  ):
    raise ValueError(
      f"erk: erk_power_scale={erk_power_scale!r} must be a number of at least 0"
    )


class Plan:
  """The leaves of a request: which are free to choose, which are fixed."""

  def __init__(self, params, filter_fn, custom_sparsity_map):
    check_filter(filter_fn)
    check_map(custom_sparsity_map)
    self.leaves, self.treedef = _leaves.flatten_with_names(params)
    names = [n for n, _ in self.leaves]
    custom = custom_sparsity_map or {}
    keys = (
      _leaves.match_patterns(custom, names, "custom_sparsity_map")
      if custom and names
      else [None] * len(names)
    )
    self.fixed = {
      i: None
      if custom[key] is None
      else check_sparsity(custom[key], f"custom_sparsity_map[{key!r}]")
      for i, key in enumerate(keys)
      if key is not None
    }
    self.free = [
      i
      for i, (name, leaf) in enumerate(self.leaves)
      if i not in self.fixed and filter_fn(name, leaf)
    ]
    if self.leaves and not self.free and not self.fixed:
      shown = ", ".join(map(_leaves.join, names[:6]))
      raise ValueError(
        "filter_fn matches no leaf of params, so nothing would be pruned; "
        f"choose some of {shown}{', …' if len(names) > 6 else ''}"
      )
    for i in (*self.free, *self.fixed):
      name, leaf = self.leaves[i]
      if i in self.fixed and self.fixed[i] is None:
        continue
      if not is_floating(leaf) or math.prod(leaf.shape) == 0:
        raise ValueError(
          f"params leaf {_leaves.join(name)!r} cannot be pruned: it is "
          f"{_describe(leaf)}, not a non-empty array of floats; leave it out "
          "with filter_fn"
        )
    self.sizes = {i: math.prod(self.leaves[i][1].shape) for i in self.free}
    self.size = sum(self.sizes.values())

  def fill(
    self, sparsity: float, densities: Mapping[int, fractions.Fraction]
  ) -> PyTree:
    """Round densities to counts by largest remainder; return sparsities."""
    total = round(self.size * (1 - fractions.Fraction(sparsity)))
    quotas = {i: densities[i] * self.sizes[i] for i in self.free}
    counts = {i: max(1, math.floor(q)) for i, q in quotas.items()}
    # Remainders first, then paths: a rule that does not depend on leaf order.
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
        break  # every leaf keeps its one weight: the least there can be
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


def _describe(leaf: Any) -> str:
  if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
    return f"{leaf.dtype}{list(leaf.shape)}"
  return f"{type(leaf).__name__} {leaf!r}"[:60]
