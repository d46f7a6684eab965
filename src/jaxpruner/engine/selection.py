# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Select masks: group leaves, search their thresholds, compare."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, UInt, UInt8

from jaxpruner.engine import local, mesh, order, search, warm_start
from jaxpruner.engine.dispatch import dispatch_on_sharding
from jaxpruner.engine.expression import ScoreExpr, Scores, value
from jaxpruner.engine.leaves import MASK_DTYPE, Group, leaf_of

_MOST = (1 << 32) - 1


class Selection(NamedTuple):
  """What a selection found.

  Attributes:
    masks: uint8 arrays shaped as the scores, 1 = kept.
    finite: bool [leaves]; whether all scores of a leaf are finite.
    hint: float32 [leaves, 3]; where the thresholds were and how they moved, for
      the `hint` of the next selection of the same leaves. None unless a hint
      was given.
  """

  masks: list[UInt8[Array, "..."]]
  finite: Bool[Array, " leaves"]
  hint: Float[Array, "leaves 3"] | None


def select(
  scores: Sequence[Scores],
  keep: Any,
  *,
  together: bool = False,
  hint: Float[Array, "leaves 3"] | None = None,
) -> Selection:
  """Keep the largest scores of each leaf, or of all leaves together.

  Exactly as many ones as asked for; among equal scores the earlier leaf and the
  lower row-major index win; NaN ranks below every number. The masks do not
  depend on the hint, on the device layout, or on `jit`.

  Args:
    scores: one array or `ScoreExpr` per leaf.
    keep: how many to keep, per leaf; with `together` one number for all. Ints,
      int32 scalars, or one int32 array of them.
    together: rank all leaves in one order (global pruning).
    hint: `new_hint(number of leaves)`, or the hint of the selection before; not
      used with `together`.

  Returns:
    A `Selection`.

  >>> select([jnp.array([3.0, 1.0, 3.0, 3.0])], [2]).masks[0].tolist()
  [1, 0, 1, 0]
  """
  if not together and len(keep) != len(scores):
    raise ValueError(
      f"keep (ones) has {len(keep)} counts for {len(scores)} leaves; give one "
      "count per leaf, or together=True for one count over all"
    )
  arrays = jax.tree.leaves(
    [s.inputs if isinstance(s, ScoreExpr) else s for s in scores]
  )
  counts: Any = keep
  if not isinstance(keep, Array | np.ndarray):
    counts = [keep] if together else list(keep)
    if all(isinstance(k, int | np.integer) for k in counts):
      counts = np.clip(np.array(counts, np.int64), 0, _MOST).astype(np.uint32)
  if any(isinstance(x, jax.core.Tracer) for x in (*arrays, hint)):
    given = [s if isinstance(s, ScoreExpr) else jnp.asarray(s) for s in scores]
    return _select_groups(given, counts, hint, together)
  # Outside `jit` there is nothing to fuse with: expressions become arrays, and
  # all that follows is one compiled function.
  return _select_jitted([value(s) for s in scores], counts, hint, together)


def _select_groups(
  scores: list[Scores],
  keep: Any,
  hint: Float[Array, "leaves 3"] | None,
  together: bool,
) -> Selection:
  masks = [jnp.zeros(s.shape, MASK_DTYPE) for s in scores]
  finite = jnp.ones(len(scores), jnp.bool_)
  pairs = [leaf_of(score) for score in scores]
  leaves, inputs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
  if together and leaves:
    common = jnp.result_type(*(leaf.dtype for leaf in leaves))
    leaves = [leaf._replace(dtype=jnp.dtype(common)) for leaf in leaves]
  groups: dict[Any, list[int]] = {}
  for i, leaf in enumerate(leaves):
    if leaf.size:
      groups.setdefault(leaf.dtype, []).append(i)
  for ids in groups.values():
    group = Group(tuple(leaves[i] for i in ids), together)
    is_float = jnp.issubdtype(group.dtype, jnp.floating)
    part = None
    if hint is not None and is_float and not together:
      part = pick(hint, ids)
    found = _select_group(
      group,
      [inputs[i] for i in ids],
      counts_of(group, keep if together else pick(keep, ids)),
      part,
    )
    for i, mask in zip(ids, found.masks, strict=True):
      masks[i] = mask
    if together:
      finite = jnp.stack([all_finite(s) for s in scores])
    elif len(ids) == len(scores):
      finite = found.finite
      hint = found.hint if part is not None else hint
    else:
      finite = finite.at[np.array(ids)].set(found.finite)
      if hint is not None and found.hint is not None:
        hint = hint.at[np.array(ids)].set(found.hint)
  return Selection(masks, finite, hint)


_select_jitted = jax.jit(_select_groups, static_argnums=3)


def pick(counts: Sequence[Any] | Array, ids: Sequence[int]) -> Any:
  """Return the counts at some positions.

  An array is indexed as a whole, because one kernel per entry would cost more.

  Args:
    counts: a list of counts, or one array of them.
    ids: the positions to return.

  Returns:
    A list if `counts` is a list, else an array.

  Example:
    >>> from jaxpruner import mask_calculator
    >>> mask_calculator.pick([5, 6, 7], [0, 2])
    [5, 7]
  """
  if len(ids) == len(counts):
    return counts
  if isinstance(counts, Array | np.ndarray):
    return counts[np.array(ids, np.int32)]
  return [counts[i] for i in ids]


def counts_of(group: Group, keep: Any) -> UInt[Array, " segments"]:
  """Return counts as uint32, from 0 to the size of the segment."""
  if int(group.segment_sizes.max()) >= 1 << 32:
    raise ValueError(
      "scores ranked together have 2**32 elements or more; rank them in parts"
    )
  word = lambda k: jnp.clip(jnp.asarray(k), 0).astype(jnp.uint32)
  if isinstance(keep, list):
    counts = jnp.stack([word(k) for k in keep])
  else:
    counts = word(keep).reshape(-1)
  return jnp.minimum(counts, group.segment_sizes.astype(np.uint32))


class _Task(NamedTuple):
  """A selection without its arrays: hashable, as a primitive's parameter."""

  find: Callable[..., search.Found]
  group: Group

  def __call__(self, inputs: Any, keep: Array, hint: Any) -> list[Array]:
    inputs = [tuple(x) for x in inputs]
    found = self.find(self.group, inputs, keep, hint)
    masks = self.group.masks(inputs, found.level, found.cut)
    return [*masks, found.finite, found.level]


def _select_group(
  group: Group,
  inputs: list[tuple[Array, ...]],
  keep: UInt[Array, " segments"],
  hint: Float[Array, "leaves 3"] | None,
) -> Selection:
  inputs, keep = lax.stop_gradient((inputs, keep))
  struct = jax.ShapeDtypeStruct
  shapes = [struct(leaf.shape, MASK_DTYPE) for leaf in group.leaves]
  shapes.append(struct(keep.shape, jnp.bool_))
  shapes.append(struct(keep.shape, order.search_dtype(group.dtype)))
  *masks, finite, level = dispatch_on_sharding(
    _Task(local.find_thresholds, group),
    _Task(mesh.find_thresholds, group),
    shapes,
    inputs,
    keep,
    hint,
  )
  if hint is not None:
    hint = warm_start.follow(hint, level, group.dtype)
  return Selection(masks, finite, hint)


def all_finite(*scores: Scores) -> Bool[Array, ""]:
  """Return whether all scores of one leaf are finite, by a pass over them."""
  finite = [jnp.isfinite(value(s)) for s in scores]
  return search.count_true(~functools.reduce(jnp.logical_and, finite)) == 0
