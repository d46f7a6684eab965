"""Stacked leaves: many layers in one array, along a stack axis.

`nn.scan`, vmapped ensembles and per-agent parameters store the weights of many
layers in one leaf. Each slice is a layer. `find_stacks` tells which leaves are
stacks, `unstack` returns the tree of slices that distributions and types see,
and `Cut` is the place of one slice.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, _tools, engine, mask_calculator
from jaxpruner._leaves import Names, PyTree

StackedAxis: TypeAlias = Any  # "auto", "none", int, mapping, or function
# Axis names in sharding annotations that stand for a stack of layers.
_AXES = frozenset({"layer", "layers", "ensemble", "stack"})
# Names of a subtree that may hold a stack; whole words.
_NODES = frozenset(
  "agents block blocks encoderblock decoderblock ensemble layer layers members "
  "stack stacked".split()
)
_VECTORS = frozenset({"bias", "scale", "beta", "gamma", "offset"})


class Stack(NamedTuple):
  """A stack of layers in one leaf.

  Attributes:
    axis: the axis that numbers the layers, at least 0.
    size: the number of layers.
    why: what says so, for `sparsity_table`.
  """

  axis: int
  size: int
  why: str


@dataclasses.dataclass(frozen=True)
class Cut:
  """The place of one slice in a stacked leaf.

  Attributes:
    axis: the axis that numbers the layers.
    index: the number of the layer.
    size: the number of layers.
  """

  axis: int
  index: int
  size: int

  def take(self, x: Any, shape: tuple[int, ...]) -> Any:
    """Return the slice's part of an entry for the whole leaf.

    Args:
      x: an array or expression of the leaf's shape, or one entry per slice
        along the first axis; a number stands for all slices.
      shape: the shape of the leaf.

    Returns:
      The part of the slice.
    """
    if isinstance(x, Slices):
      return x.entries[self.index]
    if isinstance(x, mask_calculator.AtStep):
      return type(x)(*(self.take(part, shape) for part in x))
    if isinstance(x, list | tuple):
      return x[self.index]
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(np.delete(x.shape, self.axis), x.dtype)
    if not hasattr(x, "shape") or x.shape == ():
      return x
    axis = self.axis if x.shape == shape else 0
    if x.shape[axis] != self.size:
      raise ValueError(
        f"an entry of shape {x.shape} does not fit a stack of {self.size} "
        f"layers of shape {shape}; give one entry per layer"
      )
    if isinstance(x, np.ndarray):
      part = np.take(x, self.index, axis)
      return (
        float(part) if part.ndim == 0 and part.dtype == np.float64 else part
      )
    index = lambda y: _index(y, self.index, axis)
    is_array = isinstance(x, jax.Array)
    place = (jax.typeof(x) if is_array else x.aval).sharding
    if place.spec[axis : axis + 1] in ((), (None,)):
      return engine.apply(index, x)
    # An explicit mesh refuses to cut a sharded axis.
    rest = jax.sharding.PartitionSpec(*np.delete(place.spec, axis))
    out = jax.sharding.NamedSharding(place.mesh, rest)
    run: Any = jax.sharding.auto_axes(index, out_sharding=out)
    return run(engine.value(x))

  def put(self, entries: list[Any], leaf: Any) -> Any:
    """Return the entry for the whole leaf, given those of its slices."""
    first = entries[0]
    if all(_leaves.is_absent(entry) for entry in entries):
      return first
    if isinstance(first, mask_calculator.AtStep):
      columns = zip(*entries, strict=True)
      return type(first)(*(self.put([*column], leaf) for column in columns))
    if all(isinstance(e, int | float) for e in entries):
      return np.asarray(entries, np.float64)
    if not hasattr(first, "shape"):
      return Slices(entries)
    inside = tuple(np.delete(np.shape(leaf), self.axis))
    axis = self.axis if first.shape == inside else 0
    stack = lambda *parts: jnp.stack(parts, axis)
    like = leaf if axis == self.axis and first.shape == inside else None
    return _leaves.with_auto_axes(stack, *entries, like=like)


def _index(x: jax.Array, index: int, axis: int) -> jax.Array:
  return jax.lax.index_in_dim(x, index, axis, keepdims=False)


class Slices:
  """The slices of a stacked leaf, in its place in a tree.

  Attributes:
    entries: one per layer.
  """

  def __init__(self, entries: Any):
    self.entries = list(entries)

  def __repr__(self) -> str:
    return f"Slices({self.entries!r})"


jax.tree_util.register_pytree_with_keys(
  Slices,
  lambda s: ([(_leaves.StackKey(i), x) for i, x in enumerate(s.entries)], None),
  lambda _, entries: Slices(entries),
)


def check_stacked_axis(stacked_axis: StackedAxis) -> None:
  """Raise if a value cannot tell which leaves are stacks."""
  values = [stacked_axis]
  if isinstance(stacked_axis, Mapping):
    values = list(stacked_axis.values())
  for value in values:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (value in ("auto", "none", None) or whole or callable(value)):
      raise ValueError(
        f"stacked_axis={stacked_axis!r} must be 'auto', 'none', an axis such "
        "as 0, a mapping from path or glob to an axis, or a function (names, "
        "param) -> axis or None"
      )


def find_stacks(
  params: PyTree, stacked_axis: StackedAxis = "auto"
) -> list[Stack | None]:
  """Return, per leaf, the stack of layers that it holds, or None.

  Args:
    params: the parameters, or their shapes.
    stacked_axis: see `BaseUpdater.stacked_axis`.

  Returns:
    A list in the order of the leaves.
  """
  leaves = _leaves.flatten_with_names(params)[0]
  found = _declared(params, leaves, stacked_axis)
  # What is a slice already is one layer.
  is_slice = [isinstance(n[-1], _leaves.SliceName) for n, _ in leaves]
  return [None if s else f for s, f in zip(is_slice, found, strict=True)]


def _declared(
  params: PyTree, leaves: list[tuple[Names, Any]], stacked_axis: StackedAxis
) -> list[Stack | None]:
  if stacked_axis in ("none", None):
    return [None] * len(leaves)
  if isinstance(stacked_axis, str):
    return _detect(params, leaves)
  if isinstance(stacked_axis, Mapping):
    names = [n for n, _ in leaves]
    keys = _leaves.match_patterns(stacked_axis, names, "stacked_axis")
    found = [None if k is None else stacked_axis[k] for k in keys]
    whys = [f"stacked_axis[{key!r}]" for key in keys]
    auto = _detect(params, leaves)
    return [
      auto[i] if axis == "auto" else _stack(*leaves[i], axis, whys[i])
      for i, axis in enumerate(found)
    ]
  if callable(stacked_axis):
    return [
      _stack(names, leaf, stacked_axis(names, leaf), "stacked_axis")
      for names, leaf in leaves
    ]
  return [
    _stack(names, leaf, stacked_axis, "stacked_axis") if np.ndim(leaf) else None
    for names, leaf in leaves
  ]


def _stack(names: Names, leaf: Any, axis: Any, why: str) -> Stack | None:
  if axis in ("none", None):
    return None
  shape = np.shape(leaf)
  if not -len(shape) <= axis < len(shape):
    raise ValueError(
      f"stacked_axis={axis}: params leaf {_leaves.join(names)!r} of shape "
      f"{shape} has no such axis; pass a mapping from path or glob to the axis "
      "of the stacked leaves"
    )
  if not shape[axis]:
    return None
  return Stack(axis % len(shape), shape[axis], why)


def _detect(
  params: PyTree, leaves: list[tuple[Names, Any]]
) -> list[Stack | None]:
  """Find the stacks that the tree itself tells of."""
  pairs = zip(leaves, _annotations(params), strict=True)
  found = [_annotated(*leaf, axes) for leaf, axes in pairs]
  nodes: dict[Names, list[int]] = {}
  for i, (names, _) in enumerate(leaves):
    for depth in range(1, len(names)):
      if _may_hold_stack(names[depth - 1]):
        nodes.setdefault(names[:depth], []).append(i)
  for node, ids in nodes.items():
    axis = None
    if not any(found[i] for i in ids):
      axis = _common_axis(node[-1], [leaves[i] for i in ids])
    if axis is not None:
      why = f"as all arrays below {_leaves.join(node)!r}"
      for i in ids:
        found[i] = _stack(*leaves[i], axis, why)
  return found


def _annotated(names: Names, leaf: Any, axes: tuple[Any, ...]) -> Stack | None:
  """Return the stack that the names of a leaf's axes tell of, or None."""
  for axis, name in enumerate(axes):
    if str(name).lower() in _AXES and len(axes) == np.ndim(leaf):
      return _stack(names, leaf, axis, f"named {name!r}")
  return None


