"""Draw random scores that are computed anew in every pass, never stored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner import _leaves, _tools
from jaxpruner.engine.leaves import flat_index, row_from


def draw(
  data: Array, salt: Any, leaves: list[Array], names: tuple[_leaves.Names, ...]
) -> list[Array]:
  """Return uniform float32 scores that depend on key, salt and path only.

  Args:
    data: PRNG key data.
    salt: what tells one draw from the next: the step.
    leaves: arrays of the shapes and the shardings that are wanted.
    names: their paths.

  Returns:
    Scores in [0, 1), one array per leaf.
  """
  words = leaf_words(data, salt, names)
  return [
    _uniform(row_from([words], i)[0], leaf) for i, leaf in enumerate(leaves)
  ]


def leaf_words(
  data: Array, salt: Any, names: tuple[_leaves.Names, ...]
) -> Array:
  """Two random words for each leaf, a hash of path, key and salt.

  Not `jax.random.fold_in`, whose rounds are ten kernels to compile.
  """
  paths = [_tools.path_hash(_leaves.join(n)) for n in names]
  words = np.array(paths, np.uint32)[:, None] + np.array([[0, 0x9E3779B9]])
  return _mixed(words.astype(np.uint32), data, salt)


@jax.jit
def _mixed(words: Array, data: Array, salt: Any) -> Array:
  """Mix words with key and salt: one program for all paths."""
  salt = jnp.asarray(salt).astype(jnp.uint32)
  for part in (*(data[i] for i in range(data.shape[0])), salt):
    words = _mix(words) ^ part
  return _mix(words)


def _mix(bits: Array) -> Array:
  """Return a permutation of the words in which all bits depend on all."""
  # Multiplication carries low bits upwards, shifts bring them back.
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
  return bits ^ (bits >> np.uint32(16))


@jax.jit
def _uniform(words: Array, like: Array) -> Array:
  """Random numbers as a cheap function of the index.

  Unlike those of `jax.random`, they can be computed anew in every pass over
  the scores instead of being stored.
  """
  return _leaves.shard_like(at(words, flat_index(like.shape)), like)


def at(words: Array, index: Array) -> Array:
  """Return the scores of a leaf at some flat indices.

  Args:
    words: the two words of the leaf.
    index: uint32 flat indices.

  Returns:
    Scores in [0, 1), float32, shaped as the indices.
  """
  step = words[1] | np.uint32(1)  # odd, so that no two elements share bits
  bits = _mix((index * step) ^ words[0])
  return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)
