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
  state: PyTree  # of the network, such as batch statistics
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
  train: Callable[..., tuple[Carry, jax.Array, Any]]
  snapshot: Callable[[Carry], tuple[Carry, Snapshot]]
  final: Callable[[Carry], PyTree]


def build(
  task: Task,
  updater: Any,
  data: PyTree,
  devices: int = 1,
  temperature: float = 1.0,
  batch: PyTree = None,
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

  Returns:
    start(keys, data, batches) -> Carry; train(carry, keys, data, first, count,
    length, block) -> (Carry, losses, Snapshot); snapshot(carry) -> (Carry,
    Snapshot); final(carry) -> the parameters to evaluate. Streamed tasks need
    `batches` (the first of each seed) and `block` (seeds, length, ...). A chunk
    of them may have several blocks: `train` then returns no snapshot, but the
    sums over its steps that `with_means` adds to one.
  """
  seed = _Seed(task, updater, _spreader(devices), temperature)
  return _over_seeds(task, seed, data, batch)


class _Seed:
  """The training of one seed; `build` batches and compiles its methods."""

  def __init__(self, task: Task, updater: Any, spread: Any, temperature: float):
    self._task, self._updater = task, updater
    self._spread, self._temperature = spread, temperature
    self._tx = updater.wrap_optax(task.optimizer())

  def init(self, key: jax.Array) -> PyTree:
    """Return the weights before anything is pruned."""
    return self._task.init(jax.random.fold_in(key, 0))

  def start(
    self, params: PyTree, key: jax.Array, data: PyTree, batch: PyTree = None
  ) -> Carry:
    """Return the carry before the first step."""
    state = self._task.init_state(jax.random.fold_in(key, 0))
    opt_state = self._first_tx(params, state, data, key, batch).init(params)
    params = self._updater.post_gradient_update(params, opt_state)
    env_state = self._task.start(params, data, jax.random.fold_in(key, 1))
    masks = _masks_of(params, opt_state)
    return Carry(params, opt_state, env_state, state, masks, masks)

  def _first_tx(
    self, params: PyTree, state: PyTree, data: PyTree, key: jax.Array, batch
  ) -> Any:
    """Return `tx`; it may prune at the start with the first batch."""
    task = self._task
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
        loss, grads = task.gradient(task.loss, params, batch, loss_key)
        return (loss, carry.state), grads
      loss_fn = lambda p: task.loss_and_state(p, carry.state, batch, loss_key)
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

  def snapshot(self, carry: Carry) -> tuple[Carry, Snapshot]:
    """Measure densities, churn and exploration since the last snapshot."""
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


def _once(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Compile for one call: on a CPU, save compile time instead of run time."""
  cheap = {"xla_backend_optimization_level": 0}
  options = cheap if jax.default_backend() == "cpu" else None
  return jax.jit(fn, compiler_options=options)


def _over_seeds(task: Task, seed: _Seed, data, batch) -> Training:
  """Batch the seeds: together (vmap) or one after another (map)."""
  if task.in_turn:
    over = lambda one, _: (
      lambda *all_seeds: jax.lax.map(lambda each: one(*each), all_seeds)
    )
    axes = None
  else:
    over = lambda one, axes: jax.vmap(one, in_axes=axes[0], out_axes=axes[1])
    whole = lambda key, data, batch: seed.start(
      seed.init(key), key, data, batch
    )
    axes = _seed_axes(whole, seed.train, data, batch)

  # What XLA does: it fuses the draw of the weights with their first use, and
  # rounds as that fusion does. What we do: a program of its own. What it saves:
  # all algorithms start from the same weights, to the last bit. When it can go:
  # when fusions round as single operations do.
  init_all = _once(lambda keys: over(seed.init, ((0,), 0))(keys))

  @_once
  def start_all(params, keys, data, batches):
    one = lambda params, key, batch: seed.start(params, key, data, batch)
    return over(one, ((0, 0, 0), axes))(params, keys, batches)

  def train_all(carry, keys, data, first, count, length, block=None):
    one = lambda carry, key, block: seed.train(
      carry, key, data, block, first, count, length
    )
    return over(one, ((axes, 0, 0), (axes, 0, 0)))(carry, keys, block)

  return Training(
    lambda keys, data, batches=None: start_all(
      init_all(keys), keys, data, batches
    ),
    jax.jit(train_all, static_argnums=5, donate_argnums=0),
    _once(lambda carry: over(seed.snapshot, ((axes,), (axes, 0)))(carry)),
    jax.jit(lambda carry: over(seed.final, ((axes,), 0))(carry)),
  )


def _seed_axes(start, train, data, batch) -> PyTree:
  """Return vmap's axes of the carry: None for leaves that all seeds share.

  What JAX does: `lax.cond` on a batched value becomes a select, which computes
  both branches. What we do: step counters, equal for all seeds, are not
  batched. What it saves: a selection of every mask at every step. When it can
  go: when vmap keeps conditionals on equal values.
  """
  key = jax.eval_shape(lambda: jax.random.key(0))
  data = jax.eval_shape(lambda: data)
  carry = jax.eval_shape(start, key, data, batch)

  def axis(leaf):
    shared = leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)
    return None if shared else 0

  axes = jax.tree.map(axis, carry)._replace(
    env_state=jax.tree.map(lambda _: 0, carry.env_state),
    state=jax.tree.map(lambda _: 0, carry.state),
  )
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
  batches = jax.tree.map(lambda x: np.stack([x, x]), batch)
  blocks = jax.tree.map(lambda x: x[:, None], batches)
  try:
    carries = jax.eval_shape(
      jax.vmap(start, in_axes=(0, None, 0), out_axes=axes), keys, data, batches
    )
    data_in = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), data)
    one = lambda carry, key, block: train(carry, key, data_in, block, 0, 1, 1)
    jax.eval_shape(
      jax.vmap(one, in_axes=(axes, 0, 0), out_axes=(axes, 0, 0)),
      carries,
      keys,
      blocks,
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


def raw_keys(tree: PyTree) -> PyTree:
  """Return a tree with the data of random keys: NumPy has no dtype for them."""
  return jax.tree.map(
    lambda x: (
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ),
    tree,
  )


def arrays_of(carry: Carry, progress: list[float]) -> dict[str, np.ndarray]:
  """Return the state and the progress of a training as plain arrays."""
  leaves = [np.asarray(x) for x in jax.tree.leaves(raw_keys(carry))]
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
    The carry, and [steps done, seconds, cost, checksum of the batches].

  Raises:
    CheckpointError: the arrays belong to another training.
  """
  leaves, treedef = jax.tree.flatten(carry)
  expected = {f"leaf:{i}" for i in range(len(leaves))} | {"progress"}
  if set(saved) != expected:
    raise CheckpointError(
      f"has {len(saved)} arrays, this training has {len(expected)}"
    )
  loaded = [
    restored_leaf(old, saved[f"leaf:{i}"]) for i, old in enumerate(leaves)
  ]
  progress = saved["progress"]
  if progress.shape != (4,) or not np.all(np.isfinite(progress)):
    raise CheckpointError(f"progress is {progress!r:.60}, need four numbers")
  first = progress[0]
  if first != int(first) or not 0 < first < steps:
    raise CheckpointError(f"stands at step {first:g} of {steps}")
  return treedef.unflatten(loaded), progress.tolist()


def restored_leaf(old: jax.Array, new: Any) -> jax.Array:
  """Return a stored array as a leaf like `old`; keys become keys again."""
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
