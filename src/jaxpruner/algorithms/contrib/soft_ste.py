"""S-STE: a continuous pruning function for training N:M sparsity."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxpruner import base_updater, sparsity_types
from jaxpruner.algorithms import ste


@dataclasses.dataclass(eq=False)
class SoftSte(ste.SteMagnitudePruning):
  """Train through a continuous pruning function (S-STE; Hu et al., 2024).

  The loss sees `β · sign(w) · relu(|w| - t)`, where `t` is the largest removed
  |w| of the group of N:M; for 2:4 the second smallest of four. A weight that
  leaves the mask is zero when it leaves, so the loss does not jump when masks
  change, as it does with `magnitude_ste`. `β = ⟨w, S(w)⟩ / ⟨S(w), S(w)⟩`
  makes the error ‖w - β S(w)‖ least; it is found for each leaf at `init` and
  stays. The gradient of what the loss sees goes to `w` unchanged. With other
  types than N:M there is one `t` per leaf. Use no ramp: where nothing is
  removed at `init`, β is 1. The first step takes its gradient at the params as
  they are given, dense or masked. The attributes are those of `BaseUpdater`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> pruner = jaxpruner.SoftSte(
    ...   sparsity_type=jaxpruner.NByM(2, 4, axis=-1),
    ...   sparsity_distribution_fn=lambda params: 0.5)
    >>> params = jnp.array([[3.0, -1, 2, -4]])
    >>> state = pruner.init_state(params)
    >>> pruner.forward(params, state).tolist()  # t = 2, β = (3 + 8) / 5
    [[2.200000047683716, 0.0, 0.0, -4.400000095367432]]
  """

  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    paper="Hu et al., 2024",
    cost="a dense step and one selection, every step",
  )

  def init_extra(self, params, masks):
    view = self.view(params)
    found = zip(
      view.kinds, view.leaves, view.of(masks, packed=False), strict=True
    )
    extra = super().init_extra(params, masks) or {}
    return {**extra, "scale": view.store(_best_scale(*row) for row in found)}

  def _per_leaf(self, params: Any, state: Any, function: Any) -> Any:
    view = self.view(params)
    columns = (
      view.kinds, view.leaves, view.of(state.masks),
      view.of(state.stats["scale"], "scale"),
    )  # fmt: skip
    return view.put(params, map(function, *columns))

  def forward(self, params, state):
    """Return the kept weights, moved towards zero and scaled.

    Args:
      params: the dense weights.
      state: the state, with the masks in force.

    Returns:
      A tree like `params`; removed weights are zero.
    """

    def shrink(kind, w, mask, scale):
      return scale.astype(w.dtype) * _shrunk(kind, w, mask)

    return self._per_leaf(params, state, shrink)

  def invert_forward(self, params, state):
    view = self.view(params)
    hidden = view.of(state.hidden, "hidden")

    def grow(kind, param, mask, scale, dense):
      t = _threshold(kind, dense, mask).astype(param.dtype)
      grown = param / scale.astype(param.dtype) + jnp.sign(param) * t
      # Before the first step params may still be the dense weights.
      shown = dense.astype(param.dtype)
      return jnp.where(param == shown, shown, grown)

    columns = view.of(state.masks), view.of(state.stats["scale"], "scale")
    return view.put(
      params, map(grow, view.kinds, view.leaves, *columns, hidden)
    )


def _threshold(kind: Any, w: Any, mask: Any) -> Any:
  """Return, for each weight, the largest removed |w| of its group."""
  removed = jnp.where(mask, 0, jnp.abs(w))
  if not isinstance(kind, sparsity_types.NByM):
    return jnp.max(removed)
  split, axis = kind.split(w.shape)
  most = jnp.max(removed.reshape(split), axis=axis, keepdims=True)
  return jnp.broadcast_to(most, split).reshape(w.shape)


def _shrunk(kind: Any, w: Any, mask: Any) -> Any:
  seen = base_updater.apply_mask(w, mask)
  return seen - jnp.sign(seen) * _threshold(kind, w, mask)


def _best_scale(kind: Any, w: Any, mask: Any) -> Any:
  """Return the β of least ‖w - β S(w)‖; 1 if S(w) is zero."""
  w = w.astype(jnp.float32)
  s = _shrunk(kind, w, mask)
  size = jnp.sum(s * s)
  return jnp.where(size > 0, jnp.sum(w * s) / jnp.where(size > 0, size, 1), 1.0)
