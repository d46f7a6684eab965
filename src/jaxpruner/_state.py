"""The state of an updater, its category, and the application of masks."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, engine
from jaxpruner._leaves import ABSENT
from jaxpruner.engine.draw import draw  # noqa: F401

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
      their "momentum", "random" numbers, the "loss" given to `bind`, "data" (a
      batch) or "activations".
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
      None means at least ten updates, at most one in a hundred steps.
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
    self = super().__new__(cls, *fields, explored, tally, hidden)
    return self._replace(**stored_masks) if stored_masks else self

  @property
  def masks(self) -> Masks:
    return _leaves.show(self.stored_masks)

  def _replace(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, **fields: Any
  ) -> "SparseState":
    if "masks" in fields:
      fields["stored_masks"] = _leaves.hide(fields.pop("masks"))
    return super()._replace(**fields)

  def without_none(self) -> "SparseState":
    """Return the state with `ABSENT` for every `None` a user wrote into it."""
    fields = {name: _leaves.hide(getattr(self, name)) for name in self._fields}
    return self._replace(**fields | {"inner_state": self.inner_state})


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
  if _leaves.is_dense(mask):
    return param
  param = jnp.asarray(param)
  check_fit(mask, param.shape, is_packed)
  if is_packed:
    mask = unpack_mask(mask, param)
  return jnp.where(mask, param, jnp.zeros((), param.dtype))


unpack_mask = _leaves.unpack


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


def count_ones(mask: Array) -> Array:
  """Return the number of ones in a mask, packed or not, as uint32."""
  return jnp.sum(jax.lax.population_count(mask), dtype=jnp.uint32)


def replace_masks(
  view: _leaves.Prunable,
  state: SparseState,
  masks: list[Array],
  finite: Any,
  shrink: bool = False,
) -> SparseState:
  """Return the state with new masks, except where scores are non-finite.

  Args:
    view: the prunable leaves.
    state: the state before.
    masks: the new masks of the prunable leaves.
    finite: bool per leaf, whether all its scores are finite. If not, the leaf
      keeps its mask and `skipped` counts the refused update.
    shrink: also keep an old mask that has fewer ones than the new one.

  Returns:
    The state, its other fields unchanged.
  """
  if not masks:
    return state
  # Masks are compared as they are stored; slices of a stack are not stored.
  stacked = any(view.cuts)
  stored, treedef = jax.tree.flatten(view.store(masks))
  new = masks if stacked else stored
  old = comparable(view, state.masks)
  kept = []
  for i, (mask, before) in enumerate(zip(new, old, strict=True)):
    (ok,) = engine.row_from([finite], i)
    if shrink:
      ok &= count_ones(mask) <= count_ones(before)
    kept.append(jnp.where(ok, mask, before))
  skipped = state.skipped
  if not _leaves.is_absent(skipped):
    skipped = skipped + (1 - finite.astype(jnp.int32))
  kept = view.store(kept) if stacked else treedef.unflatten(kept)
  return state._replace(masks=kept, skipped=skipped)


def comparable(view: _leaves.Prunable, masks: Masks) -> list[Array]:
  """Return a mask per prunable leaf: as it is stored, or a slice of it."""
  return view.of(masks) if any(view.cuts) else jax.tree.leaves(masks)


def new_tally(view: _leaves.Prunable, masks: Masks, tracked: bool) -> Tally:
  """Return the counts before the first update.

  Args:
    view: the prunable leaves.
    masks: their masks, as a state stores them.
    tracked: whether the union of all masks is tracked.

  Returns:
    A `Tally`.
  """
  sizes = [math.prod(leaf.shape) for leaf in view.leaves]
  size = jnp.asarray(np.array(sizes, np.uint32))
  kept = jnp.stack([count_ones(mask) for mask in comparable(view, masks)])
  # Separate buffers: a donated state must not contain a buffer twice.
  grown, dropped, reset = (jnp.zeros_like(kept) for _ in range(3))
  explored = jnp.copy(kept) if tracked else ABSENT
  return Tally(size, kept, grown, dropped, reset, explored)


def count_changes(
  view: _leaves.Prunable, old: SparseState, new: SparseState, fresh: bool
) -> SparseState:
  """Return the new state with its tally updated, if its masks changed.

  Args:
    view: the prunable leaves.
    old: the state before a mask update.
    new: the state after it.
    fresh: whether grown weights get fresh optimizer moments.

  Returns:
    The new state.
  """
  before, after = jax.tree.leaves(old.masks), jax.tree.leaves(new.masks)
  same = all(a is b for a, b in zip(before, after, strict=True))
  if _leaves.is_absent(old.tally) or same:
    return new
  if not _leaves.is_absent(new.explored):
    union = jax.tree.map(jnp.bitwise_or, new.explored, new.stored_masks)
    new = new._replace(explored=union)
  seen = []
  if not _leaves.is_absent(new.explored):
    seen = [count_ones(mask) for mask in comparable(view, new.explored)]
  before, after = comparable(view, old.masks), comparable(view, new.masks)
  kept, grown = jnp.stack(list(map(_kept_and_grown, before, after)), 1)
  return new._replace(
    tally=old.tally._replace(
      kept=kept,
      grown=grown,
      dropped=old.tally.kept + grown - kept,
      reset=grown if fresh else old.tally.reset,
      explored=jnp.stack(seen) if seen else ABSENT,
    )
  )


@jax.jit
def _kept_and_grown(old: Array, new: Array) -> Array:
  # Correct for packed bits and for bytes of 0 and 1.
  ones = [jax.lax.population_count(x) for x in (new, new & ~old)]
  values = [x.astype(jnp.uint32) for x in ones]
  return jnp.stack(engine.totals(values))


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
  is_state = lambda node: isinstance(node, SparseState)
  found = [
    s for s in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(s)
  ]
  if len(found) != 1:
    raise ValueError(
      f"opt_state holds {len(found)} sparse states, one is needed; pass the "
      "state made by pruner.wrap_optax(tx).init(params), or the SparseState "
      "itself"
    )
  return found[0]


def seed_data(seed: Any) -> Array:
  """Return the PRNG key data of an int, a typed key, or raw key data."""
  if isinstance(seed, int):
    return jax.random.key_data(jax.random.key(seed))
  if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(seed)
  return jnp.asarray(seed, jnp.uint32)


def check_seed(seed: Any) -> None:
  """Raise an error if a seed is neither an int nor a key.

  The check does not start a JAX backend.
  """
  dtype = getattr(seed, "dtype", None)
  is_key = dtype is not None and (
    jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32
  )
  if not is_key and (isinstance(seed, bool) or not isinstance(seed, int)):
    raise ValueError(
      f"rng_seed={seed!r} must be an integer or a jax.random key"
    )


def params_key(params: PyTree) -> Array:
  """Derive key data from the parameters, so that vmapped seeds differ.

  Integer sums wrap around and do not depend on the order: the key does not
  depend on how the parameters are sharded.
  """
  leaves = jax.tree.leaves(params)
  return _key_of(
    [
      leaf
      for leaf in leaves
      if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
  )


@jax.jit
def _key_of(leaves: list[Array]) -> Array:
  total = jnp.zeros([], jnp.uint32)
  for leaf in leaves:
    bits = jax.lax.bitcast_convert_type(
      jnp.asarray(leaf).astype(jnp.float32), jnp.uint32
    )
    total = total * 31 + jnp.sum(bits, dtype=jnp.uint32)
  return jax.random.key_data(jax.random.key(total))


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
  """Return a hashable value that is equal if and only if `value` is."""
  if isinstance(value, functools.partial):
    return ("partial", value.func, frozen(value.args), frozen(value.keywords))
  if isinstance(value, Mapping):
    return frozenset((frozen(k), frozen(v)) for k, v in value.items())
  if isinstance(value, list | tuple):
    return tuple(map(frozen, value))
  if isinstance(value, jax.Array | np.ndarray):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    array = np.asarray(seed_data(value) if is_key else value)
    return (array.shape, array.dtype.str, array.tobytes())
  return value
