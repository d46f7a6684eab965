"""Second-order saliency: the change of the loss to second order."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import _leaves, base_updater
from jaxpruner.algorithms import pruners
from jaxpruner.updater import checks


def second_moments(view, inner_state):
  """Return Adam's running mean of squared gradients per leaf.

  Args:
    view: the prunable leaves.
    inner_state: the state of the wrapped optimizer.

  Returns:
    An array per prunable leaf, or None where the optimizer has none.
  """
  found = optax.tree_utils.tree_get_all_with_path(inner_state, "nu")
  columns = [_leaves.align(view.params, tree, "nu") for _, tree in found]
  found = [
    next((entry for entry in entries if entry is not None), None)
    for entries in zip(*columns, strict=True)
  ]
  return view.per_layer(found) if found else [None] * len(view.names)


@dataclasses.dataclass(eq=False)
class FisherPruning(base_updater.BaseUpdater):
  """Keep the largest `w² · E[(∂L/∂w)²]` of each leaf (Theis et al., 2018).

  Optimal Brain Damage, where the diagonal of the Fisher information replaces
  the Hessian. The expectation is the second moment that Adam and similar
  optimizers store. At the first step, and with an optimizer that stores no
  second moment, the squared gradient of the batch is used. The attributes are
  those of `BaseUpdater`.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.FisherPruning(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> grads = jnp.array([[0.0, 9, 5, 1]])
    >>> pruner.instant_sparsify(params, grads)[1].tolist()
    [[0, 1, 1, 0]]
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    needs=frozenset({"gradients"}),
    paper="LeCun et al., 1990; Theis et al., 2018",
    cost="a dense step; one selection per mask update",
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    inner = None if sparse_state is None else sparse_state.inner_state
    view = self.view(params)

    def size(grad, moment):
      grad = grad.astype(jnp.float32)
      if moment is None:
        return grad
      moment = moment.astype(jnp.float32)
      return jnp.where(jnp.any(moment > 0), jnp.sqrt(moment), grad)

    sizes = map(size, view.of(grads, "grads"), second_moments(view, inner))
    # The root of the score: the same ranking, and squares do not underflow.
    return pruners.saliency_scores(
      params, view.put(None, sizes), type(self).__name__
    )


@dataclasses.dataclass(eq=False)
class WoodFisherPruning(base_updater.BaseUpdater):
  """Keep the largest `w² / [F⁻¹]ᵢᵢ` (Singh & Alistarh, 2020).

  Optimal Brain Surgeon with the empirical Fisher matrix `F = λI + 1/N Σ g gᵀ`
  of the last `window` batch gradients. The matrix is divided into blocks of
  `block_size` consecutive weights. Woodbury's identity inverts an N × N matrix
  per block, so blocks may have any length, as in M-FAC (Frantar et al., 2021).

  Attributes:
    window: number of gradients stored, each as large as the parameters.
    block_size: number of weights in a block of the Fisher matrix.
    damping: λ relative to the mean diagonal of the leaf's Fisher matrix.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.WoodFisherPruning(
    ...   window=4, sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> grads = jnp.array([[1.0, 3, 0, 2]])
    >>> pruner.instant_sparsify(jnp.ones((1, 4)), grads)[1].tolist()
    [[0, 1, 0, 1]]
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
    checks.check_number(self, "damping")
    checks.check_whole(self, "window", 1)
    checks.check_whole(self, "block_size", 1)

  def init_extra(self, params, masks):
    view = self.view(params)
    window = lambda p: jnp.stack([jnp.zeros_like(p)] * self.window)
    return {"window": view.store(map(window, view.leaves))}

  def on_gradients(self, state, params, grads):
    view, slot = self.view(params), state.count % self.window
    write = lambda window, g: window.at[slot].set(g.astype(window.dtype))
    old = view.of(state.stats["window"], "window")
    new = view.store(map(write, old, view.of(grads, "grads")))
    return state._replace(stats={"window": new})

  def calculate_scores(self, params, sparse_state=None, grads=None):
    view = self.view(params)
    if sparse_state is None:  # pruning at once: a window of one batch
      windows = [g[None] for g in view.of(grads, "grads")]
      masks: list[Any] = [1] * len(windows)
    else:
      windows = view.of(sparse_state.stats["window"], "window")
      masks = view.of(sparse_state.masks)

    def score(param, window, mask):
      # A pruned weight is no longer part of the model.
      window = jnp.where(mask, window, 0).astype(jnp.float32)
      return _leaves.with_auto_axes(
        lambda w, g: self._saliency(w.astype(jnp.float32), g),
        param,
        window,
        like=param,
      )

    return view.put(params, map(score, view.leaves, windows, masks))

  def _saliency(self, weight, window):
    count, size = window.shape[0], weight.size
    lam = self.damping * jnp.mean(jnp.square(window)) + 1e-30
    block = min(self.block_size, size)
    flat = jnp.pad(window.reshape(count, -1), ((0, 0), (0, -size % block)))
    # (blocks, N, B): F⁻¹ = 1/λ (I - Gᵀ (NλI + GGᵀ)⁻¹ G)
    g = flat.reshape(count, -1, block).swapaxes(0, 1) / jnp.sqrt(lam)
    gram = count * jnp.eye(count) + g @ g.swapaxes(1, 2)

    # XLA's factorizations of many small matrices are slow on CPU. Eliminating
    # in all blocks at once takes a few fused passes.
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
