"""The training of one cell, compiled for all seeds together.

This file enforces the protocol: with one seed, initial weights, batches,
optimizer, learning rate and number of steps depend on the task and the seed
only. The updater is the only difference between cells.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner import report
from jaxpruner.compare.tasks.base import Task

PyTree = Any


class Carry(NamedTuple):
  """The state of one seed's training."""

  params: PyTree
  opt_state: PyTree
  env_state: PyTree
  masks: PyTree  # at the last snapshot
  seen: PyTree  # weights that were kept in at least one snapshot


class Snapshot(NamedTuple):
  """The measurements after a chunk of steps, per seed."""

  density: PyTree  # per leaf, weights that the forward pass uses
  stored: PyTree  # per leaf, weights that are trained
  used: PyTree  # the density, mean over the steps of the chunk
  trained: PyTree  # weights whose gradient is needed, mean over the steps
  churn: jax.Array  # weights new in the mask / weights kept
  explored: jax.Array  # fraction of weights that were kept so far


class Training(NamedTuple):
  """The compiled functions of a training; seeds are the leading axis."""

  start: Callable[..., Carry]
  train: Callable[..., tuple[Carry, jax.Array, Snapshot]]
  final: Callable[[Carry], PyTree]


def build(
  task: Task,
  updater: Any,
  data: PyTree,
  devices: int = 1,
  temperature: float = 1.0,
) -> Training:
  """Compile the training of one cell for all its seeds together.

  Args:
    task: the task.
    updater: the pruning algorithm.
    data: the result of the task's `load`, on the device.
    devices: the number of devices that share each batch.
    temperature: divides the network's outputs in the loss that algorithms use
      which prune before training.

  Returns:
    start(keys, data) -> Carry; train(carry, keys, data, first, count, length)
    -> (Carry, losses, Snapshot); final(carry) -> the parameters to evaluate.
  """
  seed = _Seed(task, updater, _spreader(devices), temperature)
  return _over_seeds(task, seed.start, seed.train, seed.final, data)


