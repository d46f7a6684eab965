"""Leaves that stay dense under a sparsity type."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

import jaxpruner
from jaxpruner.inspect import cost


def dense_leaves(
  kind: Any,
  sparsity: float,
  shapes: Mapping[str, tuple[int, ...]],
  order: Sequence[str],
  all_layers: bool = False,
) -> dict[str, str]:
  """Return the leaves that a type leaves dense, and why.

  A structured type leaves the first and the output layer alone, unless nothing
  else is there, and leaves that its structure does not fit.

  Args:
    kind: the sparsity type.
    sparsity: the fraction removed.
    shapes: path -> shape of each leaf that pruning may change.
    order: the paths in the order in which the network uses them.
    all_layers: whether the first and the output layer are pruned too.

  Returns:
    Path -> reason.

  Example:
    >>> shapes = {"a": (3, 8), "b": (8, 8), "c": (6, 8), "d": (8, 2)}
    >>> two_of_four = jaxpruner.NByM(2, 4)
    >>> found = dense_leaves(two_of_four, 0.5, shapes, list(shapes))
    >>> found["a"], found["c"]
    ('the first layer', 'axis -2 has length 6, not divisible by m=4')
  """
  if kind == jaxpruner.Unstructured():
    return {}
  found = {}
  for name, shape in shapes.items():
    try:
      kind.check(shape, sparsity, name)
    except ValueError as error:
      reason = str(error).partition("; ")[0]
      found[name] = reason.removeprefix(f"{name}: ")
  used = [name for name in order if name in shapes]
  if not all_layers and used:
    ends = {used[0]: "the first layer", used[-1]: "the output layer"}
    if set(shapes) - set(found) - set(ends):
      for name, reason in ends.items():
        found.pop(name, None)
        found[name] = reason
  return found


def prunable_shapes(params: Any, targets: Any) -> dict[str, tuple[int, ...]]:
  """Return path -> shape of the leaves that have a target sparsity.

  Args:
    params: the parameters or their shapes.
    targets: the tree of sparsities; None where a leaf stays dense.

  Returns:
    The leaves that pruning may change.

  Example:
    >>> prunable_shapes({"a": jax.numpy.ones((2, 3))}, {"a": 0.5})
    {'a': (2, 3)}
  """
  named, treedef = jax.tree_util.tree_flatten_with_path(params)
  flat = treedef.flatten_up_to(targets)
  return {
    cost.path_name(path): tuple(leaf.shape)
    for (path, leaf), target in zip(named, flat, strict=True)
    if target is not None
  }
