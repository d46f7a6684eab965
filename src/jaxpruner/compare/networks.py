"""The network of a cell: its task and width, its data, its updater."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxpruner
from jaxpruner.compare import spelling, structure, tasks
from jaxpruner.compare.cells import BASELINES, Cell
from jaxpruner.compare.groups import costs_of, distribution_of
from jaxpruner.compare.plan import base_task, options_at
from jaxpruner.compare.settings import ComparisonSettings
from jaxpruner.compare.tasks.base import Task
from jaxpruner.inspect import cost

PyTree = Any


def updater_config(
  task: Task,
  cell: Cell,
  dense: Mapping[str, str] | None = None,
  masks: PyTree = None,
) -> dict[str, Any]:
  """Return the configuration of a cell's updater.

  Args:
    task: the task.
    cell: the cell.
    dense: leaves that its sparsity type leaves dense.
    masks: masks that are given; a leaf without one stays dense.

  Returns:
    The argument of `create_updater_from_config`.

  Example:
    >>> task = tasks.make_task("digits", {"steps": 40})
    >>> config = updater_config(task, Cell("rigl", 0.9))
    >>> config["sparsity"], config["dist_type"], config["total_steps"]
    (0.9, 'erk', 40)
  """
  if cell.name in BASELINES:
    return {"algorithm": "no_prune"}
  if masks is not None:
    return _held(task, cell, masks)
  name, options = spelling.algorithm_of(cell.algorithm)
  for key in spelling.OURS:
    options.pop(key, None)
  share = distribution_of(cell, task)
  config = {
    "algorithm": name,
    "sparsity": cell.sparsity,
    "dist_type": task.distribution if share == "global" else share,
    "total_steps": task.steps,
    **task.pruning,
  }
  steps = task.steps
  if (total := costs_of(cell).trainings) > 1:
    # Each round is as long as the training of every other algorithm.
    config |= {"update_freq": steps, "update_start_step": steps}
    config |= {"update_end_step": (total - 1) * steps}
  if cell.type:
    config["sparsity_type"] = spelling.parse_type(cell.type)
  if dense:
    chosen = dict(config.get("custom_sparsity_map") or {})
    config["custom_sparsity_map"] = chosen | dict.fromkeys(dense)
  return config | options


def _held(task: Task, cell: Cell, masks: PyTree) -> dict[str, Any]:
  """Return the configuration of an updater that holds given masks."""
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  named = jax.tree_util.tree_flatten_with_path(shapes)[0]
  kept = {p for p, _ in jax.tree_util.tree_flatten_with_path(masks)[0]}
  rest = [cost.path_name(path) for path, _ in named if path not in kept]
  chosen = dict(task.pruning.get("custom_sparsity_map") or {})
  return {
    "algorithm": "static_sparse",
    "sparsity": cell.sparsity,
    "dist_type": "uniform",
    "total_steps": task.steps,
    **task.pruning,
    "custom_sparsity_map": chosen | dict.fromkeys(rest),
  }


def cell_task(cell: Cell, settings: ComparisonSettings) -> Task:
  """Return the task of a cell; the small dense baseline is narrower."""
  task = base_task(settings, cell.options)
  if cell.name != "small_dense":
    return task
  narrow = with_width_for(task, cell.sparsity)
  if not settings.optimizer:
    return narrow
  return tasks.with_optimizer(
    narrow, options_at(settings, cell.options)["optimizer"]
  )


def with_width_for(task: Task, sparsity: float) -> Task:
  """Return the task at the width of the small dense baseline.

  The dense network of this width has as nearly as possible the number of
  weights that the sparse network keeps.

  Args:
    task: the task.
    sparsity: the sparsity of the other network.

  Returns:
    The task with another width.

  Example:
    >>> task = tasks.make_task("digits")
    >>> with_width_for(task, 0.9).width < task.width
    True
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
  total = sum(x.size for x in jax.tree.leaves(shapes))
  prunable = structure.prunable_shapes(shapes, _targets(task, shapes))
  return total, sum(map(math.prod, prunable.values()))


def _targets(task: Task, shapes: PyTree) -> PyTree:
  """Return the tree of leaves that pruning may change; None elsewhere."""
  config = {
    "algorithm": "magnitude",
    "sparsity": 0.5,
    "dist_type": "uniform",
    "total_steps": task.steps,
    **task.pruning,
  }
  updater = jaxpruner.create_updater_from_config(config)
  share = updater.sparsity_distribution_fn
  return share(shapes) if share else None


def dense_leaves(
  task: Task, cell: Cell, order: list[str], settings: ComparisonSettings
) -> dict[str, str]:
  """Return the leaves that a cell's sparsity type leaves dense, and why.

  Args:
    task: the task.
    cell: the cell.
    order: the leaves in the order in which the network uses them.
    settings: the comparison.

  Returns:
    Path -> reason.
  """
  if not cell.type or cell.name in BASELINES:
    return {}
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  prunable = structure.prunable_shapes(shapes, _targets(task, shapes))
  kind = spelling.parse_type(cell.type)
  return structure.dense_leaves(
    kind, cell.sparsity, prunable, order, settings.all_layers
  )


def task_options(settings: ComparisonSettings, options: str) -> dict[str, Any]:
  """Return the values of the task's own options at a point of the axes."""
  values = options_at(settings, options)
  if settings.optimizer:
    del values["optimizer"]
  return values


def load_data(
  name: str, folder: str, options: Mapping[str, Any] | None = None
) -> PyTree:
  """Return a task's data on the device, once per process.

  Args:
    name: the registered name of the task.
    folder: the folder to read from; "" is the default place.
    options: values for the task's fields.

  Returns:
    The arrays of the task's `load`.
  """
  # Data never depend on these, so that a width more costs no copy of them.
  apart = ("width", "steps", "learning_rate")
  kept = {k: v for k, v in (options or {}).items() if k not in apart}
  return _loaded(name, folder, tuple(sorted(kept.items())))


@functools.lru_cache(maxsize=8)
def _loaded(name: str, folder: str, options: tuple) -> PyTree:
  loaded = tasks.make_task(name, dict(options)).load(folder or None)
  return jax.tree.map(jnp.asarray, loaded)


def forward_fn(
  task: Task, state: PyTree = None
) -> Callable[[PyTree, Any], Any]:
  """Return (params, inputs) -> outputs with the state filled in.

  Args:
    task: the task.
    state: the state of the network; by default the initial one.

  Returns:
    The function that FLOPs and latency are measured on.
  """
  if task.has_state and state is None:
    state = jax.jit(task.init_state)(jax.random.key(0))
  return lambda params, inputs: task.forward(params, state, inputs)


def forward_flops(task: Task, data: PyTree) -> cost.Flops:
  """Return the FLOPs of one forward pass on the task's example."""
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  return cost.count_flops(forward_fn(task), shapes, task.example(data))
