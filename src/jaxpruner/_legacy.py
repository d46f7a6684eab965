"""Names of the paper's library that have another form here.

The library itself uses none of the old names and arguments; code written for
the paper's library does. Each name works and warns with the new way;
`docs/migrating.md` lists them, and those that do not work. What a function
stands for is imported when it is called, so every layer may offer its old
names.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner._tools import deprecation

_SINCE, _GOES = "1.0", "2.0"


def old_names(module: str, frames: int = 3) -> Callable[[str], Any]:
  """Return the `__getattr__` of a module that has old names.

  Args:
    module: the module's `__name__`.
    frames: as in `deprecation.warn`.

  Returns:
    A function from a name to its object; it warns.
  """
  table = {
    name: deprecation.Moved(get, _SINCE, _GOES, use)
    for name, (get, use) in _NAMES[module].items()
  }
  return deprecation.moved_attributes(module, table, frames)


def renamed_argument(old: str, new: str) -> Callable[[Any], Any]:
  """Return a decorator: the method takes an argument by its old name too.

  Args:
    old: the old name, which warns.
    new: the name in the signature.

  Returns:
    A decorator of methods.
  """

  def decorate(method):
    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
      if old in kwargs:
        name = f"{type(self).__name__}.{method.__name__}"
        deprecation.warn(
          deprecation.message(f"{name}({old}=)", _SINCE, _GOES, f"{new}=")
        )
        kwargs[new] = kwargs.pop(old)
      return method(self, *args, **kwargs)

    return wrapped

  return decorate


@dataclasses.dataclass(frozen=True, repr=False)
class OfType:
  """The `topk_fn` of an updater that was given none."""

  sparsity_type: Any

  def __call__(self, scores: Any, sparsity: Any) -> Any:
    return self.sparsity_type.mask(jnp.asarray(scores), sparsity)

  def __repr__(self) -> str:
    return "<that of sparsity_type>"


class _TopKFn:
  """The field `topk_fn`: the function that was given, else the type's.

  Overrides written for the paper's library call `self.topk_fn`. What was given
  is in the updater's `__dict__`, so that a copy with another sparsity type has
  that type's function.
  """

  def __get__(self, updater: Any, owner: Any = None) -> Any:
    if updater is None:
      return None  # the default of the field
    given = vars(updater).get("topk_fn")
    kind = vars(updater).get("sparsity_type")
    if given is None and callable(getattr(kind, "mask", None)):
      return OfType(kind)
    return given

  def __set__(self, updater: Any, value: Any) -> None:
    vars(updater)["topk_fn"] = None if isinstance(value, OfType) else value


def topk_fn() -> Any:
  """Return the descriptor of `BaseUpdater.topk_fn`."""
  return _TopKFn()


class OldHooks:
  """The methods of SET and RigL that subclasses used to override.

  An override of `_get_drop_scores` or `_get_grow_scores` becomes one of
  `drop_scores` or `grow_scores`; an override of `_update_masks` gets the mask
  and the scores of each leaf.
  """

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    own = cls.__dict__
    for old, new in (
      ("_get_drop_scores", "drop_scores"),
      ("_get_grow_scores", "grow_scores"),
      ("_update_masks", "update_state"),
    ):
      if old not in own or new in own or cls.__module__ == "jaxpruner._legacy":
        continue
      deprecation.warn(
        deprecation.message(f"{cls.__name__}.{old}", _SINCE, _GOES, new)
      )
      setattr(cls, new, _leaf_by_leaf if new == "update_state" else _turn(old))

  def _get_drop_scores(self: Any, sparse_state, params, grads):
    return self.drop(self.see(params, sparse_state, grads))

  def _get_grow_scores(self: Any, sparse_state, params, grads):
    return self.grow(self.see(params, sparse_state, grads))

  def _update_masks(self: Any, old_mask, drop_score, grow_score, drop_fraction):
    from jaxpruner import engine

    active = old_mask == 1
    total = engine.count_true(active).astype(jnp.int32)
    dropped = jnp.floor(drop_fraction * total + 1e-4).astype(jnp.int32)
    drop = jnp.where(active, drop_score, -jnp.inf)
    kept = engine.select([drop], [total - dropped]).masks[0]
    grow = jnp.where(kept == 1, jnp.inf, grow_score)
    return engine.select([grow], [total]).masks[0]


def _turn(old: str) -> Callable[..., Any]:
  def scores(self, params, sparse_state, grads):
    return getattr(self, old)(sparse_state, params, grads)

  return scores


def _leaf_by_leaf(self, sparse_state, params, grads, **extra):
  """Update the state with an override of `_update_masks`."""
  del extra
  view = self.view(params)
  fraction = self.drop_fraction_at(sparse_state.count)
  fraction = jnp.where(sparse_state.count == 0, 0, fraction)
  columns = (
    view.of(sparse_state.masks),
    view.of(self.drop_scores(params, sparse_state, grads), "scores"),
    view.of(self.grow_scores(params, sparse_state, grads), "scores"),
  )
  update = functools.partial(self._update_masks, drop_fraction=fraction)
  masks = [*map(update, *columns)]
  finite = [jnp.isfinite(s).all() for s in columns[1]]
  return self._replace_masks(view, sparse_state, masks, jnp.stack(finite))


def spread(updater: Any, scores: Any, sparsity: float) -> Any:
  """Return one sparsity for all leaves that a global pruner prunes.

  Args:
    updater: the global pruner.
    scores: a tree of scores.
    sparsity: the fraction removed of all leaves together.

  Returns:
    A tree of sparsities, None for dense leaves.
  """
  return dataclasses.replace(updater, sparsity=sparsity).target_sparsities(
    scores
  )


def _block(scores, sparsity, block_height, block_width, use_avg_pooling=True):
  """Keep the best blocks of the last two dimensions."""
  from jaxpruner import sparsity_types

  kind = sparsity_types.Block((block_height, block_width), use_avg_pooling)
  return kind.mask(jnp.asarray(scores), sparsity)


def _by_type(scores, sparsity, sparsity_type):
  """Return the mask of a sparsity type; none is removed at sparsity 0."""
  return sparsity_type.mask(jnp.asarray(scores), sparsity)


def _topk(scores, sparsity):
  from jaxpruner import mask_calculator

  return mask_calculator.topk_mask_calculator(scores, sparsity)


def _erdos_renyi(
  var_shape_dict: Mapping[Any, tuple[int, ...]],
  default_sparsity: float,
  custom_sparsity_map: Mapping[Any, float] | None = None,
  include_kernel: bool = True,
  erk_power_scale: float = 1.0,
) -> dict[Any, float]:
  """Return ERK sparsities by name, before they are rounded to whole weights.

  Without `include_kernel`, densities follow the last two dimensions only: the
  Erdős–Rényi distribution of Mocanu et al., 2018.
  """
  if not var_shape_dict:
    raise ValueError("Variable shape dictionary is empty; pass {name: shape}")
  if not 0 <= default_sparsity < 1:
    raise ValueError(
      f"Default sparsity {default_sparsity!r} must be at least 0 and below 1"
    )
  custom = custom_sparsity_map or {}
  raw, sizes = {}, {}
  for name, shape in var_shape_dict.items():
    if name in custom:
      continue
    sides = shape if include_kernel else shape[-2:]
    ratio = sum(sides) / math.prod(sides)
    raw[name] = ratio ** (erk_power_scale if include_kernel else 1.0)
    sizes[name] = math.prod(shape)
  # As ever, each leaf's part of the budget is rounded up.
  kept = sum(n - math.floor(default_sparsity * n) for n in sizes.values())
  dense: set[Any] = set()
  scale = 0.0
  while len(dense) < len(raw):
    rest = [name for name in raw if name not in dense]
    left = kept - sum(sizes[name] for name in dense)
    scale = left / sum(raw[name] * sizes[name] for name in rest)
    highest = max(raw[name] for name in rest)
    if highest * scale <= 1:
      break
    dense |= {name for name in rest if raw[name] == highest}
  density = lambda name: 1.0 if name in dense else raw[name] * scale
  return {
    name: custom[name] if name in custom else 1 - density(name)
    for name in var_shape_dict
  }


def _random_scores(params: Any, rng_seed: Any) -> Any:
  """Return uniform scores, a key per leaf split from `rng_seed`."""
  leaves, treedef = jax.tree.flatten(params)
  keys = jax.random.split(rng_seed, len(leaves))
  draw = lambda key, p: jax.random.uniform(key, p.shape, p.dtype)
  return treedef.unflatten([*map(draw, keys, leaves)])


def _restart_state(state: Any, masks_activated: Any) -> Any:
  """Return an optimizer's state, zero for the activated weights.

  `wrap_optax` does this by itself, for any optimizer.
  """
  from jaxpruner.program.owners import Owners, per_weight

  owners, masks = Owners(masks_activated), jax.tree.leaves(masks_activated)

  def restart(path, leaf):
    owner = owners.find(path)
    if owner is None or not per_weight(leaf, np.shape(masks[owner])):
      return leaf
    return jnp.where(masks[owner], jnp.zeros_like(leaf), leaf)

  return jax.tree_util.tree_map_with_path(restart, state)


def _restart(target_tree: Any, masks: Any) -> Any:
  """Return a tree with zeros where a mask is 1; None changes nothing."""
  from jaxpruner import _leaves

  zero = lambda _, leaf, mask: (
    leaf if mask is None else jnp.where(mask, jnp.zeros_like(leaf), leaf)
  )
  return _leaves.map_masks(zero, target_tree, masks)


def _from(module: str, name: str) -> tuple[Callable[[], Any], str]:
  home = f"jaxpruner.{module}"
  get = lambda: getattr(importlib.import_module(home), name)
  return get, f"{home}.{name}"


def _registry() -> Any:
  from jaxpruner import api

  return api._REGISTRY


_SCORES = "self.random_scores(params, sparse_state, salt)"
# Module -> old name -> (how to get it, what to write instead).
_NAMES: dict[str, dict[str, tuple[Callable[[], Any], str]]] = {
  "jaxpruner.mask_calculator": {
    "topk_block_mask_calculator": (
      lambda: _block,
      "jaxpruner.sparsity_types.Block((h, w)).mask(scores, sparsity)",
    ),
    "topk_channel_mask_calculator": (
      lambda: _by_type,
      "jaxpruner.sparsity_types.Channel(axis).mask(scores, sparsity)",
    ),
    "topk_n_by_m_mask_calculator": (
      lambda: _by_type,
      "jaxpruner.sparsity_types.NByM(n, m).mask(scores, sparsity)",
    ),
    "_topk_mask_calculator_internal": (lambda: _topk, "topk_mask_calculator"),
  },
  "jaxpruner.sparsity_distributions": {
    "get_sparsities_erdos_renyi": (
      lambda: _erdos_renyi,
      "jaxpruner.sparsity_distributions.erk(params, sparsity)",
    ),
  },
  "jaxpruner.algorithms.pruners": {
    "generate_random_scores": (lambda: _random_scores, _SCORES),
  },
  "jaxpruner.algorithms.sparse_trainers": {
    "restart_inner_state": (
      lambda: _restart_state,
      "nothing: wrap_optax makes the moments of grown weights fresh",
    ),
    "_restart_using_mask": (lambda: _restart, "jaxpruner.apply_mask"),
  },
  "jaxpruner.api": {
    "ALGORITHM_REGISTRY": (
      _registry,
      "jaxpruner.register_algorithm and jaxpruner.algorithm_class",
    ),
    "ALGORITHMS": (
      lambda: tuple(_registry()),
      "jaxpruner.all_algorithm_names()",
    ),
  },
  "jaxpruner": {
    "ALGORITHM_REGISTRY": (
      _registry,
      "jaxpruner.register_algorithm and jaxpruner.algorithm_class",
    ),
    "NoUpdateSchedule": _from("sparsity_schedules", "NoUpdateSchedule"),
    "OneShotSchedule": _from("sparsity_schedules", "OneShotSchedule"),
    "PeriodicSchedule": _from("sparsity_schedules", "PeriodicSchedule"),
    "PolynomialSchedule": _from("sparsity_schedules", "PolynomialSchedule"),
    "SparsityType": _from("sparsity_types", "SparsityType"),
  },
}
