"""Draw random scores that are computed anew in every pass, never stored."""

import functools
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
  words = _words(data, salt, names)
  return [
    _uniform(row_from([words], i)[0], leaf) for i, leaf in enumerate(leaves)
  ]


@functools.partial(jax.jit, static_argnames="names")
def _words(data: Array, salt: Any, names: tuple[_leaves.Names, ...]) -> Array:
  """Two random words for each leaf."""
  key = jax.random.fold_in(jax.random.wrap_key_data(data), salt)
  paths = jnp.array(
    [_tools.path_hash(_leaves.join(n)) for n in names], jnp.uint32
  )
  keys = jax.vmap(lambda path: jax.random.fold_in(key, path))(paths)
  return jax.random.key_data(keys)


@jax.jit
def _uniform(words: Array, like: Array) -> Array:
  """Random numbers as a cheap function of the index.

  Unlike those of `jax.random`, they can be computed anew in every pass over
  the scores instead of being stored.
  """
  step = words[1] | np.uint32(1)  # odd, so that no two elements share bits
  bits = (flat_index(like.shape) * step) ^ words[0]
  # Multiplication carries low bits upwards, shifts bring them back.
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
  bits = bits ^ (bits >> np.uint32(16))
  scores = (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)
  return _leaves.shard_like(scores, like)
