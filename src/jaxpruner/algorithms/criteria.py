"""Criteria: which kept weights are dropped, and which other weights grow?

A criterion gives every weight a score, from the values in `Seen` at a mask
update. The kept weights with the lowest scores are dropped, the other weights
with the highest scores grow. A new one is a frozen dataclass with
`__call__(seen)`, and with `needs` if it reads more than the weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxpruner import _leaves, _tools

PyTree: TypeAlias = Any


class Seen(NamedTuple):
  """Hold the values that criteria read at a mask update.

  Attributes:
    params: the parameters; pruned weights are zero.
    grads: the gradients of this step, of pruned weights too.
    momentum: the running mean of the gradients, if a part needs "momentum".
    sums: the sums of the gradients, and of their squares, over the last steps,
      if a part needs "sums".
    draw: returns a tree of uniform scores, different at each mask update.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import criteria
    >>> grads = jnp.array([-3.0, 0.0])
    >>> seen = criteria.Seen(jnp.array([1.0, -2.0]), grads=grads)
    >>> criteria.Gradient()(seen).tolist()
    [3.0, 0.0]
  """

  params: PyTree
  grads: PyTree = None
  momentum: PyTree = None
  draw: Callable[[], PyTree] | None = None
  sums: tuple[PyTree, PyTree] | None = None


@dataclasses.dataclass(frozen=True)
class Criterion:
  """Score every weight at a mask update; the base of criteria.

  Attributes:
    needs: the values it reads beside the weights, as in `Category.needs`.

  Example:
    >>> import dataclasses, jax.numpy as jnp
    >>> from jaxpruner import criteria
    >>> @dataclasses.dataclass(frozen=True)
    ... class Signed(criteria.Criterion):
    ...   def __call__(self, seen):
    ...     return seen.params
    >>> Signed()(criteria.Seen(jnp.array([1.0, -2.0]))).tolist()
    [1.0, -2.0]
  """

  needs: ClassVar[frozenset[str]] = frozenset()

  def __call__(self, seen: Seen) -> PyTree:
    """Return the scores.

    Args:
      seen: the values of this mask update.

    Returns:
      A tree of scores like the parameters.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Magnitude(Criterion):
  """Score a weight by |w| (Han et al., 2015).

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import criteria
    >>> criteria.Magnitude()(criteria.Seen(jnp.array([1.0, -2.0]))).tolist()
    [1.0, 2.0]
  """

  def __call__(self, seen: Seen) -> PyTree:
    return jax.tree.map(jnp.abs, seen.params)


@dataclasses.dataclass(frozen=True)
class Gradient(Criterion):
  """Score a weight by |∂L/∂w| (Evci et al., 2020).

  A weight at zero with a large gradient lowers the loss fastest when it grows.

  Attributes:
    needs: "gradients".

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import criteria
    >>> seen = criteria.Seen(jnp.zeros(2), grads=jnp.array([-3.0, 1.0]))
    >>> criteria.Gradient()(seen).tolist()
    [3.0, 1.0]
  """

  needs: ClassVar[frozenset[str]] = frozenset({"gradients"})

  def __call__(self, seen: Seen) -> PyTree:
    return jax.tree.map(jnp.abs, seen.grads)


@dataclasses.dataclass(frozen=True)
class Momentum(Criterion):
  """Score a weight by its |momentum| (Dettmers & Zettlemoyer, 2019).

  The momentum is the running mean of ∂L/∂w, so it covers many batches where
  `Gradient` covers one.

  Attributes:
    needs: "gradients" and their "momentum".

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import criteria
    >>> seen = criteria.Seen(jnp.zeros(2), momentum=jnp.array([-3.0, 1.0]))
    >>> criteria.Momentum()(seen).tolist()
    [3.0, 1.0]
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
class SignalToNoise(Criterion):
  """Score a weight by |mean ∂L/∂w| / √(mean (∂L/∂w)²) over the last steps.

  Adam moves a weight by this ratio, whatever the size of its gradient: 1 if all
  batches agree, near `1/√window` if they are noise. The sums run over the last
  `window` steps before a mask update, at most over those since the update
  before. They take two float32 numbers per weight, and the steps that they
  cover need dense gradients, where `Gradient` needs them at one step.

  Attributes:
    window: number of steps, at least 2.
    needs: "gradients" and their "sums".

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import criteria
    >>> grads = jnp.array([[3.0, 0.1], [-3.0, 0.1]])  # of two steps
    >>> sums = grads.sum(0), (grads**2).sum(0)
    >>> seen = criteria.Seen(jnp.zeros(2), sums=sums)
    >>> criteria.SignalToNoise(window=2)(seen).round(3).tolist()
    [0.0, 1.0]
  """

  window: int = 16

  needs: ClassVar[frozenset[str]] = frozenset({"gradients", "sums"})

  def __post_init__(self):
    _tools.check_int("SignalToNoise", "window", self.window, 2)

  def __call__(self, seen: Seen) -> PyTree:
    assert seen.sums is not None

    def ratio(_, param, total, squares):
      if total is None:
        return param
      size = jnp.sqrt(self.window * squares)
      return jnp.where(size > 0, jnp.abs(total) / size, 0)

    return _leaves.map_masks(ratio, seen.params, *seen.sums, name="sums")


@dataclasses.dataclass(frozen=True)
class Random(Criterion):
  """Score a weight by a random number (Mocanu et al., 2018).

  Each mask update draws different numbers.

  Attributes:
    needs: "random" numbers.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import criteria
    >>> draw = lambda: jnp.array([0.25, 0.75])  # an updater supplies this
    >>> criteria.Random()(criteria.Seen(jnp.zeros(2), draw=draw)).tolist()
    [0.25, 0.75]
  """

  needs: ClassVar[frozenset[str]] = frozenset({"random"})

  def __call__(self, seen: Seen) -> PyTree:
    assert seen.draw is not None
    return seen.draw()


@dataclasses.dataclass(frozen=True)
class MagnitudeGradient(Criterion):
  """Score a weight by |w| + weight · |∂L/∂w| (Yuan et al., 2021).

  The score is low for a weight that is small and changes slowly.

  Attributes:
    weight: factor of the gradient.
    needs: "gradients".

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import criteria
    >>> grads = jnp.array([-3.0, 1.0])
    >>> seen = criteria.Seen(jnp.array([1.0, -2.0]), grads=grads)
    >>> criteria.MagnitudeGradient(weight=2.0)(seen).tolist()
    [7.0, 4.0]
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
