"""Select masks by counting: everything that knows how a mask is found.

The door is `select`: scores and counts in, a `Selection` out. Scores may be
arrays or expressions (`defer`, `apply`), which are never stored.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxpruner.engine import warm_start
from jaxpruner.engine.conditional import run_if
from jaxpruner.engine.expression import (
  ScoreExpr,
  Scores,
  apply,
  defer,
  value,
)


class Selection(NamedTuple):
  """What a selection found.

  Attributes:
    masks: uint8 arrays shaped as the scores, 1 = kept.
    finite: bool [leaves]; whether all scores of a leaf are finite.
    hint: float32 [leaves, 3]; where the thresholds were and how they moved, for
      the `hint` of the next selection of the same leaves. None unless a hint
      was given.
  """

  masks: list[Array]
  finite: Array
  hint: Array | None


def select(
  scores: Sequence[Scores],
  keep: Any,
  *,
  together: bool = False,
  hint: Array | None = None,
  among: Sequence[Array] | None = None,
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
    hint: `new_hint(number of leaves)`, or the hint of the selection before.
    among: masks shaped as the scores; where they are 0, scores rank below all
      others (below NaN too) and do not count for `finite`.

  Returns:
    A `Selection`.
  """
  from jaxpruner import mask_calculator
  from jaxpruner.engine import lazy

  given = scores
  if among is not None:
    below = lambda s, a: jnp.where(a > 0, s, jnp.asarray(-jnp.inf, s.dtype))
    scores = [apply(below, s, a) for s, a in zip(scores, among, strict=True)]
  entries: list[Any] = []
  for row, score in enumerate(scores):
    expression = isinstance(score, ScoreExpr)
    score = score if expression else jnp.asarray(score)
    entry = lazy.Lazy(lambda s=score: value(s), score.shape)
    if hint is not None:
      entry.trail = hint[row]
    entries.append(entry)
  masks = mask_calculator.topk_masks(entries, keep, together=together)
  finite = [lazy.finite(entry) for entry in entries]
  if among is not None:
    known = lambda s, a: jnp.where(a > 0, s, jnp.zeros_like(s))
    finite = [
      all_finite(apply(known, s, a)) for s, a in zip(given, among, strict=True)
    ]
  trails = [entry.trail for entry in entries]
  return Selection(
    masks,
    jnp.stack(finite) if finite else jnp.ones(0, jnp.bool_),
    None if hint is None else jnp.stack(trails),
  )


def all_finite(scores: Scores) -> Array:
  """Return whether all scores are finite, by a pass over them."""
  from jaxpruner.engine import search

  return search.odd(value(scores)) == 0


new_hint = warm_start.new

__all__ = [
  "ScoreExpr",
  "Scores",
  "Selection",
  "all_finite",
  "apply",
  "defer",
  "new_hint",
  "run_if",
  "select",
  "value",
]
