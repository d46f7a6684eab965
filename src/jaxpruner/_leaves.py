"""Trees: names of leaves, the prunable ones, patterns, sharding.

`None` in a tree of masks or sparsities means "this leaf stays dense". A state
holds Optax's `MaskedNode` there, because checkpoints and trainers handle it
where they refuse `None`. A bare `jax.tree.map` would drop both; the functions
here align such trees with the parameters instead, and `Prunable` leaves them
out.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner._tools import nearest as nearest

PyTree: TypeAlias = Any
Names: TypeAlias = tuple[str, ...]

# Wrapper attributes (Flax boxes, NNX variables, named arrays) that only repeat
# what the path already says.
_WRAPPERS = frozenset({"value", "raw_value", "data_array"})

# What a state holds where there is nothing: a dense leaf, an unused field.
ABSENT = optax.MaskedNode()


@dataclasses.dataclass(frozen=True)
class StackKey:
  """The key of one slice of a stacked leaf, in a key path."""

  index: int


class SliceName(str):
  """The name of a stacked leaf, as the name of one of its slices.

  It equals the name of the leaf, so that a filter by name takes every slice;
  two slices of one leaf differ.
  """

  layer: int

  def __new__(cls, name: str, layer: int):
    self = super().__new__(cls, name)
    self.layer = layer
    return self

  def __eq__(self, other: object) -> bool:
    same = str.__eq__(self, other)
    return same and getattr(other, "layer", self.layer) == self.layer

  def __ne__(self, other: object) -> bool:
    return not self == other

  __hash__ = str.__hash__

  def __reduce__(self) -> Any:
    return SliceName, (str(self), self.layer)


def _key_name(key: Any) -> str:
  for attribute in ("key", "name", "idx"):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)


def path_names(path: Iterable[Any]) -> Names:
  """Return the names along a key path; a bare array is called `kernel`."""
  path = tuple(path)
  cut = path and isinstance(path[-1], StackKey)
  names = [_key_name(key) for key in (path[:-1] if cut else path)]
  while len(names) > 1 and names[-1] in _WRAPPERS:
    names.pop()
  names = names or ["kernel"]
  if cut:
    names[-1] = SliceName(names[-1], path[-1].index)
  return tuple(names)


def join(names: Names) -> str:
  """Spell names the way the user writes them: `encoder/layer_0/kernel`.

  A slice of a stacked leaf has its index behind: `blocks/kernel[3]`.
  """
  layer = getattr(names[-1], "layer", None) if names else None
  return "/".join(names) + ("" if layer is None else f"[{layer}]")


def flatten_with_names(tree: PyTree) -> tuple[list[tuple[Names, Any]], Any]:
  """Flatten a tree into `[(names, leaf), …]` and its treedef."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  return [(path_names(path), leaf) for path, leaf in leaves], treedef


def is_absent(node: Any) -> bool:
  """Tell whether a node stands for nothing, as a state or a user writes it."""
  return node is None or isinstance(node, optax.MaskedNode)


def with_none(tree: PyTree) -> PyTree:
  """Return a tree of a state with `None` where it holds nothing."""
  clear = lambda node: None if is_absent(node) else node
  return jax.tree.map(clear, tree, is_leaf=is_absent)


def without_none(tree: PyTree) -> PyTree:
  """Return a tree as a state holds it: `ABSENT` in the place of `None`."""
  clear = lambda node: ABSENT if is_absent(node) else node
  return jax.tree.map(clear, tree, is_leaf=is_absent)


def is_box(node: Any) -> bool:
  """Tell whether a node is one leaf in a wrapper, such as `nn.Partitioned`."""
  if node is None or isinstance(node, Mapping | list | tuple | jax.Array):
    return False
  inside = jax.tree_util.tree_flatten_with_path(
    node, is_leaf=lambda child: child is not node
  )[0]
  if len(inside) != 1 or len(inside[0][0]) != 1:
    return False
  return _wraps(inside[0][0][0])


def _wraps(key: Any) -> bool:
  """Tell whether a key is that of the one array in a wrapper.

  Wrappers that are registered without names, such as Haliax's named arrays,
  have only an index.
  """
  nameless = isinstance(key, jax.tree_util.FlattenedIndexKey)
  return nameless or _key_name(key) in _WRAPPERS


def fill(tree: PyTree, entries: list[Any]) -> PyTree:
  """Return a tree like `tree` for a state, of one entry per leaf.

  An entry that is `None` becomes `ABSENT`. An entry that has not the shape of
  its leaf loses the leaf's box, whose annotations speak of that shape.
  """
  nodes, treedef = jax.tree.flatten(tree, is_leaf=is_box)
  left = iter(entries)
  filled = []
  for node in nodes:
    leaves, inside = jax.tree.flatten(node)
    own = [next(left) for _ in leaves]
    if len(own) != 1:
      filled.append(inside.unflatten(map(without_none, own)))
    elif is_absent(own[0]) or np.shape(own[0]) != np.shape(leaves[0]):
      filled.append(without_none(own[0]))
    else:
      filled.append(inside.unflatten(own))
  return treedef.unflatten(filled)


