"""The step of `KeptUpdater.wrap_optax`: optimizer, mask update, state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxpruner import _leaves
from jaxpruner.kept import checking, rewiring, states, tensors
from jaxpruner.kept import growth as growing
from jaxpruner.kept.differentiation import Growth
from jaxpruner.kept.states import KeptState
from jaxpruner.updater import checks, moments

PyTree = Any


def wrap(
  updater: Any, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
  """Return the transformation of `KeptUpdater.wrap_optax`.

  Args:
    updater: the algorithm.
    inner: the optimizer.

  Returns:
    The transformation; its state is a `KeptState`.
  """
  checks.warn_if_never_updates(updater)
  inner = optax.with_extra_args_support(inner)

  made: set[Any] = set()  # structures of the states so far

  def init(params: PyTree) -> KeptState:
    # `optax.tree_map_params` asks which fields are like params.
    if type(params).__name__ == "_ParamsPlaceholder":
      return states.placeholders(inner, params, made)
    values, _ = tensors.split(params)
    state = states.start(updater, params)
    made.add(jax.tree.structure(state))
    return state._replace(inner_state=inner.init(values))

  def update(updates, state, params=None, *, growth=None, **extra):
    _check(updater, state, params, growth)
    step = lambda old: inner.update(updates, old, params, **extra)
    count = optax.safe_increment(state.count)
    if not checking.rewires(updater):
      updates, inner_state = step(state.inner_state)
      return updates, state._replace(inner_state=inner_state, count=count)
    due = updater.scheduler.is_mask_update_iter(state.count)
    layouts, skipped, moved = jax.lax.cond(
      due,
      lambda: _rewire(updater, state, params, growth or {}),
      lambda: _unmoved(state, params),
    )
    stays = [None if m is None else ~m for m in moved]
    keep = moments.keepers(
      state.inner_state,
      params,
      stays,
      inner.init(_map(_clear, params, moved)),
      due,
    )
    updates, inner_state = moments.update(step, state.inner_state, keep)
    updates = jax.tree.map(
      lambda u: jnp.where(due, jnp.zeros_like(u), u), updates
    )
    updates = _map(_hold, params, moved, jax.tree.leaves(updates))
    return updates, KeptState(layouts, inner_state, count, state.key, skipped)

  return optax.GradientTransformationExtraArgs(init, update)


def _check(updater: Any, state: Any, params: Any, growth: Any) -> None:
  """Raise if a step lacks something."""
  if params is None:
    raise ValueError(
      "KeptUpdater.wrap_optax(…).update needs params: call "
      "tx.update(grads, opt_state, params)"
    )
  if not isinstance(state, KeptState):
    raise ValueError(
      f"opt_state is {type(state).__name__}, not KeptState: it was made "
      "with another storage; convert it with from_masked"
    )
  if not checking.grows_by_gradient(updater):
    return
  for layout in jax.tree.leaves(state.layouts, is_leaf=states.is_layout):
    if layout.name not in (growth or {}):
      raise ValueError(
        f"params leaf {layout.name!r}: {type(updater).__name__} grows by "
        "gradient, and nothing tells the gradients of weights that are not "
        "kept; call value, grads, growth = pruner.value_and_grad(loss_fn)"
        "(params, opt_state, …) and tx.update(grads, opt_state, params, "
        "growth=growth), with a loss that uses the weight through kept.lift"
      )


def _rewire(
  updater: Any, state: KeptState, params: PyTree, growth: Growth
) -> tuple[PyTree, Array, list[Any]]:
  """Return new layouts, refusals, and the entries that moved."""
  leaves, treedef = jax.tree.flatten(params)
  layouts = states.layouts_of(params, state)
  found = iter(_rewired(updater, state, leaves, layouts, growth))
  new, moved, refused = [], [], []
  for values, layout in zip(leaves, layouts, strict=True):
    if layout is None:
      new.append(_leaves.ABSENT)
      moved.append(None)
      continue
    own, moves, fine = next(found)
    new.append(own)
    moves = moves.reshape(moves.shape + (1,) * (values.ndim - moves.ndim))
    moved.append(jnp.broadcast_to(moves, values.shape))
    refused.append(jnp.atleast_1d(~fine))
  skipped = state.skipped + jnp.concatenate(refused).astype(jnp.int32)
  return treedef.unflatten(new), skipped, moved


def _rewired(updater, state, leaves, layouts, growth) -> list[Any]:
  """Return, per kept leaf: its new layout, its moves, and whether it is one.

  Plain leaves are rewired together. The layers of a stack are rewired one after
  the other, by one compiled body.
  """
  kept = [(v, l) for v, l in zip(leaves, layouts, strict=True) if l is not None]
  plain, finite = [], []
  for values, layout in kept:
    if layout.axis is None:
      scores = _scores(updater, state, layout, growth)
      leaf, fine = _leaf(updater, state, layout, values, scores)
      plain.append(leaf)
      finite.append(fine)
  done = zip(rewiring.rewire(plain), finite, strict=True)

  def layers(layout, values, scores):
    leaf, fine = _leaf(updater, state, layout, values, scores)
    ((new, moved, summed),) = rewiring.rewire([leaf])
    return new, moved, fine & summed

  found = []
  for values, layout in kept:
    if layout.axis is None:
      (new, moved, summed), fine = next(done)
      found.append((new, moved, fine & summed))
      continue
    scores = _scores(updater, state, layout, growth)
    new, moved, fine = layout.in_turn(layers, values, scores)
    new = tensors.restack(new, layout.shape, layout.axis)
    found.append((new, moved, fine))
  return found


def _leaf(updater, state, layout, values, scores) -> tuple[Any, Array]:
  """Return the mask update of a leaf, and whether it starts from numbers."""
  totals = jnp.full((1,), layout.count, jnp.int32)
  survivors = updater.survivors(state, totals, None, None)[0]
  finite = scores.factors_finite() & rewiring.all_finite(values)
  left = jnp.where(finite, survivors, layout.count)
  most = _most(updater, layout.count)
  return rewiring.Leaf(values, layout, scores, left, most), finite


def _scores(updater, state, layout, growth) -> growing.Growth:
  """Return the growth scores of a leaf; of a stack, with the layers before."""
  if checking.grows_by_gradient(updater):
    return growing.gradient(growth[layout.name], layout.layers)
  salt = state.count + 1
  return growing.random(
    state.key, salt, layout.name, layout.shape, layout.split, layout.axis
  )


def _most(updater: Any, count: int) -> int:
  """Return how many weights a mask update replaces at most."""
  if updater.drop_fraction_fn is not None:
    return count
  return min(count, int(updater.drop_fraction * count) + 1)


def _unmoved(state: KeptState, params: PyTree):
  moved = [
    None if layout is None else jnp.zeros(layout.values_shape, bool)
    for layout in states.layouts_of(params, state)
  ]
  return state.layouts, state.skipped, moved


def _map(fn: Any, params: PyTree, moved: list[Any], *columns: Any) -> PyTree:
  """Map `fn(param, moved, …)` over the leaves."""
  leaves, treedef = jax.tree.flatten(params)
  return treedef.unflatten([*map(fn, leaves, moved, *columns)])


def _clear(param: Array, moved: Array | None) -> Array:
  return (
    param if moved is None else jnp.where(moved, jnp.zeros_like(param), param)
  )


def _hold(param: Array, moved: Array | None, update: Array) -> Array:
  """Bring moved entries to exactly zero: grown weights start there."""
  if moved is None:
    return update
  dtype = jnp.promote_types(param.dtype, update.dtype)
  return jnp.where(moved, -param.astype(dtype), update.astype(dtype))