def _may_hold_stack(name: str) -> bool:
  return _is_lifted(name) or name.lower() in _NODES


def _is_lifted(name: str) -> bool:
  """Tell whether Flax named a module for `nn.scan` or `nn.vmap`."""
  parts = _tools.words(name)
  return len(parts) > 1 and parts[0] in ("Scan", "Vmap")


def _common_axis(name: str, leaves: list[tuple[Names, Any]]) -> int | None:
  """Return the axis, 0 or 1, that has one length in all arrays, or None.

  Under a name that Flax gave to a lifted module this is enough. Under names
  such as "layers" there must also be biases or scales, and all of them must
  have an axis more than usual.
  """
  shapes = [np.shape(leaf) for _, leaf in leaves]
  vectors = [np.ndim(x) for n, x in leaves if n[-1].lower() in _VECTORS]
  if not _is_lifted(name):
    if not vectors or min(vectors) < 2 or len(leaves) < 2:
      return None
    if any(part.isdigit() for n, _ in leaves for part in n[:-1]):
      return None  # numbered layers, each with leaves of its own
  for axis in (0, 1):
    if all(len(s) > axis for s in shapes):
      sizes = {shape[axis] for shape in shapes}
      if len(sizes) == 1 and sizes != {1} and _biases_fit(leaves, axis):
        return axis
  return None


