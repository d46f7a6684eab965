"""Redistribution: which leaf gets how many of the dropped weights back?

Without one, each leaf grows what it dropped. A redistribution gives each leaf a
share; what all leaves dropped together grows in proportion, so the total never
changes. One of your own is a frozen dataclass with `__call__`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Redistribution:
  """Base of the redistributions."""

  needs: ClassVar[frozenset[str]] = frozenset()

  def __call__(self, kept: list[Any], momentum: list[Any]) -> jax.Array:
    """Return a share of at least 0 per leaf.

    Args:
      kept: masks of the weights that are left after dropping.
      momentum: the running mean of the gradients, per leaf (or None).
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class BySurvivors(Redistribution):
  """In proportion to the weights a leaf has left (Mostafa & Wang, 2019)."""

  def __call__(self, kept: list[Any], momentum: list[Any]) -> jax.Array:
    del momentum
    return jnp.stack([jnp.sum(mask, dtype=jnp.float32) for mask in kept])


@dataclasses.dataclass(frozen=True)
class ByMomentum(Redistribution):
  """In proportion to the mean |momentum| of a leaf's weights (Dettmers &
  Zettlemoyer, 2019).
  """

  needs: ClassVar[frozenset[str]] = frozenset({"gradients", "momentum"})

  def __call__(self, kept: list[Any], momentum: list[Any]) -> jax.Array:
    def mean(mask, momentum):
      total = jnp.sum(jnp.where(mask == 1, jnp.abs(momentum), 0))
      return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1)

    return jnp.stack([mean(*pair) for pair in zip(kept, momentum, strict=True)])


def allocate(shares: jax.Array, total: jax.Array, room: jax.Array) -> jax.Array:
  """Split a total over leaves in proportion to shares, none beyond its room.

  What a full leaf cannot take, the others do. Whole numbers that add up to the
  total exactly, if there is room for it; remainders go to the largest
  fractions, the earlier leaf among equals.

  Args:
    shares: float per leaf, at least 0; all equal if they are all 0.
    total: int, how much there is.
    room: int per leaf.

  >>> allocate(jnp.array([1.0, 3.0]), 6, jnp.array([9, 4])).tolist()
  [2, 4]
  """
  total, room = jnp.asarray(total, jnp.int32), room.astype(jnp.int32)
  # A trace of everyone: a share of 0 must take what the others cannot.
  floor = jnp.maximum(jnp.max(shares), 1) * 1e-9
  shares = jnp.maximum(shares.astype(jnp.float32), floor)
  quota = jnp.zeros(shares.shape, jnp.float32)
  full = jnp.zeros(shares.shape, bool)
  for _ in range(shares.shape[0]):  # each round fills a leaf, or is the last
    left = total - jnp.sum(jnp.where(full, room, 0))
    open_ = jnp.where(full, 0, shares)
    quota = jnp.where(
      full, room, left * (open_ / jnp.maximum(jnp.sum(open_), floor))
    )
    full = full | (quota >= room)
  given = jnp.minimum(jnp.floor(quota).astype(jnp.int32), room)
  order = jnp.argsort(-(quota - given), stable=True)
  # One each, then whatever room is left: rounding in float32 may owe more.
  for most in (1, None):
    free = room - given
    free = free if most is None else jnp.minimum(free, most)
    given = given + _pour(total - jnp.sum(given), free, order)
  return given


def _pour(left: jax.Array, free: jax.Array, order: jax.Array) -> jax.Array:
  """Hand out `left` in this order, to each what it has free."""
  queue = free[order]
  before = jnp.cumsum(queue) - queue
  taken = jnp.clip(left - before, 0, queue)
  return jnp.zeros_like(free).at[order].set(taken)
