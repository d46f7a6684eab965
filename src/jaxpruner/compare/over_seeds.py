"""Batch the training of one seed over all seeds, and compile it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.compare.tasks.base import Task

PyTree = Any


class Training(NamedTuple):
  """The compiled functions of a training; seeds are the leading axis."""

  start: Callable[..., Any]
  train: Callable[..., tuple[Any, jax.Array, Any]]
  snapshot: Callable[[Any], tuple[Any, Any]]
  final: Callable[[Any], PyTree]


def once(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Compile for one call: on a CPU, save compile time instead of run time."""
  cheap = {"xla_backend_optimization_level": 0}
  options = cheap if jax.default_backend() == "cpu" else None
  return jax.jit(fn, compiler_options=options)


def over_seeds(
  task: Task, seed: Any, data: PyTree, batch: PyTree, given: Any
) -> Training:
  """Batch the seeds: together (vmap) or one after another (map).

  Args:
    task: the task.
    seed: the training of one seed: init, start, train, snapshot, final.
    data: the result of the task's `load`, on the device.
    batch: for streamed tasks, a batch of one seed and step.
    given: what the training starts from; seeds are the leading axis.

  Returns:
    The compiled functions.
  """
  if task.in_turn:
    over = lambda one, _: (
      lambda *all_seeds: jax.lax.map(lambda each: one(*each), all_seeds)
    )
    axes = None
  else:
    over = lambda one, axes: jax.vmap(one, in_axes=axes[0], out_axes=axes[1])
    whole = lambda key, data, batch, given: seed.start(
      seed.init(key) if given.params is None else given.params,
      key,
      data,
      batch,
      given,
    )
    axes = _seed_axes(whole, seed.train, data, batch, given)

  # What XLA does: it fuses the draw of the weights with their first use, and
  # rounds as that fusion does. What we do: a program of its own. What it saves:
  # all algorithms start from the same weights, to the last bit. When it can go:
  # when fusions round as single operations do.
  init_all = once(lambda keys: over(seed.init, ((0,), 0))(keys))

  @once
  def start_all(params, keys, data, batches, given):
    one = lambda params, key, batch, given: seed.start(
      params, key, data, batch, given
    )
    return over(one, ((0, 0, 0, 0), axes))(params, keys, batches, given)

  def begin(keys, data, batches=None):
    params = init_all(keys) if given.params is None else given.params
    return start_all(params, keys, data, batches, given)

  def train_all(carry, keys, data, first, count, length, block=None):
    one = lambda carry, key, block: seed.train(
      carry, key, data, block, first, count, length
    )
    return over(one, ((axes, 0, 0), (axes, 0, 0)))(carry, keys, block)

  return Training(
    begin,
    jax.jit(train_all, static_argnums=5, donate_argnums=0),
    once(lambda carry: over(seed.snapshot, ((axes,), (axes, 0)))(carry)),
    jax.jit(lambda carry: over(seed.final, ((axes,), 0))(carry)),
  )


def _seed_axes(start, train, data, batch, given) -> PyTree:
  """Return vmap's axes of the carry: None for leaves that all seeds share.

  What JAX does: `lax.cond` on a batched value becomes a select, which computes
  both branches. What we do: step counters, equal for all seeds, are not
  batched. What it saves: a selection of every mask at every step. When it can
  go: when vmap keeps conditionals on equal values.
  """
  key = jax.eval_shape(lambda: jax.random.key(0))
  data = jax.eval_shape(lambda: data)
  given = jax.eval_shape(lambda: given)
  like = jax.ShapeDtypeStruct
  one = jax.tree.map(lambda x: like(x.shape[1:], x.dtype), given)
  carry = jax.eval_shape(start, key, data, batch, one)

  def axis(leaf):
    shared = leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)
    return None if shared else 0

  axes = jax.tree.map(axis, carry)._replace(
    env_state=jax.tree.map(lambda _: 0, carry.env_state),
    state=jax.tree.map(lambda _: 0, carry.state),
    teacher=jax.tree.map(lambda _: 0, carry.teacher),
  )
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
  batches = jax.tree.map(lambda x: np.stack([x, x]), batch)
  pair = jax.tree.map(lambda x: like((2, *x.shape), x.dtype), one)
  blocks = jax.tree.map(lambda x: x[:, None], batches)
  try:
    carries = jax.eval_shape(
      jax.vmap(start, in_axes=(0, None, 0, 0), out_axes=axes),
      keys,
      data,
      batches,
      pair,
    )
    data_in = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), data)
    step = lambda carry, key, block: train(carry, key, data_in, block, 0, 1, 1)
    jax.eval_shape(
      jax.vmap(step, in_axes=(axes, 0, 0), out_axes=(axes, 0, 0)),
      carries,
      keys,
      blocks,
    )
  except ValueError:
    # An integer that does differ between seeds: batch everything.
    return jax.tree.map(lambda _: 0, carry)
  return axes
