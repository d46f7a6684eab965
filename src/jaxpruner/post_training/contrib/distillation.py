"""Train a pruned model on the predictions of the dense one, masks fixed."""

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import _leaves
from jaxpruner.post_training import fixed_masks
from jaxpruner.post_training.calibration import ApplyFn


def distill(
  apply_fn: ApplyFn,
  params: Any,
  masks: Any,
  teacher: Any,
  batches: Iterable[Any],
  *,
  tx: optax.GradientTransformation | None = None,
  learning_rate: float = 1e-4,
  temperature: float = 1.0,
  loss_fn: Callable[[Any, Any], Any] | None = None,
  seconds: float = np.inf,
  clock: Callable[[], float] = time.perf_counter,
  progress: Callable[[int, float], None] | None = None,
) -> Any:
  """Train a pruned model towards the dense model's predictions, masks fixed.

  Each batch gives one step on the mean over the positions of
  T² · KL(softmax(teacher / T) ‖ softmax(student / T)), the last axis being that
  of the classes (Hinton et al., 2015). Labels are used only by a `loss_fn`.
  Pruned weights stay exactly +0.0 (`hold_masks`).

  Args:
    apply_fn: `apply_fn(params, batch) -> logits`.
    params: the pruned parameters.
    masks: their masks, None where dense.
    teacher: the dense parameters.
    batches: an iterable of batches of equal shapes; read once, so give as many
      as there are steps.
    tx: any Optax optimizer, with its own rate; by default Adam.
    learning_rate: of Adam. If `seconds` are given, it decays to zero over them
      (half a cosine), so that the last steps settle.
    temperature: T.
    loss_fn: `loss_fn(logits, batch) -> scalar`, what is added to the
      divergence, such as the loss of the task with a weight.
    seconds: no step starts after this time; the first one always runs.
    clock: what `seconds` are counted by: `time.process_time` where others use
      the machine too.
    progress: called with (steps done, loss).

  Returns:
    The trained parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {"w": jnp.array([[1.0, 0.0], [0.0, 0.5]])}
    >>> masks = {"w": jnp.array([[1, 0], [0, 1]], jnp.uint8)}
    >>> dense = {"w": jnp.array([[1.5, 0.2], [0.1, 1.0]])}
    >>> new = distill(lambda p, x: x @ p["w"], params, masks, dense,
    ...               [jnp.eye(2)] * 3, tx=optax.sgd(0.5))
    >>> (new["w"] > params["w"]).tolist(), new["w"][0, 1].item()
    ([[True, False], [False, True]], 0.0)
  """
  if not 0 < temperature < np.inf:
    raise ValueError(f"temperature={temperature!r} must be positive and finite")
  if not 0 < learning_rate < np.inf:
    raise ValueError(
      f"learning_rate={learning_rate!r} must be positive and finite"
    )
  if not seconds >= 0:
    raise ValueError(f"seconds={seconds!r} must be a number of at least 0")
  adam = optax.chain(optax.scale_by_adam(), optax.scale(-1.0))
  held = fixed_masks.hold_masks(adam if tx is None else tx, masks)
  # Copies: a step gives its arguments away.
  params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
  state = held.init(params)
  step = jax.jit(
    functools.partial(_step, apply_fn, held, temperature, loss_fn),
    donate_argnums=(0, 1),
  )
  start = clock()
  done = 0
  for batch in batches:
    spent = (clock() - start) / seconds if seconds else 0.0
    rate = 1.0 if tx is not None else learning_rate * _decay(min(1.0, spent))
    params, state, loss = step(params, state, teacher, batch, rate)
    loss.block_until_ready()  # steps in flight would not be counted
    done += 1
    if progress is not None:
      progress(done, float(loss))
    if clock() - start > seconds:
      break
  if not done:
    raise ValueError("batches is empty; give at least one batch")
  keep = lambda _, x, mask: x if mask is None else jnp.where(mask, x, 0)
  return _leaves.map_masks(keep, params, masks)


def _decay(spent: float) -> float:
  return 0.5 + 0.5 * math.cos(math.pi * spent)


def _step(
  apply_fn, tx, temperature, loss_fn, params, state, teacher, batch, rate
):
  goal = jax.nn.log_softmax(
    apply_fn(teacher, batch).astype(jnp.float32) / temperature
  )

  def loss(params):
    logits = apply_fn(params, batch).astype(jnp.float32)
    now = jax.nn.log_softmax(logits / temperature)
    gap = jnp.sum(jnp.exp(goal) * (goal - now), axis=-1)
    more = 0.0 if loss_fn is None else loss_fn(logits, batch)
    return temperature**2 * jnp.mean(gap) + more

  value, grads = jax.value_and_grad(loss)(params)
  updates, state = tx.update(grads, state, params)
  updates = jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates)
  return optax.apply_updates(params, updates), state, value
