"""What an updater's fields mean for a parameter tree: its prunable leaves."""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import (
  _leaves,
  _stacks,
  engine,
  sparsity_distributions,
  sparsity_types,
)
from jaxpruner._leaves import Prunable, PyTree
from jaxpruner._state import Array, Sparsities, check_seed, frozen
from jaxpruner.sparsity_distributions import budget


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
  whole, treedef = _leaves.flatten_with_names(params)
  key = None if targets is not None else _key(updater, whole, treedef)
  if key is not None and key in _VIEWS:
    return _VIEWS[key]._replace(params=params)
  stacks = _stacks.find_stacks(params, updater.stacked_axis)
  # From here on a slice of a stacked leaf is a leaf like any other.
  opened = _stacks.unstacked(params, stacks, shapes_only=True)
  leaves = _leaves.flatten_with_names(opened)[0]
  cuts = [cut for stack in stacks for cut in _stacks.cuts_of(stack)]
  homes = [i for i, stack in enumerate(stacks) for _ in _stacks.cuts_of(stack)]
  if targets is None:
    seen = opened if key is not None else _stacks.unstacked(params, stacks)
    wanted = updater._distribute(seen)
    wanted = _leaves.align(params, wanted, "sparsity_distribution_fn")
  else:
    wanted = _leaves.align(params, targets, "sparsities")
  wanted = [
    wanted[i]
    if cut is None or wanted[i] is None
    else cut.take(wanted[i], whole[i][1].shape)
    for i, cut in zip(homes, cuts, strict=True)
  ]
  chosen = [i for i, s in enumerate(wanted) if s is not None]
  prunable = [leaves[i] for i in chosen]
  kinds = [
    kind.for_leaf(names, leaf.shape) if hasattr(kind, "for_leaf") else kind
    for kind, (names, leaf) in zip(
      _types(updater, prunable, [names for names, _ in leaves]),
      prunable,
      strict=True,
    )
  ]
  found = [wanted[i] for i in chosen]
  if targets is None:
    rows = zip(prunable, kinds, found, strict=True)
    found = [_checked(updater, *leaf, kind, s) for leaf, kind, s in rows]
  _check_whole(homes, chosen, leaves)
  _check_total(updater, prunable)
  view = Prunable(
    names=tuple(names for names, _ in prunable),
    kinds=tuple(kinds),
    targets=tuple(found),
    params=None,
    packed=updater.use_packed_masks,
    places=tuple(homes[i] for i in chosen),
    among=tuple(names for names, _ in leaves),
    cuts=tuple(cuts[i] for i in chosen),
  )
  if key is not None:
    if len(_VIEWS) >= _MAX_VIEWS:
      del _VIEWS[next(iter(_VIEWS))]
    _VIEWS[key] = view
  return view._replace(params=params)


def reasons(updater: Any, params: PyTree) -> list[str]:
  """Return, per leaf, why it is pruned or not, in words for a table.

  Args:
    updater: a `BaseUpdater`.
    params: the parameters, or their shapes.

  Returns:
    One reason per leaf; stacked leaves whole.
  """
  stacks = _stacks.find_stacks(params, updater.stacked_axis)
  opened = _stacks.unstacked(params, stacks, shapes_only=True)
  leaves = _leaves.flatten_with_names(opened)[0]
  fn = updater.sparsity_distribution_fn
  options = dict(getattr(fn, "keywords", {}))
  if updater.ranking == "global":
    options = vars(updater)
  known = updater.ranking == "global" or fn is UNSET
  known |= getattr(fn, "func", None) in _KNOWN
  known &= type(updater)._distribute.__module__ == "jaxpruner.base_updater"
  if known:
    filter_fn = options.get("filter_fn", sparsity_distributions.default_filter)
    custom = options.get("custom_sparsity_map")
    found = budget.explain(leaves, filter_fn, custom)
  else:
    targets = _leaves.align(params, updater.target_sparsities(params))
    word = "no distribution" if fn is None else "chosen by the distribution"
    other = "no distribution" if fn is None else "left out by the distribution"
    pairs = zip(targets, stacks, strict=True)
    found = [
      other if target is None else word
      for target, stack in pairs
      for _ in _stacks.cuts_of(stack)
    ]
  left, told = iter(found), []
  for stack in stacks:
    own = [next(left) for _ in _stacks.cuts_of(stack)]
    where = f"; stack on axis {stack.axis}, {stack.why}" if stack else ""
    told.append(own[0] + where)
  return told