class _Seed:
  """The training of one seed; `build` batches and compiles its methods."""

  def __init__(self, task: Task, updater: Any, spread: Any, temperature: float):
    self._task, self._updater = task, updater
    self._spread, self._temperature = spread, temperature
    self._tx = updater.wrap_optax(task.optimizer())

  def start(self, key: jax.Array, data: PyTree) -> Carry:
    """Return the carry before the first step."""
    params = self._task.init(jax.random.fold_in(key, 0))
    opt_state = self._first_tx(params, data, key).init(params)
    params = self._updater.post_gradient_update(params, opt_state)
    env_state = self._task.start(params, data, jax.random.fold_in(key, 1))
    masks = _masks_of(params, opt_state)
    return Carry(params, opt_state, env_state, masks, masks)

  def _first_tx(self, params: PyTree, data: PyTree, key: jax.Array) -> Any:
    """Return `tx`; it may prune at the start with the first batch."""
    task = self._task
    if "loss" not in self._updater.needs:
      return self._tx
    env_state = task.start(params, data, jax.random.fold_in(key, 1))
    batch_key, loss_key = jax.random.split(jax.random.fold_in(key, 2))
    _, batch = task.interact(env_state, params, data, batch_key, jnp.array(0))
    softened = task.with_temperature(self._temperature)
    bound = self._updater.bind(
      lambda p, batch: softened.loss(p, batch, loss_key),
      batch,
      task.apply,
      task.example(data),
    )
    return bound.wrap_optax(task.optimizer())

  def train(
    self, carry: Carry, key: jax.Array, data: PyTree, first, count, length
  ) -> tuple[Carry, jax.Array, Snapshot]:
    """Run `count` steps from `first` on; return `length` losses."""

    def body(i, state):
      carry, losses, spent = state
      # The masks before a step are those of its forward pass.
      now = self._needed(carry, first + i)
      spent = jax.tree.map(jnp.add, spent, now)
      carry, loss = self._step(carry, first + i, key, data)
      return carry, losses.at[i].set(loss), spent

    spent = jax.tree.map(jnp.zeros_like, self._needed(carry, first))
    # A dynamic bound: the shorter last chunk reuses the compiled program.
    carry, losses, spent = jax.lax.fori_loop(
      0, count, body, (carry, jnp.zeros(length), spent)
    )
    carry, taken = self._snapshot(carry)
    used, trained = jax.tree.map(lambda total: total / count, spent)
    return carry, losses, taken._replace(used=used, trained=trained)

  def _step(self, carry: Carry, t: jax.Array, key: jax.Array, data: PyTree):
    task = self._task
    batch_key, loss_key = jax.random.split(jax.random.fold_in(key, 2))
    forward = lambda p: self._updater.pre_forward_update(p, carry.opt_state)
    env_state, batch = task.interact(
      carry.env_state, forward(carry.params), data, batch_key, t
    )
    batch = self._spread(batch)
    gradient = lambda params: task.gradient(
      lambda p, batch, key: task.loss(forward(p), batch, key),
      params,
      batch,
      jax.random.fold_in(loss_key, t),
    )
    loss, grads = gradient(carry.params)
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
      params=params, opt_state=opt_state, env_state=env_state
    )
    return carry, loss

  def _snapshot(self, carry: Carry) -> tuple[Carry, Snapshot]:
    masks = _masks_of(carry.params, carry.opt_state)
    flat = jax.tree.leaves(masks)
    size = sum(m.size for m in flat)
    seen = jax.tree.map(jnp.maximum, carry.seen, masks)
    density, stored = self._densities(carry.opt_state, masks)
    churn, explored = jnp.zeros([]), jnp.ones([])
    if size:
      old = jax.tree.leaves(carry.masks)
      grown = _total([new > was for new, was in zip(flat, old, strict=True)])
      churn = grown / jnp.maximum(_total(flat), 1)
      explored = jnp.asarray(_total(jax.tree.leaves(seen))) / size
    taken = Snapshot(density, stored, density, stored, churn, explored)
    return carry._replace(masks=masks, seen=seen), taken

  def _densities(self, opt_state: PyTree, masks: PyTree) -> tuple[Any, Any]:
    """Return, per leaf, the fractions used in the forward pass and trained."""
    state = jaxpruner.find_state(opt_state)
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
    masks = _masks_of(carry.params, carry.opt_state)
    used, trained = self._densities(carry.opt_state, masks)
    dense = report.needs_dense_gradient(self._updater, t)
    return used, jax.tree.map(lambda d: jnp.where(dense, 1, d), trained)

  def final(self, carry: Carry) -> PyTree:
    """Return the parameters that are evaluated."""
    return self._updater.pre_forward_update(carry.params, carry.opt_state)


def _total(leaves: list[jax.Array]) -> jax.Array | int:
  return sum(leaf.sum(dtype=jnp.float32) for leaf in leaves)


def _masks_of(params: PyTree, opt_state: PyTree) -> PyTree:
  masks = jaxpruner.find_state(opt_state).masks
  if masks is None:
    return jax.tree.map(lambda _: None, params)
  return masks


