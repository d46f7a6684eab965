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
from jaxtyping import Bool, UInt8

from jaxpruner.engine import counting, order, search, warm_start
from jaxpruner.engine.dispatch import tell_if_sharded
from jaxpruner.engine.expression import Scores, apply, value
from jaxpruner.engine.leaves import Group, PerSegment
from jaxpruner.engine.warm_start import Hint

_LARGEST = (1 << 32) - 1


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
  hint: Hint | None


def select(
  scores: Sequence[Scores],
  keep: Any,
  *,
  together: bool = False,
  hint: Hint | None = None,
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
  counts: Any = keep
  if not isinstance(keep, Array | np.ndarray):
    counts = [keep] if together else list(keep)
    if all(isinstance(k, int | np.integer) for k in counts):
      counts = np.clip(np.array(counts, np.int64), 0, _LARGEST).astype(
        np.uint32
      )
  arrays = jax.tree.leaves((list(scores), hint))
  if any(isinstance(x, jax.core.Tracer) for x in arrays):
    return _select(list(scores), counts, hint, together)
  # Outside `jit` there is nothing to fuse with: expressions become arrays, and
  # all that follows is one compiled function.
  return _select_jitted([value(s) for s in scores], counts, hint, together)


def _select(
  scores: list[Scores], keep: Any, hint: Hint | None, together: bool
) -> Selection:
  if not scores:
    return Selection([], jnp.ones(0, jnp.bool_), hint)
  # Thresholds of floats are extrapolated; floats of all widths are floats of
  # the widest, exactly.
  are_floats = all(jnp.issubdtype(s.dtype, jnp.floating) for s in scores)
  near = hint if are_floats and not together else None
  leaves = _ranked(scores, together or near is not None)
  leaves, keep, near = lax.stop_gradient((leaves, keep, near))
  group = Group(leaves, together)
  counts = _counts_of(group, keep)
  run: Callable[..., Any] = lambda is_sharded, leaves, keep, near: (
    counting.find_thresholds(Group(leaves, together), keep, near, is_sharded)
  )
  key = order.search_dtype(group.key_dtype)
  shapes = [(counts.shape, dtype) for dtype in (key, jnp.uint32, jnp.bool_)]
  level, cut, finite = tell_if_sharded(run, shapes, leaves, counts, near)
  if together:
    finite = jnp.stack([all_finite(s) for s in scores])
  if near is not None:
    hint = warm_start.follow(near, level, leaves[0].dtype)
  return Selection(group.masks(level, cut), finite, hint)


_select_jitted = jax.jit(_select, static_argnums=3)


def _ranked(scores: list[Scores], alike: bool) -> list[Scores]:
  """Return the scores in the dtypes in which they are ranked.

  Args:
    scores: the scores of each leaf.
    alike: whether all are ranked in one dtype.
  """
  dtypes: list[Any] = [jnp.dtype(score.dtype) for score in scores]
  for i, dtype in enumerate(dtypes):
    if jnp.issubdtype(dtype, jnp.complexfloating):
      raise ValueError(f"scores of dtype {dtype} have no order: use jnp.abs")
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1:
      dtypes[i] = jnp.dtype(jnp.bfloat16)
  if alike:
    dtypes = [jnp.dtype(jnp.result_type(*dtypes))] * len(scores)
  return [
    s if s.dtype == dtype else apply(lambda x, t=dtype: x.astype(t), s)
    for s, dtype in zip(scores, dtypes, strict=True)
  ]


def _counts_of(group: Group, keep: Any) -> PerSegment:
  """Return counts as uint32, from 0 to the size of the segment."""
  if int(group.segment_sizes.max()) > _LARGEST:
    raise ValueError(
      f"scores of shapes {[leaf.shape for leaf in group.leaves]} have 2**32 "
      "elements or more in one ranking; rank them in parts"
    )
  parts: list[Any] = keep if isinstance(keep, list) else [keep]
  clipped = [jnp.clip(jnp.asarray(k), 0).astype(jnp.uint32) for k in parts]
  counts = jnp.concatenate([k.reshape(-1) for k in clipped])
  return jnp.minimum(counts, group.segment_sizes.astype(np.uint32))


def all_finite(*scores: Scores) -> Bool[Array, ""]:
  """Return whether all scores of one leaf are finite, by a pass over them."""
  finite = [jnp.isfinite(value(s)) for s in scores]
  return search.count_true(~functools.reduce(jnp.logical_and, finite)) == 0