def _check_whole(
  homes: list[int], chosen: list[int], leaves: list[Any]
) -> None:
  """Raise if only some slices of a stacked leaf are pruned.

  One array holds their masks; a slice without a mask has no place in it.
  """
  pruned = {homes[i] for i in chosen}
  for i, home in enumerate(homes):
    if home in pruned and i not in chosen:
      raise ValueError(
        f"params leaf {_leaves.join(leaves[i][0])!r} stays dense, but other "
        "layers of its stack are pruned; give it the sparsity 0.0 instead of "
        "None, or stacked_axis='none' to take the stack for one layer"
      )


def _key(updater: Any, leaves: list[Any], treedef: Any) -> Any:
  """Return what a view depends on; None if that may be more than shapes."""
  fn, kind = updater.sparsity_distribution_fn, updater.sparsity_type
  known = fn is None or fn is UNSET
  known |= isinstance(fn, functools.partial) and fn.func in _KNOWN
  known &= type(updater)._distribute.__module__ == "jaxpruner.base_updater"
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


def _checked(updater, names, leaf, kind, sparsity) -> Any:
  """Return the target of a leaf, or raise if its type cannot give it."""
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


def _types(updater: Any, leaves: list[Any], among: list[Any]) -> list[Any]:
  """Return the sparsity type of each `(names, leaf)`."""
  if (topk_fn := given_topk_fn(updater)) is not None:
    return [_TopKFn(topk_fn)] * len(leaves)
  kind = updater.sparsity_type
  if isinstance(kind, Mapping):
    # A pattern must match some leaf, pruned or not.
    keys = _leaves.match_patterns(kind, among, "sparsity_type")
    table = dict(zip(among, keys, strict=True))
    default = sparsity_types.Unstructured()
    return [
      default if table[names] is None else kind[table[names]]
      for names, _ in leaves
    ]
  if callable(getattr(kind, "mask", None)):
    return [kind] * len(leaves)
  kinds = [kind(names, leaf) for names, leaf in leaves]
  for (names, _), chosen in zip(leaves, kinds, strict=True):
    if isinstance(chosen, type) or not hasattr(chosen, "mask"):
      raise ValueError(
        f"sparsity_type gives {chosen!r} for {_leaves.join(names)!r}; it "
        "must return a sparsity type, such as Unstructured()"
      )
  return kinds


def given_topk_fn(updater: Any) -> Any:
  """Return the `topk_fn` that an updater was given, or None."""
  return vars(updater).get("topk_fn")


@dataclasses.dataclass(frozen=True)
class _TopKFn:
  """A user's function in the place of a sparsity type."""

  fn: Callable[[Array, Any], Array]

  def mask(self, scores: Array, sparsity: Any) -> Array:
    return self.fn(scores, sparsity)


def check_fields(updater: Any) -> None:
  """Raise if a field of an updater makes no sense."""
  for name in ("is_mask_update_iter", "get_sparsity_at_step"):
    if isinstance(updater.scheduler, type) or not callable(
      getattr(updater.scheduler, name, None)
    ):
      raise ValueError(
        f"scheduler={updater.scheduler!r} has no method {name}; use one of "
        "jaxpruner.sparsity_schedules, such as OneShotSchedule(0)"
      )
  for name in (
    "skip_gradients",
    "is_sparse_gradients",
    "use_packed_masks",
    "track_exploration",
    "continue_sparse",
  ):
    if not isinstance(getattr(updater, name), bool | np.bool_):
      raise ValueError(
        f"{name}={getattr(updater, name)!r} must be True or False"
      )
  for name in ("sparsity_distribution_fn", "topk_fn"):
    value = getattr(updater, name)
    if value is not None and not callable(value):
      raise ValueError(
        f"{name}={value!r} must be a function, such as functools.partial("
        "jaxpruner.sparsity_distributions.uniform, sparsity=0.8)"
        if name == "sparsity_distribution_fn"
        else f"{name}={value!r} must be a function (scores, sparsity) -> mask"
      )
  kinds = updater.sparsity_type
  for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
    if isinstance(kind, type) or not (
      callable(kind) or callable(getattr(kind, "mask", None))
    ):
      raise ValueError(
        f"sparsity_type={kind!r} is not a sparsity type; use one of "
        "jaxpruner.sparsity_types, such as NByM(2, 4)"
      )
  _stacks.check_stacked_axis(updater.stacked_axis)
  if updater.stacked_axis is None:  # configuration has no None
    updater.stacked_axis = "none"
  if updater.rng_seed is not None:
    check_seed(updater.rng_seed)


