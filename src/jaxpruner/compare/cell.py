"""Train one cell of the table: one algorithm, one sparsity, all seeds."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner.compare import plan, program, tasks
from jaxpruner.compare.tasks.base import Task
from jaxpruner.inspect import cost as report

PyTree = Any
STRETCHES = 20  # parts a training is cut into: snapshots, progress, restarts


def updater_config(
  task: Task, cell: plan.Cell, settings: plan.Settings
) -> dict[str, Any]:
  """Return what `create_updater_from_config` is given for this cell."""
  if cell.algorithm in plan.BASELINES:
    return {"algorithm": "no_prune"}
  config = {
    "algorithm": cell.algorithm,
    "sparsity": cell.sparsity,
    "dist_type": settings.distribution or task.distribution,
    "total_steps": task.steps,
    **task.pruning,
  }
  steps = task.steps
  if (total := trainings(cell)) > 1:
    # Each round is as long as the training of every other algorithm.
    config |= {"update_freq": steps, "update_start_step": steps}
    config |= {"update_end_step": (total - 1) * steps}
  if settings.type:
    config["sparsity_type"] = settings.type
    # N:M gives every leaf the same sparsity; another share contradicts it.
    if plan.type_sparsity(settings.type) is not None:
      config["dist_type"] = settings.distribution or "uniform"
  return config


def trainings(cell: plan.Cell) -> int:
  """Return how many trainings a cell takes: one, but for tickets."""
  if cell.algorithm in plan.BASELINES:
    return 1
  return jaxpruner.algorithm_class(cell.algorithm).trainings(cell.sparsity)


def cell_task(cell: plan.Cell, settings: plan.Settings) -> Task:
  """Return the task, narrowed for the small dense baseline."""
  task = tasks.make_task(settings.task, settings.options)
  if cell.algorithm != "small_dense":
    return task
  return narrowed(task, cell.sparsity)


def narrowed(task: Task, sparsity: float) -> Task:
  """Return the task with the width whose dense network comes closest to the
  sparse one's number of weights.
  """

  def size(width: int) -> int:
    return _sizes(dataclasses.replace(task, width=width))[0]

  total, prunable = _sizes(task)
  wanted = total - round(prunable * sparsity)
  step = task.width_multiple
  low, high = 1, task.width // step
  while low < high:
    middle = (low + high) // 2
    if size(middle * step) < wanted:
      low = middle + 1
    else:
      high = middle
  candidates = {max(1, low - 1) * step, low * step}
  width = min(candidates, key=lambda w: abs(size(w) - wanted))
  return dataclasses.replace(task, width=width)


@functools.lru_cache(maxsize=256)
def _sizes(task: Task) -> tuple[int, int]:
  """Return (all parameters, those that pruning may remove)."""
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  config = {
    "algorithm": "magnitude",
    "sparsity": 0.5,
    "dist_type": "uniform",
    "total_steps": task.steps,
    **task.pruning,
  }
  updater = jaxpruner.create_updater_from_config(config)
  share = updater.sparsity_distribution_fn
  targets = share(shapes) if share else None
  total = sum(x.size for x in jax.tree.leaves(shapes))
  masked = jax.tree.structure(shapes).flatten_up_to(targets)
  prunable = sum(
    x.size
    for x, target in zip(jax.tree.leaves(shapes), masked, strict=True)
    if target is not None
  )
  return total, prunable


@functools.lru_cache(maxsize=8)
def load_data(name: str, folder: str) -> PyTree:
  """Return a task's data on the device, once per process."""
  loaded = tasks.make_task(name).load(folder or None)
  return jax.tree.map(jnp.asarray, loaded)


@functools.lru_cache(maxsize=32)
def _evaluator(task: Task) -> Callable[[PyTree, PyTree], dict[str, jax.Array]]:
  if task.in_turn:
    return jax.jit(
      lambda params, data: jax.lax.map(lambda p: task.evaluate(p, data), params)
    )
  return jax.jit(jax.vmap(task.evaluate, in_axes=(0, None)))


class Outcome(NamedTuple):
  """A trained cell: its record for the table, and the first seed's arrays."""

  record: dict[str, Any]
  arrays: dict[str, np.ndarray]


