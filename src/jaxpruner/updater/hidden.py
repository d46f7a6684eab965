"""Hidden weights: those that the state trains and params show otherwise.

A straight-through algorithm trains weights that `params` show as zero; a
`master_dtype` keeps a copy in a higher precision. `forward` leads from the
hidden weights to `params`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import _leaves
from jaxpruner._leaves import PyTree
from jaxpruner.updater.prunable import Prunable
from jaxpruner.updater.state import SparseState, masked_forward


def hides(updater: Any) -> bool:
  """Tell whether the state keeps weights that params do not show as they are.

  Args:
    updater: a `BaseUpdater`.

  Returns:
    True for straight-through algorithms, and with a `master_dtype`.
  """
  return updater.straight_through or updater.master_dtype is not None


def copies(updater: Any, view: Prunable) -> PyTree:
  """Return copies of the weights that params will not show as they are.

  Args:
    updater: a `BaseUpdater`.
    view: the prunable leaves.

  Returns:
    The first `state.hidden`.
  """
  if not hides(updater):
    return _leaves.ABSENT

  def copy(place, leaf):
    dtype = leaf.dtype
    if updater.master_dtype is not None and jnp.issubdtype(dtype, jnp.floating):
      dtype = jnp.promote_types(dtype, updater.master_dtype)
    trained = updater.straight_through and place in view.places
    if not trained and dtype == leaf.dtype:
      return None
    # A buffer of its own: params and state may both be donated.
    return jnp.array(leaf, dtype, copy=True)

  leaves = jax.tree.leaves(view.params)
  return _leaves.fill(view.params, [copy(*pair) for pair in enumerate(leaves)])


def masked_view(updater: Any, params: PyTree, state: SparseState) -> PyTree:
  """Return params to look at; see `BaseUpdater.pre_forward_update`."""
  if not (updater.straight_through and jax.tree.leaves(state.masks)):
    return params
  return updater.view(params).map(masked_forward, params, state.masks)


def dense(updater: Any, params: PyTree, state: SparseState) -> PyTree:
  """Return the weights that are trained; see `BaseUpdater.dense_params`."""
  kept = _leaves.align(params, state.hidden, "hidden")
  if not hides(updater) or all(w is None for w in kept):
    return params
  leaves, treedef = jax.tree.flatten(params)
  pairs = [*zip(leaves, kept, strict=True)]
  whole = treedef.unflatten([p if w is None else w for p, w in pairs])
  shown = _leaves.align(params, updater.forward(whole, state))
  changed = _leaves.align(params, updater.invert_forward(params, state))
  return treedef.unflatten(
    [
      p if w is None else jnp.where(p == s.astype(p.dtype), w, new)
      for (p, w), s, new in zip(pairs, shown, changed, strict=True)
    ]
  )


def show(
  updater: Any, updates: PyTree, state: SparseState, params: PyTree, moved: Any
) -> tuple[PyTree, SparseState]:
  """Return the updates from the present to the next params.

  The state takes the dense weights `moved`. The difference is taken in float32
  and is exact if a weight changes by less than a factor of two, is masked or
  returns. Else params may show the next weight rounded in its last bit, which
  counts as a change from outside: the next step starts from the rounded weight.

  Args:
    updater: a `BaseUpdater`.
    updates: the updates of the dense weights.
    state: the state, with the masks in force.
    params: the parameters before the step.
    moved: the dense weights after it.

  Returns:
    The updates of `params`, and the state.
  """
  seen = _leaves.align(params, updater.forward(moved, state))
  olds = _leaves.align(params, state.hidden)
  news, found = [], []
  for p, u, w, s, old in zip(
    jax.tree.leaves(params),
    _leaves.align(params, updates),
    jax.tree.leaves(moved),
    seen,
    olds,
    strict=True,
  ):
    if old is not None:
      dtype = jnp.promote_types(jnp.promote_types(p.dtype, u.dtype), "float32")
      u = s.astype(p.dtype).astype(dtype) - p.astype(dtype)
    found.append(u)
    news.append(old if old is None else w)
  hidden = _leaves.fill(params, news)
  updates = jax.tree.structure(params).unflatten(found)
  return updates, state._replace(hidden=hidden)
