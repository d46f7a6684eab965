"""Learn N:M masks of frozen weights on the loss."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import _leaves
from jaxpruner.config import codec
from jaxpruner.post_training.calibration import FilterFn
from jaxpruner.sparsity_distributions import default_filter
from jaxpruner.sparsity_types import NByM

_SPREAD = 0.01  # of the first logits


def learn_masks(
  loss_fn: Callable[[Any, Any], Any],
  params: Any,
  batches: Iterable[Any],
  *,
  steps: int,
  masks: Any = None,
  sparsity_type: Any = "2:4",
  filter_fn: FilterFn = default_filter,
  tx: optax.GradientTransformation | None = None,
  learning_rate: float = 1e-3,
  temperature: tuple[float, float] = (4.0, 0.05),
  scale: tuple[float, float] = (100.0, 500.0),
  prior: float = 3.0,
  weight: float = 0.0,
  seed: int = 0,
  progress: Callable[[int, float], None] | None = None,
) -> Any:
  """Learn which N of every M weights stay; the weights do not change.

  Each group of M weights has a logit π for each of its (M choose N) masks, six
  for 2:4. A step sees the mean of these masks with the chances
  softmax((κπ + g) / τ), g drawn from Gumbel's distribution, and moves π along
  the gradient of the loss. κ grows and τ falls, so that the choice becomes one
  mask; the mask of the largest π is returned (Fang et al., "MaskLLM", 2024).

  Args:
    loss_fn: `loss_fn(params, batch) -> scalar`.
    params: the parameters; held as they are.
    batches: batches of equal shapes, one per step.
    steps: over how many τ and κ change; further batches are not read.
    masks: where to start, such as those of `prune`; None for no preference.
    sparsity_type: N:M; groups run along the axis that a product sums over.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    tx: any Optax optimizer of the logits; by default Adam.
    learning_rate: of Adam.
    temperature: τ at the start and at the end.
    scale: κ at the start and at the end.
    prior: how much a mask that shares weights with `masks` is preferred.
    weight: λ; λ Σ (m w)² is subtracted from the loss, so that kept weights are
      large and gradients do not vanish.
    seed: of the draws.
    progress: called with (steps done, loss).

  Returns:
    Masks like `params`, uint8, None for dense leaves.

  Raises:
    ValueError: no leaf is chosen, an axis is not divisible, or too few batches.

  Example:
    >>> w = jnp.array([[1.0], [1.0], [1.0], [1.0]])
    >>> loss = lambda p, goal: jnp.sum((p["w"] - goal) ** 2)
    >>> goal = jnp.array([[1.0], [0.0], [0.0], [1.0]])
    >>> found = learn_masks(loss, {"w": w}, [goal] * 60, steps=60,
    ...                     learning_rate=0.01)
    >>> found["w"].ravel().tolist()
    [1, 0, 0, 1]
  """
  kind = codec.parse_sparsity_type(sparsity_type)
  if type(kind) is not NByM:
    raise ValueError(f"sparsity_type={sparsity_type!r} must be N:M, as '2:4'")
  if steps < 1:
    raise ValueError(f"steps={steps!r} must be at least 1")
  named, treedef = _leaves.flatten_with_names(params)
  leaves = [leaf for _, leaf in named]
  kinds: dict[int, Any] = {
    i: kind.for_leaf(names, leaf.shape)
    for i, (names, leaf) in enumerate(named)
    if filter_fn(names, leaf)
  }
  if not kinds:
    raise ValueError("filter_fn takes no leaf")
  for i, own in kinds.items():
    own.check(leaves[i].shape, own.sparsity, _leaves.join(named[i][0]))
  known = _leaves.align(params, masks)
  choices = _candidates(kind.n, kind.m)
  keys = jax.random.split(jax.random.key(seed), len(kinds))
  logits = [
    _first(keys[k], _grouped(own, leaves[i]).shape[0], choices,
           None if known[i] is None else _grouped(own, known[i]), prior)
    for k, (i, own) in enumerate(kinds.items())
  ]  # fmt: skip
  tx = optax.adam(learning_rate) if tx is None else tx

  def loss(logits, noise, tau, kappa, leaves, batch):
    seen, kept = list(leaves), jnp.float32(0)
    for (i, own), pi, g in zip(kinds.items(), logits, noise, strict=True):
      soft = jax.nn.softmax((kappa * pi + g) / tau) @ choices
      mask = _whole(own, soft, leaves[i].shape)
      seen[i] = (leaves[i] * mask).astype(leaves[i].dtype)
      kept = kept + jnp.sum(jnp.square(leaves[i] * mask))
    return loss_fn(treedef.unflatten(seen), batch) - weight * kept

  @jax.jit
  def step(logits, state, at, leaves, batch):
    share = at / max(steps - 1, 1)
    tau, kappa = (a + share * (b - a) for a, b in (temperature, scale))
    noise = [draw(seed, at, k, pi.shape) for k, pi in enumerate(logits)]
    value, grads = jax.value_and_grad(loss)(
      logits, noise, tau, kappa, leaves, batch
    )
    updates, state = tx.update(grads, state, logits)
    return optax.apply_updates(logits, updates), state, value

  state, done = tx.init(logits), 0
  for batch in itertools.islice(batches, steps):
    logits, state, value = step(logits, state, jnp.float32(done), leaves, batch)
    done += 1
    if progress is not None:
      progress(done, float(value))
  if done < steps:
    raise ValueError(f"steps={steps!r}, but batches has {done}; give as many")
  found: list[Any] = [None] * len(leaves)
  for (i, own), pi in zip(kinds.items(), logits, strict=True):
    hard = choices[jnp.argmax(pi, axis=-1)].astype(jnp.uint8)
    found[i] = _whole(own, hard, leaves[i].shape)
  return treedef.unflatten(found)


def draw(seed: int, step: Any, leaf: int, shape: tuple[int, ...]) -> Any:
  """Return the Gumbel noise of a step."""
  key = jax.random.fold_in(jax.random.key(seed), 1 + leaf)
  key = jax.random.fold_in(key, jnp.asarray(step, jnp.int32))
  return jax.random.gumbel(key, shape)


@functools.cache
def _candidates(n: int, m: int) -> np.ndarray:
  """Return all masks that keep n of m, (choices, m)."""
  rows = itertools.combinations(range(m), n)
  return np.stack([np.isin(range(m), row) for row in rows]).astype(np.float32)


def _first(key, groups, choices, known, prior) -> jax.Array:
  """Return the first logits: small, larger for masks near the known one."""
  logits = _SPREAD * jax.random.normal(key, (groups, len(choices)))
  if known is None:
    return logits
  near = jnp.asarray(known, jnp.float32) @ choices.T
  return logits + _SPREAD * prior * (near - near.mean(-1, keepdims=True))


def _grouped(kind: NByM, x: Any) -> Any:
  """Return the weights as (groups, m)."""
  split, axis = kind.split(x.shape)
  return jnp.moveaxis(jnp.reshape(x, split), axis, -1).reshape(-1, kind.m)


def _whole(kind: NByM, groups: Any, shape: tuple[int, ...]) -> Any:
  """Return (groups, m) in the shape of the weight."""
  split, axis = kind.split(shape)
  rest = (*split[:axis], *split[axis + 1 :], kind.m)
  return jnp.moveaxis(groups.reshape(rest), -1, axis).reshape(shape)
