"""Train one cell of the table: one algorithm, one sparsity, all seeds."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner.compare import spelling, streams, structure, tasks, training
from jaxpruner.compare.cells import (
  AFTER,
  BASELINES,
  Cell,
  base_task,
  costs_of,
  distribution_of,
  needs_dense,
  options_at,
)
from jaxpruner.compare.records import Chunk, Numbers, Record
from jaxpruner.compare.settings import ComparisonSettings
from jaxpruner.compare.tasks.base import Task
from jaxpruner.inspect import cost

PyTree = Any
CHUNKS = 20  # parts of a training; after each: snapshot, progress, checkpoint


def updater_config(
  task: Task, cell: Cell, dense: Mapping[str, str] | None = None
) -> dict[str, Any]:
  """Return the configuration of a cell's updater.

  Args:
    task: the task.
    cell: the cell.
    dense: leaves that its sparsity type leaves dense.

  Returns:
    The argument of `create_updater_from_config`.

  Example:
    >>> task = tasks.make_task("digits", {"steps": 40})
    >>> config = updater_config(task, Cell("rigl", 0.9))
    >>> config["sparsity"], config["dist_type"], config["total_steps"]
    (0.9, 'erk', 40)
  """
  if cell.algorithm in BASELINES:
    return {"algorithm": "no_prune"}
  name, options = spelling.algorithm_of(cell.algorithm)
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


def cell_task(cell: Cell, settings: ComparisonSettings) -> Task:
  """Return the task of a cell; the small dense baseline is narrower."""
  task = base_task(settings, cell.options)
  if cell.algorithm != "small_dense":
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
  if not cell.type or cell.algorithm in BASELINES:
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


class Outcome(NamedTuple):
  """A trained cell: its record, and the arrays of the first seed."""

  record: Record
  arrays: dict[str, np.ndarray]
  every: dict[str, np.ndarray] | None = None  # all seeds, of a dense cell


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
  data = load_data(
    settings.task, settings.data, task_options(settings, cell.options)
  )
  flops = cost.count_flops(
    forward_fn(task),
    jax.eval_shape(task.init, jax.random.key(0)),
    task.example(data),
  )
  dense = dense_leaves(task, cell, list(flops.leaves), settings)
  config = updater_config(task, cell, dense)
  updater = jaxpruner.create_updater_from_config(config)
  stream = None
  if task.streamed:
    stream = streams.Stream(task, range(settings.seeds))
  built = training.build(
    task,
    updater,
    data,
    settings.devices,
    costs_of(cell).temperature,
    stream and stream.template,
  )
  keys = jax.vmap(jax.random.key)(jnp.arange(settings.seeds))
  if not task.resumable:
    checkpoint = None
  run = _Run(cell, task, flops, built, keys, data, stream)
  done = run.train(began, emit, checkpoint)

  params, state = built.final(done.carry), done.carry.state
  metrics = evaluate(task, params, state, data)
  params, masks, state = jax.device_get((params, done.carry.masks, state))
  record = Record(
    cell=cell.id,
    algorithm=cell.algorithm,
    sparsity=cell.sparsity,
    width=task.width,
    metrics=metrics,
    **sizes_of(params, masks),
    **costs_of_masks(flops, done.cost, task, masks),
    seconds=done.spent + time.perf_counter() - began,
    notes=[f"{name} stays dense: {why}" for name, why in dense.items()],
    batches=f"{done.checksum:08x}" if stream and run.rounds == 1 else "",
  )
  problem = problem_of(record, task, cell)
  every = None
  if cell == cell.dense and needs_dense(settings):
    raw = training.raw_keys(state)
    every = _named("param", params) | _named("state", raw)
  return Outcome(
    dataclasses.replace(record, problem=problem),
    first_seed(params, masks, state),
    every,
  )


def first_seed(
  params: PyTree, masks: PyTree, state: PyTree
) -> dict[str, np.ndarray]:
  """Return the arrays of the first seed by name, as they are stored."""
  one = lambda tree: jax.tree.map(lambda x: np.asarray(x[0]), tree)
  arrays = _named("param", one(params)) | _named("mask", one(masks))
  return arrays | _named("state", training.raw_keys(one(state)))


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


class _Progress(NamedTuple):
  carry: training.Carry
  first: int  # the next step
  spent: float  # seconds of earlier, interrupted processes
  cost: float  # FLOPs
  checksum: int  # of the batches of a streamed task


@dataclasses.dataclass(frozen=True)
class _Run:
  """A cell's training, chunk by chunk."""

  cell: Cell
  task: Task
  flops: cost.Flops
  built: training.Training
  keys: jax.Array
  data: PyTree
  stream: streams.Stream | None = None

  @property
  def rounds(self) -> int:
    """The number of trainings, more than 1 for iterative pruning."""
    return costs_of(self.cell).trainings

  @property
  def steps(self) -> int:
    return self.rounds * self.task.steps

  @property
  def length(self) -> int:
    """The number of steps in a chunk."""
    return max(1, -(-self.steps // CHUNKS))

  def train(
    self,
    began: float,
    emit: Callable[[Chunk], None],
    checkpoint: Checkpoint | None,
  ) -> _Progress:
    """Train to the end, from the checkpoint if there is one."""
    at = self._resume(checkpoint)
    saved_at = time.perf_counter()
    for carry, first, losses, taken, checksum in self._chunks(at):
      count = min(self.length, self.steps - first)
      chunk = chunk_of(self.cell, self.steps, first, count, losses, taken)
      each = costs_of(self.cell).gradients_per_step * _step_cost(
        self.flops, taken
      )
      at = at._replace(
        carry=carry,
        first=first + count,
        cost=at.cost + count * each,
        checksum=checksum,
      )
      emit(chunk)
      now = time.perf_counter()
      if checkpoint and at.first < self.steps and now - saved_at > 30:
        progress = [at.first, at.spent + now - began, at.cost, at.checksum]
        checkpoint.save(training.arrays_of(carry, progress))
        saved_at = now
    return at

  def _chunks(self, at: _Progress) -> Iterator[tuple]:
    """Yield (carry, first step, losses, snapshot, checksum) per chunk."""
    if self.stream is not None:
      yield from self._streamed_chunks(at, self.stream)
      return
    carry = at.carry
    for first in range(at.first, self.steps, self.length):
      count = min(self.length, self.steps - first)
      carry, losses, taken = self.built.train(
        carry, self.keys, self.data, first, count, self.length
      )
      yield carry, first, losses, taken, 0

  def _streamed_chunks(
    self, at: _Progress, stream: streams.Stream
  ) -> Iterator[tuple]:
    carry, begun = at.carry, at.first
    parts: list[jax.Array] = []
    spent = None
    per_block = stream.steps_per_block(self.length)
    # Dispatch is asynchronous: a block trains while the next one is drawn.
    for block in stream.blocks(at.first, self.steps, self.length, at.checksum):
      carry, losses, more = self.built.train(
        carry,
        self.keys,
        self.data,
        block.first,
        block.length,
        per_block,
        block.batches,
      )
      parts.append(losses[:, : block.length])
      spent = more if spent is None else jax.tree.map(jnp.add, spent, more)
      end = block.first + block.length
      if end - begun == self.length or end == self.steps:
        carry, taken = self.built.snapshot(carry)
        losses = jnp.concatenate(parts, 1)
        taken = training.with_means(taken, spent, end - begun)
        yield carry, begun, losses, taken, block.checksum
        begun, parts, spent = end, [], None

  def _resume(self, checkpoint: Checkpoint | None) -> _Progress:
    batches = self.stream.start() if self.stream else None
    carry = self.built.start(self.keys, self.data, batches)
    saved = checkpoint.load() if checkpoint else None
    if checkpoint is None or saved is None:
      return _Progress(carry, 0, 0.0, 0.0, 0)
    try:
      carry, progress = training.restore(carry, saved, self.steps)
    except training.CheckpointError as error:
      # Only time is lost: the cell starts over and gives the same numbers.
      checkpoint.set_aside(str(error))
      return _Progress(carry, 0, 0.0, 0.0, 0)
    first, spent, flops, checksum = progress
    return _Progress(carry, int(first), spent, flops, int(checksum))


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
  if cell.algorithm in BASELINES:
    return ""
  if record.nonzero_pruned:
    return f"{record.nonzero_pruned} weights under the mask are not zero"
  if not record.prunable:
    return "nothing was pruned"
  # Each leaf rounds to whole weights; blocks and channels to whole blocks.
  # Solvers such as Wanda's round each output by itself.
  plain = not cell.type and not cell.name.startswith(AFTER)
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


def _named(prefix: str, tree: PyTree) -> dict[str, np.ndarray]:
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {f"{prefix}:{cost.path_name(path)}": leaf for path, leaf in flat}
