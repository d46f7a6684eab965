"""One cell's training as a compiled program, all seeds at once.

Here the protocol is enforced: for one seed, initial weights, batches,
optimizer, learning rate and number of steps are functions of the task and the
seed only; the updater is the one thing that differs between cells.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner.compare.tasks.base import Task

PyTree = Any


class Carry(NamedTuple):
  """What one seed's training is at some step."""

  params: PyTree
  opt_state: PyTree
  world: PyTree
  masks: PyTree  # at the last snapshot
  seen: PyTree  # every weight that was active at some snapshot


class Snapshot(NamedTuple):
  """What is measured after a stretch of steps, per seed."""

  density: PyTree  # per leaf, of the weights the forward pass uses
  stored: PyTree  # per leaf, of the weights that are trained
  churn: jax.Array  # weights swapped since the last snapshot / weights kept
  explored: jax.Array  # share of weights active so far


class Program(NamedTuple):
  """The compiled pieces of a cell; seeds are the leading axis."""

  start: Callable[..., Carry]
  train: Callable[..., tuple[Carry, jax.Array, Snapshot]]
  final: Callable[[Carry], PyTree]


def build(task: Task, updater: Any, data: PyTree, devices: int = 1) -> Program:
  """Compile one cell's training for all its seeds at once."""
  tx = updater.wrap_optax(task.optimizer())
  spread = _spreader(devices)

  def masks_of(params: PyTree, opt_state: PyTree) -> PyTree:
    masks = jaxpruner.find_state(opt_state).masks
    if masks is None:
      return jax.tree.map(lambda _: None, params)
    return masks

  def first_tx(params: PyTree, data: PyTree, key: jax.Array) -> Any:
    """Return `tx`, which may look at the first batch to prune at the start."""
    if "loss" not in updater.needs:
      return tx
    world = task.start(params, data, jax.random.fold_in(key, 1))
    batch_key, loss_key = jax.random.split(jax.random.fold_in(key, 2))
    _, batch = task.interact(world, params, data, batch_key, jnp.array(0))
    cooled = task.cooled(updater.category.temperature)
    bound = updater.bind(
      lambda p, batch: cooled.loss(p, batch, loss_key),
      batch,
      task.apply,
      task.example(data),
    )
    return bound.wrap_optax(task.optimizer())

  def start(key: jax.Array, data: PyTree) -> Carry:
    params = task.init(jax.random.fold_in(key, 0))
    opt_state = first_tx(params, data, key).init(params)
    params = updater.post_gradient_update(params, opt_state)
    world = task.start(params, data, jax.random.fold_in(key, 1))
    masks = masks_of(params, opt_state)
    return Carry(params, opt_state, world, masks, masks)

  def step(carry: Carry, t: jax.Array, key: jax.Array, data: PyTree):
    batch_key, loss_key = jax.random.split(jax.random.fold_in(key, 2))
    forward = lambda p: updater.pre_forward_update(p, carry.opt_state)
    world, batch = task.interact(
      carry.world, forward(carry.params), data, batch_key, t
    )
    batch = spread(batch)
    gradient = lambda params: task.gradient(
      lambda p, batch, key: task.loss(forward(p), batch, key),
      params,
      batch,
      jax.random.fold_in(loss_key, t),
    )
    loss, grads = gradient(carry.params)
    updates, opt_state = tx.update(
      grads,
      carry.opt_state,
      carry.params,
      grad_fn=lambda params: gradient(params)[1],
    )
    params = jax.tree.map(
      lambda p, u: (p + u).astype(p.dtype), carry.params, updates
    )
    return carry._replace(params=params, opt_state=opt_state, world=world), loss

  def snapshot(carry: Carry) -> tuple[Carry, Snapshot]:
    masks = masks_of(carry.params, carry.opt_state)
    kept = sum(m.sum(dtype=jnp.float32) for m in jax.tree.leaves(masks))
    size = sum(m.size for m in jax.tree.leaves(masks))
    seen = jax.tree.map(jnp.maximum, carry.seen, masks)
    grown = sum(
      (new > old).sum(dtype=jnp.float32)
      for new, old in zip(
        jax.tree.leaves(masks), jax.tree.leaves(carry.masks), strict=True
      )
    )
    active = sum(m.sum(dtype=jnp.float32) for m in jax.tree.leaves(seen))
    mean = lambda m: m.mean(dtype=jnp.float32)
    density = jax.tree.map(mean, masks)
    state = jaxpruner.find_state(carry.opt_state)
    trained = state.masks if updater.holds_zeros else None
    if updater.category.trained is not None:
      trained = state.stats[updater.category.trained]
    stored = jax.tree.map(jnp.ones_like, density)
    if trained is not None and size:
      stored = jax.tree.map(mean, trained)
    taken = Snapshot(
      density,
      stored,
      grown / jnp.maximum(kept, 1) if size else jnp.zeros([]),
      jnp.asarray(active) / size if size else jnp.ones([]),
    )
    return carry._replace(masks=masks, seen=seen), taken

  def train(carry: Carry, key: jax.Array, data: PyTree, first, count, length):
    def body(i, state):
      carry, losses = state
      carry, loss = step(carry, first + i, key, data)
      return carry, losses.at[i].set(loss)

    # A dynamic bound: the shorter last stretch reuses the compiled program.
    carry, losses = jax.lax.fori_loop(
      0, count, body, (carry, jnp.zeros(length))
    )
    carry, taken = snapshot(carry)
    return carry, losses, taken

  def final(carry: Carry) -> PyTree:
    return updater.pre_forward_update(carry.params, carry.opt_state)

  return _over_seeds(task, start, train, final, data)


