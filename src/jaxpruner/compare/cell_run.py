"""Train one cell of the table: one algorithm, one sparsity, all seeds."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner.compare import settings as settings_lib
from jaxpruner.compare import tasks, training
from jaxpruner.compare.cells import BASELINES, Cell, costs_of
from jaxpruner.compare.records import Chunk, Record
from jaxpruner.compare.settings import ComparisonSettings
from jaxpruner.compare.tasks.base import Task
from jaxpruner.inspect import cost

PyTree = Any
CHUNKS = 20  # parts of a training; after each: snapshot, progress, checkpoint


def updater_config(
  task: Task, cell: Cell, settings: ComparisonSettings
) -> dict[str, Any]:
  """Return the configuration of a cell's updater.

  Args:
    task: the task.
    cell: the cell.
    settings: the comparison.

  Returns:
    The argument of `create_updater_from_config`.

  Example:
    >>> task = tasks.make_task("digits", {"steps": 40})
    >>> config = updater_config(task, Cell("rigl", 0.9), ComparisonSettings())
    >>> config["sparsity"], config["dist_type"], config["total_steps"]
    (0.9, 'erk', 40)
  """
  if cell.algorithm in BASELINES:
    return {"algorithm": "no_prune"}
  config = {
    "algorithm": cell.algorithm,
    "sparsity": cell.sparsity,
    "dist_type": settings.distribution or task.distribution,
    "total_steps": task.steps,
    **task.pruning,
  }
  steps = task.steps
  if (total := costs_of(cell).trainings) > 1:
    # Each round is as long as the training of every other algorithm.
    config |= {"update_freq": steps, "update_start_step": steps}
    config |= {"update_end_step": (total - 1) * steps}
  if settings.type:
    config["sparsity_type"] = settings.type
    # N:M gives every leaf the same sparsity; ERK would contradict it.
    if settings_lib.type_sparsity(settings.type) is not None:
      config["dist_type"] = settings.distribution or "uniform"
  return config


def cell_task(cell: Cell, settings: ComparisonSettings) -> Task:
  """Return the task of a cell; the small dense baseline is narrower."""
  task = tasks.make_task(settings.task, settings.options)
  if cell.algorithm != "small_dense":
    return task
  return with_width_for(task, cell.sparsity)


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
  """A trained cell: its record, and the arrays of the first seed."""

  record: Record
  arrays: dict[str, np.ndarray]


class Checkpoint(Protocol):
  """The storage of an interrupted training."""

  def load(self) -> dict[str, np.ndarray] | None:
    """Return the arrays of an interrupted training, if there is one."""
    ...

  def save(self, arrays: dict[str, np.ndarray]) -> None:
    """Store the arrays; called at most twice a minute."""
    ...

  def set_aside(self, reason: str) -> None:
    """Rename a checkpoint that cannot be used."""
    ...


def run_cell(
  cell: Cell,
  settings: ComparisonSettings,
  emit: Callable[[Chunk], None] = lambda _: None,
  checkpoint: Checkpoint | None = None,
) -> Outcome:
  """Train and evaluate one cell, and count its cost.

  Args:
    cell: which algorithm and sparsity.
    settings: the comparison it belongs to.
    emit: receives each chunk of the training.
    checkpoint: where an interrupted training is kept; None keeps none.

  Returns:
    the record for the table, and the first seed's parameters and masks.
  """
  began = time.perf_counter()
  task = cell_task(cell, settings)
  data = load_data(settings.task, settings.data)
  config = updater_config(task, cell, settings)
  updater = jaxpruner.create_updater_from_config(config)
  flops = cost.count_flops(
    task.apply,
    jax.eval_shape(task.init, jax.random.key(0)),
    task.example(data),
  )
  built = training.build(
    task, updater, data, settings.devices, costs_of(cell).temperature
  )
  keys = jax.vmap(jax.random.key)(jnp.arange(settings.seeds))
  if not task.resumable:
    checkpoint = None
  run = _Run(cell, task, flops, built, keys, data)
  done = run.train(began, emit, checkpoint)

  params = built.final(done.carry)
  metrics = jax.device_get(_evaluator(task)(params, data))
  params, masks = jax.device_get((params, done.carry.masks))
  record = Record(
    cell=cell.id,
    algorithm=cell.algorithm,
    sparsity=cell.sparsity,
    width=task.width,
    metrics={
      name: np.asarray(value, np.float64).tolist()
      for name, value in metrics.items()
    },
    **_sizes_of(params, masks),
    **_costs_of(flops, done.cost, task, masks),
    seconds=done.spent + time.perf_counter() - began,
  )
  problem = _problem(record, task, cell, settings)
  one = lambda tree: jax.tree.map(lambda x: np.asarray(x[0]), tree)
  arrays = _named("param", one(params)) | _named("mask", one(masks))
  return Outcome(dataclasses.replace(record, problem=problem), arrays)


class _Progress(NamedTuple):
  carry: training.Carry
  first: int  # the next step
  spent: float  # seconds of earlier, interrupted processes
  cost: float  # FLOPs


@dataclasses.dataclass(frozen=True)
class _Run:
  """A cell's training, chunk by chunk."""

  cell: Cell
  task: Task
  flops: cost.Flops
  built: training.Training
  keys: jax.Array
  data: PyTree

  @property
  def steps(self) -> int:
    return costs_of(self.cell).trainings * self.task.steps

  def train(
    self,
    began: float,
    emit: Callable[[Chunk], None],
    checkpoint: Checkpoint | None,
  ) -> _Progress:
    """Train to the end, from the checkpoint if there is one."""
    at = self._resume(checkpoint)
    length = max(1, -(-self.steps // CHUNKS))
    saved_at = time.perf_counter()
    while at.first < self.steps:
      count = min(length, self.steps - at.first)
      carry, losses, taken = self.built.train(
        at.carry, self.keys, self.data, at.first, count, length
      )
      chunk = chunk_of(self.cell, self.steps, at.first, count, losses, taken)
      each = costs_of(self.cell).gradients_per_step * _step_cost(
        self.flops, taken
      )
      at = _Progress(carry, at.first + count, at.spent, at.cost + count * each)
      emit(chunk)
      now = time.perf_counter()
      if checkpoint and at.first < self.steps and now - saved_at > 30:
        progress = [at.first, at.spent + now - began, at.cost]
        checkpoint.save(training.arrays_of(carry, progress))
        saved_at = now
    return at

  def _resume(self, checkpoint: Checkpoint | None) -> _Progress:
    carry = self.built.start(self.keys, self.data)
    saved = checkpoint.load() if checkpoint else None
    if checkpoint is None or saved is None:
      return _Progress(carry, 0, 0.0, 0.0)
    try:
      carry, progress = training.restore(carry, saved, self.steps)
    except training.CheckpointError as error:
      # Only time is lost: the cell starts over and gives the same numbers.
      checkpoint.set_aside(str(error))
      return _Progress(carry, 0, 0.0, 0.0)
    return _Progress(carry, int(progress[0]), progress[1], progress[2])


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


def _step_cost(flops: cost.Flops, taken: training.Snapshot) -> float:
  """Return the mean FLOPs of a gradient on the example batch, over a chunk.

  The forward pass and the gradient with respect to the inputs use the masked
  weights; the gradient with respect to the weights is needed for trained ones.
  FLOPs are linear in the densities, so that means over steps are exact.
  """
  used, trained = map(_by_name, jax.device_get((taken.used, taken.trained)))
  return 2 * flops.total(used) + flops.total(trained)


def _costs_of(flops, spent, task, masks) -> dict[str, Any]:
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


def _sizes_of(params, masks) -> dict[str, Any]:
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


def _problem(
  record: Record, task: Task, cell: Cell, settings: ComparisonSettings
) -> str:
  """Return the reason to keep the cell out of the table, or ''."""
  values = np.array(record.metrics[task.metric], float)
  if not np.all(np.isfinite(values)):
    return f"{task.metric} is not finite: the training diverged"
  if cell.algorithm in BASELINES:
    return ""
  if record.nonzero_pruned:
    return f"{record.nonzero_pruned} weights under the mask are not zero"
  if not record.prunable:
    return "nothing was pruned"
  # Each leaf rounds to whole weights; blocks and channels to whole blocks.
  cls = jaxpruner.algorithm_class(cell.algorithm)
  plain = cls.sparsity_type == jaxpruner.Unstructured() and not settings.type
  slack = (1e-4 if plain else 0.01) + record.leaves / record.prunable
  for realised in np.array(record.realised, float):
    if abs(realised - cell.sparsity) > slack:
      return (
        f"sparsity {realised:.4f} was realised, {cell.sparsity:g} requested"
      )
  return ""


def _named(prefix: str, tree: PyTree) -> dict[str, np.ndarray]:
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {f"{prefix}:{cost.path_name(path)}": leaf for path, leaf in flat}
