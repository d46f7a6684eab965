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

from jaxpruner import _leaves
from jaxpruner._leaves import PyTree
from jaxpruner.program import evaluate as _jaxprs

# What computes each weight's number from that weight's numbers alone.
_ELEMENTWISE = frozenset(
  "abs add and broadcast_in_dim cbrt clamp convert_element_type copy div eq "
  "erf exp exp2 expm1 ge gt integer_pow is_finite le log log1p logistic lt max "
  "min mul ne neg not or pow rsqrt select_n sign sqrt square stop_gradient sub "
  "tanh xor".split()
)


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
  table = _table(params, kept)

  def keeper(path, old, new=None):
    param, mask = _owner(table, path)
    if new is None or mask is None or not _per_weight(old, param):
      mask = None

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
  closed, shapes = jax.make_jaxpr(step, return_shape=True)(state)
  updates, treedef = jax.tree.structure(shapes).children()
  outs = closed.jaxpr.outvars[updates.num_leaves :]
  early = {}
  if len(set(map(id, outs))) == len(outs):
    early = dict(zip(map(id, outs), keep, strict=True))
  early = _apart(closed.jaxpr.eqns, early)

  def run(eqn, inputs):
    values = _jaxprs.bind(eqn, inputs)
    return [
      early[id(out)](value) if id(out) in early else value
      for out, value in zip(eqn.outvars, values, strict=True)
    ]

  values = _jaxprs.evaluate(closed.jaxpr, closed.consts, leaves, run)
  new = values[updates.num_leaves :]
  for i, out in enumerate(outs):
    if id(out) not in early:
      new[i] = keep[i](new[i])
  values = values[: updates.num_leaves]
  return updates.unflatten(values), treedef.unflatten(new)


def _apart(eqns: list[Any], wanted: dict[int, Any]) -> dict[int, Any]:
  """Return those of `wanted` made by `eqns`; none if their entries mix."""
  made = {id(out) for eqn in eqns for out in eqn.outvars}
  found = {key: fn for key, fn in wanted.items() if key in made}
  seen = set(found)
  for eqn in eqns:
    if any(id(atom) in seen for atom in eqn.invars):
      if not _jaxprs.consists_of(eqn, _ELEMENTWISE):
        return {}
      seen.update(map(id, eqn.outvars))
  return found


def unmatched(state: PyTree, params: PyTree, keep: list[Any]) -> list[str]:
  """Name the state leaves that speak of pruned weights, but not one by one.

  Factored statistics (the rows and columns of Adafactor and SM3) and flattened
  ones are such: no entry belongs to one weight by its place, so none can be
  made fresh when a weight grows.
  """
  table = _table(params, keep)
  pruned = {p: leaf for p, (leaf, kept) in table.items() if kept is not None}
  size = sum(leaf.size for leaf in pruned.values())

  def speaks_of_pruned(path, leaf) -> bool:
    param, kept = _owner(table, path)
    if param is not None:
      return kept is not None and not _per_weight(leaf, param)
    inside = any(
      path[start : start + len(p)] == p
      for p in pruned
      for start in range(len(path) - len(p))
    )
    return inside or np.size(leaf) >= size

  return [
    _leaves.join(_leaves.path_names(path))
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    if np.size(leaf) > 1 and speaks_of_pruned(path, leaf)
  ]


def _table(params: PyTree, keep: list[Any]) -> dict[Any, Any]:
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return {
    path: (leaf, kept) for (path, leaf), kept in zip(leaves, keep, strict=True)
  }


def _owner(table: dict[Any, Any], path: tuple[Any, ...]) -> tuple[Any, Any]:
  for start in range(len(path) + 1):
    if path[start:] in table:
      return table[path[start:]]
  return None, None


def _per_weight(leaf: Any, param: Any) -> bool:
  shape = np.shape(leaf)
  return shape == param.shape or shape[1:] == param.shape