def _once(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Compile for one call: on CPU, quick code generation beats quick code."""
  cheap = {"xla_backend_optimization_level": 0}
  options = cheap if jax.default_backend() == "cpu" else None
  return jax.jit(fn, compiler_options=options)


def _over_seeds(task, start, train, final, data) -> Program:
  """Batch the seeds: one bigger program (vmap), or one after another (map)."""
  if task.in_turn:
    start_all = lambda keys, data: jax.lax.map(lambda k: start(k, data), keys)
    final_all = lambda carry: jax.lax.map(final, carry)
  else:
    axes = _seed_axes(start, train, data)
    start_all = jax.vmap(start, in_axes=(0, None), out_axes=axes)
    final_all = jax.vmap(final, in_axes=(axes,))

  def train_all(carry, keys, data, first, count, length):
    one = lambda carry, key: train(carry, key, data, first, count, length)
    if task.in_turn:
      return jax.lax.map(lambda pair: one(*pair), (carry, keys))
    mapped = jax.vmap(one, in_axes=(axes, 0), out_axes=(axes, 0, 0))
    return mapped(carry, keys)

  return Program(
    _once(start_all),
    jax.jit(train_all, static_argnums=5, donate_argnums=0),
    jax.jit(final_all),
  )


def _seed_axes(start, train, data) -> PyTree:
  """Return vmap's axes of the carry: None for what all seeds share.

  Step counters are the same for every seed. Left unbatched, `lax.cond` on
  them stays a branch; batched, it would become a select that recomputes
  every mask at every step.
  """
  key = jax.eval_shape(lambda: jax.random.key(0))
  data = jax.eval_shape(lambda: data)
  carry = jax.eval_shape(start, key, data)

  def axis(leaf):
    shared = leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)
    return None if shared else 0

  axes = jax.tree.map(axis, carry)._replace(
    world=jax.tree.map(lambda _: 0, carry.world)
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
  """Return a training's state, and how far it is, as plain arrays."""
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


def restore(
  carry: Carry, saved: dict[str, np.ndarray]
) -> tuple[Carry, list[float]]:
  """Return what `arrays_of` was given; `carry` lends its structure."""
  leaves, treedef = jax.tree.flatten(carry)
  loaded = []
  for i, old in enumerate(leaves):
    new = jnp.asarray(saved[f"leaf:{i}"])
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
      new = jax.random.wrap_key_data(new)
    loaded.append(new)
  return treedef.unflatten(loaded), saved["progress"].tolist()
