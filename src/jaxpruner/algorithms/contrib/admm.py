"""ADMM on the loss itself, without a surrogate per layer."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater
from jaxpruner.algorithms import pruners
from jaxpruner.updater import checks


@dataclasses.dataclass(eq=False)
class AdmmPruning(pruners.MagnitudePruning):
  """Tie the weights to a sparse copy, by ADMM (ELSA; Lee et al., 2025).

  Minimises the loss `f(w)` where `w = z` and `z` is sparse. The optimizer takes
  steps on `f(w) + λ/2 ‖w - z + u‖²`. At each update of the schedule `z` becomes
  `w + u` with all but the largest entries set to zero, the nearest point of the
  target sparsity, and `u` grows by `w - z`. So the weights are drawn to the
  sparse set little by little, while the loss sees all of them: `state.masks`
  contains ones until the last update of the schedule. There the mask of `z`
  takes effect, the sparsity is exact, and what follows is training under it.
  The paper weights its projection by Adam's second moment; this one is
  Euclidean. Update often (`update_freq` 32) and end late.

  Attributes:
    penalty: λ; larger is nearer to the sparse set when the mask takes effect.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.AdmmPruning(
    ...   penalty=0.5, scheduler=jaxpruner.sparsity_schedules.
    ...   PolynomialSchedule(1, 0, 4), sparsity_distribution_fn=
    ...   functools.partial(jaxpruner.sparsity_distributions.uniform,
    ...                     sparsity=0.5))
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> state = pruner.init_state(params)
    >>> state = pruner.update_state(state, params, None)
    >>> state.stats["sparse"].tolist(), state.stats["dual"].tolist()
    ([[3.0, 0.0, 0.0, -4.0]], [[0.0, -1.0, 2.0, 0.0]])
    >>> pruner.prepare_gradients(jnp.zeros((1, 4)), state, params).tolist()
    [[0.0, -1.0, 2.0, 0.0]]
  """

  penalty: float = 0.01

  changes: ClassVar[tuple[str, ...]] = ("stats",)
  category: ClassVar[base_updater.Category] = base_updater.Category(
    paper="Lee et al., 2025",
    cost="a dense step; one selection per mask update; two more copies",
  )

  def __post_init__(self):
    super().__post_init__()
    checks.check_number(self, "penalty")

  def init_extra(self, params, masks):
    view = self.view(params)
    wide = [w.astype(jnp.float32) for w in view.leaves]
    zeros = map(jnp.zeros_like, wide)
    return {"sparse": view.store(wide), "dual": view.store(zeros)}

  def _is_over(self, step) -> jax.Array:
    """Return whether the schedule is at its end, where masks take effect."""
    return self.scheduler.get_sparsity_at_step(jnp.float32(1), step) >= 1

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del grads
    size = lambda w, u=0.0: jnp.abs(w.astype(jnp.float32) + u)
    if sparse_state is None:
      return jax.tree.map(size, params)
    scores = jax.tree.map(size, params)
    moved = map(
      size,
      self.view(params).leaves,
      self.view(params).of(sparse_state.stats["dual"], "dual"),
    )
    return self.view(params).put(scores, moved)

  def update_state(self, sparse_state, params, grads, **extra):
    del grads, extra
    view = self.view(params)
    if not view.names:
      return sparse_state
    scores = view.of(self.calculate_scores(params, sparse_state), "scores")
    found = self._select(view, scores, view.targets)
    stats = sparse_state.stats
    old = (view.of(stats[name], name) for name in ("sparse", "dual"))
    sparse, dual = [], []
    for w, mask, z, u in zip(view.leaves, found.masks, *old, strict=True):
      whole = w.astype(jnp.float32) + u
      near = jnp.where(mask, whole, 0)
      fine = jnp.all(jnp.isfinite(whole))  # else the leaf keeps what it has
      sparse.append(jnp.where(fine, near, z))
      dual.append(jnp.where(fine, whole - near, u))
    over = self._is_over(sparse_state.count)
    now = [jnp.where(over, m, jnp.ones_like(m)) for m in found.masks]
    state = self._replace_masks(view, sparse_state, now, found.finite)
    stats = {"sparse": view.store(sparse), "dual": view.store(dual)}
    return state._replace(stats=stats)

  def prepare_gradients(self, grads, state, params):
    grads = super().prepare_gradients(grads, state, params)
    rate = jnp.where(self._is_over(state.count), 0, self.penalty)

    def pull(grad, w, z, u):
      return grad + (rate * (w.astype(jnp.float32) - z + u)).astype(grad.dtype)

    stats = state.stats
    return self.view(params).map(
      pull, grads, params, stats["sparse"], stats["dual"]
    )
