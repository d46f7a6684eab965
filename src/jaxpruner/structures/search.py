"""Choose N of N:M for every layer."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpruner import _leaves, sparsity_distributions, sparsity_types


def search_n_by_m(
  params: Any,
  sparsity: float,
  m: int = 16,
  axis: int = -2,
  filter_fn: Callable[..., bool] = sparsity_distributions.default_filter,
) -> dict[str, sparsity_types.NByM]:
  """Choose N of N:M for every leaf so that little energy `Σw²` is removed.

  A greedy search like DominoSearch (Sun et al., 2021). All leaves start at
  M:M. Each step lowers the N of one leaf by one: the leaf for which this
  removes the smallest share of its energy per weight removed. The search stops
  when the total sparsity is reached. Pass the result as `sparsity_type`.

  Args:
    params: the weights.
    sparsity: fraction to remove of all leaves together; the result reaches it
      and exceeds it by less than one step of the last leaf.
    m: size of the groups.
    axis: the axis along which groups run.
    filter_fn: `(names, param) -> bool`, the leaves to prune.

  Returns:
    Path of the leaf -> its N:M type.

  Example:
    >>> params = {"even": np.ones((4, 4)), "peaked": np.diag(np.ones(4))}
    >>> found = search_n_by_m(params, 0.375, m=4)
    >>> {path: (kind.n, kind.m) for path, kind in found.items()}
    {'even': (4, 4), 'peaked': (1, 4)}
  """
  sparsity = sparsity_distributions.check_sparsity(sparsity)
  steps: list[tuple[float, str]] = []
  losses: dict[str, list[float]] = {}
  sizes: dict[str, int] = {}
  for names, leaf in _leaves.flatten_with_names(params)[0]:
    if not filter_fn(names, leaf):
      continue
    name = _leaves.join(names)
    sparsity_types.NByM(m, m, axis).check(leaf.shape, 0.0, name)
    energy = np.square(np.moveaxis(np.asarray(leaf, np.float64), axis, -1))
    ranked = np.sort(energy.reshape(-1, m), axis=1).sum(0)
    sizes[name] = leaf.size
    # Ascending, so the cheapest step of a leaf is always its next.
    losses[name] = list(ranked / max(ranked.sum(), 1e-30) / leaf.size)
    heapq.heappush(steps, (losses[name][0], name))
  left = sparsity * sum(sizes.values())
  kept = dict.fromkeys(sizes, m)
  while left > 1e-9 and steps:
    _, name = heapq.heappop(steps)
    kept[name] -= 1
    left -= sizes[name] / m
    if kept[name] > 1:
      heapq.heappush(steps, (losses[name][m - kept[name]], name))
  return {
    name: sparsity_types.NByM(n, m, axis) for name, n in sorted(kept.items())
  }