def _once(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Compile for one call: on a CPU, save compile time instead of run time."""
  cheap = {"xla_backend_optimization_level": 0}
  options = cheap if jax.default_backend() == "cpu" else None
  return jax.jit(fn, compiler_options=options)


def _over_seeds(task, start, train, final, data) -> Training:
  """Batch the seeds: together (vmap) or one after another (map)."""
  if task.in_turn:
    start_all = lambda keys, data: jax.lax.map(lambda k: start(k, data), keys)
    final_all = lambda carry: jax.lax.map(final, carry)
    over = lambda one: (
      lambda *all_seeds: jax.lax.map(lambda pair: one(*pair), all_seeds)
    )
  else:
    axes = _seed_axes(start, train, data)
    start_all = jax.vmap(start, in_axes=(0, None), out_axes=axes)
    final_all = jax.vmap(final, in_axes=(axes,))
    over = lambda one: jax.vmap(one, in_axes=(axes, 0), out_axes=(axes, 0, 0))

  def train_all(carry, keys, data, first, count, length):
    one = lambda carry, key: train(carry, key, data, first, count, length)
    return over(one)(carry, keys)

  return Training(
    _once(start_all),
    jax.jit(train_all, static_argnums=5, donate_argnums=0),
    jax.jit(final_all),
  )


def _seed_axes(start, train, data) -> PyTree:
  """Return vmap's axes of the carry: None for leaves that all seeds share.

  What JAX does: `lax.cond` on a batched value becomes a select, which computes
  both branches. What we do: step counters, equal for all seeds, are not
  batched. What it saves: a selection of every mask at every step. When it can
  go: when vmap keeps conditionals on equal values.
  """
  key = jax.eval_shape(lambda: jax.random.key(0))
  data = jax.eval_shape(lambda: data)
  carry = jax.eval_shape(start, key, data)

  def axis(leaf):
    shared = leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)
    return None if shared else 0

  axes = jax.tree.map(axis, carry)._replace(
    env_state=jax.tree.map(lambda _: 0, carry.env_state)
  )
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
  try:
    carries = jax.eval_shape(
      jax.vmap(start, in_axes=(0, None), out_axes=axes), keys, data
    )
    one = lambda carry, key: train(carry, key, data_in, 0, 1, 1)
    data_in = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), data)
    jax.eval_shape(
      jax.vmap(one, in_axes=(axes, 0), out_axes=(axes, 0, 0)), carries, keys
    )
  except ValueError:
    # An integer that does differ between seeds: batch everything.
    return jax.tree.map(lambda _: 0, carry)
  return axes


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


def arrays_of(carry: Carry, progress: list[float]) -> dict[str, np.ndarray]:
  """Return the state and the progress of a training as plain arrays."""
  # Typed keys have no NumPy dtype: their data is stored.
  raw = lambda x: (
    jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    else x
  )
  leaves = [np.asarray(raw(x)) for x in jax.tree.leaves(carry)]
  arrays = {f"leaf:{i}": leaf for i, leaf in enumerate(leaves)}
  arrays["progress"] = np.asarray(progress, np.float64)
  return arrays


class CheckpointError(ValueError):
  """A checkpoint can be read, but belongs to another training."""


def restore(
  carry: Carry, saved: dict[str, np.ndarray], steps: int
) -> tuple[Carry, list[float]]:
  """Return the state and the progress stored by `arrays_of`.

  Args:
    carry: the training before its first step, for structure and shapes.
    saved: the arrays.
    steps: the number of steps of the training.

  Returns:
    The carry, and [steps done, seconds, cost].

  Raises:
    CheckpointError: the arrays belong to another training.
  """
  leaves, treedef = jax.tree.flatten(carry)
  expected = {f"leaf:{i}" for i in range(len(leaves))} | {"progress"}
  if set(saved) != expected:
    raise CheckpointError(
      f"has {len(saved)} arrays, this training has {len(expected)}"
    )
  loaded = [_restored(old, saved[f"leaf:{i}"]) for i, old in enumerate(leaves)]
  progress = saved["progress"]
  if progress.shape != (3,) or not np.all(np.isfinite(progress)):
    raise CheckpointError(f"progress is {progress!r:.60}, need three numbers")
  first = progress[0]
  if first != int(first) or not 0 < first < steps:
    raise CheckpointError(f"stands at step {first:g} of {steps}")
  return treedef.unflatten(loaded), progress.tolist()


def _restored(old: jax.Array, new: np.ndarray) -> jax.Array:
  is_key = jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
  like = jax.random.key_data(old) if is_key else old
  if (new.shape, new.dtype) != (like.shape, like.dtype):
    raise CheckpointError(
      f"an array is {new.dtype}{new.shape}, need {like.dtype}{like.shape}"
    )
  loaded = jnp.asarray(new)
  if is_key:
    return jax.random.wrap_key_data(loaded, impl=jax.random.key_impl(old))
  return loaded
