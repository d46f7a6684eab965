"""Qualities of a trained classifier beyond its accuracy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpruner import post_training
from jaxpruner.compare import layers
from jaxpruner.compare.tasks.base import Classification, calibration_error

PyTree = Any
EXAMPLES = 1000  # of the test set; a gradient attack is slow
STEPS = 10  # of the attack
TRANSFER_STEPS = 100
# Names of the qualities -> whether more is better.
QUALITIES = {
  "accuracy": True,
  "corrupted": True,
  "attacked": True,
  "outside AUROC": True,
  "NLL": False,
  "ECE": False,
  "transfer": True,
}


def corruptions(x: jax.Array, scale: float) -> dict[str, jax.Array]:
  """Return inputs, corrupted in five ways (after Hendrycks & Dietterich, 2019).

  Args:
    x: standardised inputs: images (NHWC), or vectors.
    scale: the strength, in units of the inputs.

  Returns:
    Name -> inputs of the same shape.

  Example:
    >>> sorted(corruptions(jnp.ones((1, 4)), 0.5))
    ['blur', 'brightness', 'contrast', 'impulse', 'noise']
  """
  one, two = jax.random.split(jax.random.key(0))
  hit = jax.random.bernoulli(two, 0.1, x.shape)
  middle = x.mean(tuple(range(1, x.ndim)), keepdims=True)
  near = [jnp.roll(x, shift, axis) for axis in _plane(x) for shift in (-1, 1)]
  return {
    "noise": x + scale * jax.random.normal(one, x.shape),
    "impulse": jnp.where(hit, jnp.sign(x - middle) * -3 * scale, x),
    "brightness": x + scale,
    "contrast": middle + (x - middle) * 0.4,
    "blur": sum(near, x) / (1 + len(near)),
  }


def _plane(x: jax.Array) -> tuple[int, ...]:
  """Return the axes along which neighbours are near each other."""
  return (1, 2) if x.ndim == 4 else (1,)


def attack(loss: Any, x: jax.Array, y: jax.Array, radius: float) -> jax.Array:
  """Return inputs that projected gradient ascent found (Madry et al., 2018).

  Args:
    loss: (inputs, labels) -> scalar.
    x: the inputs.
    y: their labels.
    radius: the largest change of an input, in units of the inputs.

  Returns:
    Inputs within the radius.

  Example:
    >>> loss = lambda x, y: x.sum()
    >>> attack(loss, jnp.zeros((1, 2)), jnp.zeros(1), 0.5).tolist()
    [[0.5, 0.5]]
  """
  step = 2.5 * radius / STEPS

  def body(_, moved):
    slope = jax.grad(loss)(moved, y)
    return jnp.clip(moved + step * jnp.sign(slope), x - radius, x + radius)

  return jax.lax.fori_loop(0, STEPS, body, x)


def auroc(inside: jax.Array, outside: jax.Array) -> jax.Array:
  """Return the probability that an inside score is above an outside one.

  Args:
    inside: scores of examples like the training data.
    outside: scores of other examples.

  Returns:
    The area under the ROC curve; ties count half.

  Example:
    >>> float(auroc(jnp.array([2.0, 3.0]), jnp.array([1.0, 2.0])))
    0.875
  """
  order = jnp.sort(outside)
  below = jnp.searchsorted(order, inside, side="left")
  upto = jnp.searchsorted(order, inside, side="right")
  return (below + upto).mean() / (2 * outside.shape[0])


def measured(
  task: Classification, params: PyTree, data: PyTree
) -> dict[str, jax.Array]:
  """Return the qualities of one network that need no training.

  Args:
    task: the task.
    params: the parameters of one seed.
    data: the result of its `load`.

  Returns:
    Quality -> number; accuracies, ECE and AUROC in percent.
  """
  x = task.prepare(data["test_x"][:EXAMPLES])
  y = data["test_y"][:EXAMPLES]
  loss = lambda x, y: layers.cross_entropy(task.apply(params, x), y)
  hits = lambda x: (task.apply(params, x).argmax(-1) == y).mean()
  sure = jax.nn.softmax(task.apply(params, x))
  others = jax.nn.softmax(task.apply(params, task.outside(data)))
  corrupt = corruptions(x, task.noise)
  return {
    "accuracy": 100 * hits(x),
    "corrupted": 100 * jnp.mean(jnp.stack([*map(hits, corrupt.values())])),
    "attacked": 100 * hits(attack(loss, x, y, task.noise / 4)),
    "outside AUROC": 100 * auroc(sure.max(-1), others.max(-1)),
    "NLL": loss(x, y),
    "ECE": 100
    * calibration_error(sure.max(-1), sure.argmax(-1) == y, jnp.ones(len(y))),
  }


def transferred(
  task: Classification, params: PyTree, masks: PyTree, data: PyTree
) -> jax.Array:
  """Return the accuracy on a second task, after a short training with the mask.

  Args:
    task: the task.
    params: the parameters of one seed.
    masks: their masks, held during the training; None is dense.
    data: the result of its `load`.

  Returns:
    The accuracy in percent.
  """
  second = jax.tree.map(jnp.asarray, task.second(data))
  tx = post_training.hold_masks(optax.adam(task.learning_rate), masks)

  def step(i, carry):
    params, state = carry
    key = jax.random.fold_in(jax.random.key(1), i)
    size = len(second["train_y"])
    rows = jax.random.randint(key, (task.batch_size,), 0, size)
    x, y = second["train_x"][rows], second["train_y"][rows]
    slope = jax.grad(
      lambda p: layers.cross_entropy(task.apply(p, task.prepare(x)), y)
    )(params)
    updates, state = tx.update(slope, state, params)
    return optax.apply_updates(params, updates), state

  params, _ = jax.lax.fori_loop(
    0, TRANSFER_STEPS, step, (params, tx.init(params))
  )
  guess = task.apply(params, task.prepare(second["test_x"])).argmax(-1)
  return 100 * (guess == second["test_y"]).mean()


@functools.lru_cache(maxsize=32)
def program(task: Classification, masked: bool) -> Any:
  """Return (params, masks, data) -> qualities of one seed, compiled once."""

  def run(params: PyTree, masks: PyTree, data: PyTree) -> dict[str, jax.Array]:
    held = masks if masked else jax.tree.map(lambda _: None, params)
    found = measured(task, params, data)
    return found | {"transfer": transferred(task, params, held, data)}

  return jax.jit(run)
