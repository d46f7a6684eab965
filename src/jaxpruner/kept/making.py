"""Make kept weights: from a key, from dense ones, from a masked run."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner.kept import checking, conversion, creation, folding, states
from jaxpruner.kept.states import KeptState
from jaxpruner.program.owners import Owners, per_weight
from jaxpruner.sparsity_distributions.stacking import find_stacks
from jaxpruner.sparsity_types import Block
from jaxpruner.updater.state import SparseState, seed_data, unpack_mask

PyTree = Any
Apply = Callable[..., Any] | None


def create(
  updater: Any,
  key: Any,
  init_fn: Callable[..., PyTree],
  inputs: Sequence[Any],
  apply_fn: Apply,
  initializer: Any,
) -> PyTree:
  """Return sparse parameters of a model; see `KeptUpdater.create`."""
  shapes = jax.eval_shape(init_fn, key, *inputs)
  view = updater.view(shapes)
  leaves, treedef = jax.tree.flatten(shapes)
  forms = checking.forms(view)
  axes = [forms[i].axis if i in forms else None for i in range(len(leaves))]
  folds = folding.find(apply_fn, shapes, inputs, axes)
  own = [i for i in range(len(leaves)) if i not in forms]
  inputs = jax.tree.map(_concrete, inputs)

  def rest(key, *inputs):
    made = jax.tree.leaves(init_fn(key, *inputs))
    return [made[i] for i in own]

  out = dict(zip(own, jax.jit(rest)(key, *inputs), strict=True))
  for i, form in forms.items():
    out[i] = creation.create(
      key,
      leaves[i].shape,
      form.target,
      initializer=initializer,
      dtype=leaves[i].dtype,
      split=folds[i].split,
      block=form.block,
      axis=form.axis,
      fan_in=folds[i].fan_in,
      name=form.name,
      positions_key=_seed(updater, key),
    )
  return treedef.unflatten([out[i] for i in range(len(leaves))])


def _seed(updater: Any, key: Any) -> Any:
  if updater.rng_seed is not None:
    return seed_data(updater.rng_seed)
  return jax.random.key_data(key) if creation.is_key(key) else key


def from_dense(
  updater: Any,
  params: PyTree,
  masks: PyTree,
  inputs: Sequence[Any],
  apply_fn: Apply,
) -> PyTree:
  """Return dense parameters at kept size; see `KeptUpdater.from_dense`."""
  if masks is None:
    view = updater.view(params)
    checking.forms(view)  # refuses what has no kept form
    masks = updater.get_initial_masks(params, view.put(None, view.targets))
  stacks = find_stacks(params, updater.stacked_axis)
  axes = [None if stack is None else stack.axis for stack in stacks]
  folds = folding.find(apply_fn, params, inputs, axes)
  rows, treedef = _leaves.flatten_with_names(params)
  kind = updater.sparsity_type
  block = kind if type(kind) is Block else None
  out = []
  for (names, leaf), mask, (split, _), axis in zip(
    rows, _leaves.align(params, masks), folds, axes, strict=True
  ):
    if mask is not None:
      leaf = conversion.from_dense(
        leaf,
        mask,
        split=split,
        block=block,
        axis=axis,
        name=_leaves.join(names),
      )
    out.append(leaf)
  return treedef.unflatten(out)


def from_masked(
  updater: Any,
  params: PyTree,
  opt_state: PyTree,
  inputs: Sequence[Any],
  apply_fn: Apply,
) -> tuple[PyTree, KeptState]:
  """Switch a masked run to kept size; see `KeptUpdater.from_masked`."""
  if not isinstance(opt_state, SparseState):
    raise ValueError(
      f"from_masked: opt_state is {type(opt_state).__name__}, not the "
      "SparseState of wrap_optax; wrap_optax must be outermost"
    )
  if not _leaves.is_absent(opt_state.hidden):
    raise ValueError(
      "from_masked: the state hides dense weights that the algorithm still "
      "trains (a straight-through one, or master_dtype); finish with fixed "
      "masks: from_dense(params, opt_state.masks), and a fresh optimizer"
    )
  masks = _unpacked(params, opt_state.masks)
  weights = from_dense(updater, params, masks, inputs, apply_fn)
  state = states.start(updater, weights)
  places = states.layouts_of(params, state)
  owners, leaves = Owners(params), jax.tree.leaves(params)

  def carry(path, leaf):
    owner = owners.find(path)
    if owner is None or places[owner] is None:
      return leaf
    shape = np.shape(leaves[owner])
    if per_weight(leaf, shape):
      pick = places[owner].pick
      return pick(leaf) if leaf.shape == shape else jax.vmap(pick)(leaf)
    if np.size(leaf) <= 1:
      return leaf
    raise ValueError(
      f"from_masked: the optimizer's {jax.tree_util.keystr(path)} of shape "
      f"{np.shape(leaf)} has no entry per weight, so it has no kept form; "
      "use an optimizer with moments per weight, such as adam or sgd"
    )

  inner = jax.tree_util.tree_map_with_path(carry, opt_state.inner_state)
  key = state.key if _leaves.is_absent(opt_state.key) else opt_state.key
  return weights, state._replace(
    inner_state=inner, count=opt_state.count, key=key
  )


def _concrete(x: Any) -> Any:
  if isinstance(x, jax.ShapeDtypeStruct):
    return jnp.zeros(x.shape, x.dtype)
  return x


def _unpacked(params: PyTree, masks: PyTree) -> PyTree:
  def unpack(_, param, mask):
    if mask is None or mask.shape == param.shape:
      return mask
    return unpack_mask(mask, param)

  return _leaves.map_masks(unpack, params, masks)
