"""The training of one cell, compiled for all seeds together.

This file enforces the protocol: with one seed, initial weights, batches,
optimizer, learning rate and number of steps depend on the task and the seed
only. The updater is the only difference between cells.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner import report
from jaxpruner.compare.distillation import Distillation
from jaxpruner.compare.over_seeds import Training, over_seeds
from jaxpruner.compare.tasks.base import Task

PyTree = Any


class Carry(NamedTuple):
  """The state of one seed's training."""

  params: PyTree
  opt_state: PyTree
  env_state: PyTree
  state: PyTree  # of the network, such as batch statistics
  masks: PyTree  # at the last snapshot
  seen: PyTree  # weights that were kept in at least one snapshot
  teacher: PyTree = ()  # (params, state) of the network that it learns from


class Given(NamedTuple):
  """What a training starts from instead of the task's own weights."""

  params: PyTree = None
  state: PyTree = None
  masks: PyTree = None  # held from start to end
  teacher: PyTree = ()


class Snapshot(NamedTuple):
  """The measurements after a chunk of steps, per seed."""

  density: PyTree  # per leaf, weights that the forward pass uses
  stored: PyTree  # per leaf, weights that are trained
  used: PyTree  # the density, mean over the steps of the chunk
  trained: PyTree  # weights whose gradient is needed, mean over the steps
  churn: jax.Array  # weights new in the mask / weights kept
  explored: jax.Array  # fraction of weights that were kept so far


def build(
  task: Task,
  updater: Any,
  data: PyTree,
  devices: int = 1,
  temperature: float = 1.0,
  batch: PyTree = None,
  distillation: Distillation | None = None,
  given: Given | None = None,
) -> Training:
  """Compile the training of one cell for all its seeds together.

  Args:
    task: the task.
    updater: the pruning algorithm.
    data: the result of the task's `load`, on the device.
    devices: the number of devices that share each batch.
    temperature: divides the network's outputs in the loss that algorithms use
      which prune before training.
    batch: for streamed tasks, a batch of one seed and step.
    distillation: how it learns from the teacher in `given`.
    given: what it starts from; seeds are the leading axis.

  Returns:
    start(keys, data, batches) -> Carry; train(carry, keys, data, first, count,
    length, block) -> (Carry, losses, Snapshot); snapshot(carry) -> (Carry,
    Snapshot); final(carry) -> the parameters to evaluate. Streamed tasks need
    `batches` (the first of each seed) and `block` (seeds, length, ...). A chunk
    of them may have several blocks: `train` then returns no snapshot, but the
    sums over its steps that `with_means` adds to one.
  """
  if isinstance(updater, jaxpruner.kept.KeptUpdater):
    from jaxpruner.compare import kept_training  # it builds on this file

    kept_training.check(task, given, distillation is not None)
    return kept_training.build(task, updater, data, given)
  seed = Seed(task, updater, _spreader(devices), temperature, distillation)
  return over_seeds(task, seed, data, batch, given or Given())