def check_number(updater: Any, name: str, above: float = 0.0) -> None:
  """Raise if a field is no finite number greater than `above`."""
  value = getattr(updater, name)
  if (
    isinstance(value, bool)
    or not isinstance(value, int | float)
    or not above < value < float("inf")
  ):
    raise ValueError(
      f"{type(updater).__name__}: {name}={value!r} must be a number above "
      f"{above:g}"
    )


def check_whole(updater: Any, name: str, least: int) -> None:
  """Raise if a field is no integer of at least `least`."""
  value = getattr(updater, name)
  if type(value) is not int or value < least:
    raise ValueError(
      f"{type(updater).__name__}: {name}={value!r} must be an integer of at "
      f"least {least}"
    )


def blame_keys(params: PyTree, error: Exception) -> None:
  """Raise an error that names the first PRNG key among the parameters."""
  for names, leaf in _leaves.flatten_with_names(params)[0]:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
      raise ValueError(
        f"params leaf {_leaves.join(names)!r} is a PRNG key, {dtype} of shape "
        f"{leaf.shape}, which has no score; keep keys out of params: "
        "eqx.partition(model, eqx.is_inexact_array), nnx.split(model, "
        "nnx.Param, ...)"
      ) from error


def select_at_once(updater: Any, view: Prunable, grads: PyTree) -> PyTree:
  """Return the masks of `instant_sparsify` from one compiled function.

  Inside it, scores are expressions that are never stored.

  Args:
    updater: a `BaseUpdater`.
    view: the prunable leaves.
    grads: the gradients, or None.

  Returns:
    The masks, not packed; None if the updater runs code of the user, which may
    read values, or if there are other leaves than arrays.
  """
  own = (updater.calculate_scores, updater.create_masks, updater._choose)
  leaves, treedef = _leaves.flatten_with_names(view.params)
  arrays = jax.tree.leaves((view.params, grads))
  if (
    not view.names
    or any(not fn.__module__.startswith("jaxpruner.") for fn in own)
    or "loss" in updater.needs
    or _key(updater, leaves, treedef) is None
    or not all(isinstance(x, jax.Array | np.ndarray) for x in arrays)
    or any(isinstance(x, jax.core.Tracer) for x in arrays)
  ):
    return None
  masks, wrong = _selected(updater, view.params, grads)
  wrong = np.asarray(wrong)
  if wrong.any():
    return None  # the usual path names the leaf
  found = view.split(_leaves.align(view.params, masks))
  if updater.ranking == "global":
    from jaxpruner import _ranking

    _ranking.warn_if_emptied(view, found)
  return masks


@functools.partial(jax.jit, static_argnums=0)
def _selected(updater: Any, params: PyTree, grads: PyTree) -> Any:
  view = updater.view(params)
  scores = updater._scores(view, None, grads, {})
  masks = updater._select(view, scores, view.targets).masks
  isnan = lambda s: jnp.any(jnp.isnan(engine.value(s)))
  return view.put(None, masks), jnp.stack([isnan(s) for s in scores])


def check_scores(updater: Any, view: Prunable, scores: PyTree) -> None:
  """Raise if the scores do not fit the parameters."""
  entries = _leaves.align(view.params, scores, "scores")
  leaves = jax.tree.leaves(view.params)
  for place, names in dict(zip(view.places, view.names, strict=True)).items():
    score, param = entries[place], leaves[place]
    shape = getattr(score, "shape", None)
    if shape != param.shape or jnp.iscomplexobj(score):
      found = f"{score.dtype} of shape {shape}" if shape else repr(score)
      raise ValueError(
        f"scores of {_leaves.join(names)!r} are {found}; "
        f"{type(updater).__name__}.calculate_scores must return real numbers "
        f"of the parameter's shape {param.shape}"
      )
