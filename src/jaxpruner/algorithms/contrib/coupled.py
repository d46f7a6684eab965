"""Neurons, filters and heads: slices of several leaves, removed together."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxpruner import (
  _leaves,
  base_updater,
  engine,
  mask_calculator,
  sparsity_types,
)
from jaxpruner.algorithms import pruners


@dataclasses.dataclass(frozen=True)
class Coupling:
  """Name the leaves whose slices are kept or removed together.

  Attributes:
    axes: maps the path of each leaf to its axis, for example `{"up/kernel": -1,
      "down/kernel": -2}` for the neurons between two layers.
    width: number of consecutive indices in one unit, for example the size of a
      head.

  Example:
    >>> from jaxpruner import structures
    >>> coupling = structures.Coupling({"up": -1, "down": -2}, width=64)
    >>> coupling.width  # one head is 64 columns of "up" and 64 rows of "down"
    64
  """

  axes: Mapping[str, int]
  width: int = 1

  def __hash__(self) -> int:
    return hash((frozenset(self.axes.items()), self.width))

  def find(self, leaves: list[tuple[Any, Any]]) -> dict[int, int]:
    """Return the axis of each leaf; refuse axes of different lengths.

    Args:
      leaves: `(names, leaf)` pairs, all leaves of the parameters.

    Returns:
      A dict from the index of a leaf to its axis.
    """
    table = {_leaves.join(names): i for i, (names, _) in enumerate(leaves)}
    found, sizes = {}, set()
    for path, axis in self.axes.items():
      if path not in table:
        raise ValueError(
          f"Coupling: {path!r} is no leaf of params; "
          f"{_leaves.nearest(path, table)}"
        )
      found[table[path]] = axis
      sizes.add(leaves[table[path]][1].shape[axis])
    if len(sizes) != 1 or min(sizes) % self.width:
      raise ValueError(
        f"Coupling: the slices of {dict(self.axes)} number {sorted(sizes)}; "
        f"they must be equally many, a multiple of width={self.width}"
      )
    return found


@dataclasses.dataclass(eq=False)
class CoupledPruning(pruners.MagnitudePruning):
  """Keep the neurons, filters or heads of largest mean |w| (Li et al., 2016).

  The score of a unit is the mean of |w| over its slice of a leaf, averaged over
  the leaves of the coupling. A removed unit is masked in all of them, so that
  `sparse.shrink` can remove it from the arrays. The sparsity is the fraction of
  units removed. A leaf in two couplings loses rows and columns and becomes
  sparser than that.

  Attributes:
    couplings: the slices that are removed together; other leaves stay dense.
    stacked_axis: "none": the axes of couplings are those of whole leaves.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> from jaxpruner import structures
    >>> pruner = structures.CoupledPruning(
    ...   couplings=(structures.Coupling({"up": -1, "down": -2}),),
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = {"up": jnp.array([[1.0, 5]]), "down": jnp.array([[1.0], [2]])}
    >>> masks = pruner.instant_sparsify(params)[1]
    >>> masks["up"].tolist(), masks["down"].tolist()
    ([[0, 1]], [[0], [1]])
  """

  couplings: tuple[Coupling, ...] = ()
  # The axes of couplings are those of whole leaves.
  stacked_axis: Any = "none"

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Li et al., 2016; Voita et al., 2019",
    cost="a dense step; one selection per mask update",
  )
  targets_by_shape: ClassVar[bool] = False

  def _distribute(self, params):
    leaves, treedef = _leaves.flatten_with_names(params)
    wanted = _leaves.align(params, super()._distribute(params))
    found = {i for c in self.couplings for i in c.find(leaves)}
    return treedef.unflatten(
      [s if i in found else None for i, s in enumerate(wanted)]
    )

  def create_masks(self, scores, sparsities):
    leaves, treedef = _leaves.flatten_with_names(scores)
    wanted = _leaves.align(scores, sparsities, "sparsities")
    masks: list[Any] = [None] * len(leaves)
    for coupling in self.couplings:
      found = {
        i: sparsity_types.Channel(axis)
        for i, axis in coupling.find(leaves).items()
        if wanted[i] is not None
      }
      pooled = [
        sparsity_types.pool(kind, leaves[i][1]) for i, kind in found.items()
      ]
      units = jnp.sum(jnp.stack(pooled), axis=0)
      units = units.reshape(-1, coupling.width).mean(1)
      ones = mask_calculator.num_ones(units.size, wanted[min(found)])
      chosen = engine.select([units], [ones]).masks[0]
      chosen = jnp.repeat(chosen, coupling.width)
      for i, kind in found.items():
        mask = sparsity_types.expand(kind, chosen, leaves[i][1])
        masks[i] = mask if masks[i] is None else masks[i] & mask
    return treedef.unflatten(masks)


def permute(params: Any, order: Any, coupling: Coupling) -> Any:
  """Return the parameters with the slices of a coupling in another order.

  The network computes the same function: one layer's outputs and the next
  layer's inputs are permuted alike. The coupling must contain the biases too.

  Args:
    params: the parameters.
    order: the index of the old slice for each new slice.
    coupling: the leaves to permute, and their axes.

  Returns:
    A tree like `params`.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import structures
    >>> params = {"up": jnp.array([[1.0, 5]]), "down": jnp.array([[1.0], [2]])}
    >>> coupling = structures.Coupling({"up": -1, "down": -2})
    >>> new = structures.permute(params, [1, 0], coupling)
    >>> new["up"].tolist(), new["down"].tolist()
    ([[5.0, 1.0]], [[2.0], [1.0]])
  """
  leaves, treedef = _leaves.flatten_with_names(params)
  axes = coupling.find(leaves)
  return treedef.unflatten(
    [
      jnp.take(leaf, jnp.asarray(order), axis=axes[i]) if i in axes else leaf
      for i, (_, leaf) in enumerate(leaves)
    ]
  )
