"""What an updater carries: its category, its state, and how masks apply."""

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
from jaxpruner.engine.draw import draw  # noqa: F401

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
Masks: TypeAlias = PyTree  # of uint8 arrays, 1 = kept, and None = dense
Sparsities: TypeAlias = PyTree  # of floats and None


@dataclasses.dataclass(frozen=True)
class Category:
  """Where an algorithm stands on the map of sparse training.

  Compare like with like: an algorithm that starts sparse never pays for a dense
  network, one that starts dense does.

  Attributes:
    when: "before", "during" or "after" training are weights removed.
    start: "dense-to-sparse", "sparse-to-sparse", or "dense".
    dynamic: whether a removed weight may come back.
    needs: what scores are computed from, beside the weights: "gradients" of the
      step, their "momentum", "random" numbers, the "loss" given to `bind`,
      "data" (a batch) or "activations".
    paper: who proposed it.
    cost: what it adds to a training step, in words.
    gradients_per_step: evaluations of the gradient in a training step.
    trainings: `sparsity -> number`, how many trainings of the usual length the
      method takes; None means one.
    temperature: what the network's outputs are divided by in the loss given to
      `bind`.
    default_schedule: the schedule of a configuration that names none; None
      means "periodic" for dynamic algorithms that start sparse, and
      "polynomial" for all others.
    update_every: steps between mask updates in a configuration that does not
      say; None means at least ten updates, at most one in a hundred steps.
    trained: the key in `state.stats` of the masks of the trained weights, where
      those are not `state.masks`.

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
  """What mask updates count as they go, one uint32 per prunable leaf.

  Attributes:
    size: weights.
    kept: weights under a one of the mask.
    grown: weights the last mask update brought in.
    dropped: weights it removed.
    reset: weights that came in with fresh optimizer moments.
    explored: weights that were ever kept, if the updater tracks them.
  """

  size: Array
  kept: Array
  grown: Array
  dropped: Array
  reset: Array
  explored: Array | None = None


class SparseState(NamedTuple):
  """What must survive a checkpoint: an Optax state.

  Attributes:
    masks: uint8 of the parameter's shape (or packed bits), None where dense.
    inner_state: state of the wrapped optimizer.
    target_sparsities: float32 per leaf, None where dense.
    count: number of updates so far.
    key: PRNG key data of algorithms that draw, else None.
    skipped: per prunable leaf, the mask updates refused because a score was
      not finite.
    stats: what an algorithm of its own remembers from step to step.
    explored: the union of all masks so far, if the updater tracks it.
    tally: counts of the last mask update; see `state_metrics`.
  """

  masks: Masks
  inner_state: Any = None
  target_sparsities: Sparsities = None
  count: Any = None
  key: Any = None
  skipped: Any = None
  stats: Any = None
  explored: Masks = None
  tally: Any = None  # a Tally


def apply_mask(param: Array, mask: Any, is_packed: bool = False) -> Array:
  """Select the kept weights; the others become exactly +0.0.

  Selecting, not multiplying: NaN and infinity vanish under the mask, kept
  weights keep their bits, and the dtype stays.
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
def masked_forward(param: Array, mask: Array, reach: Array | None) -> Array:
  """Return the masked weights; the gradient passes to those in `reach`.

  Args:
    param: the weights.
    mask: uint8, the weights that the forward pass sees.
    reach: uint8, the weights that the gradient reaches; None means all, the
      straight-through estimator.

  Returns:
    The weights, +0.0 where the mask is 0.
  """
  del reach
  return apply_mask(param, mask)


masked_forward.defvjp(
  lambda param, mask, reach: (apply_mask(param, mask), reach),
  lambda reach, cotangent: (apply_mask(cotangent, reach), None, None),
)


def check_fit(
  mask: Any, shape: tuple[int, ...], is_packed: bool, name: str = ""
) -> None:
  """Raise if a mask cannot belong to a parameter of this shape."""
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
  """Return the ones of a mask, packed or not, as uint32."""
  return jnp.sum(jax.lax.population_count(mask), dtype=jnp.uint32)


