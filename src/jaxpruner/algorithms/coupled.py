"""Neurons, filters and heads: slices of several leaves that go together."""

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
  """Leaves whose slices are kept or removed together.

  Attributes:
    axes: path of each leaf to its axis, such as `{"up/kernel": -1,
      "down/kernel": -2}` for the neurons between two layers.
    width: consecutive indices that make one unit: the size of a head.
  """

  axes: Mapping[str, int]
  width: int = 1

  def __hash__(self) -> int:
    return hash((frozenset(self.axes.items()), self.width))

  def find(self, leaves: list[tuple[Any, Any]]) -> dict[int, int]:
    """Return `{position: axis}`; check that the slices are as many."""
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

  The units of a coupling are scored by the mean of `Channel`'s scores over its
  leaves and masked in all of them, so that `sparse.shrink` can remove them from
  the arrays. `sparsity` is the fraction of units removed; a leaf in two
  couplings, which loses rows and columns, ends sparser than that.

  Attributes:
    couplings: which slices go together; other leaves stay dense.
  """

  couplings: tuple[Coupling, ...] = ()

  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Li et al., 2016; Voita et al., 2019",
    cost="a dense step; one selection per mask update",
  )

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

  The network computes the same: what one layer puts out in a new order, the
  next takes in that order. List the biases too.
  """
  leaves, treedef = _leaves.flatten_with_names(params)
  axes = coupling.find(leaves)
  return treedef.unflatten(
    [
      jnp.take(leaf, jnp.asarray(order), axis=axes[i]) if i in axes else leaf
      for i, (_, leaf) in enumerate(leaves)
    ]
  )