def align(tree: PyTree, other: PyTree, name: str = "masks") -> list[Any]:
  """Return `other`'s entry for each leaf of `tree`, `None` where dense."""
  treedef = jax.tree.structure(tree)
  if is_absent(other):
    return [None] * treedef.num_leaves
  try:
    entries = treedef.flatten_up_to(other)
  except (ValueError, TypeError, KeyError):
    entries = _align_by_path(tree, other, name)
  return [None if is_absent(entry) else entry for entry in entries]


def _align_by_path(tree: PyTree, other: PyTree, name: str) -> list[Any]:
  # Partitioned optimizers replace whole subtrees by one MaskedNode.
  table = dict(
    jax.tree_util.tree_flatten_with_path(other, is_leaf=is_absent)[0]
  )
  entries = []
  for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
    prefixes = (path[:n] for n in range(len(path), -1, -1))
    found = next((p for p in prefixes if p in table), None)
    if (
      found is None
      or not (
        is_absent(table[found])
        # A scalar that stands for a boxed leaf has no box.
        or all(map(_wraps, path[len(found) :]))
      )
    ):
      raise ValueError(
        f"{name}: no entry for params leaf {join(path_names(path))!r}; "
        f"{name} must have the structure of params, with None where a leaf "
        "stays dense (were the params rebuilt after init?)"
      )
    entries.append(table[found])
  return entries


def like(tree: PyTree, other: PyTree, name: str) -> PyTree:
  """Return `other` in the structure of `tree`, `None` where it has nothing."""
  return jax.tree.structure(tree).unflatten(align(tree, other, name))


def map_masks(
  fn: Callable[..., Any], tree: PyTree, *others: PyTree, name: str = "masks"
) -> PyTree:
  """Map `fn(names, leaf, *entries)` over `tree`; entries may be `None`."""
  leaves, treedef = flatten_with_names(tree)
  columns = [align(tree, other, name) for other in others]
  return treedef.unflatten(
    [fn(*leaf, *row) for leaf, *row in zip(leaves, *columns, strict=True)]
  )


def match_patterns(
  patterns: Iterable[Any], names: list[Names], argument: str
) -> list[Any]:
  """Return, per leaf, the pattern that applies to it, or `None`.

  A pattern is an exact path (`"a/b/kernel"` or the tuple of its names) or a
  glob (`"*/kernel"`). Exact wins over glob, an earlier glob over a later one.
  Every pattern must match something.
  """
  spelled = {
    key: join(key) if isinstance(key, tuple) else str(key) for key in patterns
  }
  # A slice has two paths: its own, and that of the stacked leaf.
  paths = [list(dict.fromkeys([join(n), "/".join(n)])) for n in names]
  known = dict.fromkeys(path for own in paths for path in own)
  for pattern in spelled.values():
    if not any(p == pattern or fnmatch.fnmatchcase(p, pattern) for p in known):
      raise ValueError(
        f"{argument}: {pattern!r} matches no leaf of params; "
        f"{nearest(pattern, known)}"
      )

  def applies(own: list[str]) -> Any:
    for key, pattern in spelled.items():
      if pattern == own[0]:
        return key
    for key, pattern in spelled.items():
      if pattern in own:
        return key
    for key, pattern in spelled.items():
      if any(fnmatch.fnmatchcase(path, pattern) for path in own):
        return key
    return None

  return [applies(own) for own in paths]


def shard_like(x: jax.Array, param: jax.Array) -> jax.Array:
  """Give `x` the sharding of `param`, in eager mode and under any mesh."""
  sharding = jax.typeof(param).sharding
  if any(axis is not None for axis in sharding.spec):
    return jax.sharding.reshard(x, sharding)
  # Auto meshes decide sharding after tracing: a select that reads `param` is
  # what makes the partitioner lay `x` out like it.
  return jnp.where(param == param, x, x)


def with_auto_axes(
  fn: Callable[..., jax.Array], *args: Any, like: jax.Array | None = None
) -> jax.Array:
  """Return `fn(*args)`, which may reshape and slice sharded arrays freely.

  Explicit mesh axes refuse that. The result lies like `like`; without it,
  whole on every device.
  """
  for x in (like, *args):
    sharding = None if x is None else jax.typeof(x).sharding
    if sharding and any(axis is not None for axis in sharding.spec):
      break
  else:
    return fn(*args)
  out = jax.sharding.NamedSharding(
    sharding.mesh,
    jax.sharding.PartitionSpec()
    if like is None
    else jax.typeof(like).sharding.spec,
  )
  run: Any = jax.sharding.auto_axes(fn, out_sharding=out)
  return run(*args)
