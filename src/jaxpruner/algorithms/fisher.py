"""Second-order saliency: what the loss loses to second order."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import _checks, _leaves, base_updater


def second_moments(params, inner_state):
  """Return Adam's running mean of squared gradients per leaf, or `None`s."""
  found = optax.tree_utils.tree_get_all_with_path(inner_state, "nu")
  columns = [_leaves.align(params, tree, "nu") for _, tree in found]
  none = [None] * len(jax.tree.leaves(params))
  return jax.tree.structure(params).unflatten(
    [
      next((leaf for leaf in row if leaf is not None), None)
      for row in zip(none, *columns, strict=True)
    ]
  )


@dataclasses.dataclass(eq=False)
class FisherPruning(base_updater.BaseUpdater):
  """Keep the largest `w² · E[(∂L/∂w)²]` of each leaf (Theis et al., 2018).

  Optimal Brain Damage with the diagonal Fisher information for the Hessian,
  read from the second moment that Adam and its kin keep anyway. An optimizer
  without one, or a first step, offers the squared gradient of the batch.
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    needs=frozenset({"gradients"}),
    paper="LeCun et al., 1990; Theis et al., 2018",
    cost="a dense step; one selection per mask update",
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    inner = None if sparse_state is None else sparse_state.inner_state

    def score(names, weight, grad, moment):
      if grad is None:
        raise ValueError(
          f"{type(self).__name__}: grads hold no entry for params leaf "
          f"{_leaves.join(names)!r}; pass the gradients of all params"
        )
      fisher = jnp.square(grad.astype(jnp.float32))
      if moment is not None:
        moment = moment.astype(jnp.float32)
        fisher = jnp.where(jnp.any(moment > 0), moment, fisher)
      return jnp.square(weight.astype(jnp.float32)) * fisher

    return _leaves.map_masks(
      score, params, grads, second_moments(params, inner), name="grads"
    )


@dataclasses.dataclass(eq=False)
class WoodFisherPruning(base_updater.BaseUpdater):
  """Keep the largest `w² / [F⁻¹]ᵢᵢ` (Singh & Alistarh, 2020).

  Optimal Brain Surgeon with the empirical Fisher `F = λI + 1/N Σ g gᵀ` of the
  last `window` batch gradients, in blocks of `block_size` consecutive weights
  (of any length, as in M-FAC: Woodbury's identity inverts only an N × N
  matrix). `λ` is `damping` times the mean diagonal of the leaf.

  Attributes:
    window: gradients kept, each as large as the parameters.
    block_size: weights in a block of the Fisher matrix.
    damping: λ relative to the mean diagonal.
  """

  window: int = 16
  block_size: int = 64
  damping: float = 0.01

  category: ClassVar[base_updater.Category] = base_updater.Category(
    needs=frozenset({"gradients"}),
    paper="Singh & Alistarh, 2020; Frantar et al., 2021",
    cost="a dense step, `window` gradients in memory; one small inverse per "
    "block and one selection per mask update",
  )

  def __post_init__(self):
    super().__post_init__()
    _checks.check_number(self, "damping")
    for name in ("window", "block_size"):
      _checks.check_number(self, name)
      if not isinstance(getattr(self, name), int):
        raise ValueError(
          f"{type(self).__name__}: {name}={getattr(self, name)!r} must be an "
          "integer"
        )

  def init_stats(self, params, masks):
    return _leaves.map_masks(
      lambda _, p, m: (
        None if m is None else jnp.stack([jnp.zeros_like(p)] * self.window)
      ),
      params,
      masks,
    )

  def observe(self, state, params, grads):
    slot = state.count % self.window
    new = _leaves.map_masks(
      lambda _, p, grad, kept: (
        None if kept is None else kept.at[slot].set(grad.astype(kept.dtype))
      ),
      params,
      grads,
      state.stats,
      name="grads",
    )
    return state._replace(stats=new)

  def calculate_scores(self, params, sparse_state=None, grads=None):
    if sparse_state is None:  # pruning at once: a window of one batch
      stats = jax.tree.map(lambda g: g[None], grads)
      sparse_state = base_updater.SparseState(masks=None, stats=stats)

    def score(_, param, window, mask):
      if window is None:
        return param
      # A pruned weight is no longer part of the model.
      kept = 1 if mask is None else self._unpack(mask, param)
      window = jnp.where(kept, window, 0).astype(jnp.float32)
      return _leaves.with_auto_axes(
        lambda w, g: self._saliency(w.astype(jnp.float32), g),
        param,
        window,
        like=param,
      )

    return _leaves.map_masks(
      score, params, sparse_state.stats, sparse_state.masks, name="grads"
    )

  def _saliency(self, weight, window):
    count, size = window.shape[0], weight.size
    lam = self.damping * jnp.mean(jnp.square(window)) + 1e-30
    block = min(self.block_size, size)
    flat = jnp.pad(window.reshape(count, -1), ((0, 0), (0, -size % block)))
    # (blocks, N, B): F⁻¹ = 1/λ (I - Gᵀ (NλI + GGᵀ)⁻¹ G)
    g = flat.reshape(count, -1, block).swapaxes(0, 1) / jnp.sqrt(lam)
    gram = count * jnp.eye(count) + g @ g.swapaxes(1, 2)

    # XLA's own factorisations of many small matrices are slow on CPU; one
    # elimination of all blocks at once is a few fused passes.
    def eliminate(r, carry):
      rows, inverse = carry
      row = rows[:, r]
      pivot = row[:, r, None]
      share = jnp.where(jnp.arange(count) > r, rows[:, :, r] / pivot, 0)
      rows = rows - share[:, :, None] * row[:, None]
      return rows, inverse - jnp.square(row[:, count:]) / pivot

    rows = jnp.concatenate([gram, g], axis=-1)
    start = rows, jnp.ones_like(g[:, 0])
    _, inverse = jax.lax.fori_loop(0, count, eliminate, start)
    inverse = inverse.reshape(-1)[:size] / lam
    return jnp.square(weight) / jnp.maximum(
      inverse.reshape(weight.shape), 1e-30
    )
