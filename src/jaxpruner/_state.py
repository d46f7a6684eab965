"""What an updater carries: its category, its state, and how masks apply."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, mask_calculator
from jaxpruner.engine import search as _selection

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
    needs: what the algorithm reads besides the weights; of "gradients",
      "momentum" (the optimizer's first moment), "loss" (the function, given
      to `bind`), "data", "activations", "random" (it draws).
    paper: who proposed it.
    cost: what it adds to a training step, in words.
  """

  when: str = "during"
  start: str = "dense-to-sparse"
  dynamic: bool = False
  needs: frozenset[str] = frozenset()
  paper: str = ""
  cost: str = ""


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


def unpack_mask(mask: Array, param: Array) -> Array:
  """Return the uint8 mask that packed bits stand for, laid out like `param`."""
  return _leaves.with_auto_axes(
    lambda mask: mask_calculator.unpack_mask(mask, param.shape),
    mask,
    like=param,
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


def new_tally(leaves: list[Any], masks: list[Any], tracked: bool) -> Tally:
  """Return the counts before the first update."""
  size = jnp.asarray(np.array([leaf.size for leaf in leaves], np.uint32))
  kept = jnp.stack([count_ones(mask) for mask in masks])
  # Buffers of their own: a state that is donated may hold none twice.
  grown, dropped, reset = (jnp.zeros_like(kept) for _ in range(3))
  explored = jnp.copy(kept) if tracked else None
  return Tally(size, kept, grown, dropped, reset, explored)


def update_tally(
  tally: Tally, old: list[Any], new: list[Any], seen: list[Any], fresh: bool
) -> Tally:
  """Return the counts of an update from masks to masks."""
  kept, grown = jnp.stack(list(map(_kept_and_grown, old, new)), 1)
  return tally._replace(
    kept=kept,
    grown=grown,
    dropped=tally.kept + grown - kept,
    reset=grown if fresh else tally.reset,
    explored=jnp.stack([count_ones(s) for s in seen]) if seen else None,
  )


@jax.jit
def _kept_and_grown(old: Array, new: Array) -> Array:
  # On bits and on bytes of 0 and 1 alike.
  ones = [jax.lax.population_count(x) for x in (new, new & ~old)]
  ones = [x.astype(jnp.uint32) for x in ones]
  return jnp.stack(_selection.totals(ones))


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


def draw(
  data: Array, salt: Any, leaves: list[Array], names: tuple[_leaves.Names, ...]
) -> list[Array]:
  """Return uniform float32 scores that depend on key, salt and path only."""
  words = _words(data, salt, names)
  return [
    _uniform(_selection.row_from([words], i)[0], leaf)
    for i, leaf in enumerate(leaves)
  ]


@functools.partial(jax.jit, static_argnames="names")
def _words(data: Array, salt: Any, names: tuple[_leaves.Names, ...]) -> Array:
  """Two random words for each leaf."""
  key = jax.random.fold_in(jax.random.wrap_key_data(data), salt)
  paths = jnp.array([_leaves.path_hash(path) for path in names], jnp.uint32)
  keys = jax.vmap(lambda path: jax.random.fold_in(key, path))(paths)
  return jax.random.key_data(keys)


@jax.jit
def _uniform(words: Array, like: Array) -> Array:
  """Random numbers as a cheap function of the index.

  Unlike those of `jax.random`, they can be computed anew in every pass over
  the scores instead of being stored.
  """
  step = words[1] | np.uint32(1)  # odd, so that no two elements share bits
  bits = (_selection.flat_index(like.shape) * step) ^ words[0]
  # Multiplication carries low bits upwards, shifts bring them back.
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
  bits = bits ^ (bits >> np.uint32(16))
  scores = (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)
  return _leaves.shard_like(scores, like)


def refuse_nan(leaves: list[tuple[_leaves.Names, Any]]) -> None:
  """Raise outside `jit` if scores hold NaN, naming path and count."""
  for names, entry in leaves:
    scores: Any = entry() if callable(entry) else entry
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
