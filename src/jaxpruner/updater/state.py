"""The state of an updater, its category, and the application of masks."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, engine, mask_calculator
from jaxpruner._leaves import ABSENT

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
Masks: TypeAlias = PyTree  # of uint8 arrays, 1 = kept, and None = dense
Sparsities: TypeAlias = PyTree  # of floats and None


@dataclasses.dataclass(frozen=True)
class Category:
  """Describe an algorithm: when it prunes, its inputs and its cost.

  Compare algorithms of the same category: an algorithm that starts sparse never
  trains a dense network, an algorithm that starts dense does.

  Attributes:
    when: weights are removed "before", "during" or "after" training.
    start: "dense-to-sparse", "sparse-to-sparse", or "dense".
    dynamic: whether a removed weight may return.
    needs: the inputs of the scores beside the weights: "gradients" of the step,
      their "momentum", their "sums" over the steps before an update, "random"
      numbers, the "loss" given to `bind`, "data" (a batch) or "activations".
    paper: authors and year of the paper.
    cost: the cost added to a training step, in words.
    gradients_per_step: evaluations of the gradient in a training step.
    trainings: `sparsity -> number` of trainings of the usual length that the
      method takes; None means one.
    temperature: divisor of the network's outputs in the loss given to `bind`.
    default_schedule: the schedule of a configuration that names none; None
      means "periodic" for dynamic algorithms that start sparse, and
      "polynomial" for all others.
    update_every: steps between mask updates if the configuration names none;
      None means a tenth of the steps up to the last update, at most 100.
    trained: the key in `state.stats` of the masks of the trained weights, if
      these differ from `state.masks`.

  Example:
    >>> import jaxpruner
    >>> jaxpruner.algorithm_category("rigl").start
    'sparse-to-sparse'
  """

  when: str = "during"
  start: str = "dense-to-sparse"
  dynamic: bool = False
  needs: frozenset[str] = frozenset()
  paper: str = ""
  cost: str = ""
  gradients_per_step: int = 1
  trainings: Callable[[float], int] | None = None
  temperature: float = 1.0
  default_schedule: str | None = None
  update_every: int | None = None
  trained: str | None = None


class Tally(NamedTuple):
  """Count the changes of mask updates, one uint32 per prunable leaf and field.

  Attributes:
    size: weights of the leaf.
    kept: kept weights.
    grown: weights that the last mask update added.
    dropped: weights that the last mask update removed.
    reset: weights that were added with fresh optimizer moments.
    explored: weights that were ever kept, if the updater tracks them.
  """

  size: Array
  kept: Array
  grown: Array
  dropped: Array
  reset: Array
  explored: Any = ABSENT


class _Fields(NamedTuple):
  """What a `SparseState` holds; `ABSENT` stands for nothing."""

  stored_masks: PyTree = ABSENT
  inner_state: Any = ABSENT
  target_sparsities: Sparsities = ABSENT
  count: Any = ABSENT
  key: Any = ABSENT
  skipped: Any = ABSENT
  stats: Any = ABSENT
  explored: PyTree = ABSENT
  tally: Any = ABSENT  # a Tally
  hidden: PyTree = ABSENT


_Class = TypeVar("_Class", bound=type)


def _only_tuple(cls: _Class) -> _Class:
  """Return a class like `cls`, a subclass of a NamedTuple, on `tuple` alone.

  Code that walks states by type takes a class for a NamedTuple only if its one
  base is `tuple` (the checkpoints of Levanter, for example).
  """
  body = {**vars(_Fields), **vars(cls)}
  same: Any = type(cls)(cls.__name__, (tuple,), body)
  return same


@_only_tuple
class SparseState(_Fields):
  """Hold the state of an updater: an Optax state, to be saved in checkpoints.

  It holds `optax.MaskedNode()`, never `None`, in the place of dense leaves and
  unused fields, so that trainers and checkpoints can walk it.

  Attributes:
    masks: uint8 of the parameter's shape (or packed bits), None where dense.
    stored_masks: the same, `optax.MaskedNode()` where dense.
    inner_state: state of the wrapped optimizer.
    target_sparsities: float32 per prunable leaf.
    count: number of updates so far.
    key: PRNG key data of algorithms that draw random numbers.
    skipped: per prunable leaf, the number of mask updates that were refused
      because of non-finite scores.
    stats: a dict of arrays that an algorithm carries from step to step.
    explored: the union of all masks so far, if the updater tracks it.
    tally: counts of the last mask update; see `state_metrics`.
    hidden: the dense weights that `params` show masked (or in a lower
      precision), if the algorithm trains them; see `dense_params`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
    >>> state = pruner.init_state({"w": jnp.ones((2, 2)), "b": jnp.ones(2)})
    >>> state.masks["w"].tolist(), state.masks["b"], int(state.count)
    ([[1, 1], [1, 1]], None, 0)
  """

  __slots__ = ()

  def __new__(
    cls,
    masks: Masks = ABSENT,
    inner_state: Any = ABSENT,
    target_sparsities: Sparsities = ABSENT,
    count: Any = ABSENT,
    key: Any = ABSENT,
    skipped: Any = ABSENT,
    stats: Any = ABSENT,
    explored: Masks = ABSENT,
    tally: Any = ABSENT,
    hidden: PyTree = ABSENT,
    **stored_masks: PyTree,
  ):
    # JAX and Flax rebuild states by place or by field: no value is changed.
    fields = (masks, inner_state, target_sparsities, count, key, skipped, stats)
    # Without `super`: see `_only_tuple`.
    self = tuple.__new__(cls, (*fields, explored, tally, hidden))
    return self._replace(**stored_masks) if stored_masks else self

  @property
  def masks(self) -> Masks:
    return _leaves.with_none(self.stored_masks)

  def _replace(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, **fields: Any
  ) -> "SparseState":
    if "masks" in fields:
      fields["stored_masks"] = _leaves.without_none(fields.pop("masks"))
    replaced: Any = _Fields._replace(self, **fields)
    return replaced

  def without_none(self) -> "SparseState":
    """Return the state with `ABSENT` for every `None` a user wrote into it."""
    fields = {
      name: _leaves.without_none(getattr(self, name)) for name in self._fields
    }
    return self._replace(**fields | {"inner_state": self.inner_state})


def unpack_mask(mask: Array, param: Array) -> Array:
  """Return the uint8 mask that packed bits stand for, laid out like `param`."""
  return _leaves.with_auto_axes(
    lambda mask: mask_calculator.unpack_mask(mask, param.shape),
    mask,
    like=param,
  )


def apply_mask(param: Array, mask: Any, is_packed: bool = False) -> Array:
  """Return the kept weights; removed weights become exactly +0.0.

  The function selects instead of multiplying: NaN and infinity under the mask
  become zero, kept weights do not change, and the dtype stays.

  Args:
    param: the weights.
    mask: the mask, 1 = kept; None keeps all weights.
    is_packed: whether the mask is packed bits.

  Returns:
    An array like `param`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> mask = jnp.array([1, 0, 0], jnp.uint8)
    >>> jaxpruner.apply_mask(jnp.array([1.5, -2.0, jnp.nan]), mask).tolist()
    [1.5, 0.0, 0.0]
  """
  if _leaves.is_absent(mask):
    return param
  param = jnp.asarray(param)
  check_fit(mask, param.shape, is_packed)
  if is_packed:
    mask = unpack_mask(mask, param)
  return jnp.where(mask, param, jnp.zeros((), param.dtype))


@jax.custom_vjp
def masked_forward(param: Array, mask: Array) -> Array:
  """Return the masked weights; the gradient reaches all of them.

  This is the straight-through estimator.

  Args:
    param: the weights.
    mask: uint8, the weights that the forward pass uses.

  Returns:
    The weights, +0.0 where the mask is 0.
  """
  return apply_mask(param, mask)


masked_forward.defvjp(
  lambda param, mask: (apply_mask(param, mask), None),
  lambda _, cotangent: (cotangent, None),
)


def check_fit(
  mask: Any, shape: tuple[int, ...], is_packed: bool, name: str = ""
) -> None:
  """Raise an error if a mask does not fit a parameter.

  Args:
    mask: the mask.
    shape: the shape of the parameter.
    is_packed: whether the mask is packed bits.
    name: the path of the leaf, for the message.
  """
  found = np.shape(mask)
  fits = found == shape
  if is_packed:
    fits = math.prod(found) == -(-math.prod(shape) // 8)
  if not fits:
    where = f"params leaf {name!r}: " if name else ""
    raise ValueError(
      f"{where}mask of shape {found} does not fit the parameter of shape "
      f"{shape}; packed masks need is_packed=True (use_packed_masks), others "
      "False"
    )


def find_state(opt_state: PyTree) -> SparseState:
  """Return the one `SparseState` inside an optimizer state.

  Args:
    opt_state: the state of an Optax optimizer, or a `SparseState`.

  Returns:
    The `SparseState`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner, optax
    >>> pruner = jaxpruner.GlobalMagnitudePruning(
    ...   sparsity=0.5,
    ...   scheduler=jaxpruner.sparsity_schedules.OneShotSchedule())
    >>> tx = optax.chain(optax.clip(1.0), pruner.wrap_optax(optax.sgd(0.1)))
    >>> opt_state = tx.init(jnp.ones((2, 2)))
    >>> jaxpruner.find_state(opt_state).masks.tolist()
    [[1, 1], [1, 1]]
  """
  return find_only(
    opt_state,
    SparseState,
    "sparse states",
    "state made by pruner.wrap_optax(tx).init(params), or the SparseState "
    "itself (kept storage has a state of its own: kept.find_kept_state)",
  )


def find_only(opt_state: PyTree, kind: type, called: str, cure: str) -> Any:
  """Return the only state of a kind inside an optimizer state.

  Args:
    opt_state: the state of an Optax optimizer.
    kind: the class of the state.
    called: the states in words, for the message.
    cure: what to pass, for the message.

  Returns:
    The state.
  """
  is_state = lambda node: isinstance(node, kind)
  found = [
    s for s in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(s)
  ]
  if len(found) != 1:
    raise ValueError(
      f"opt_state holds {len(found)} {called}, one is needed; pass the {cure}"
    )
  return found[0]


def seed_data(seed: Any) -> Array:
  """Return the PRNG key data of an int, a typed key, or raw key data."""
  if isinstance(seed, int):
    return jax.random.key_data(jax.random.key(seed))
  if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(seed)
  return jnp.asarray(seed, jnp.uint32)


def refuse_nan(leaves: list[tuple[_leaves.Names, Any]]) -> None:
  """Raise an error outside `jit` if scores contain NaN, with path and count."""
  for names, entry in leaves:
    scores = engine.value(entry)
    if isinstance(scores, jax.core.Tracer):
      continue
    if not jnp.issubdtype(jnp.result_type(scores), jnp.inexact):
      continue
    count = int(jnp.sum(jnp.isnan(scores)))
    if count:
      raise ValueError(
        f"scores of {_leaves.join(names)!r} hold {count} NaN of "
        f"{np.size(scores)}; NaN weights or gradients cannot be ranked: find "
        "where they arise, or leave the leaf out with filter_fn"
      )


def frozen(value: Any) -> Any:
  """Return a hashable value that is equal if and only if `value` is.

  In a mapping the order of globs counts: the earlier one wins.
  """
  if isinstance(value, functools.partial):
    keywords = frozenset((k, frozen(v)) for k, v in value.keywords.items())
    return ("partial", value.func, frozen(value.args), keywords)
  if isinstance(value, Mapping):
    items = [(frozen(k), frozen(v)) for k, v in value.items()]
    is_glob = lambda key: isinstance(key, str) and not {*"*?["}.isdisjoint(key)
    globs = tuple(item for item in items if is_glob(item[0]))
    return ("mapping", globs, frozenset(items))
  if isinstance(value, list | tuple):
    return tuple(map(frozen, value))
  if isinstance(value, jax.Array | np.ndarray):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    array = np.asarray(seed_data(value) if is_key else value)
    return (array.shape, array.dtype.str, array.tobytes())
  return value
