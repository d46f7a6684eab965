"""The results of a cell: metrics, sizes, costs, and its record's checks."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner.compare import stored_carry, training
from jaxpruner.compare.cells import AFTER, BASELINES, RETRAIN, Cell
from jaxpruner.compare.records import Chunk, Numbers, Record
from jaxpruner.compare.tasks.base import Task
from jaxpruner.inspect import cost

PyTree = Any


class Outcome(NamedTuple):
  """A trained cell: its record, and the arrays of the first seed."""

  record: Record
  arrays: dict[str, np.ndarray]
  every: dict[str, np.ndarray] | None = None  # all seeds, if rows need them


@functools.lru_cache(maxsize=32)
def _evaluator(task: Task) -> Callable[..., dict[str, jax.Array]]:
  if task.in_turn:
    return jax.jit(
      lambda params, state, data: jax.lax.map(
        lambda each: task.measure(each[0], each[1], data), (params, state)
      )
    )
  return jax.jit(jax.vmap(task.measure, in_axes=(0, 0, None)))


def evaluate(
  task: Task, params: PyTree, state: PyTree, data: PyTree
) -> dict[str, Numbers]:
  """Return the metrics of all seeds.

  Args:
    task: the task.
    params: the parameters; seeds are the leading axis.
    state: the state of the network; seeds are the leading axis.
    data: the result of the task's `load`.

  Returns:
    Name -> a number for each seed.
  """
  if task.on_host:
    seeds = jax.tree.leaves(params)[0].shape[0]
    one = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
    found = [
      task.measure(one(params, i), one(state, i), data) for i in range(seeds)
    ]
    metrics = {name: [each[name] for each in found] for name in found[0]}
  else:
    metrics = jax.device_get(_evaluator(task)(params, state, data))
  return {
    name: np.asarray(value, np.float64).tolist()
    for name, value in metrics.items()
  }


def first_seed(
  params: PyTree, masks: PyTree, state: PyTree
) -> dict[str, np.ndarray]:
  """Return the arrays of the first seed by name, as they are stored."""
  one = lambda tree: jax.tree.map(lambda x: np.asarray(x[0]), tree)
  arrays = named("param", one(params)) | named("mask", one(masks))
  return arrays | named("state", stored_carry.raw_keys(one(state)))


def chunk_of(
  cell: Cell,
  steps: int,
  first: int,
  count: int,
  losses: jax.Array,
  taken: training.Snapshot,
) -> Chunk:
  """Return the record of a chunk of training.

  Args:
    cell: that is trained.
    steps: of its whole training.
    first: the chunk's first step.
    count: how many steps it has.
    losses: per seed and step; longer than `count` for the last chunk.
    taken: what was measured at its end.
  """
  taken = jax.device_get(taken)
  return Chunk(
    cell=cell.id,
    start=first,
    count=count,
    steps=steps,
    loss=np.asarray(losses, np.float64)[:, :count].tolist(),
    density=_by_name(taken.density),
    stored=_by_name(taken.stored),
    churn=np.asarray(taken.churn, np.float64).tolist(),
    explored=np.asarray(taken.explored, np.float64).tolist(),
  )


def _by_name(tree: PyTree) -> dict[str, float]:
  """Return the mean of each leaf over the seeds."""
  named, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {cost.path_name(path): float(np.mean(leaf)) for path, leaf in named}


def step_cost(flops: cost.Flops, taken: training.Snapshot) -> float:
  """Return the mean FLOPs of a gradient on the example batch, over a chunk.

  The forward pass and the gradient with respect to the inputs use the masked
  weights; the gradient with respect to the weights is needed for trained ones.
  FLOPs are linear in the densities, so that means over steps are exact.
  """
  used, trained = map(_by_name, jax.device_get((taken.used, taken.trained)))
  return 2 * flops.total(used) + flops.total(trained)


def costs_of_masks(flops, spent, task, masks) -> dict[str, Any]:
  """Return the fields of a record with the cost of the cell."""
  dense = flops.total()
  density = cost.leaf_densities(masks)
  return {
    "inference_flops": flops.total(density),
    "inference_flops_dense": dense,
    "training_flops": spent,
    "training_flops_dense": 3 * dense * task.steps,
    "density": density,
  }


def sizes_of(params, masks) -> dict[str, Any]:
  """Return the fields of a record with the size of the network."""
  one = lambda tree: jax.tree.map(lambda x: np.asarray(x[0]), tree)
  flat = jax.tree.leaves(masks)
  prunable = sum(m[0].size for m in flat)
  seeds = jax.tree.leaves(params)[0].shape[0]
  removed = [
    sum(int(m[i].size - np.count_nonzero(m[i])) for m in flat)
    for i in range(seeds)
  ]
  # Check the weights themselves, not only the masks.
  kept_zero = 0
  named = dict(jax.tree_util.tree_flatten_with_path(params)[0])
  for path, mask in jax.tree_util.tree_flatten_with_path(masks)[0]:
    kept_zero += int(np.count_nonzero(named[path][mask == 0]))
  return {
    "prunable": prunable,
    "realised": [r / prunable for r in removed] if prunable else [0.0] * seeds,
    "nonzero_pruned": kept_zero,
    "leaves": len(flat),
    "collapsed": _collapsed(masks),
    "weights": cost.count_weights(one(params), one(masks)),
    "bytes": cost.stored_bytes(one(params), one(masks)),
    "bytes_dense": cost.stored_bytes(one(params)),
  }


def _collapsed(masks) -> list[str]:
  """Return the leaves that lost every weight with at least one seed."""
  return [
    cost.path_name(path)
    for path, mask in jax.tree_util.tree_flatten_with_path(masks)[0]
    if not np.all(np.any(mask.reshape(mask.shape[0], -1), axis=1))
  ]


def problem_of(record: Record, task: Task, cell: Cell) -> str:
  """Return the reason to keep the cell out of the table, or ''."""
  values = np.array(record.metrics[task.metric], float)
  if not np.all(np.isfinite(values)):
    return f"{task.metric} is not finite: the training diverged"
  if cell.name in BASELINES:
    return ""
  if record.nonzero_pruned:
    return f"{record.nonzero_pruned} weights under the mask are not zero"
  if not record.prunable:
    return "nothing was pruned"
  # Each leaf rounds to whole weights; blocks and channels to whole blocks.
  # Solvers such as Wanda's round each output by itself.
  plain = not cell.type and not cell.name.startswith((AFTER, RETRAIN))
  if plain:
    cls = jaxpruner.algorithm_class(cell.name)
    plain = cls.sparsity_type == jaxpruner.Unstructured()
  slack = (1e-4 if plain else 0.01) + record.leaves / record.prunable
  for realised in np.array(record.realised, float):
    if abs(realised - cell.sparsity) > slack:
      return (
        f"sparsity {realised:.4f} was realised, {cell.sparsity:g} requested"
      )
  return ""


def named(prefix: str, tree: PyTree) -> dict[str, np.ndarray]:
  """Return the leaves of a tree as `prefix:path` -> array."""
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {f"{prefix}:{cost.path_name(path)}": leaf for path, leaf in flat}


def every_seed(
  params: PyTree, masks: PyTree, state: PyTree, start: PyTree, flops: float
) -> dict[str, np.ndarray]:
  """Return the arrays of all seeds by name, as other rows read them.

  Args:
    params: the trained parameters; seeds are the leading axis.
    masks: their masks.
    state: the state of the network.
    start: the weights that the last round of training began with; None if
      these are the task's own.
    flops: the FLOPs of the training of one seed.

  Returns:
    The arrays.
  """
  found = named("param", params) | named("mask", masks) | named("start", start)
  found |= named("state", stored_carry.raw_keys(state))
  return found | {"flops": np.asarray(flops, np.float64)}


def filled(
  shapes: PyTree,
  arrays: Mapping[str, np.ndarray],
  prefix: str,
  optional: bool = False,
) -> PyTree:
  """Return a tree from the arrays that `named` gave names to.

  Args:
    shapes: the tree of one seed.
    arrays: `prefix:path` -> array; all seeds may be a leading axis.
    prefix: "param", "mask", "start" or "state".
    optional: whether a leaf without an array becomes None.

  Returns:
    The tree.

  Raises:
    ValueError: an array is missing.

  Example:
    >>> filled({"w": np.zeros(2)}, {"mask:w": np.ones(2)}, "mask")["w"].tolist()
    [1.0, 1.0]
  """

  def leaf(path, like):
    name = f"{prefix}:{cost.path_name(path)}"
    if name not in arrays:
      if optional:
        return None
      raise ValueError(f"{name} is missing among the stored weights")
    stored = jnp.asarray(arrays[name])
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
      return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(like))
    return stored

  return jax.tree_util.tree_map_with_path(leaf, shapes)
