# pyright: strict, reportUnknownMemberType=false
"""Which parameter a leaf of another tree belongs to.

Optimizer states, averages and masks hold copies of the parameters' tree. A leaf
of such a tree belongs to the parameter whose key path ends its own path; it
speaks of that parameter weight by weight if it has its shape, perhaps behind
one leading axis (a memory of several steps).
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
    """Return the number of the parameter with the longest matching path."""
    suffixes = (path[start:] for start in range(len(path) + 1))
    return next((self._index[s] for s in suffixes if s in self._index), None)


def per_weight(leaf: Any, shape: tuple[int, ...]) -> bool:
  """Tell whether a leaf has an entry, or several, for each weight.

  Args:
    leaf: an array, such as a moment of an optimizer.
    shape: the shape of the parameter it belongs to.
  """
  own = np.shape(leaf)
  return own == shape or own[1:] == shape
