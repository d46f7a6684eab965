"""Rows "after training": prune the dense row's own trained weights."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import post_training, sparsity_distributions
from jaxpruner.compare import cell_run, spelling, streams
from jaxpruner.compare.cell_run import Outcome
from jaxpruner.compare.cells import AFTER, Cell, distribution_of
from jaxpruner.compare.records import Record
from jaxpruner.compare.settings import ComparisonSettings
from jaxpruner.compare.tasks.base import Task
from jaxpruner.inspect import cost
from jaxpruner.post_training.solvers.table import SOLVERS

PyTree = Any
CALIBRATION = 8  # batches, the first of each seed's training


def run_after(
  cell: Cell, settings: ComparisonSettings, trained: Mapping[str, np.ndarray]
) -> Outcome:
  """Prune the trained dense network of every seed, and evaluate it.

  Args:
    cell: the cell; its algorithm is `after:SOLVER`.
    settings: the comparison.
    trained: the arrays of all seeds of the dense cell.

  Returns:
    The record, and the first seed's parameters and masks.
  """
  began = time.perf_counter()
  task = cell_run.cell_task(cell, settings)
  options = cell_run.task_options(settings, cell.options)
  data = cell_run.load_data(settings.task, settings.data, options)
  params = filled(
    jax.eval_shape(task.init, jax.random.key(0)), trained, "param"
  )
  state = ()
  if task.has_state:
    initial = jax.jit(task.init_state)(jax.random.key(0))
    state = filled(initial, trained, "state")
  flops = cost.count_flops(
    cell_run.forward_fn(task),
    jax.eval_shape(task.init, jax.random.key(0)),
    task.example(data),
  )
  dense = cell_run.dense_leaves(task, cell, list(flops.leaves), settings)
  name, chosen = spelling.algorithm_of(cell.algorithm)
  count = chosen.pop("calibration", CALIBRATION)
  pruned, masks = [], []
  for seed in range(settings.seeds):
    one = jax.tree.map(lambda x, seed=seed: x[seed], (params, state))
    inputs = calibration_inputs(task, data, seed, count)
    found = post_training.prune(
      cell_run.forward_fn(task, one[1]),
      one[0],
      inputs,
      method=name.removeprefix(AFTER),
      sparsity_type=spelling.parse_type(cell.type),
      **_shares(cell, task, dense, one[0]),
      **chosen,
    )
    pruned.append(found[0])
    masks.append(found[1])
  stack = lambda *leaves: jnp.stack(leaves)
  pruned, masks = jax.tree.map(stack, *pruned), jax.tree.map(stack, *masks)
  metrics = cell_run.evaluate(task, pruned, state, data)
  pruned, masks = jax.device_get((pruned, masks))
  spent = 3 * flops.total() * task.steps
  spent += calibration_flops(flops, params, name.removeprefix(AFTER), count)
  record = Record(
    cell=cell.id,
    algorithm=cell.algorithm,
    sparsity=cell.sparsity,
    width=task.width,
    metrics=metrics,
    **cell_run.sizes_of(pruned, masks),
    **cell_run.costs_of_masks(flops, spent, task, masks),
    notes=[f"{path} stays dense: {why}" for path, why in dense.items()],
    seconds=time.perf_counter() - began,
  )
  problem = cell_run.problem_of(record, task, cell)
  return Outcome(
    dataclasses.replace(record, problem=problem),
    cell_run.first_seed(pruned, masks, jax.device_get(state)),
  )


def _shares(
  cell: Cell, task: Task, dense: Mapping[str, str], params: PyTree
) -> dict[str, Any]:
  """Return the arguments of `prune` that set the sparsity of each leaf."""
  share = distribution_of(cell, task)
  chosen = dict(task.pruning.get("custom_sparsity_map") or {})
  chosen |= dict.fromkeys(dense)
  given = {
    key: value for key, value in task.pruning.items() if key == "filter_fn"
  }
  if share == "lamp":
    targets = sparsity_distributions.lamp(
      params, cell.sparsity, custom_sparsity_map=chosen or None, **given
    )
    named = jax.tree_util.tree_flatten_with_path(targets)[0]
    chosen |= {cost.path_name(path): target for path, target in named}
    share = "uniform"
  return given | {
    "sparsity": cell.sparsity,
    "allocation": share,
    "custom_sparsity_map": chosen or None,
  }


def calibration_inputs(
  task: Task, data: PyTree, seed: int, count: int
) -> list[Any]:
  """Return the inputs of the first training batches of a seed.

  Args:
    task: the task.
    data: the result of its `load`.
    seed: the number of the seed.
    count: the number of batches.

  Returns:
    What `apply` takes, one entry per batch.
  """
  if task.streamed:
    batches = streams.first_batches(task, seed, 0, count)
  else:
    key, _ = jax.random.split(jax.random.fold_in(jax.random.key(seed), 2))
    batches = [task.batches(data, key, jnp.array(i)) for i in range(count)]
  return [task.inputs(batch) for batch in batches]


def calibration_flops(
  flops: cost.Flops, params: PyTree, method: str, count: int
) -> float:
  """Return the FLOPs of calibration and of solving, without the training.

  A solver that needs inputs costs a forward pass per batch. One that needs
  second moments costs 2 n d² per leaf of d inputs and n rows, and d³ + 2 d² k
  to solve it for k outputs.

  Args:
    flops: those of one batch.
    params: the parameters of all seeds.
    method: the name of the solver.
    count: the number of batches.

  Returns:
    The FLOPs for one seed.

  Example:
    >>> flops = cost.Flops({"w": 2.0 * 5 * 3 * 4}, other=0.0)
    >>> params = {"w": jnp.ones((1, 3, 4))}  # one seed, 5 rows
    >>> calibration_flops(flops, params, "magnitude", 2)
    0.0
    >>> calibration_flops(flops, params, "wanda", 2)
    240.0
    >>> calibration_flops(flops, params, "sparsegpt", 2) - 240
    279.0
  """
  needs = SOLVERS.find(method).needs
  if needs == "none":
    return 0.0
  total = count * flops.total()
  if needs == "square":
    return total
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    shape = leaf.shape[1:]
    products = flops.leaves.get(cost.path_name(path))
    if products is None or len(shape) < 2:
      continue
    inputs, outputs = math.prod(shape[:-1]), shape[-1]
    rows = count * products / (2 * inputs * outputs)
    total += 2 * rows * inputs**2 + inputs**3 + 2 * inputs**2 * outputs
  return total


def filled(
  shapes: PyTree, arrays: Mapping[str, np.ndarray], prefix: str
) -> PyTree:
  """Return a tree of all seeds from stored arrays.

  Args:
    shapes: the tree of one seed.
    arrays: `prefix:path` -> array; seeds are the leading axis.
    prefix: "param" or "state".

  Returns:
    The tree.

  Raises:
    ValueError: an array is missing.
  """

  def leaf(path, like):
    name = f"{prefix}:{cost.path_name(path)}"
    if name not in arrays:
      raise ValueError(f"{name} is missing among the dense row's weights")
    stored = jnp.asarray(arrays[name])
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
      return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(like))
    return stored

  return jax.tree_util.tree_map_with_path(leaf, shapes)
