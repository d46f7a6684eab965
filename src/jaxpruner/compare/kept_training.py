"""The training of one cell whose weights are stored at kept size.

Weights, batches and masks are those of the masked row; products, gradients and
moments have the size of what is kept.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import kept
from jaxpruner.compare import training
from jaxpruner.compare.over_seeds import Training, once
from jaxpruner.compare.tasks.base import Task
from jaxpruner.compare.training import Carry

PyTree = Any


def check(task: Task, given: training.Given | None, taught: bool) -> None:
  """Raise if a task cannot train at kept size.

  Args:
    task: the task.
    given: what the training starts from, if not the task's own weights.
    taught: whether it learns from a teacher.

  Raises:
    ValueError: says why, and what to use instead.
  """
  why = ""
  if type(task).gradient is not Task.gradient:
    why = "it computes its gradients itself"
  elif type(task).interact is not Task.interact:
    why = "its batches depend on the weights"
  elif taught:
    why = "a teacher's loss is not traced at kept size"
  elif given is not None and given.masks is not None:
    why = "its masks are given"
  if why:
    raise ValueError(
      f"storage=kept: task {task.name!r} cannot train at kept size, because "
      f"{why}; leave out storage=kept"
    )


def build(
  task: Task,
  pruner: kept.KeptUpdater,
  data: PyTree,
  given: training.Given | None = None,
) -> Training:
  """Compile the training of one cell at kept size, one seed after another.

  Args:
    task: the task.
    pruner: the pruning algorithm.
    data: the result of the task's `load`, on the device.
    given: what it starts from; seeds are the leading axis.

  Returns:
    The functions of `training.build`.
  """
  del data
  given = given or training.Given()
  seed = _KeptSeed(task, pruner)
  in_turn = lambda one: (
    lambda *all_seeds: jax.lax.map(lambda each: one(*each), all_seeds)
  )
  draw = in_turn(seed.init) if task.in_turn else jax.vmap(seed.init)
  first = once(seed.masked.start)

  def start(keys, data, batches=None):
    params = given.params
    if params is None:
      params = once(draw)(keys)

    def one(i):
      pick = lambda tree: jax.tree.map(lambda x: x[i], tree)
      carry = first(pick(params), keys[i], data, pick(batches), pick(given))
      return seed.converted(carry, data)

    # Every seed keeps as many weights: their arrays have the same shapes.
    seeds = [one(i) for i in range(keys.shape[0])]
    return jax.tree.map(lambda *a: jnp.stack(a), *seeds)

  def train(carry, keys, data, first, count, length, block=None):
    one = lambda carry, key, block: seed.train(
      carry, key, data, block, first, count, length
    )
    return in_turn(one)(carry, keys, block)

  return Training(
    start,
    jax.jit(train, static_argnums=5, donate_argnums=0),
    jax.jit(in_turn(seed.snapshot)),
    jax.jit(in_turn(seed.final)),
  )


class _KeptSeed(training.Seed):
  """The training of one seed at kept size."""

  def __init__(self, task: Task, pruner: kept.KeptUpdater):
    own = lambda batch: batch
    super().__init__(task, pruner.updater, own, 1.0, None)
    self.masked = training.Seed(task, pruner.updater, own, 1.0, None)
    self._pruner = pruner
    self._tx = pruner.wrap_optax(task.optimizer())

  def converted(self, carry: Carry, data: PyTree) -> Carry:
    """Return the masked row's carry at kept size."""
    task, state = self._task, carry.state
    weights, opt_state = self._pruner.from_masked(
      carry.params,
      carry.opt_state,
      task.example(data),
      apply_fn=lambda params, x: task.forward(params, state, x),
    )
    params = kept.split(weights)[0]
    return carry._replace(params=params, opt_state=opt_state)

  def _weights(self, carry: Carry) -> PyTree:
    return self._pruner.pre_forward_update(carry.params, carry.opt_state)

  def _step(self, carry, t, key, data, batch):
    task = self._task
    batch_key, loss_key = jax.random.split(jax.random.fold_in(key, 2))
    loss_key = jax.random.fold_in(loss_key, t)
    if not task.streamed:
      batch = task.batches(data, batch_key, t)

    def loss(params, opt_state):
      fn = lambda p: task.loss_and_state(p, carry.state, batch, loss_key)
      return kept.lift(fn)(self._pruner.pre_forward_update(params, opt_state))

    (value, state), grads, growth = self._pruner.value_and_grad(
      loss, has_aux=True
    )(carry.params, carry.opt_state)
    updates, opt_state = self._tx.update(
      grads, carry.opt_state, carry.params, growth=growth
    )
    params = jax.tree.map(
      lambda p, u: (p + u).astype(p.dtype), carry.params, updates
    )
    carry = carry._replace(params=params, opt_state=opt_state, state=state)
    return carry, value

  def _masks(self, carry: Carry) -> PyTree:
    return kept.todense(self._weights(carry))[1]

  def _densities(self, carry: Carry, masks: PyTree) -> tuple[Any, Any]:
    del masks  # the number of weights is constant
    is_kept = lambda leaf: isinstance(leaf, kept.KeptTensor)

    def density(leaf):
      if not is_kept(leaf):
        return None
      full = jax.eval_shape(leaf.layout.mask).size
      return jnp.float32(min(1.0, leaf.values.size / full))

    found = jax.tree.map(density, self._weights(carry), is_leaf=is_kept)
    return found, found

  def final(self, carry: Carry) -> PyTree:
    return kept.todense(self._weights(carry))[0]
