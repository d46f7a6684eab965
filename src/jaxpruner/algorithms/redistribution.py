"""Redistribution: how many of the dropped weights does each leaf grow?

Without a redistribution, each leaf grows the number of weights that it dropped.
A redistribution gives each leaf a share. The dropped weights of all leaves form
one budget, which is divided in proportion to the shares, so the total number of
weights is constant. A new one is a frozen dataclass with `__call__`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Redistribution:
  """Give each leaf a share of the dropped weights; the base of redistributions.

  Attributes:
    needs: the values it reads beside the masks, as in `Category.needs`.
    before_dropping: whether it gets the masks of before the weights are
      dropped; by default those of the weights that remain.

  Example:
    >>> import dataclasses, jax.numpy as jnp
    >>> from jaxpruner import redistribution
    >>> @dataclasses.dataclass(frozen=True)
    ... class Equal(redistribution.Redistribution):
    ...   def __call__(self, kept, momentum):
    ...     return jnp.ones(len(kept))
    >>> Equal()([jnp.array([1, 1]), jnp.array([0, 1])], [None, None]).tolist()
    [1.0, 1.0]
  """

  needs: ClassVar[frozenset[str]] = frozenset()
  before_dropping: ClassVar[bool] = False

  def __call__(self, kept: list[Any], momentum: list[Any]) -> jax.Array:
    """Return the share of each leaf.

    Args:
      kept: masks of the weights that remain after dropping, or of those before
        (`before_dropping`).
      momentum: the running mean of the gradients per leaf, or None per leaf.

    Returns:
      float32 per leaf, at least 0.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class BySurvivors(Redistribution):
  """Give shares in proportion to the remaining weights (Mostafa & Wang, 2019).

  The share of a leaf is the number of its weights that were not dropped.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import redistribution
    >>> kept = [jnp.array([1, 1, 0]), jnp.array([0, 1, 0])]
    >>> redistribution.BySurvivors()(kept, [None, None]).tolist()
    [2.0, 1.0]
  """

  def __call__(self, kept: list[Any], momentum: list[Any]) -> jax.Array:
    del momentum
    return jnp.stack([jnp.sum(mask, dtype=jnp.float32) for mask in kept])


@dataclasses.dataclass(frozen=True)
class ByMomentum(Redistribution):
  """Give shares in proportion to momentum (Dettmers & Zettlemoyer, 2019).

  The share of a leaf is the mean |momentum| of the weights that it kept before
  the update, the dropped ones included.

  Attributes:
    needs: "gradients" and their "momentum".
    before_dropping: True.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import redistribution
    >>> kept = [jnp.array([1, 1, 0]), jnp.array([0, 1, 0])]
    >>> momentum = [jnp.array([1.0, -3, 9]), jnp.array([9.0, 5, 9])]
    >>> redistribution.ByMomentum()(kept, momentum).tolist()
    [2.0, 5.0]
  """

  needs: ClassVar[frozenset[str]] = frozenset({"gradients", "momentum"})
  before_dropping: ClassVar[bool] = True

  def __call__(self, kept: list[Any], momentum: list[Any]) -> jax.Array:
    def mean(mask, momentum):
      total = jnp.sum(jnp.where(mask == 1, jnp.abs(momentum), 0))
      return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1)

    return jnp.stack([mean(*pair) for pair in zip(kept, momentum, strict=True)])


def allocate(shares: jax.Array, total: jax.Array, room: jax.Array) -> jax.Array:
  """Divide a total among leaves in proportion to their shares.

  No leaf gets more than its room; the other leaves get the excess. The results
  are integers that add up to the total exactly, if the total room is large
  enough. The remainder after rounding down goes to the leaves with the largest
  fractional parts; among equal ones the earlier leaf comes first.

  Args:
    shares: float per leaf, at least 0; if all are 0, all leaves count equally.
    total: int, the number to divide.
    room: int per leaf, the largest number it can get.

  Returns:
    int32 per leaf.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import redistribution
    >>> shares, room = jnp.array([1.0, 3.0]), jnp.array([9, 4])
    >>> redistribution.allocate(shares, 6, room).tolist()
    [2, 4]
  """
  total, room = jnp.asarray(total, jnp.int32), room.astype(jnp.int32)
  # Raise shares of 0 a little: these leaves get the excess of full leaves.
  floor = jnp.maximum(jnp.max(shares), 1) * 1e-9
  shares = jnp.maximum(shares.astype(jnp.float32), floor)
  quota = jnp.zeros(shares.shape, jnp.float32)
  full = jnp.zeros(shares.shape, bool)
  for _ in range(shares.shape[0]):  # each round fills a leaf or is the last
    left = total - jnp.sum(jnp.where(full, room, 0))
    open_ = jnp.where(full, 0, shares)
    quota = jnp.where(
      full, room, left * (open_ / jnp.maximum(jnp.sum(open_), floor))
    )
    full = full | (quota >= room)
  given = jnp.minimum(jnp.floor(quota).astype(jnp.int32), room)
  order = jnp.argsort(-(quota - given), stable=True)
  # The remainder: first one per leaf, then the rest, which float32 rounding can
  # leave over, up to the room of each leaf.
  for most in (1, None):
    free = room - given
    free = free if most is None else jnp.minimum(free, most)
    given = given + _pour(total - jnp.sum(given), free, order)
  return given


def _pour(left: jax.Array, free: jax.Array, order: jax.Array) -> jax.Array:
  """Give `left` to the leaves in this order, to each at most its `free`."""
  queue = free[order]
  before = jnp.cumsum(queue) - queue
  taken = jnp.clip(left - before, 0, queue)
  return jnp.zeros_like(free).at[order].set(taken)