def _biases_fit(leaves: list[tuple[Names, Any]], axis: int) -> bool:
  """Tell whether the slices of biases have the outputs of their weights."""
  shape = lambda leaf: tuple(np.delete(np.shape(leaf), axis))
  modules: dict[Names, dict[str, tuple[int, ...]]] = {}
  for names, leaf in leaves:
    modules.setdefault(names[:-1], {})[str(names[-1])] = shape(leaf)
  for arrays in modules.values():
    bias = arrays.get("bias")
    for name in ("kernel", "weight"):
      weight = arrays.get(name)
      if bias and weight:
        fits = weight[-len(bias) :] == bias
        # A `weight` may be out × in.
        fits |= name == "weight" and weight[: len(bias)] == bias
        if not fits:
          return False
  return True


def _annotations(params: PyTree) -> list[tuple[Any, ...]]:
  """Return the names of the axes of every leaf, as its box tells; else ()."""
  nodes = jax.tree.leaves(params, is_leaf=lambda x: _axis_names(x) is not None)
  found = []
  for node in nodes:
    count = len(jax.tree.leaves(node))
    found += [_axis_names(node) or ()] * count
  return found


def _axis_names(node: Any) -> tuple[Any, ...] | None:
  """Return the axis names of a Flax box or NNX variable."""
  if isinstance(node, jax.Array | np.ndarray | Mapping | list | tuple):
    return None
  names = getattr(node, "names", None)
  if names is None and callable(getattr(node, "get_metadata", None)):
    metadata = node.get_metadata()
    for key in ("sharding_names", "out_sharding", "sharding"):
      names = names or metadata.get(key)
  return tuple(names) if isinstance(names, tuple | list) else None


def unstack(params: PyTree, stacked_axis: StackedAxis = "auto") -> PyTree:
  """Return the tree in which every stacked leaf is replaced by its layers.

  A distribution that is called directly, `lamp(unstack(params), 0.5)`, then
  gives every layer a sparsity of its own; `fixed` takes the result. An updater
  does this by itself.

  Args:
    params: the parameters, or their shapes.
    stacked_axis: which leaves are stacks, as the field of `BaseUpdater`.

  Returns:
    A tree with one leaf per layer, whose path is `blocks/kernel[3]`.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner import sparsity_distributions
    >>> params = {"blocks": {"kernel": jnp.ones((3, 8, 4))}}
    >>> layers = sparsity_distributions.unstack(params, stacked_axis=0)
    >>> [x.shape for x in jax.tree.leaves(layers)]
    [(8, 4), (8, 4), (8, 4)]
  """
  check_stacked_axis(stacked_axis)
  return unstacked(params, find_stacks(params, stacked_axis))


class Layers(NamedTuple):
  """The layers of a tree: its leaves, and slices in the place of stacked ones.

  Attributes:
    tree: the tree of slices, see `unstack`; of stacked leaves only shapes.
    leaves: the path and the shape of every layer.
    homes: the index of the leaf that a layer is, or is a slice of.
    cuts: the place of the slice in that leaf; None for a leaf that is no stack.
    stacks: per leaf of the tree, the stack that it holds, or None.
  """

  tree: PyTree
  leaves: list[tuple[Names, Any]]
  homes: list[int]
  cuts: list[Cut | None]
  stacks: list[Stack | None]

  @property
  def names(self) -> list[Names]:
    """The path of every layer."""
    return [names for names, _ in self.leaves]


def layers(params: PyTree, stacked_axis: StackedAxis) -> Layers:
  """Return the layers of a tree.

  Args:
    params: the parameters, or their shapes.
    stacked_axis: which leaves are stacks, as the field of `BaseUpdater`.

  Returns:
    The `Layers`.
  """
  stacks = find_stacks(params, stacked_axis)
  tree = unstacked(params, stacks, shapes_only=True)
  cuts = [*map(cuts_of, stacks)]
  return Layers(
    tree,
    _leaves.flatten_with_names(tree)[0],
    [i for i, own in enumerate(cuts) for _ in own],
    [cut for own in cuts for cut in own],
    stacks,
  )


def unstacked(
  params: PyTree, stacks: list[Stack | None], shapes_only: bool = False
) -> PyTree:
  """Return the tree of slices; see `unstack`."""

  def slices(leaf: Any, stack: Stack | None) -> Any:
    if stack is None:
      return leaf
    if shapes_only:
      leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return Slices(cut.take(leaf, leaf.shape) for cut in _cuts(stack))

  leaves, treedef = jax.tree.flatten(params)
  return treedef.unflatten(map(slices, leaves, stacks))


def _cuts(stack: Stack) -> list[Cut]:
  return [Cut(stack.axis, i, stack.size) for i in range(stack.size)]


def cuts_of(stack: Stack | None) -> list[Cut | None]:
  """Return the place of each slice; `[None]` for a leaf that is no stack."""
  return [None] if stack is None else [*_cuts(stack)]
