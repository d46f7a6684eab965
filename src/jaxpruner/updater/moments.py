"""The optimizer's state, weight by weight: held, made fresh, written in place.

A state leaf belongs to the parameter whose key path ends its own path and
whose shape it has (or has behind one leading memory axis).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, program
from jaxpruner._leaves import PyTree
from jaxpruner.program import Node, Var
from jaxpruner.program.owners import Owners, per_weight
from jaxpruner.program.primitives import ELEMENTWISE

# What computes each weight's number from that weight's numbers alone.
_PER_WEIGHT = ELEMENTWISE | {"broadcast_in_dim"}


def keepers(
  state: PyTree, params: PyTree, kept: list[Any], fresh: PyTree, held: Any
) -> list[Callable[[Any], Any]]:
  """Return, per state leaf, the function from its new value to the stored one.

  Where a weight is not `kept` the leaf takes the value of `fresh =
  inner.init(params)`: not zero, because Adagrad starts at 0.1 and schedule-free
  at the parameter itself. Else, while `held`, it stays as it is in `state`.

  Args:
    state: the optimizer's state.
    params: the parameters.
    kept: their masks, None where dense.
    fresh: a new state; None if pruned weights' moments need not be fresh.
    held: whether the optimizer rests.
  """
  owners, leaves = Owners(params), jax.tree.leaves(params)

  def keeper(path, old, new=None):
    owner = owners.find(path)
    mask = None
    if new is not None and owner is not None:
      fits = per_weight(old, np.shape(leaves[owner]))
      mask = kept[owner] if fits else None

    def keep(value):
      if held is not False:
        value = jnp.where(held, old, value)
      if mask is not None:
        value = jnp.where(mask, value, jnp.asarray(new, value.dtype))
      return value

    return keep

  trees = (state,) if fresh is None else (state, fresh)
  return jax.tree.leaves(jax.tree_util.tree_map_with_path(keeper, *trees))


def update(
  step: Callable[[PyTree], tuple[PyTree, PyTree]],
  state: PyTree,
  keep: list[Callable[[Any], Any]],
) -> tuple[PyTree, PyTree]:
  """Return the updates of `step(state)`, and its new state as it is stored.

  What `keep` changes belongs to weights whose update is not used. So where no
  weight looks at another's state, the step may go on from the stored value:
  then the old one is read by nothing but the operation that overwrites it. If
  the step went on from its own value, XLA would compute that twice, and copy
  all moments to have the old ones still.
  """
  leaves = jax.tree.leaves(state)
  if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    updates, new = step(state)
    new, treedef = jax.tree.flatten(new)
    kept = [fn(value) for fn, value in zip(keep, new, strict=True)]
    return updates, treedef.unflatten(kept)
  traced = program.trace(step, state, open_calls=False, unroll=0)
  updates, treedef = traced.out_tree.children()
  outs = traced.outputs[updates.num_leaves :]
  early: dict[Var, Callable[[Any], Any]] = {}
  if len(set(outs)) == len(outs):
    early = _elementwise_only(traced.nodes, dict(zip(outs, keep, strict=True)))

  def visit(node: Node, inputs: list[Any]) -> list[Any]:
    values = program.bind(node, inputs)
    return [
      early[out](value) if out in early else value
      for out, value in zip(node.outputs, values, strict=True)
    ]

  values = program.run(traced, leaves, visit)
  new = [
    value if out in early else fn(value)
    for out, fn, value in zip(
      outs, keep, values[updates.num_leaves :], strict=True
    )
  ]
  values = values[: updates.num_leaves]
  return updates.unflatten(values), treedef.unflatten(new)


def _elementwise_only(
  nodes: list[Node], wanted: dict[Var, Callable[[Any], Any]]
) -> dict[Var, Callable[[Any], Any]]:
  """Return those of `wanted` that `nodes` compute.

  Empty if an operation that is not elementwise reads one of them, or anything
  computed from one: then entries of different weights may mix.
  """
  made = {out for node in nodes for out in node.outputs}
  found = {out: fn for out, fn in wanted.items() if out in made}
  seen = set(found)
  for node in nodes:
    if not seen.isdisjoint(node.inputs):
      if not program.consists_of(node, _PER_WEIGHT):
        return {}
      seen.update(node.outputs)
  return found


def unmatched(state: PyTree, params: PyTree, keep: list[Any]) -> list[str]:
  """Name the state leaves that speak of pruned weights, but not one by one.

  Factored statistics (the rows and columns of Adafactor and SM3) and flattened
  ones are such: no entry belongs to one weight by its place, so none can be
  made fresh when a weight grows.
  """
  owners, leaves = Owners(params), jax.tree.leaves(params)
  pruned = [i for i, kept in enumerate(keep) if kept is not None]
  size = sum(leaves[i].size for i in pruned)

  def speaks_of_pruned(path, leaf) -> bool:
    owner = owners.find(path)
    if owner is not None:
      return owner in pruned and not per_weight(leaf, leaves[owner].shape)
    inside = any(
      path[start : start + len(p)] == p
      for p in (owners.paths[i] for i in pruned)
      for start in range(len(path) - len(p))
    )
    return inside or np.size(leaf) >= size

  return [
    _leaves.join(_leaves.path_names(path))
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    if np.size(leaf) > 1 and speaks_of_pruned(path, leaf)
  ]
