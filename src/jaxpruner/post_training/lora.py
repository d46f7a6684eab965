"""Low-rank fine-tuning of a pruned model that keeps its sparsity."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import _leaves, _tools
from jaxpruner.updater.state import apply_mask


def add_lora(params: Any, masks: Any, rank: int, key: jax.Array) -> Any:
  """Return trainable low-rank factors for the pruned weights.

  A weight reshaped to (rest, last axis) gets the factors `a` (rest, rank),
  random, and `b` (rank, last), zero: training starts from the pruned model (Hu
  et al., "LoRA", 2021).

  Args:
    params: the pruned parameters.
    masks: their masks; leaves without a mask get no factors.
    rank: columns of `a`.
    key: PRNG key for `a`.

  Returns:
    Path of the leaf -> {"a", "b"}: the parameters to train.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> masks = {"w": jnp.ones((4, 2), jnp.uint8)}
    >>> factors = add_lora({"w": jnp.ones((4, 2))}, masks, 1, jax.random.key(0))
    >>> factors["w"]["a"].shape, factors["w"]["b"].shape
    ((4, 1), (1, 2))
  """
  _tools.check_int("add_lora", "rank", rank)
  named, _ = _leaves.flatten_with_names(params)
  rows = _leaves.align(params, masks)
  factors = {}
  for (names, leaf), mask in zip(named, rows, strict=True):
    if mask is None:
      continue
    last = leaf.shape[-1]
    size = leaf.size // last
    # From the path: the order of leaves never matters.
    own = jax.random.fold_in(key, _tools.path_hash(_leaves.join(names)))
    a = jax.random.normal(own, (size, rank))
    factors[_leaves.join(names)] = {
      "a": (a / jnp.sqrt(size)).astype(leaf.dtype),
      "b": jnp.zeros((rank, last), leaf.dtype),
    }
  if not factors:
    raise ValueError("masks holds no mask: there is no pruned weight to adapt")
  return factors


def apply_lora(params: Any, masks: Any, factors: Any) -> Any:
  """Return the parameters for the forward pass: mask ∘ (w + a b).

  Differentiate a loss of this with respect to `factors`. The result is masked,
  so the trained function is the function that `merge_lora` returns.

  Args:
    params: the pruned parameters.
    masks: their masks.
    factors: the result of `add_lora`, trained or not.

  Returns:
    Parameters of the same structure, +0.0 where removed.

  Example:
    >>> import jax.numpy as jnp
    >>> params, masks = {"w": jnp.ones((1, 2))}, {"w": jnp.array([[1, 0]])}
    >>> factors = {"w": {"a": jnp.ones((1, 1)), "b": jnp.full((1, 2), 3.0)}}
    >>> apply_lora(params, masks, factors)["w"].tolist()
    [[4.0, 0.0]]
  """

  def adapted(names, leaf, mask):
    pair = factors.get(_leaves.join(names))
    if mask is None or pair is None:
      return leaf
    change = (pair["a"] @ pair["b"]).reshape(leaf.shape).astype(leaf.dtype)
    return apply_mask(leaf + change, mask)

  return _leaves.map_masks(adapted, params, masks)


def merge_lora(params: Any, masks: Any, factors: Any) -> Any:
  """Add trained factors to the weights; pruned ones stay exactly +0.0.

  Args:
    params: the pruned parameters.
    masks: their masks.
    factors: the trained factors.

  Returns:
    Parameters of the same structure and the same sparsity.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> params = {"w": jnp.array([[0.0, 2.0], [1.0, 0.0]])}
    >>> masks = {"w": jnp.array([[0, 1], [1, 0]], jnp.uint8)}
    >>> factors = add_lora(params, masks, 1, jax.random.key(0))
    >>> factors["w"]["b"] += 1
    >>> merged = merge_lora(params, masks, factors)["w"]
    >>> bool(merged[0, 0] == merged[1, 1] == 0), bool((merged == 0).sum() == 2)
    (True, True)
  """
  return apply_lora(params, masks, factors)
