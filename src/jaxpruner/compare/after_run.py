"""Rows "after training": prune the dense row's own trained weights."""

import dataclasses
import math
import time
from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import post_training, sparsity_distributions
from jaxpruner.compare import networks, outcomes, spelling, streams
from jaxpruner.compare.cells import AFTER, Cell
from jaxpruner.compare.given import trained_state
from jaxpruner.compare.groups import distribution_of
from jaxpruner.compare.outcomes import Outcome
from jaxpruner.compare.plan import keeps_all
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
  task = networks.cell_task(cell, settings)
  options = networks.task_options(settings, cell.options)
  data = networks.load_data(settings.task, settings.data, options)
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  params = outcomes.filled(shapes, trained, "param")
  state = trained_state(task, trained)
  flops = networks.forward_flops(task, data)
  dense = networks.dense_leaves(task, cell, list(flops.leaves), settings)
  name, chosen = spelling.algorithm_of(cell.algorithm)
  count = chosen.pop("calibration", CALIBRATION)
  pruned, masks = [], []
  for seed in range(settings.seeds):
    one = jax.tree.map(lambda x, seed=seed: x[seed], (params, state))
    inputs = calibration_inputs(task, data, seed, count)
    found = post_training.prune(
      networks.forward_fn(task, one[1]),
      one[0],
      inputs,
      method=name.removeprefix(AFTER),
      sparsity_type=spelling.parse_type(cell.type),
      **_shares(cell, task, dense, one[0], flops.leaves),
      **chosen,
    )
    pruned.append(found[0])
    masks.append(found[1])
  stack = lambda *leaves: jnp.stack(leaves)
  pruned, masks = jax.tree.map(stack, *pruned), jax.tree.map(stack, *masks)
  metrics = outcomes.evaluate(task, pruned, state, data)
  pruned, masks = jax.device_get((pruned, masks))
  spent = float(trained["flops"])
  spent += calibration_flops(flops, params, name.removeprefix(AFTER), count)
  record = Record(
    cell=cell.id,
    algorithm=cell.algorithm,
    sparsity=cell.sparsity,
    width=task.width,
    metrics=metrics,
    **outcomes.sizes_of(pruned, masks),
    **outcomes.costs_of_masks(flops, spent, task, masks),
    notes=[f"{path} stays dense: {why}" for path, why in dense.items()],
    seconds=time.perf_counter() - began,
  )
  problem = outcomes.problem_of(record, task, cell)
  state, every = jax.device_get(state), None
  if keeps_all(cell, settings):
    every = outcomes.every_seed(pruned, masks, state, None, spent)
  return Outcome(
    dataclasses.replace(record, problem=problem),
    outcomes.first_seed(pruned, masks, state),
    every,
  )


def _shares(
  cell: Cell,
  task: Task,
  dense: Mapping[str, str],
  params: PyTree,
  multiplied: Container[str],
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
  # A solver knows the leaves of products only: others stay dense by themselves.
  named = jax.tree_util.tree_flatten_with_path(params)[0]
  other = {cost.path_name(path) for path, _ in named}
  chosen = {
    name: value
    for name, value in chosen.items()
    if value is not None or name not in other or name in multiplied
  }
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
