"""DSnoT: exchange weights of a mask until the mean output is as it was."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.post_training._pattern import Pattern
from jaxpruner.post_training.solvers import wanda
from jaxpruner.post_training.solvers.table import Solver
from jaxpruner.sparsity_types import NByM, Unstructured

ROUNDS = 50  # exchanges per output at most
THRESHOLD = 0.1  # an output whose mean is off by less is left alone


def solve(
  w: jax.Array, statistics: Any, sparsity: float, pattern: Pattern
) -> tuple[jax.Array, jax.Array]:
  """Start from Wanda's mask; exchange a weight of each output, repeatedly.

  With e the change of an output's mean, −Σ w E[x] over its removed weights, the
  weight that comes back is the removed one of largest −sign(e) w E[x] / Var(x).
  The weight that goes is, among the kept ones with −sign(e) w E[x] < 0, whose
  removal moves the mean the right way, that of smallest |w| ‖x‖. An output is
  done after 50 exchanges, or when |e| < 0.1 (Zhang et al., "Dynamic Sparse No
  Training", 2024). N:M exchanges within a group, among those where a weight may
  go. Kept weights keep their values.
  """
  pattern.refuse_other("dsnot", Unstructured, NByM)
  _, mask = wanda.solve(w, statistics, sparsity, pattern)
  exchange = jax.vmap(functools.partial(_exchange, pattern.m))
  new = exchange(w, mask, statistics.mean, statistics.square)
  return jnp.where(new, w, 0), new


@functools.partial(jax.jit, static_argnums=0)
def _exchange(
  m: int, w: jax.Array, mask: jax.Array, mean: jax.Array, square: jax.Array
) -> jax.Array:
  """Exchange weights of (inputs, outputs), all outputs at once."""
  gain = w * mean[:, None]
  variance = jnp.maximum(square - mean**2, 1e-8 * square + 1e-30)[:, None]
  size = jnp.abs(w) * jnp.sqrt(square)[:, None]
  each = jnp.arange(w.shape[1])
  m = m or len(w)  # single weights: all inputs are one group
  group = jnp.arange(len(w)) // m

  def one(_, mask):
    off = -jnp.sum(jnp.where(mask, 0, gain), axis=0)
    way = -jnp.sign(off)
    may_go = (mask != 0) & (way * gain < 0)
    some = jnp.any(may_go.reshape(-1, m, len(each)), axis=1)[group]
    back = jnp.where((mask == 0) & some, way * gain / variance, -jnp.inf)
    into = jnp.argmax(back, axis=0)
    near = group[:, None] == group[into]
    leave = jnp.where(may_go & near, size, jnp.inf)
    out = jnp.argmin(leave, axis=0)
    can = (jnp.abs(off) >= THRESHOLD) & jnp.isfinite(leave[out, each])
    can &= jnp.isfinite(back[into, each])
    put = lambda at, value, mask: mask.at[at, each].set(
      jnp.where(can, jnp.uint8(value), mask[at, each])
    )
    return put(out, 0, put(into, 1, mask))

  return jax.lax.fori_loop(0, ROUNDS, one, mask)


SOLVER = Solver(solve, needs="square")
