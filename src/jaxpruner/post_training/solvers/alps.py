"""Least squares over a sparse set: refinement of kept weights, and ADMM."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpruner.post_training._pattern import FREE, Pattern
from jaxpruner.post_training.solvers import per_group, sparsegpt
from jaxpruner.post_training.solvers.table import Solver

_dot = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnums=(4, 5))
def refine(
  w: Array,
  mask: Array,
  dense: Array,
  gram: Array,
  damping: float = 0.01,
  steps: int = 20,
) -> Array:
  """Re-fit the kept weights to the dense layer's output, mask fixed.

  Minimises ‖x w - x w_dense‖² (damped) over the kept weights by conjugate
  gradients with a diagonal preconditioner, all outputs at once, each with its
  own step lengths (the last step of Meng et al., "ALPS", 2024). The error never
  rises.

  Args:
    w: (inputs, outputs), where to start; zero where masked.
    mask: 1 = kept.
    dense: the weights before pruning.
    gram: (inputs, inputs), the mean of x xᵀ.
    damping: fraction of the mean diagonal added to the Hessian.
    steps: iterations; each costs inputs² × outputs multiply-adds.

  Returns:
    The refined weights, zero where masked.
  """
  hessian = sparsegpt.damped(gram, damping)
  scale = 1 / jnp.diagonal(hessian)[:, None]
  keep = mask != 0
  only = lambda x: jnp.where(keep, x, 0)
  total = lambda a, b: jnp.sum(a * b, axis=0, keepdims=True)
  ratio = lambda a, b: jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)
  left = only(_dot(hessian, dense - w))
  eased = scale * left
  first = total(left, eased)
  # Below the rounding of its first value a residual is noise, and steps along
  # it lead away: an output that has converged rests.
  least = first * jnp.finfo(first.dtype).eps ** 2

  def step(_, carry):
    w, left, direction, size = carry
    pushed = only(_dot(hessian, direction))
    length = ratio(size, total(direction, pushed))
    length = jnp.where(size > least, length, 0)
    w, left = w + length * direction, left - length * pushed
    eased = scale * left
    new = total(left, eased)
    return w, left, eased + ratio(new, size) * direction, new

  start = only(w), left, eased, first
  return lax.fori_loop(0, steps, step, start)[0]


class _State(NamedTuple):
  sparse: Array
  dual: Array
  mask: Array
  penalty: Array
  step: Array
  changed: Array


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def prune(
  w: Array,
  gram: Array,
  sparsity: float,
  pattern: Pattern = FREE,
  damping: float = 0.01,
  steps: int = 300,
  refinement: int = 20,
) -> tuple[Array, Array]:
  """Choose mask and weights of a layer together, by ADMM.

  Alternates a ridge regression towards the sparse weights with a projection
  onto the sparse set; the penalty that ties them grows as the mask settles,
  until it stays (Meng et al., "ALPS", 2024). The inputs are scaled to unit
  second moment, the penalty's eigenproblem is solved once, and the kept
  weights are re-fitted at the end.

  Cost: an eigendecomposition of inputs², then per step 2 × inputs² × outputs
  multiply-adds: an order of magnitude beyond SparseGPT.

  Args:
    w: (inputs, outputs).
    gram: (inputs, inputs), the mean of x xᵀ.
    sparsity: fraction removed.
    pattern: shape of the mask.
    damping: fraction of the mean diagonal added to the Hessian.
    steps: largest number of ADMM steps.
    refinement: conjugate-gradient steps at the end.

  Returns:
    `(w, mask)`.
  """
  hessian = sparsegpt.damped(gram, damping)
  norm = jnp.sqrt(jnp.diagonal(hessian))[:, None]
  values, vectors = jnp.linalg.eigh(hessian / norm / norm.T)
  dense = w * norm
  pull = _dot(vectors, values[:, None] * _dot(vectors.T, dense))
  choose = lambda x: pattern.mask(jnp.square(x)[None], sparsity)[0]
  kept = jnp.maximum(1, w.size * (1 - sparsity))

  def iterate(s: _State) -> _State:
    goal = pull - s.dual + s.penalty * s.sparse
    near = _dot(vectors.T, goal) / (values[:, None] + s.penalty)
    full = _dot(vectors, near)
    shifted = full + s.dual / s.penalty
    mask = choose(shifted)
    sparse = jnp.where(mask != 0, shifted, 0)
    dual = s.dual + s.penalty * (full - sparse)
    third = (s.step % 3) == 2
    # Counted over three steps, the rhythm in which the penalty grows.
    moved = s.changed + jnp.sum(mask != s.mask, dtype=jnp.float32) / 2
    share = moved / kept
    growth = jnp.where(share > 0.1, 1.3, jnp.where(share > 0.005, 1.2, 1.1))
    penalty = jnp.where(third, s.penalty * growth, s.penalty)
    settled = third & (moved == 0)
    changed = jnp.where(third, jnp.where(settled, -1.0, 0.0), moved)
    return _State(sparse, dual, mask, penalty, s.step + 1, changed)

  first = choose(dense)
  start = _State(
    jnp.where(first != 0, dense, 0),
    jnp.zeros_like(dense),
    first,
    jnp.float32(0.1),
    jnp.int32(0),
    jnp.float32(0),
  )
  end = lax.while_loop(
    lambda s: (s.step < steps) & (s.changed >= 0), iterate, start
  )
  found = end.sparse / norm
  return refine(found, end.mask, w, gram, damping, refinement), end.mask


def solve(
  w: Array, statistics: Any, sparsity: float, pattern: Pattern, damping: float
) -> tuple[Array, Array]:
  """Prune every group of a (groups, inputs, outputs) weight."""
  one = lambda w, gram: prune(w, gram, sparsity, pattern, damping)
  return per_group.stack(one, w, statistics)


SOLVER = Solver(solve, needs="gram")
