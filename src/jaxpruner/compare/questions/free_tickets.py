"""FreeTickets: an ensemble of sparse networks from one chain of trainings.

After Liu et al., "Deep Ensembling with No Overhead for either Training or
Testing" (FreeTickets, 2022), in the sequential form (EDST): a trained sparse
network leaves its basin by a large change of its masks, is refined with a new
cycle of the learning rate, and becomes the next member. All members together
answer by the mean of their probabilities. The members of a static network
change no mask: they are the control.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpruner import post_training
from jaxpruner.compare.tasks.base import Classification, calibration_error

PyTree = Any
MEMBERS = 3
EXPLORE = 0.5  # the part of the kept weights that is replaced between members
PART = 2  # a refinement takes this part of the training's steps


def rewired(
  weights: jax.Array,
  mask: jax.Array,
  growth: jax.Array,
  fraction: float = EXPLORE,
) -> jax.Array:
  """Return a mask in which the smallest kept weights made place for others.

  Args:
    weights: a leaf.
    mask: its mask.
    growth: the scores of removed weights; the largest enter.
    fraction: the part of the kept weights that is replaced; less where fewer
      are removed.

  Returns:
    A mask that keeps as many weights.

  Example:
    >>> mask = jnp.array([True, True, False, False])
    >>> rewired(jnp.array([1.0, 9, 0, 0]), mask, jnp.arange(4.0)).tolist()
    [False, True, False, True]
  """
  kept = mask.reshape(-1).astype(bool)
  count = kept.sum()
  moved = jnp.minimum((fraction * count).astype(int), kept.size - count)
  rank = lambda score: jnp.argsort(jnp.argsort(-score))
  flat = jnp.abs(weights.reshape(-1))
  stays = kept & (rank(jnp.where(kept, flat, -jnp.inf)) < count - moved)
  enters = rank(jnp.where(kept, -jnp.inf, growth.reshape(-1))) < moved
  return (stays | (enters & ~kept)).reshape(mask.shape)


def refine(
  task: Classification,
  params: PyTree,
  masks: PyTree,
  data: PyTree,
  key: jax.Array,
  growth: str,
) -> tuple[PyTree, PyTree]:
  """Return the next member: masks changed, then trained with these held.

  Args:
    task: the task.
    params: the parameters of the member before.
    masks: its masks; None where a leaf is dense.
    data: the result of the task's `load`.
    key: chooses the batches, and what grows at random.
    growth: "gradient", "random", or "" to change no mask.

  Returns:
    The parameters and the masks.
  """
  leaves, treedef = jax.tree.flatten(params)
  old = treedef.flatten_up_to(masks)
  loss = lambda p, batch, key: task.loss(p, batch, key)
  slopes = jax.grad(loss)(params, task.batches(data, key, jnp.array(0)), key)
  scores = [
    jnp.abs(slope)
    if growth == "gradient"
    else jax.random.uniform(jax.random.fold_in(key, i), slope.shape)
    for i, slope in enumerate(jax.tree.leaves(slopes))
  ]
  fresh = [
    mask if mask is None or not growth else rewired(weights, mask, score)
    for weights, mask, score in zip(leaves, old, scores, strict=True)
  ]
  # A weight that enters starts at zero, one that leaves is gone.
  leaves = [
    w if new is None else jnp.where(before.astype(bool) & new, w, 0)
    for w, before, new in zip(leaves, old, fresh, strict=True)
  ]
  masks = jax.tree.unflatten(treedef, fresh)
  steps = max(1, task.steps // PART)
  tx = post_training.hold_masks(
    optax.adam(optax.cosine_decay_schedule(task.learning_rate, steps)), masks
  )

  def step(i, carry):
    params, state = carry
    batch = task.batches(data, key, i + 1)
    slope = jax.grad(loss)(params, batch, jax.random.fold_in(key, i))
    updates, state = tx.update(slope, state, params)
    return optax.apply_updates(params, updates), state

  params = jax.tree.unflatten(treedef, leaves)
  params, _ = jax.lax.fori_loop(0, steps, step, (params, tx.init(params)))
  return params, masks


@functools.lru_cache(maxsize=32)
def program(task: Classification, growth: str, masked: bool) -> Any:
  """Return (params, masks, data, key) -> measurements of one seed."""

  def run(params, masks, data, key):
    if not masked:
      masks = jax.tree.map(lambda _: None, params)
    size = min(2000, data["test_y"].shape[0])
    x, y = task.prepare(data["test_x"][:size]), data["test_y"][:size]
    answer = lambda params: jax.nn.softmax(task.apply(params, x))
    answers = [answer(params)]
    for member in range(1, MEMBERS):
      own = jax.random.fold_in(key, member)
      params, masks = refine(task, params, masks, data, own, growth)
      answers.append(answer(params))
    together = jnp.mean(jnp.stack(answers), 0)
    guesses = jnp.stack([each.argmax(-1) for each in answers])
    pairs = [(i, j) for i in range(MEMBERS) for j in range(i)]
    apart = jnp.stack([(guesses[i] != guesses[j]).mean() for i, j in pairs])
    return {
      "member": 100 * (guesses == y).mean(1).mean(),
      "last member": 100 * (guesses[-1] == y).mean(),
      "ensemble": 100 * (together.argmax(-1) == y).mean(),
      "disagreement": 100 * apart.mean(),
      "ensemble NLL": -jnp.log(
        together[jnp.arange(size), y].clip(1e-12)
      ).mean(),
      "last NLL": -jnp.log(answers[-1][jnp.arange(size), y].clip(1e-12)).mean(),
      "ensemble ECE": 100
      * calibration_error(
        together.max(-1), together.argmax(-1) == y, jnp.ones(size)
      ),
    }

  return jax.jit(run)
