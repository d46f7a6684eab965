"""Metrics of the masks for a training loop, from the optimizer state alone."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner.updater.state import SparseState, Tally, find_state

PyTree: TypeAlias = Any


def state_metrics(opt_state: PyTree, per_leaf: bool = False) -> dict[str, Any]:
  """Return metrics of the masks for any logger; works under `jit`.

  Mask updates store their counts in the state: this function reads a few
  integers per leaf, never the weights or the masks.

  Args:
    opt_state: the optimizer state (or the `SparseState` itself).
    per_leaf: also return `sparsity/…`, `churn/…` and `exploration/…` of each
      leaf under its path.

  Returns:
    `sparsity` of the prunable leaves; `kept`, the number of their kept weights;
    `churn`, the share of the kept weights that the last mask update added;
    `dropped`, the number of weights it removed; `exploration`, the share of
    weights that were kept at any time (with `track_exploration`);
    `near_collapse`, the number of leaves that keep fewer weights than the
    square root of their size; `collapsed`, the number of leaves that keep none;
    `moments_reset`, the number of added weights whose moments were reset;
    `skipped`, the number of mask updates skipped because of non-finite scores.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner, optax
    >>> half = functools.partial(
    ...   jaxpruner.sparsity_distributions.uniform, sparsity=0.5)
    >>> tx = jaxpruner.StaticRandomSparse(
    ...   sparsity_distribution_fn=half).wrap_optax(optax.sgd(0.1))
    >>> found = jaxpruner.state_metrics(tx.init({"w": jnp.ones((4, 4))}))
    >>> float(found["sparsity"]), int(found["kept"])
    (0.5, 8)
  """
  state = find_state(opt_state)
  tally = state.tally
  if _leaves.is_absent(tally):
    return {}
  metrics = {
    "sparsity": 1 - _share(tally.kept, tally.size),
    "kept": jnp.sum(tally.kept),
    "churn": _share(tally.grown, tally.kept),
    "dropped": jnp.sum(tally.dropped),
    "near_collapse": jnp.sum(_is_near_collapse(tally)),
    "collapsed": jnp.sum(tally.kept == 0),
    "moments_reset": jnp.sum(tally.reset),
    "skipped": jnp.sum(state.skipped),
  }
  if not _leaves.is_absent(tally.explored):
    metrics["exploration"] = _share(tally.explored, tally.size)
  if per_leaf:
    for i, name in enumerate(_leaf_names(state)):
      row = jax.tree.map(lambda x, i=i: x[i], tally)
      metrics[f"sparsity/{name}"] = 1 - _share(row.kept, row.size)
      metrics[f"churn/{name}"] = _share(row.grown, row.kept)
      if not _leaves.is_absent(row.explored):
        metrics[f"exploration/{name}"] = _share(row.explored, row.size)
  return metrics


def layers_near_collapse(opt_state: PyTree) -> dict[str, int]:
  """Return the leaves that keep very few weights, with their counts.

  These are the leaves that keep fewer weights than the square root of their
  size: in a square layer, some neurons have no weight. A leaf without weights
  blocks every path through its layer.

  Args:
    opt_state: the optimizer state (or the `SparseState` itself).

  Returns:
    Path of the leaf -> number of weights it keeps.

  Example:
    >>> import functools, jax.numpy as jnp, jaxpruner, optax
    >>> most = functools.partial(
    ...   jaxpruner.sparsity_distributions.uniform, sparsity=0.9)
    >>> tx = jaxpruner.StaticRandomSparse(
    ...   sparsity_distribution_fn=most).wrap_optax(optax.sgd(0.1))
    >>> layers_near_collapse(tx.init({"w": jnp.ones((4, 4))}))
    {'w': 2}
  """
  state = find_state(opt_state)
  if _leaves.is_absent(state.tally):
    return {}
  near = np.asarray(_is_near_collapse(state.tally))
  kept = np.asarray(state.tally.kept)
  names = _leaf_names(state)
  return {names[i]: int(kept[i]) for i in np.flatnonzero(near)}


def _is_near_collapse(tally: Tally) -> Any:
  kept, size = (x.astype(jnp.float32) for x in (tally.kept, tally.size))
  return kept < jnp.sqrt(size)


def _leaf_names(state: SparseState) -> list[str]:
  """Return the path of every prunable leaf, and layer of a stacked leaf."""
  masks = _leaves.flatten_with_names(state.masks)[0]
  targets = jax.tree.leaves(state.target_sparsities)
  names: list[str] = []
  for (path, _), target in zip(masks, targets, strict=True):
    name = _leaves.join(path)
    # A stacked leaf has a target for each of its layers.
    layers = [f"{name}[{i}]" for i in range(np.size(target))]
    names += layers if np.ndim(target) else [name]
  return names


def _share(part: Any, whole: Any) -> Any:
  # In float32 before the sum: counts of many leaves may pass 2**32.
  total = lambda x: jnp.sum(x.astype(jnp.float32))
  return total(part) / jnp.maximum(total(whole), 1)
