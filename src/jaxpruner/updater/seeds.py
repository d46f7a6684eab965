"""Random numbers: keys from seeds or from parameters, and uniform scores."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, sparsity_distributions
from jaxpruner._leaves import PyTree
from jaxpruner.updater.draw import draw
from jaxpruner.updater.state import Array, seed_data


def check_seed(seed: Any) -> None:
  """Raise an error if a seed is neither an int nor a key.

  The check does not start a JAX backend.
  """
  dtype = getattr(seed, "dtype", None)
  is_key = dtype is not None and (
    jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32
  )
  if not is_key and (isinstance(seed, bool) or not isinstance(seed, int)):
    raise ValueError(
      f"rng_seed={seed!r} must be an integer or a jax.random key"
    )


def params_key(params: PyTree) -> Array:
  """Derive key data from the parameters, so that vmapped seeds differ.

  Integer sums wrap around and do not depend on the order: the key does not
  depend on how the parameters are sharded.
  """
  leaves = jax.tree.leaves(params)
  return _key_of(
    [
      leaf
      for leaf in leaves
      if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
  )


@jax.jit
def _key_of(leaves: list[Array]) -> Array:
  total = jnp.zeros([], jnp.uint32)
  for leaf in leaves:
    bits = jax.lax.bitcast_convert_type(
      jnp.asarray(leaf).astype(jnp.float32), jnp.uint32
    )
    total = total * 31 + jnp.sum(bits, dtype=jnp.uint32)
  return jax.random.key_data(jax.random.key(total))


def key_of(updater: Any, params: PyTree) -> Array:
  """Return the key data of an updater: of its seed, or of the parameters."""
  if updater.rng_seed is None:
    return params_key(params)
  return seed_data(updater.rng_seed)


def random_scores(params: PyTree, key: Array, salt: Any) -> PyTree:
  """Return uniform scores; see `BaseUpdater.random_scores`."""
  leaves, treedef = _leaves.flatten_with_names(params)
  floating = [sparsity_distributions.is_floating(leaf) for _, leaf in leaves]
  chosen = [pair for pair, f in zip(leaves, floating, strict=True) if f]
  names = tuple(names for names, _ in chosen)
  drawn = iter(draw(key, salt, [leaf for _, leaf in chosen], names))
  pairs = zip(leaves, floating, strict=True)
  return treedef.unflatten([next(drawn) if f else x for (_, x), f in pairs])
