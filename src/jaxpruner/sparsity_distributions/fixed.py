"""Fixed: a tree of sparsities that was computed before."""

from typing import Any, TypeAlias

from jaxpruner import _leaves

PyTree: TypeAlias = Any


def fixed(params: PyTree, sparsities: PyTree) -> PyTree:
  """Return a tree of sparsities that was computed before.

  Args:
    params: tree of parameters.
    sparsities: a tree like `params` with sparsities, `None` for dense leaves.

  Returns:
    `sparsities`.

  Raises:
    ValueError: the two trees differ in structure.

  Example:
    >>> import functools, jax.numpy as jnp
    >>> plan = functools.partial(fixed, sparsities={"w": 0.5, "b": None})
    >>> plan({"w": jnp.ones((2, 2)), "b": jnp.ones(2)})
    {'w': 0.5, 'b': None}
  """
  _leaves.align(params, sparsities, "sparsities")  # raises where they differ
  return sparsities
