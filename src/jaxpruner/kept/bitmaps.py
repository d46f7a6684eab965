"""Sets of positions as bitmaps: one bit per weight, in words of 32.

A bitmap turns sorting into counting: the rank of a position is the number of
bits before it. Nothing here is larger than one bit per weight, or one number
per kept weight.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

WORD = 32


def count_words(size: int) -> int:
  """Return the words of a bitmap of so many bits."""
  return -(-size // WORD)


def from_positions(positions: Array, words: int) -> Array:
  """Return the bitmap of distinct positions; those past the end are dropped."""
  bits = jnp.uint32(1) << (positions & 31).astype(jnp.uint32)
  empty = jnp.zeros(words, jnp.uint32)
  return empty.at[positions >> 5].add(bits, mode="drop")


def pack(kept: Array) -> Array:
  """Return the bitmap of a boolean array, in row-major order."""
  flat = kept.reshape(-1)
  flat = jnp.pad(flat, (0, -flat.size % WORD)).reshape(-1, WORD)
  places = jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)
  return jnp.sum(jnp.where(flat, places, 0), axis=1, dtype=jnp.uint32)


def unpack(words: Array, size: int) -> Array:
  """Return the first `size` bits as booleans."""
  places = jnp.arange(WORD, dtype=jnp.uint32)
  return ((words[:, None] >> places) & 1).reshape(-1)[:size] == 1


def before(words: Array) -> Array:
  """Return the number of bits before each word, int32."""
  counts = lax.population_count(words).astype(jnp.int32)
  return jnp.cumsum(counts) - counts


def ranks(words: Array, positions: Array) -> Array:
  """Return the number of bits before each position."""
  at = positions >> 5
  low = (jnp.uint32(1) << (positions & 31).astype(jnp.uint32)) - 1
  inside = lax.population_count(words[at] & low).astype(jnp.int32)
  return before(words)[at] + inside


def positions(words: Array, size: int) -> Array:
  """Return the first `size` positions in order, int32; past the last: -1."""
  first = before(words)
  wanted = jnp.arange(size, dtype=jnp.int32)
  at = jnp.searchsorted(first, wanted, side="right").astype(jnp.int32) - 1
  word, rank = words[at], wanted - first[at]
  exists = rank < lax.population_count(word).astype(jnp.int32)
  place = jnp.zeros_like(rank)
  for step in (16, 8, 4, 2, 1):
    low = (word >> place.astype(jnp.uint32)) & np.uint32(2**step - 1)
    count = lax.population_count(low).astype(jnp.int32)
    beyond = rank >= count
    rank = jnp.where(beyond, rank - count, rank)
    place = jnp.where(beyond, place + step, place)
  return jnp.where(exists, at * WORD + place, -1)


def lowest(words: Array, count: Array) -> Array:
  """Return the bitmap of the first `count` bits."""
  room = jnp.clip(count - before(words), 0, WORD)

  def take(_, state):
    taken, rest, room = state
    bit = rest & (~rest + jnp.uint32(1))
    taken = jnp.where(room > 0, taken | bit, taken)
    return taken, rest ^ bit, room - 1

  start = (jnp.zeros_like(words), words, room)
  return jax.lax.fori_loop(0, WORD, take, start)[0]


def contains(words: Array, positions: Array) -> Array:
  """Return whether each position is in the set."""
  place = (positions & 31).astype(jnp.uint32)
  return (words[positions >> 5] >> place) & 1 == 1