def run_cell(
  cell: plan.Cell,
  settings: plan.Settings,
  on_stretch: Callable[[dict[str, Any]], None] = lambda _: None,
  load_state: Callable[[], dict[str, np.ndarray] | None] = lambda: None,
  save_state: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> Outcome:
  """Train, evaluate and price one cell.

  Args:
    cell: which algorithm and sparsity.
    settings: the comparison it belongs to.
    on_stretch: receives the record of each stretch of training.
    load_state: returns the arrays of an interrupted training, if any.
    save_state: stores them; called at most twice a minute.
  """
  began = time.perf_counter()
  task = cell_task(cell, settings)
  data = load_data(settings.task, settings.data)
  config = updater_config(task, cell, settings)
  updater = jaxpruner.create_updater_from_config(config)
  built = program.build(task, updater, data, settings.devices)
  keys = jax.vmap(jax.random.key)(jnp.arange(settings.seeds))
  flops = report.count_flops(
    task.apply,
    jax.eval_shape(task.init, jax.random.key(0)),
    task.example(data),
  )

  steps = trainings(cell) * task.steps
  length = max(1, -(-steps // STRETCHES))
  carry = built.start(keys, data)
  first, spent, cost = 0, 0.0, 0.0
  if task.resumable and (saved := load_state()):
    carry, (first, spent, cost) = program.restore(carry, saved)
    first = int(first)
  saved_at = time.perf_counter()
  while first < steps:
    count = min(length, steps - first)
    carry, losses, taken = built.train(carry, keys, data, first, count, length)
    stretch = _stretch_record(cell, steps, first, count, losses, taken)
    each = updater.category.gradients_per_step * _step_cost(flops, stretch)
    cost += count * each
    on_stretch(stretch)
    first += count
    now = time.perf_counter()
    due = task.resumable and first < steps and now - saved_at > 30
    if save_state and due:
      progress = [first, spent + now - began, cost]
      save_state(program.arrays_of(carry, progress))
      saved_at = now

  params = built.final(carry)
  metrics = jax.device_get(_evaluator(task)(params, data))
  masks = jax.device_get(carry.masks)
  record = {
    "cell": cell.id,
    "algorithm": cell.algorithm,
    "sparsity": cell.sparsity,
    "width": task.width,
    "metrics": {
      name: np.asarray(value, np.float64).tolist()
      for name, value in metrics.items()
    },
    **_size_record(jax.device_get(params), masks, cell),
    **_cost_record(flops, cost, task, carry, updater),
    "seconds": spent + time.perf_counter() - began,
  }
  record["problem"] = _problem(record, task, cell, settings)
  one = lambda tree: jax.tree.map(lambda x: np.asarray(x[0]), tree)
  arrays = _named("param", one(jax.device_get(params)))
  arrays |= _named("mask", one(masks))
  return Outcome(record, arrays)


def _stretch_record(cell, steps, first, count, losses, taken) -> dict[str, Any]:
  taken = jax.device_get(taken)
  named = lambda tree: {
    report.path_name(path): float(np.mean(leaf))
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }
  return {
    "cell": cell.id,
    "start": first,
    "count": count,
    "steps": steps,
    "loss": np.asarray(losses, np.float64)[:, :count].tolist(),
    "density": named(taken.density),
    "stored": named(taken.stored),
    "churn": np.asarray(taken.churn, np.float64).tolist(),
    "explored": np.asarray(taken.explored, np.float64).tolist(),
  }


def _step_cost(flops: report.Flops, stretch: dict[str, Any]) -> float:
  """Return the FLOPs of one gradient on the example batch.

  Forward and the gradient by the inputs use the masked weights; the gradient
  by the weights is needed for the weights that are trained.
  """
  return 2 * flops.total(stretch["density"]) + flops.total(stretch["stored"])


def _cost_record(flops, cost, task, carry, updater) -> dict[str, Any]:
  dense = flops.total()
  masks = jax.device_get(carry.masks)
  density = report.leaf_densities(masks)
  updates = _dense_gradients(updater, task.steps)
  return {
    "inference_flops": flops.total(density),
    "inference_flops_dense": dense,
    "training_flops": cost + updates * (dense - flops.total(density)),
    "training_flops_dense": 3 * dense * task.steps,
    "density": density,
  }


def _dense_gradients(updater: Any, steps: int) -> int:
  """Return on how many steps a sparse trainer needs every gradient.

  RigL and its kin rank pruned weights by gradient when they rewire.
  """
  category = updater.category
  sparse = category.start == "sparse-to-sparse" and category.dynamic
  if not (sparse and "gradients" in updater.needs):
    return 0
  if "momentum" in updater.needs:
    return steps
  every = np.arange(steps)
  due = jax.vmap(updater.scheduler.is_mask_update_iter)(jnp.asarray(every))
  return int(np.sum(np.asarray(due)))


def _size_record(params, masks, cell) -> dict[str, Any]:
  one = lambda tree: jax.tree.map(lambda x: np.asarray(x[0]), tree)
  flat = jax.tree.leaves(masks)
  prunable = sum(m[0].size for m in flat)
  seeds = jax.tree.leaves(params)[0].shape[0]
  removed = [
    sum(int(m[i].size - np.count_nonzero(m[i])) for m in flat)
    for i in range(seeds)
  ]
  # The weights themselves are checked, not only the masks that claim it.
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
    "weights": report.count_weights(one(params), one(masks)),
    "bytes": report.stored_bytes(one(params), one(masks)),
    "bytes_dense": report.stored_bytes(one(params)),
  }


def _collapsed(masks) -> list[str]:
  """Name the leaves that lost every weight in some seed."""
  return [
    report.path_name(path)
    for path, mask in jax.tree_util.tree_flatten_with_path(masks)[0]
    if not np.all(np.any(mask.reshape(mask.shape[0], -1), axis=1))
  ]


def _problem(record, task, cell, settings) -> str:
  """Return why the cell may not enter the table, or ''."""
  values = record["metrics"][task.metric]
  if not np.all(np.isfinite(values)):
    return f"{task.metric} is not finite: the training diverged"
  if cell.algorithm in plan.BASELINES:
    return ""
  if record["nonzero_pruned"]:
    return f"{record['nonzero_pruned']} weights under the mask are not zero"
  if not record["prunable"]:
    return "nothing was pruned"
  # Each leaf rounds to whole weights; blocks and channels to whole blocks.
  cls = jaxpruner.algorithm_class(cell.algorithm)
  plain = cls.sparsity_type == jaxpruner.Unstructured() and not settings.type
  slack = 1e-4 if plain else 0.01
  slack += record["leaves"] / record["prunable"]
  for realised in record["realised"]:
    if abs(realised - cell.sparsity) > slack:
      return (
        f"sparsity {realised:.4f} was realised, {cell.sparsity:g} requested"
      )
  return ""


def _named(prefix: str, tree: PyTree) -> dict[str, np.ndarray]:
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {f"{prefix}:{report.path_name(path)}": leaf for path, leaf in flat}
