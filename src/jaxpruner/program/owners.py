# pyright: strict, reportUnknownMemberType=false
"""Find the parameter that a leaf of another tree belongs to.

Optimizer states, averages and masks contain trees like the parameters. A leaf
belongs to the parameter whose key path is the end of its own path. It has one
entry per weight if it has the parameter's shape, possibly with one more leading
axis (a history of several steps).
"""

from typing import Any, TypeAlias, cast

import jax
import numpy as np

Path: TypeAlias = tuple[Any, ...]


class Owners:
  """The parameters of a tree, found by the end of a path.

  Args:
    params: the tree of parameters.

  Attributes:
    paths: the key path of each leaf, in the order of `jax.tree.leaves`.

  Example:
    >>> import numpy as np
    >>> owners = Owners({"w": np.ones((2, 3)), "b": np.ones(3)})
    >>> state = {"mu": {"w": np.ones((2, 3))}}
    >>> (path, _), = jax.tree_util.tree_leaves_with_path(state)
    >>> owners.find(path)  # leaves are in the order b, w
    1
  """

  def __init__(self, params: Any):
    leaves = cast(
      "list[tuple[Path, Any]]", jax.tree_util.tree_leaves_with_path(params)
    )
    self.paths = [path for path, _ in leaves]
    self._index = {path: i for i, path in enumerate(self.paths)}

  def find(self, path: Path) -> int | None:
    """Return the index of the parameter with the longest matching path."""
    suffixes = (path[start:] for start in range(len(path) + 1))
    return next((self._index[s] for s in suffixes if s in self._index), None)


def per_weight(leaf: Any, shape: tuple[int, ...]) -> bool:
  """Return whether a leaf has one or more entries for each weight.

  Args:
    leaf: an array, such as a moment of an optimizer.
    shape: the shape of the parameter it belongs to.

  Returns:
    True if the leaf has this shape, or this shape after one leading axis.

  Example:
    >>> per_weight(np.ones((5, 2, 3)), (2, 3)), per_weight(np.ones(3), (2, 3))
    (True, False)
  """
  own = np.shape(leaf)
  return own == shape or own[1:] == shape
