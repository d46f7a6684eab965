"""Where thresholds were, and so where they will be.

Scores that change little from step to step have thresholds that drift. A trail,
[3], has the score at which a threshold is, how far it came to be there, and by
how much that was not expected. It tells a search where to look first; what is
found does not depend on it.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner.engine import search as sel

# Where to look first, in errors of what is expected.
_ERRORS = np.array([-8, -2.5, -1, 1, 2.5, 8], np.float32)
# And at least so many images away.
_APART = np.array([-3, -2, -1, 1, 2, 3], np.int8)


def new(number: int) -> Array:
  """What is known of thresholds [S, 3] before the first: nothing."""
  return jnp.asarray(np.tile(np.array([0, 0, np.inf], np.float32), (number, 1)))


def follow(trails: Array, levels: Array, dtype) -> Array:
  """Return the trails [S, 3] of thresholds whose images are `levels` [S]."""
  old, move, error = trails.T
  now = sel.score(levels, dtype).astype(old.dtype)
  # One that was met by chance does not make the next that certain.
  error = jnp.maximum(jnp.abs(now - (old + move)), error / 4)
  known = jnp.isfinite(error)
  move = jnp.where(known, now - old, 0)
  error = jnp.where(known, error, jnp.abs(now) / 32)
  return jnp.stack([now, move, error], 1)


def probes(trails: Array, dtype) -> Array:
  """The first probes [S, P], around where thresholds would go on to."""
  level, move, error = (x[:, None] for x in trails.T)
  images = sel.image((level + move + error * _ERRORS).astype(dtype))
  return sel.between_ends(images + _APART.astype(images.dtype), dtype)
