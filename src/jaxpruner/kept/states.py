"""The state of training at kept size: positions, moments, counters."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner.kept import tensors
from jaxpruner.kept.blocks import BlockLayout
from jaxpruner.kept.layouts import Layout
from jaxpruner.updater.seeds import params_key
from jaxpruner.updater.state import find_only, seed_data

PyTree = Any


class KeptState(NamedTuple):
  """Hold the state of a `KeptUpdater`: an Optax state, for checkpoints.

  It holds `optax.MaskedNode()`, never `None`, in the place of dense leaves and
  unused fields, so that trainers and checkpoints can walk it.

  Attributes:
    layouts: a `Layout` or `BlockLayout` per kept leaf, `optax.MaskedNode()`
      where dense.
    inner_state: state of the wrapped optimizer, at kept size.
    count: number of updates so far.
    key: PRNG key data.
    skipped: per kept leaf (and layer of a stack), how many mask updates were
      refused because of non-finite weights or scores.

  Example:
    >>> import jax.numpy as jnp, jaxpruner, optax
    >>> from jaxpruner import kept
    >>> pruner = kept.KeptUpdater(jaxpruner.StaticRandomSparse())
    >>> state = pruner.wrap_optax(optax.adam(0.1)).init(
    ...   {"w": kept.from_dense(jnp.eye(4))})
    >>> state.layouts["w"].count, state.inner_state[0].mu["w"].shape
    (4, (4,))
  """

  layouts: PyTree
  inner_state: Any = _leaves.ABSENT
  count: Any = _leaves.ABSENT
  key: Any = _leaves.ABSENT
  skipped: Any = _leaves.ABSENT


def find_kept_state(opt_state: PyTree) -> KeptState:
  """Return the one `KeptState` inside an optimizer state.

  Args:
    opt_state: the state of an Optax optimizer, or a `KeptState`.

  Returns:
    The `KeptState`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner, optax
    >>> from jaxpruner import kept
    >>> pruner = kept.KeptUpdater(jaxpruner.StaticRandomSparse())
    >>> tx = optax.chain(optax.clip(1.0), pruner.wrap_optax(optax.sgd(0.1)))
    >>> opt_state = tx.init({"w": kept.from_dense(jnp.eye(4))})
    >>> kept.find_kept_state(opt_state).layouts["w"].count
    4
  """
  return find_only(
    opt_state,
    KeptState,
    "states of kept storage",
    "state made by pruner.wrap_optax(tx).init(weights) of a KeptUpdater",
  )


def start(updater: Any, weights: PyTree) -> KeptState:
  """Return the state before the first step, without that of an optimizer.

  Args:
    updater: the algorithm.
    weights: a tree with `KeptTensor` leaves.

  Returns:
    A `KeptState`.
  """
  held = [
    leaf.layout
    for leaf in jax.tree.leaves(weights, is_leaf=tensors.is_kept)
    if tensors.is_kept(leaf)
  ]
  if not held:
    raise ValueError(
      "tx.init: the tree has no KeptTensor leaf; pass the result of create, "
      "from_dense or from_masked"
    )
  named = jax.tree_util.tree_map_with_path(
    named_layout, weights, is_leaf=tensors.is_kept
  )
  if updater.rng_seed is not None:
    key = seed_data(updater.rng_seed)
  else:
    key = params_key(tensors.split(weights)[0])
  return KeptState(
    layouts=named,
    count=jnp.zeros([], jnp.int32),
    key=key,
    skipped=jnp.zeros([sum(l.layers or 1 for l in held)], jnp.int32),
  )


def placeholders(inner: Any, params: Any, made: set[Any]) -> KeptState:
  """Return the answer to `optax.tree_map_params`: which fields are params.

  Args:
    inner: the optimizer.
    params: Optax's placeholder.
    made: the structures of the states that `init` made, without those of the
      optimizer. If there is one, each leaf of the layouts is handed over by
      itself, else all of them together.

  Returns:
    A state with the placeholder where the optimizer has it.
  """
  leaf = np.zeros([], np.int32)
  state = KeptState(leaf, _leaves.ABSENT, leaf, leaf, leaf)
  if len(made) == 1:
    (structure,) = made
    state = structure.unflatten([leaf] * structure.num_leaves)
  return state._replace(inner_state=inner.init(params))


def layouts_of(params: PyTree, state: KeptState) -> list[Any]:
  """Return the layout of each leaf of the parameters, None where dense."""
  return _leaves.align(params, state.layouts, "layouts")


def is_layout(value: Any) -> bool:
  return isinstance(value, Layout | BlockLayout)


def named_layout(path: Any, leaf: Any) -> Any:
  """Return the layout under the path that the algorithm knows."""
  if not tensors.is_kept(leaf):
    return _leaves.ABSENT
  name = _leaves.join(_leaves.path_names(path))
  return dataclasses.replace(leaf.layout, name=name)
