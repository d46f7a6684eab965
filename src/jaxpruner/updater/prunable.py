"""What an updater's fields mean for a parameter tree: its prunable leaves."""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import (
  _leaves,
  mask_calculator,
  sparsity_distributions,
  sparsity_types,
)
from jaxpruner._leaves import Names, PyTree
from jaxpruner.sparsity_distributions import budget, stacking
from jaxpruner.updater.state import Array, Sparsities, frozen, unpack_mask


class Prunable(NamedTuple):
  """The prunable leaves of a parameter tree: what an algorithm handles.

  `updater.view(params)` makes it. All lists have one entry per prunable leaf,
  in the order of the tree; dense leaves, `None` and packed bits do not show. A
  stacked leaf shows as its slices, each of them a leaf.

  Attributes:
    names: path of each prunable leaf.
    kinds: its sparsity type.
    targets: the sparsity it is heading for.
    params: the parameters.
    packed: whether stored masks hold one bit per weight.
    places: index of each prunable leaf among all leaves.
    all_names: paths of all leaves, and of slices in the place of stacked ones.
    cuts: where in the leaf a slice lies; None for a leaf that is no stack.
  """

  names: tuple[Names, ...]
  kinds: tuple[Any, ...]
  targets: tuple[Any, ...]
  params: PyTree
  packed: bool
  places: tuple[int, ...]
  all_names: tuple[Names, ...]
  cuts: tuple[Any, ...]

  @property
  def leaves(self) -> list[Any]:
    """The prunable parameters."""
    return self.per_layer(jax.tree.leaves(self.params))

  @property
  def stacks(self) -> list[list[int]]:
    """The positions, in the lists here, of the layers of each stacked leaf."""
    found: dict[int, list[int]] = {}
    for i, (place, cut) in enumerate(zip(self.places, self.cuts, strict=True)):
      if cut is not None and cut.size > 1:
        found.setdefault(place, []).append(i)
    return list(found.values())

  def per_layer(self, column: list[Any]) -> list[Any]:
    """Return an entry per prunable leaf, given one for each leaf of the tree.

    Args:
      column: entries in the order of the tree, stacked leaves whole.

    Returns:
      A list, one entry per prunable leaf.
    """
    leaves = jax.tree.leaves(self.params)
    return [
      column[i] if cut is None else cut.take(column[i], leaves[i].shape)
      for i, cut in zip(self.places, self.cuts, strict=True)
    ]

  def per_leaf(self, entries: Iterable[Any]) -> dict[int, Any]:
    """Return place -> entry for the whole leaf: the inverse of `per_layer`.

    Args:
      entries: one per prunable leaf.

    Returns:
      A dict; the places of dense leaves are missing.
    """
    parts: dict[int, list[Any]] = {}
    for place, entry in zip(self.places, entries, strict=True):
      parts.setdefault(place, []).append(entry)
    cut_at = dict(zip(self.places, self.cuts, strict=True))
    leaves = jax.tree.leaves(self.params)
    return {
      i: found[0] if cut_at[i] is None else cut_at[i].put(found, leaves[i])
      for i, found in parts.items()
    }

  def of(
    self, tree: PyTree, name: str = "masks", packed: bool | None = None
  ) -> list[Any]:
    """Return a tree's entries for the prunable leaves, masks unpacked.

    Args:
      tree: a tree like the parameters: gradients, moments, scores, or masks as
        a state stores them. It may hold `None` where a leaf stays dense.
      name: what an error calls the tree.
      packed: whether uint8 entries are packed masks; by default as a state
        stores them.

    Returns:
      A list, one entry per prunable leaf.
    """
    packed = self.packed if packed is None else packed
    entries = _leaves.align(self.params, tree, name)
    leaves = jax.tree.leaves(self.params)
    for place, names in dict(zip(self.places, self.names, strict=True)).items():
      if entries[place] is None:
        raise ValueError(
          f"{name}: no entry for params leaf {_leaves.join(names)!r}, which is "
          f"pruned; pass the {name} of all params"
        )
      # All prunable leaves are floats, so packed uint8 entries are masks.
      if packed and getattr(entries[place], "dtype", None) == jnp.uint8:
        entries[place] = unpack_mask(entries[place], leaves[place])
    return self.per_layer(entries)

  def put(self, tree: PyTree, entries: Iterable[Any]) -> PyTree:
    """Return `tree` with these entries in place of the prunable leaves.

    Args:
      tree: a tree like the parameters; `None` makes all dense leaves `None`.
      entries: one per prunable leaf.

    Returns:
      A tree of the structure of the parameters.
    """
    result = _leaves.align(self.params, tree, "tree")
    for place, entry in self.per_leaf(entries).items():
      result[place] = entry
    return jax.tree.structure(self.params).unflatten(result)

  def map(self, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Apply a function to each prunable leaf; others stay as in the first tree.

    Args:
      fn: takes one entry of each tree.
      *trees: trees like the parameters, masks packed or not.

    Returns:
      The first tree, prunable leaves replaced by `fn`'s results.
    """
    return self.put(trees[0], map(fn, *(self.of(t, "trees") for t in trees)))

  def store(self, entries: Iterable[Any]) -> PyTree:
    """Return the tree that a state keeps: masks packed, if they are.

    Args:
      entries: one per prunable leaf: masks, or other arrays or scalars.

    Returns:
      A tree of the structure of the parameters; dense leaves are `ABSENT`.
    """
    stored: list[Any] = [None] * jax.tree.structure(self.params).num_leaves
    for place, entry in self.per_leaf(entries).items():
      if self.packed and getattr(entry, "dtype", None) == jnp.uint8:
        entry = _leaves.with_auto_axes(mask_calculator.pack_mask, entry)
      stored[place] = entry
    return _leaves.fill(self.params, stored)


class Unset(enum.Enum):
  """A distribution that nobody chose: nothing is removed.

  A member of an enumeration stays itself when it is copied or pickled, so
  `is UNSET` holds for copies too.
  """

  UNSET = "unset"

  def __call__(self, params: PyTree) -> Sparsities:
    return sparsity_distributions.uniform(params, 0.0)

  def __repr__(self) -> str:
    return "UNSET"


UNSET = Unset.UNSET

# Distributions that read shapes only, through the same two arguments.
_KNOWN = (sparsity_distributions.uniform, sparsity_distributions.erk)

# Views by structure, shapes and configuration; the oldest goes first.
_VIEWS: dict[Any, Prunable] = {}
_MAX_VIEWS = 64


def build(updater: Any, params: PyTree, targets: PyTree = None) -> Prunable:
  """Return the prunable leaves of a tree; see `BaseUpdater.view`."""
  key = None
  if targets is None:
    key = cache_key(updater, *_leaves.flatten_with_names(params))
  view = _VIEWS.get(key)
  if view is None:
    view = _build(updater, params, targets, by_shape=key is not None)
  if key is not None and key not in _VIEWS:
    if len(_VIEWS) >= _MAX_VIEWS:
      del _VIEWS[next(iter(_VIEWS))]
    _VIEWS[key] = view
  return view._replace(params=params)


def _build(updater: Any, params: PyTree, targets: Any, by_shape: bool) -> Any:
  # From here on a slice of a stacked leaf is a leaf like any other.
  layers = stacking.layers(params, updater.stacked_axis)
  if targets is None:
    seen = layers.tree
    if not by_shape:
      seen = stacking.unstacked(params, layers.stacks)
    wanted = updater._distribute(seen)
    wanted = _leaves.align(params, wanted, "sparsity_distribution_fn")
  else:
    wanted = _leaves.align(params, targets, "sparsities")
  wanted = _per_layer(wanted, params, layers)
  chosen = [i for i, s in enumerate(wanted) if s is not None]
  _check_stacks(layers, chosen)
  leaves = [layers.leaves[i] for i in chosen]
  _check_total(updater, leaves)
  kinds = _types(updater, leaves, layers.names)
  found = [wanted[i] for i in chosen]
  if targets is None:
    found = map(functools.partial(_checked, updater), leaves, kinds, found)
  return Prunable(
    names=tuple(names for names, _ in leaves),
    kinds=tuple(kinds),
    targets=tuple(found),
    params=None,
    packed=updater.use_packed_masks,
    places=tuple(layers.homes[i] for i in chosen),
    all_names=tuple(layers.names),
    cuts=tuple(layers.cuts[i] for i in chosen),
  )


def _per_layer(
  entries: list[Any], params: PyTree, layers: stacking.Layers
) -> list[Any]:
  """Return an entry for every layer, given one for each leaf."""
  shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]
  return [
    entries[i]
    if cut is None or entries[i] is None
    else cut.take(entries[i], shapes[i])
    for i, cut in zip(layers.homes, layers.cuts, strict=True)
  ]


def reasons(updater: Any, params: PyTree) -> list[str]:
  """Return, per leaf, why it is pruned or not, in words for a table.

  Args:
    updater: a `BaseUpdater`.
    params: the parameters, or their shapes.

  Returns:
    One reason per leaf; stacked leaves whole.
  """
  layers = stacking.layers(params, updater.stacked_axis)
  fn = updater.sparsity_distribution_fn
  is_global = updater.ranking == "global"
  known = is_global or fn is UNSET or getattr(fn, "func", None) in _KNOWN
  if known and updater.targets_by_shape:
    options = vars(updater) if is_global else getattr(fn, "keywords", {})
    filter_fn = options.get("filter_fn", sparsity_distributions.default_filter)
    custom = options.get("custom_sparsity_map")
    found = budget.explain(layers.leaves, filter_fn, custom)
  else:
    targets = _leaves.align(params, updater.target_sparsities(params))
    words = ["left out by the distribution", "chosen by the distribution"]
    if fn is None:
      words = ["no distribution"] * 2
    found = [words[targets[i] is not None] for i in layers.homes]
  # The first layer of a stack speaks for the others.
  first = dict(zip(reversed(layers.homes), reversed(found), strict=True))
  where = lambda stack: f"; stack on axis {stack.axis}, {stack.why}"
  return [
    first[i] + (where(stack) if stack else "")
    for i, stack in enumerate(layers.stacks)
  ]


def _check_stacks(layers: stacking.Layers, chosen: list[int]) -> None:
  """Raise if only some slices of a stacked leaf are pruned.

  One array holds their masks; a slice without a mask has no place in it.
  """
  pruned = {layers.homes[i] for i in chosen}
  for i, (home, names) in enumerate(
    zip(layers.homes, layers.names, strict=True)
  ):
    if home in pruned and i not in chosen:
      raise ValueError(
        f"params leaf {_leaves.join(names)!r} stays dense, but other "
        "layers of its stack are pruned; give it the sparsity 0.0 instead of "
        "None, or stacked_axis='none' to take the stack for one layer"
      )


def cache_key(updater: Any, leaves: list[Any], treedef: Any) -> Any:
  """Return what a view depends on; None if that may be more than shapes."""
  fn, kind = updater.sparsity_distribution_fn, updater.sparsity_type
  known = fn is None or fn is UNSET
  known |= isinstance(fn, functools.partial) and fn.func in _KNOWN
  known &= updater.targets_by_shape
  if not known or not (isinstance(kind, Mapping) or hasattr(kind, "mask")):
    return None
  names = ("sparsity", "filter_fn", "custom_sparsity_map")
  fields = [fn, kind, given_topk_fn(updater), updater.use_packed_masks]
  fields.append(updater.stacked_axis)
  fields += [getattr(updater, n) for n in names if updater.ranking == "global"]
  try:
    shapes = tuple((x.shape, str(x.dtype)) for _, x in leaves)
    key = (updater.ranking, treedef, shapes, frozen(fields))
    hash(key)
  except (AttributeError, TypeError):
    return None
  return key


def _check_total(updater: Any, leaves: list[Any]) -> None:
  """Raise if a global ranking has more weights than it can count."""
  sizes = {_leaves.join(names): math.prod(x.shape) for names, x in leaves}
  if updater.ranking == "global" and sum(sizes.values()) >= 1 << 32:
    largest = max(sizes, key=lambda name: sizes[name])
    raise ValueError(
      f"{type(updater).__name__}: the leaves ranked together have "
      f"{sum(sizes.values()):,} weights, 2**32 or more; the largest is "
      f"{largest!r} with {sizes[largest]:,}: rank leaf by leaf "
      "(MagnitudePruning with erk), or leave some out with filter_fn"
    )


def _checked(updater: Any, layer: Any, kind: Any, sparsity: Any) -> Any:
  """Return the target of a leaf, or raise if its type cannot give it."""
  names, leaf = layer
  name = f"params leaf {_leaves.join(names)!r}"
  budget.check_size(name, leaf)
  if not isinstance(sparsity, jax.Array):
    sparsity = sparsity_distributions.check_sparsity(sparsity, name)
    if hasattr(kind, "sparsity"):
      if updater.sparsity_distribution_fn is UNSET:
        sparsity = kind.sparsity  # the structure says it all
      elif abs(sparsity - kind.sparsity) > 1e-6:
        raise ValueError(
          f"{name}: sparsity={sparsity} contradicts {kind}, which "
          f"removes exactly {kind.sparsity:g}; ask for that, or change it"
        )
  if hasattr(kind, "check"):
    kind.check(leaf.shape, sparsity, name)
  return sparsity


def _types(updater: Any, leaves: list[Any], all_names: list[Any]) -> list[Any]:
  """Return the sparsity type of each `(names, leaf)`."""
  kind = updater.sparsity_type
  if (topk_fn := given_topk_fn(updater)) is not None:
    kinds = [_TopKFn(topk_fn)] * len(leaves)
  elif isinstance(kind, Mapping):
    # A pattern must match some leaf, pruned or not.
    keys = _leaves.match_patterns(kind, all_names, "sparsity_type")
    table = dict(zip(all_names, keys, strict=True))
    default = sparsity_types.Unstructured()
    kinds = [kind.get(table[names], default) for names, _ in leaves]
  elif callable(getattr(kind, "mask", None)):
    kinds = [kind] * len(leaves)
  else:
    kinds = [kind(names, leaf) for names, leaf in leaves]
  pairs = zip(kinds, leaves, strict=True)
  return [_for_leaf(kind, *leaf) for kind, leaf in pairs]


def _for_leaf(kind: Any, names: Names, leaf: Any) -> Any:
  if isinstance(kind, type) or not hasattr(kind, "mask"):
    raise ValueError(
      f"sparsity_type gives {kind!r} for {_leaves.join(names)!r}; it "
      "must return a sparsity type, such as Unstructured()"
    )
  named = hasattr(kind, "for_leaf")
  return kind.for_leaf(names, leaf.shape) if named else kind


def given_topk_fn(updater: Any) -> Any:
  """Return the `topk_fn` that an updater was given, or None."""
  return vars(updater).get("topk_fn")


@dataclasses.dataclass(frozen=True)
class _TopKFn:
  """A user's function in the place of a sparsity type."""

  fn: Callable[[Array, Any], Array]

  def mask(self, scores: Array, sparsity: Any) -> Array:
    return self.fn(scores, sparsity)