class Seed:
  """The training of one seed; `build` batches and compiles its methods."""

  def __init__(
    self,
    task: Task,
    updater: Any,
    spread: Any,
    temperature: float,
    distillation: Distillation | None,
  ):
    self._task, self._updater = task, updater
    self._spread, self._temperature = spread, temperature
    self._distillation = distillation
    self._tx = updater.wrap_optax(task.optimizer())

  def init(self, key: jax.Array) -> PyTree:
    """Return the weights before anything is pruned."""
    return self._task.init(jax.random.fold_in(key, 0))

  def start(
    self, params: PyTree, key: jax.Array, data: PyTree, batch, given: Given
  ) -> Carry:
    """Return the carry before the first step."""
    state = given.state
    if state is None:
      state = self._task.init_state(jax.random.fold_in(key, 0))
    first = self._first_tx(params, state, data, key, batch, given.masks)
    opt_state = first.init(params)
    params = self._updater.post_gradient_update(params, opt_state)
    env_state = self._task.start(params, data, jax.random.fold_in(key, 1))
    masks = _masks_of(params, opt_state)
    return Carry(
      params, opt_state, env_state, state, masks, masks, given.teacher
    )

  def _first_tx(
    self,
    params: PyTree,
    state: PyTree,
    data: PyTree,
    key: jax.Array,
    batch: PyTree,
    masks: PyTree,
  ) -> Any:
    """Return `tx`; it may prune at the start with the first batch."""
    task = self._task
    if masks is not None:
      fixed = dataclasses.replace(self._updater, masks=masks)
      return fixed.wrap_optax(task.optimizer())
    if "loss" not in self._updater.needs:
      return self._tx
    batch_key, loss_key = jax.random.split(jax.random.fold_in(key, 2))
    if not task.streamed:
      env_state = task.start(params, data, jax.random.fold_in(key, 1))
      _, batch = task.interact(env_state, params, data, batch_key, jnp.array(0))
    softened = task.with_temperature(self._temperature)
    bound = self._updater.bind(
      lambda p, batch: softened.loss_and_state(p, state, batch, loss_key)[0],
      batch,
      lambda p, inputs: task.forward(p, state, inputs),
      task.example(data),
    )
    return bound.wrap_optax(task.optimizer())

  def train(
    self,
    carry: Carry,
    key: jax.Array,
    data: PyTree,
    block,
    first,
    count,
    length,
  ) -> tuple[Carry, jax.Array, Any]:
    """Run `count` steps from `first` on; return `length` losses."""

    def body(i, state):
      carry, losses, spent = state
      batch = jax.tree.map(lambda x: x[i], block)
      # The masks before a step are those of its forward pass.
      now = self._needed(carry, first + i)
      spent = jax.tree.map(jnp.add, spent, now)
      carry, loss = self._step(carry, first + i, key, data, batch)
      return carry, losses.at[i].set(loss), spent

    spent = jax.tree.map(jnp.zeros_like, self._needed(carry, first))
    # A dynamic bound: the shorter last chunk reuses the compiled program.
    carry, losses, spent = jax.lax.fori_loop(
      0, count, body, (carry, jnp.zeros(length), spent)
    )
    if self._task.streamed:  # the caller adds up the blocks of a chunk
      return carry, losses, spent
    carry, taken = self.snapshot(carry)
    return carry, losses, with_means(taken, spent, count)

  def _step(
    self, carry: Carry, t: jax.Array, key: jax.Array, data: PyTree, batch
  ):
    task = self._task
    batch_key, loss_key = jax.random.split(jax.random.fold_in(key, 2))
    loss_key = jax.random.fold_in(loss_key, t)
    env_state = carry.env_state
    if not task.streamed:
      env_state, batch = task.interact(
        env_state, carry.params, data, batch_key, t
      )
    batch = self._spread(batch)

    def gradient(params):
      if not task.has_state:
        plain = lambda p, b, key: self._loss(p, carry, b, key)[0]
        loss, grads = task.gradient(plain, params, batch, loss_key)
        return (loss, carry.state), grads
      loss_fn = lambda p: self._loss(p, carry, batch, loss_key)
      return jax.value_and_grad(loss_fn, has_aux=True)(params)

    (loss, state), grads = gradient(carry.params)
    updates, opt_state = self._tx.update(
      grads,
      carry.opt_state,
      carry.params,
      grad_fn=lambda params: gradient(params)[1],
    )
    params = jax.tree.map(
      lambda p, u: (p + u).astype(p.dtype), carry.params, updates
    )
    carry = carry._replace(
      params=params, opt_state=opt_state, env_state=env_state, state=state
    )
    return carry, loss

  def _loss(
    self, params: PyTree, carry: Carry, batch: PyTree, key: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    """Return (loss, new state), with the teacher's part if there is one."""
    task = self._task
    loss, state = task.loss_and_state(params, carry.state, batch, key)
    if self._distillation is not None:
      loss = self._distillation.mixed(
        task, loss, params, carry.state, batch, carry.teacher
      )
    return loss, state

  def _masks(self, carry: Carry) -> PyTree:
    return _masks_of(carry.params, carry.opt_state)

  def snapshot(self, carry: Carry) -> tuple[Carry, Snapshot]:
    """Measure densities, churn and exploration since the last snapshot."""
    masks = self._masks(carry)
    flat = jax.tree.leaves(masks)
    size = sum(m.size for m in flat)
    seen = jax.tree.map(jnp.maximum, carry.seen, masks)
    density, stored = self._densities(carry, masks)
    churn, explored = jnp.zeros([]), jnp.ones([])
    if size:
      old = jax.tree.leaves(carry.masks)
      grown = _total([new > was for new, was in zip(flat, old, strict=True)])
      churn = grown / jnp.maximum(_total(flat), 1)
      explored = jnp.asarray(_total(jax.tree.leaves(seen))) / size
    taken = Snapshot(density, stored, density, stored, churn, explored)
    return carry._replace(masks=masks, seen=seen), taken

  def _densities(self, carry: Carry, masks: PyTree) -> tuple[Any, Any]:
    """Return, per leaf, the fractions used in the forward pass and trained."""
    state = jaxpruner.find_state(carry.opt_state)
    flat, treedef = jax.tree.flatten(masks)
    tally = state.tally  # counted at mask updates: no pass over the masks
    density = treedef.unflatten(
      [
        mask.mean(dtype=jnp.float32)
        if not tally
        else tally.kept[i].astype(jnp.float32) / mask.size
        for i, mask in enumerate(flat)
      ]
    )
    stored = jax.tree.map(jnp.ones_like, density)
    if not self._updater.reselects:
      stored = density
    key = self._updater.category.trained
    if key is not None and flat:
      mean = lambda m: m.mean(dtype=jnp.float32)
      stored = jax.tree.map(mean, state.stats[key])
    return density, stored

  def _needed(self, carry: Carry, t: jax.Array) -> tuple[Any, Any]:
    """Return the fractions of weights and of gradients that a step needs."""
    masks = self._masks(carry)
    used, trained = self._densities(carry, masks)
    dense = report.needs_dense_gradient(self._updater, t)
    return used, jax.tree.map(lambda d: jnp.where(dense, 1, d), trained)

  def final(self, carry: Carry) -> PyTree:
    """Return the parameters that are evaluated."""
    return carry.params


def with_means(taken: Snapshot, spent: Any, count: Any) -> Snapshot:
  """Return a snapshot with the means over the steps of its chunk.

  Args:
    taken: the snapshot at the end.
    spent: (used, trained), summed over the steps.
    count: the number of steps.

  Returns:
    The snapshot.
  """
  used, trained = jax.tree.map(lambda total: total / count, spent)
  return taken._replace(used=used, trained=trained)


def _total(leaves: list[jax.Array]) -> jax.Array | int:
  return sum(leaf.sum(dtype=jnp.float32) for leaf in leaves)


def _masks_of(params: PyTree, opt_state: PyTree) -> PyTree:
  masks = jaxpruner.find_state(opt_state).masks
  if masks is None:
    return jax.tree.map(lambda _: None, params)
  return masks


def _spreader(devices: int) -> Callable[[PyTree], PyTree]:
  """Return a function that splits a batch over the devices."""
  if devices == 1:
    return lambda batch: batch
  if devices > jax.device_count():
    raise ValueError(
      f"--devices {devices}: only {jax.device_count()} available; on CPU set "
      f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}"
    )
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), ("batch",))
  spec = jax.sharding.PartitionSpec("batch")
  sharding = jax.sharding.NamedSharding(mesh, spec)
  return lambda batch: jax.tree.map(
    lambda x: jax.lax.with_sharding_constraint(x, sharding), batch
  )
