"""SparseSwaps: exchange a kept and a removed weight while the error falls."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training._pattern import Pattern
from jaxpruner.post_training.solvers import wanda
from jaxpruner.post_training.solvers.table import Solver
from jaxpruner.sparsity_types import NByM, Unstructured

ROUNDS = 100  # swaps per output at most
_ELEMENTS = 1 << 24  # of the table of all swaps, for outputs solved at once


def solve(
  w: jax.Array, statistics: Any, sparsity: float, pattern: Pattern
) -> tuple[jax.Array, jax.Array]:
  """Start from Wanda's mask; swap the best pair of each output, repeatedly.

  With second moments G and removed weights r (w where the mask is 0, else 0),
  an output loses rᵀ G r. Removing kept i and restoring removed j changes it by
  2 wᵢ (Gr)ᵢ + wᵢ² Gᵢᵢ − 2 wⱼ (Gr)ⱼ + wⱼ² Gⱼⱼ − 2 wᵢ wⱼ Gᵢⱼ, so the best pair is
  found exactly, and the error never rises (SparseSwaps, Zimmer et al., 2025).
  N:M swaps within a group. Kept weights keep their values.
  """
  pattern.refuse_other("sparseswaps", Unstructured, NByM)
  _, mask = wanda.solve(w, statistics, sparsity, pattern)
  inputs, outputs = w.shape[1:]
  step = max(1, min(outputs, _ELEMENTS // inputs**2))
  masks = []
  for g in range(len(w)):
    parts = []
    for start in range(0, outputs, step):
      at = slice(start, start + step)
      parts.append(
        _swap(
          w[g, :, at].T, mask[g, :, at].T, statistics.gram[g], pattern.m, ROUNDS
        )
      )
    masks.append(jnp.concatenate(parts).T)
  new = jnp.stack(masks)
  return jnp.where(new, w, 0), new


@functools.partial(jax.jit, static_argnums=(3, 4))
def _swap(
  w: jax.Array, mask: jax.Array, gram: jax.Array, m: int, rounds: int
) -> jax.Array:
  """Swap within rows of (outputs, inputs) until nothing falls."""
  gram = gram.astype(jnp.float32)
  diagonal = jnp.diagonal(gram)
  size = w.shape[1]
  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  # Below rounding, a gain is noise, and swaps could go around in circles.
  floor = 1e-6 * jnp.sum(w * product(w, gram), axis=1)
  rows = np.arange(size)
  apart = (rows[:, None] // m != rows // m) if m else np.zeros((1, 1), bool)

  def one(state):
    i, mask, _ = state
    removed = jnp.where(mask, 0, w)
    pull = product(removed, gram)
    square = w**2 * diagonal
    drop = jnp.where(mask, 2 * w * pull + square, jnp.inf)
    grow = jnp.where(mask, jnp.inf, square - 2 * w * pull)
    cross = 2 * w[:, :, None] * gram * w[:, None, :]
    change = drop[:, :, None] + grow[:, None, :] - cross
    change = jnp.where(apart, jnp.inf, change).reshape(len(w), -1)
    best = jnp.argmin(change, axis=1)
    falls = jnp.take_along_axis(change, best[:, None], 1)[:, 0] < -floor
    out, into = best // size, best % size
    each = jnp.arange(len(w))
    new = mask.at[each, out].set(jnp.where(falls, 0, mask[each, out]))
    new = new.at[each, into].set(jnp.where(falls, 1, new[each, into]))
    return i + 1, new, falls.any()

  going = lambda state: (state[0] < rounds) & state[2]
  return jax.lax.while_loop(going, one, (0, mask, True))[1]


SOLVER = Solver(solve, needs="gram")