def replace_masks(
  view: _leaves.Prunable,
  state: SparseState,
  masks: list[Array],
  finite: Any,
  shrink: bool = False,
) -> SparseState:
  """Return the state with new masks, the old one where scores are not finite.

  Args:
    view: the prunable leaves.
    state: the state before.
    masks: the new masks of the prunable leaves.
    finite: bool per leaf, whether all scores it was selected by are finite.
      Refused updates are counted in `skipped`.
    shrink: also keep a mask that has fewer ones than the new one.

  Returns:
    The state, its other fields unchanged.
  """
  if not masks:
    return state
  stored = jax.tree.leaves(view.store(masks))
  old = jax.tree.leaves(state.masks)
  finite = [finite[i] for i in range(len(masks))]
  kept = []
  for ok, mask, before in zip(finite, stored, old, strict=True):
    if shrink:
      ok &= count_ones(mask) <= count_ones(before)
    kept.append(jnp.where(ok, mask, before))
  skipped = state.skipped
  if skipped is not None:
    skipped = skipped + (1 - jnp.stack(finite).astype(jnp.int32))
  return state._replace(masks=view.put(None, kept), skipped=skipped)


def new_tally(leaves: list[Any], masks: list[Any], tracked: bool) -> Tally:
  """Return the counts before the first update."""
  size = jnp.asarray(np.array([leaf.size for leaf in leaves], np.uint32))
  kept = jnp.stack([count_ones(mask) for mask in masks])
  # Buffers of their own: a state that is donated may hold none twice.
  grown, dropped, reset = (jnp.zeros_like(kept) for _ in range(3))
  explored = jnp.copy(kept) if tracked else None
  return Tally(size, kept, grown, dropped, reset, explored)


def count_changes(
  old: SparseState, new: SparseState, fresh: bool
) -> SparseState:
  """Return the new state with its tally, if its masks are not the old ones.

  Args:
    old: the state before a mask update.
    new: the state after it.
    fresh: whether grown weights get fresh optimizer moments.
  """
  before, after = jax.tree.leaves(old.masks), jax.tree.leaves(new.masks)
  same = all(a is b for a, b in zip(before, after, strict=True))
  if old.tally is None or same:
    return new
  if new.explored is not None:
    union = jax.tree.map(jnp.bitwise_or, new.explored, new.masks)
    new = new._replace(explored=union)
  seen = [count_ones(mask) for mask in jax.tree.leaves(new.explored)]
  kept, grown = jnp.stack(list(map(_kept_and_grown, before, after)), 1)
  return new._replace(
    tally=old.tally._replace(
      kept=kept,
      grown=grown,
      dropped=old.tally.kept + grown - kept,
      reset=grown if fresh else old.tally.reset,
      explored=jnp.stack(seen) if seen else None,
    )
  )


@jax.jit
def _kept_and_grown(old: Array, new: Array) -> Array:
  # On bits and on bytes of 0 and 1 alike.
  ones = [jax.lax.population_count(x) for x in (new, new & ~old)]
  values = [x.astype(jnp.uint32) for x in ones]
  # One reduction of two operands, the rows first: XLA's CPU backend vectorizes
  # it as it stands and threads share it, while it writes the operand of a long
  # reduction of one operand to memory first.
  add = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]
  last = old.ndim - 1
  for axes in ((last,), tuple(range(last))):
    if old.ndim and axes:
      values = jax.lax.reduce(values, [np.uint32(0)] * 2, add, axes)
  return jnp.stack(values)


def find_state(opt_state: PyTree) -> SparseState:
  """Return the one `SparseState` inside an optimizer state."""
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
  """Raise if a seed is no int and no key, without starting a backend."""
  dtype = getattr(seed, "dtype", None)
  is_key = dtype is not None and (
    jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32
  )
  if not is_key and (isinstance(seed, bool) or not isinstance(seed, int)):
    raise ValueError(
      f"rng_seed={seed!r} must be an integer or a jax.random key"
    )


def params_key(params: PyTree) -> Array:
  """Derive key data from the parameters, so that vmapped seeds draw apart.

  Integer sums wrap around in any order alike: the key does not depend on how
  the parameters are sharded.
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
  """Raise outside `jit` if scores hold NaN, naming path and count."""
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
  """Return a hashable image of a configuration value, equal iff it is."""
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
