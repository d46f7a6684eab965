"""Train one cell of the table: one algorithm, one sparsity, all seeds."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner.compare import given as given_lib
from jaxpruner.compare import (
  networks,
  outcomes,
  stored_carry,
  streams,
  training,
)
from jaxpruner.compare.cells import BASELINES, Cell
from jaxpruner.compare.distillation import Distillation, distillation_of
from jaxpruner.compare.groups import costs_of
from jaxpruner.compare.outcomes import Outcome
from jaxpruner.compare.plan import keeps_all
from jaxpruner.compare.records import Chunk, Record
from jaxpruner.compare.settings import ComparisonSettings
from jaxpruner.compare.tasks.base import Task
from jaxpruner.inspect import cost

PyTree = Any


CHUNKS = 20  # parts of a training; after each: snapshot, progress, checkpoint


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
  trained: Mapping[str, np.ndarray] | None = None,
) -> Outcome:
  """Train and evaluate one cell, and count its cost.

  Args:
    cell: which algorithm and sparsity.
    settings: the comparison it belongs to.
    emit: receives each chunk of the training.
    checkpoint: where an interrupted training is kept; None keeps none.
    trained: the arrays of all seeds of its source, if it has one.

  Returns:
    the record for the table, and the first seed's parameters and masks.
  """
  began = time.perf_counter()
  task = networks.cell_task(cell, settings)
  data = networks.load_data(
    settings.task, settings.data, networks.task_options(settings, cell.options)
  )
  flops = networks.forward_flops(task, data)
  dense = networks.dense_leaves(task, cell, list(flops.leaves), settings)
  keys = jax.vmap(jax.random.key)(jnp.arange(settings.seeds))
  given = given_lib.given_for(cell, task, settings, trained, keys)
  updater = jaxpruner.create_updater_from_config(
    networks.updater_config(task, cell, dense, given.masks)
  )
  if given.masks is not None:
    updater = given_lib.holding(updater)
  stream = None
  if task.streamed:
    stream = streams.Stream(task, range(settings.seeds))
  learns = distillation_of(cell.algorithm)
  built = training.build(
    task,
    updater,
    data,
    settings.devices,
    costs_of(cell).temperature,
    stream and stream.template,
    learns,
    given,
  )
  if not task.resumable:
    checkpoint = None
  run = _Run(cell, task, flops, built, keys, data, stream)
  done = run.train(began, emit, checkpoint)

  params, state = built.final(done.carry), done.carry.state
  metrics = outcomes.evaluate(task, params, state, data)
  start = _rewound(done.carry.opt_state, cell)
  params, masks, state, start = jax.device_get(
    (params, done.carry.masks, state, start)
  )
  spent = done.cost + run.steps * _extra_flops(task, flops, learns)
  if trained is not None:  # what its source cost belongs to its price
    spent += float(trained["flops"])
  record = Record(
    cell=cell.id,
    algorithm=cell.algorithm,
    sparsity=cell.sparsity,
    width=task.width,
    metrics=metrics,
    **outcomes.sizes_of(params, masks),
    **outcomes.costs_of_masks(flops, spent, task, masks),
    seconds=done.spent + time.perf_counter() - began,
    step_seconds=done.step_seconds,
    training_bytes=_held_bytes(done.carry, settings.seeds),
    notes=[f"{name} stays dense: {why}" for name, why in dense.items()],
    batches=f"{done.checksum:08x}" if stream and run.rounds == 1 else "",
  )
  problem = outcomes.problem_of(record, task, cell)
  every = None
  if keeps_all(cell, settings):
    every = outcomes.every_seed(params, masks, state, start, spent)
  return Outcome(
    dataclasses.replace(record, problem=problem),
    outcomes.first_seed(params, masks, state),
    every,
  )


def _held_bytes(carry: training.Carry, seeds: int) -> int:
  """Return the bytes of weights and optimizer state of one seed."""
  held = (carry.params, carry.opt_state)
  return sum(x.nbytes for x in jax.tree.leaves(held)) // seeds


def _rewound(opt_state: PyTree, cell: Cell) -> PyTree:
  """Return the weights that iterative pruning rewinds to, or None."""
  if cell.name in BASELINES or costs_of(cell).trainings == 1:
    return None
  found = jaxpruner.find_state(opt_state).stats
  return found.get("params") if isinstance(found, Mapping) else None


def _extra_flops(
  task: Task, flops: cost.Flops, learns: Distillation | None
) -> float:
  """Return the FLOPs that a teacher adds to a step.

  The teacher's forward pass is dense. XLA computes the student's outputs once
  for both parts of the loss, except where the loss runs the network in another
  mode, with batch statistics.
  """
  if learns is None:
    return 0.0
  return (4 if task.has_state else 1) * flops.total()


class _Progress(NamedTuple):
  carry: training.Carry
  first: int  # the next step
  spent: float  # seconds of earlier, interrupted processes
  cost: float  # FLOPs
  checksum: int  # of the batches of a streamed task
  step_seconds: float = 0.0  # the least of all chunks but the first, per seed


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
    saved_at = chunk_began = time.perf_counter()
    compiled = False
    for carry, first, losses, taken, checksum in self._chunks(at):
      count = min(self.length, self.steps - first)
      chunk = outcomes.chunk_of(
        self.cell, self.steps, first, count, losses, taken
      )
      seeds = self.keys.shape[0]
      each_step = (time.perf_counter() - chunk_began) / (count * seeds)
      # The first chunk compiles; interruptions only add time.
      least = min(at.step_seconds or each_step, each_step) if compiled else 0.0
      compiled = True
      each = costs_of(self.cell).gradients_per_step * outcomes.step_cost(
        self.flops, taken
      )
      at = at._replace(
        carry=carry,
        first=first + count,
        cost=at.cost + count * each,
        checksum=checksum,
        step_seconds=least,
      )
      emit(chunk)
      now = time.perf_counter()
      if checkpoint and at.first < self.steps and now - saved_at > 30:
        progress = [at.first, at.spent + now - began, at.cost, at.checksum]
        checkpoint.save(stored_carry.arrays_of(carry, progress))
        saved_at = now
      chunk_began = time.perf_counter()
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
      carry, progress = stored_carry.restore(carry, saved, self.steps)
    except stored_carry.CheckpointError as error:
      # Only time is lost: the cell starts over and gives the same numbers.
      checkpoint.set_aside(str(error))
      return _Progress(carry, 0, 0.0, 0.0, 0)
    first, spent, flops, checksum = progress
    return _Progress(carry, int(first), spent, flops, int(checksum))
