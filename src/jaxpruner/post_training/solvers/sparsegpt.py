"""SparseGPT: remove weights and correct the weights not yet visited."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner import mask_calculator
from jaxpruner.post_training import _pattern
from jaxpruner.post_training._pattern import FREE, Pattern
from jaxpruner.post_training.solvers import per_group
from jaxpruner.post_training.solvers.table import Solver
from jaxpruner.sparsity_types import Block, NByM, Unstructured

_EXACT = lax.Precision.HIGHEST
_ROWS = 16  # eliminated by one fused loop
_WIDE = 128  # outputs; below, that loop takes longer to compile than it saves


def damped(gram: Array, damping: float) -> Array:
  """Return a second moment that can be inverted.

  Inputs that never fire get a unit diagonal, and `damping` times the mean of
  the diagonal is added to all of it.
  """
  diagonal = jnp.diagonal(gram)
  diagonal = jnp.where(diagonal == 0, 1, diagonal)
  diagonal = diagonal + damping * jnp.mean(diagonal)
  return jnp.fill_diagonal(gram, diagonal, inplace=False)


@functools.partial(jax.jit, static_argnums=1)
def inverse_factor(gram: Array, damping: float) -> Array:
  """Return the upper triangular U with UᵀU = (gram + damping)⁻¹.

  The papers' three steps (factorise, invert, factorise again) take one
  factorisation and one triangular inverse if the matrix is read backwards:
  with H = R Rᵀ, R upper triangular, U is R⁻¹.
  """
  backwards = damped(gram, damping)[::-1, ::-1]
  upper = jnp.linalg.cholesky(backwards)[::-1, ::-1]
  return jax.scipy.linalg.solve_triangular(upper, jnp.eye(len(gram)))


def prune(
  w: Array,
  gram: Array,
  sparsity: float,
  pattern: Pattern = FREE,
  damping: float = 0.01,
  block_size: int = 128,
) -> tuple[Array, Array]:
  """Remove the weights of smallest w² / U²ᵢᵢ; correct the others for the error.

  Inputs are visited in order, in panels of `block_size`. When a panel is
  reached its mask is chosen by the error that each removal would cause (for
  N:M, group by group); each removal's error is then spread over the inputs
  that follow, with weights from the Cholesky factor of the inverse Hessian.
  What later panels owe to earlier ones is applied at once, as one matrix
  product, when they are reached (Frantar & Alistarh, "SparseGPT", 2023).

  Cost: a Cholesky factorisation and a triangular inverse of inputs², and
  inputs² × outputs multiply-adds.

  Args:
    w: (inputs, outputs), float32.
    gram: (inputs, inputs), the mean of x xᵀ.
    sparsity: fraction removed.
    pattern: shape of the mask.
    damping: fraction of the mean diagonal added to the Hessian.
    block_size: inputs per panel.

  Returns:
    `(w, mask)`.
  """
  pattern.refuse_other("sparsegpt", Unstructured, NByM, Block)
  inputs, outputs = w.shape
  unit = math.lcm(pattern.m or 1, pattern.block[0] if pattern.block else 1)
  block = min(max(unit, block_size // unit * unit), inputs)
  factor = inverse_factor(gram, damping)
  if not bool(jnp.isfinite(factor[0, -1]) & jnp.isfinite(factor[-1, -1])):
    raise ValueError(
      f"the second moment of {inputs} inputs is not positive definite in "
      f"float32; raise damping={damping} or calibrate on more batches"
    )
  w = jnp.where(jnp.diagonal(gram)[:, None] == 0, 0, w).astype(jnp.float32)
  errors = jnp.zeros_like(w)
  mask = jnp.ones(w.shape, jnp.uint8)
  counts = _counts(pattern, (inputs, outputs), block, sparsity)
  for i, start in enumerate(range(0, inputs, block)):
    size = min(block, inputs - start)
    # Powers of two: a handful of compilations, not one per panel.
    seen = min(inputs, 1 << max(start - 1, 0).bit_length()) if start else 0
    w, errors, mask = _panel(
      pattern, size, seen, w, errors, mask, factor, start, counts[i]
    )
  return w, mask


def _counts(
  pattern: Pattern, shape: tuple[int, int], block: int, sparsity: float
) -> np.ndarray:
  """Return how many units each panel keeps; together exactly the request."""
  inputs, outputs = shape
  total = _pattern.units(pattern, shape)
  kept = int(mask_calculator.num_ones(total, sparsity))
  ends = [
    _pattern.units(pattern, (min(s + block, inputs), outputs))
    for s in range(0, inputs, block)
  ]
  return np.diff([0, *((kept * end + total // 2) // total for end in ends)])


def _panel(pattern, size, seen, w, errors, mask, factor, start, ones):
  """Prune `size` inputs from `start`; of `errors` the first `seen` count."""
  # Three small programs: each is compiled for the few shapes it really has.
  panel, inner = _reach(size, seen, w, errors, factor, start)
  chosen = None if pattern.m else _choose(pattern, panel, inner, ones)
  return _finish(pattern, w, errors, mask, panel, inner, chosen, start)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _reach(size, seen, w, errors, factor, start) -> tuple[Array, Array]:
  """Apply the corrections of the preceding panels to a panel."""
  panel = lax.dynamic_slice_in_dim(w, start, size, 0)
  if seen:
    owed = lax.dynamic_slice_in_dim(factor[:seen], start, size, 1)
    panel = panel - jnp.dot(owed.T, errors[:seen], precision=_EXACT)
  return panel, lax.dynamic_slice(factor, (start, start), (size, size))


@functools.partial(jax.jit, static_argnums=0)
def _choose(pattern: Pattern, w: Array, factor: Array, ones: Any) -> Array:
  scores = jnp.square(w / jnp.diagonal(factor)[:, None])
  return _pattern.panel_units(pattern, scores, ones)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def _finish(pattern, w, errors, mask, panel, factor, chosen, start):
  put = functools.partial(
    lax.dynamic_update_slice_in_dim, start_index=start, axis=0
  )
  new, chosen, wrong = _eliminate(pattern, panel, factor, chosen)
  return put(w, new), put(errors, wrong), put(mask, chosen)


def _eliminate(
  pattern: Pattern, w: Array, factor: Array, mask: Array | None
) -> tuple[Array, Array, Array]:
  """Go through a panel's inputs; N:M groups are chosen when reached."""
  size = len(w)
  diagonal = jnp.diagonal(factor)[:, None]
  unit = pattern.m or 1
  most = max(unit, _ROWS if w.shape[1] >= _WIDE else _ROWS // 4)
  rows = max(r for r in range(unit, most + 1, unit) if size % r == 0)
  if mask is None:
    mask = jnp.ones(w.shape, jnp.uint8)

  def some(i, carry):
    w, mask, errors = carry
    start = i * rows
    cut = functools.partial(
      lax.dynamic_slice_in_dim, start_index=start, slice_size=rows
    )
    owed = cut(factor, axis=1)
    now = cut(w) - jnp.dot(owed.T, errors, precision=_EXACT)
    inner, scale = cut(owed), cut(diagonal)
    kept = cut(mask)
    left, groups, wrong = list(now), [], []
    for r in range(rows):
      if pattern.m and r % pattern.m == 0:
        group = slice(r, r + pattern.m)
        scores = jnp.square(jnp.stack(left[group]) / scale[group])
        groups.append(
          mask_calculator.n_by_m_mask(scores, pattern.n, pattern.m, axis=0)
        )
        kept = jnp.concatenate([*groups, kept[r + pattern.m :]])
      keep = kept[r] != 0
      wrong.append(jnp.where(keep, 0, left[r] / inner[r, r]))
      left[r] = jnp.where(keep, left[r], 0)
      for later in range(r + 1, rows):
        left[later] = left[later] - inner[r, later] * wrong[r]
    put = functools.partial(
      lax.dynamic_update_slice_in_dim, start_index=start, axis=0
    )
    return (
      put(w, jnp.stack(left)),
      put(mask, kept),
      put(errors, jnp.stack(wrong)),
    )

  return lax.fori_loop(0, size // rows, some, (w, mask, jnp.zeros_like(w)))


def solve(
  w: Array,
  statistics: Any,
  sparsity: float,
  pattern: Pattern,
  damping: float,
  block_size: int,
) -> tuple[Array, Array]:
  """Prune every group of a (groups, inputs, outputs) weight."""
  one = lambda w, gram: prune(w, gram, sparsity, pattern, damping, block_size)
  return per_group.stack(one, w, statistics)


SOLVER = Solver(solve, needs="gram")
