"""The state of a training as plain arrays, so that it can be stored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def raw_keys(tree: PyTree) -> PyTree:
  """Return a tree with the data of random keys: NumPy has no dtype for them."""
  return jax.tree.map(
    lambda x: (
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ),
    tree,
  )


def arrays_of(carry: PyTree, progress: list[float]) -> dict[str, np.ndarray]:
  """Return the state and the progress of a training as plain arrays."""
  leaves = [np.asarray(x) for x in jax.tree.leaves(raw_keys(carry))]
  arrays = {f"leaf:{i}": leaf for i, leaf in enumerate(leaves)}
  arrays["progress"] = np.asarray(progress, np.float64)
  return arrays


class CheckpointError(ValueError):
  """A checkpoint can be read, but belongs to another training."""


def restore(
  carry: PyTree, saved: dict[str, np.ndarray], steps: int
) -> tuple[PyTree, list[float]]:
  """Return the state and the progress stored by `arrays_of`.

  Args:
    carry: the training before its first step, for structure and shapes.
    saved: the arrays.
    steps: the number of steps of the training.

  Returns:
    The carry, and [steps done, seconds, cost, checksum of the batches].

  Raises:
    CheckpointError: the arrays belong to another training.
  """
  leaves, treedef = jax.tree.flatten(carry)
  expected = {f"leaf:{i}" for i in range(len(leaves))} | {"progress"}
  if set(saved) != expected:
    raise CheckpointError(
      f"has {len(saved)} arrays, this training has {len(expected)}"
    )
  loaded = [
    restored_leaf(old, saved[f"leaf:{i}"]) for i, old in enumerate(leaves)
  ]
  progress = saved["progress"]
  if progress.shape != (4,) or not np.all(np.isfinite(progress)):
    raise CheckpointError(f"progress is {progress!r:.60}, need four numbers")
  first = progress[0]
  if first != int(first) or not 0 < first < steps:
    raise CheckpointError(f"stands at step {first:g} of {steps}")
  return treedef.unflatten(loaded), progress.tolist()


def restored_leaf(old: jax.Array, new: Any) -> jax.Array:
  """Return a stored array as a leaf like `old`; keys become keys again."""
  is_key = jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
  like = jax.random.key_data(old) if is_key else old
  if (new.shape, new.dtype) != (like.shape, like.dtype):
    raise CheckpointError(
      f"an array is {new.dtype}{new.shape}, need {like.dtype}{like.shape}"
    )
  loaded = jnp.asarray(new)
  if is_key:
    return jax.random.wrap_key_data(loaded, impl=jax.random.key_impl(old))
  return loaded
