"""Criteria: which kept weights are dropped, and which others grow?

A criterion scores every weight from what is `Seen` at a mask update. The lowest
scores among the kept weights drop, the highest among the others grow. One of
your own is a frozen dataclass with `__call__(seen)`, and `needs` if it reads
more than the weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxpruner import _leaves

PyTree: TypeAlias = Any


class Seen(NamedTuple):
  """What a mask update looks at.

  Attributes:
    params: the parameters, pruned ones at zero.
    grads: this step's gradients of all of them, pruned or not.
    momentum: the running mean of the gradients, if a part needs "momentum".
    draw: returns a tree of uniform scores, other ones at each update.
  """

  params: PyTree
  grads: PyTree = None
  momentum: PyTree = None
  draw: Callable[[], PyTree] | None = None


@dataclasses.dataclass(frozen=True)
class Criterion:
  """Base of the criteria."""

  needs: ClassVar[frozenset[str]] = frozenset()

  def __call__(self, seen: Seen) -> PyTree:
    """Return a tree of scores like the parameters."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Magnitude(Criterion):
  """|w|: what contributes little drops (Han et al., 2015)."""

  def __call__(self, seen: Seen) -> PyTree:
    return jax.tree.map(jnp.abs, seen.params)


@dataclasses.dataclass(frozen=True)
class Gradient(Criterion):
  """|∂L/∂w|: what would lower the loss most grows (Evci et al., 2020)."""

  needs: ClassVar[frozenset[str]] = frozenset({"gradients"})

  def __call__(self, seen: Seen) -> PyTree:
    return jax.tree.map(jnp.abs, seen.grads)


@dataclasses.dataclass(frozen=True)
class Momentum(Criterion):
  """|running mean of ∂L/∂w|: as `Gradient`, over many batches (Dettmers &
  Zettlemoyer, 2019).
  """

  needs: ClassVar[frozenset[str]] = frozenset({"gradients", "momentum"})

  def __call__(self, seen: Seen) -> PyTree:
    return _leaves.map_masks(
      lambda _, param, mean: param if mean is None else jnp.abs(mean),
      seen.params,
      seen.momentum,
      name="momentum",
    )


@dataclasses.dataclass(frozen=True)
class Random(Criterion):
  """A uniform draw, another one at each update (Mocanu et al., 2018)."""

  needs: ClassVar[frozenset[str]] = frozenset({"random"})

  def __call__(self, seen: Seen) -> PyTree:
    assert seen.draw is not None
    return seen.draw()


@dataclasses.dataclass(frozen=True)
class MagnitudeGradient(Criterion):
  """|w| + weight · |∂L/∂w|: small, and not about to change (Yuan et al., 2021).

  Attributes:
    weight: how much the gradient counts.
  """

  weight: float = 1.0

  needs: ClassVar[frozenset[str]] = frozenset({"gradients"})

  def __call__(self, seen: Seen) -> PyTree:
    return jax.tree.map(
      lambda w, g: (
        jnp.abs(w.astype(jnp.float32))
        + self.weight * jnp.abs(g.astype(jnp.float32))
      ),
      seen.params,
      seen.grads,
    )
