"""SparseGPT that rounds to int8 as it prunes: one pass, one error feedback."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpruner import mask_calculator
from jaxpruner.post_training._pattern import FREE, Pattern
from jaxpruner.post_training.solvers import per_group, sparsegpt
from jaxpruner.post_training.solvers.table import Solver
from jaxpruner.sparse._int8 import GROUP
from jaxpruner.sparsity_types import NByM, Unstructured


def prune(
  w: Array,
  gram: Array,
  sparsity: float,
  pattern: Pattern = FREE,
  damping: float = 0.01,
) -> tuple[Array, Array]:
  """Remove weights and round the others to int8; both errors are corrected.

  SparseGPT's pass with panels of 64 inputs, the group that shares a scale in
  `sparse.Int8` and in the layout `int8`. When a panel is reached its mask is
  chosen; pruning it gives the largest weight of each output, and so the scale.
  Then each input is rounded when it is visited, and what removal and rounding
  changed is spread over the inputs that follow (Frantar & Alistarh,
  "SparseGPT", 2023, section 3.5). Within an N:M panel all groups
  are chosen at once.

  The largest weight becomes ±127 scales, although earlier rounding moved it a
  little: so packing finds the same scale, and rounds nothing a second time.

  Args:
    w: (inputs, outputs), float32.
    gram: (inputs, inputs), the mean of x xᵀ.
    sparsity: fraction removed.
    pattern: shape of the mask: single weights, or N:M where M divides 64.
    damping: fraction of the mean diagonal added to the Hessian.

  Returns:
    `(w, mask)`: weights are codes from -127 to 127 times a bfloat16 scale.
  """
  pattern.refuse_other("sparsegpt_int8", Unstructured, NByM)
  if pattern.m and GROUP % pattern.m:
    raise ValueError(
      f"sparsegpt_int8 needs {pattern.n}:{pattern.m} groups within the {GROUP} "
      f"inputs of a scale; choose an M that divides {GROUP}"
    )
  inputs = len(w)
  factor = sparsegpt.inverse_factor(gram, damping)
  if not bool(jnp.isfinite(factor[0, -1]) & jnp.isfinite(factor[-1, -1])):
    raise ValueError(
      f"the second moment of {inputs} inputs is not positive definite in "
      f"float32; raise damping={damping} or calibrate on more batches"
    )
  w = jnp.where(jnp.diagonal(gram)[:, None] == 0, 0, w).astype(jnp.float32)
  errors = jnp.zeros_like(w)
  mask = jnp.ones(w.shape, jnp.uint8)
  counts = sparsegpt._counts(pattern, (inputs, w.shape[1]), GROUP, sparsity)
  for i, start in enumerate(range(0, inputs, GROUP)):
    size = min(GROUP, inputs - start)
    # Powers of two: a handful of compilations, not one per panel.
    seen = min(inputs, 1 << max(start - 1, 0).bit_length()) if start else 0
    panel, inner = sparsegpt._reach(size, seen, w, errors, factor, start)
    if pattern.m:
      scores = jnp.square(panel / jnp.diagonal(inner)[:, None])
      chosen = mask_calculator.n_by_m_mask(scores, pattern.n, pattern.m, axis=0)
    else:
      chosen = sparsegpt._choose(pattern, panel, inner, counts[i])
    new, wrong = _round(panel, inner, chosen)
    w = lax.dynamic_update_slice_in_dim(w, new, start, 0)
    errors = lax.dynamic_update_slice_in_dim(errors, wrong, start, 0)
    chosen = chosen.astype(jnp.uint8)
    mask = lax.dynamic_update_slice_in_dim(mask, chosen, start, 0)
  return w, mask


@jax.jit
def _round(panel: Array, factor: Array, mask: Array) -> tuple[Array, Array]:
  """Prune a panel, then again with rounding; return weights and errors."""
  kept = mask != 0
  rows = jnp.arange(len(panel))[:, None]

  def walk(value):
    """Visit the inputs one by one; each takes the value it is given."""

    def step(r, carry):
      w, errors = carry
      new = jnp.where(kept[r], value(r, w[r]), 0)
      wrong = (w[r] - new) / factor[r, r]
      w = w - jnp.where(rows > r, factor[r][:, None] * wrong, 0)
      return w.at[r].set(new), errors.at[r].set(wrong)

    return lax.fori_loop(0, len(panel), step, (panel, jnp.zeros_like(panel)))

  # Removal moves the kept weights, so scales are known only behind it.
  alone, _ = walk(lambda _, now: now)
  sizes = jnp.abs(alone)
  scale = (sizes.max(0) / 127).astype(jnp.bfloat16).astype(jnp.float32)
  largest, signs = jnp.argmax(sizes, 0), jnp.sign(alone)

  def rounded(r, now):
    code = jnp.rint(now / jnp.where(scale > 0, scale, 1))
    code = jnp.where(largest == r, 127 * signs[r], jnp.clip(code, -127, 127))
    return code * scale

  return walk(rounded)


def solve(
  w: Array, statistics: Any, sparsity: float, pattern: Pattern, damping: float
) -> tuple[Array, Array]:
  """Prune and round every group of a (groups, inputs, outputs) weight."""
  one = lambda w, gram: prune(w, gram, sparsity, pattern, damping)
  return per_group.stack(one, w, statistics)


SOLVER = Solver(solve, needs="gram")
