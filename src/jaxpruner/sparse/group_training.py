"""Make a model smaller while it trains: a penalty, and removal now and then.

PruneTrain (Lym et al., 2019): the norms of all coupled groups are part of the
loss, so that groups that do not earn their place tend to zero; these are
removed from the arrays and from the optimizer, and training goes on with a
smaller, faster model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import _groups
from jaxpruner.sparse._dims import Dim
from jaxpruner.sparse.shrinking import Shrunk, shrink

Filter = Callable[[tuple[str, ...], Any], bool]


def group_lasso(
  apply_fn: Callable[..., Any],
  weights: Any,
  /,
  *example_inputs: Any,
  filter_fn: Filter | None = None,
) -> Callable[[Any], jax.Array]:
  """Return the penalty that empties whole channels, neurons and heads.

  The groups are those of `prune_to`, found from the traced program. The penalty
  is the sum of their norms (not squared), so its gradient pulls all weights of
  a group to zero together, with a force that does not fade.

  Args:
    apply_fn: `apply_fn(weights, *inputs)`, the forward pass.
    weights: its parameters, any pytree.
    *example_inputs: inputs, or their shapes.
    filter_fn: `(names, param) -> bool`; a group counts only if it is true for
      all parameters that the group is part of.

  Returns:
    `penalty(weights)`, a number to add to the loss, times a small factor. It is
    for weights of these shapes: ask for a new one when they became smaller.

  Raises:
    ValueError: if the function has no group that could be removed.

  Example:
    >>> params = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 1))}
    >>> mlp = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
    >>> penalty = group_lasso(mlp, params, jnp.ones((1, 3)))
    >>> float(penalty(params))  # four neurons of four weights each
    8.0

  Paper: PruneTrain (Lym et al., 2019); group lasso (Yuan and Lin, 2006).
  """
  traced, _ = _groups.trace(apply_fn, weights, example_inputs)
  dims = _groups.chosen(traced, weights, filter_fn)

  def penalty(weights: Any) -> jax.Array:
    total = jnp.zeros(())
    for squares in _squares(traced, dims, weights).values():
      # The gradient of a norm at zero is taken as zero: what is empty stays.
      empty = squares == 0
      norms = jnp.sqrt(jnp.where(empty, 1.0, squares))
      total += jnp.where(empty, 0.0, norms).sum()
    return total

  return penalty


def remove_small_groups(
  apply_fn: Callable[..., Any],
  weights: Any,
  /,
  *example_inputs: Any,
  below: float,
  filter_fn: Filter | None = None,
) -> Shrunk:
  """Remove the channels, neurons and heads whose weights are small.

  A group is small if the root mean square of its weights is below the
  threshold. At least one index of each dimension stays.

  Args:
    apply_fn: `apply_fn(weights, *inputs)`, the forward pass.
    weights: its parameters, any pytree.
    *example_inputs: inputs, or their shapes.
    below: the threshold; positive. PruneTrain uses 1e-4 after many epochs.
    filter_fn: as in `group_lasso`.

  Returns:
    The smaller model: go on with `small.params`, `small.shrink(opt_state)` and
    `small.fn`, or your own function where `small.same_code` is true.

  Raises:
    ValueError: if the threshold is not positive, weights are not finite, or
      the function has no group that could be removed.

  Example:
    >>> params = {"up": jnp.eye(3, 4), "down": jnp.eye(4, 1)}
    >>> mlp = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
    >>> small = remove_small_groups(mlp, params, jnp.ones((1, 3)), below=0.6)
    >>> small.params["up"].shape  # only the first neuron has two ones
    (3, 1)

  Paper: PruneTrain (Lym et al., 2019).
  """
  if not below > 0:
    raise ValueError(f"below={below} must be positive")
  traced, treedef = _groups.trace(apply_fn, weights, example_inputs)
  dims = _groups.chosen(traced, weights, filter_fn)
  ones = treedef.unflatten(
    [np.ones(v.shape, np.float32) for v in traced.values]
  )
  squares, counts = (
    {d: np.asarray(x) for d, x in _squares(traced, dims, tree).items()}
    for tree in (weights, ones)
  )
  keep: dict[Dim, np.ndarray] = {}
  for dim in dims:
    if not np.isfinite(squares[dim]).all():
      raise ValueError(
        f"{traced.name(dim)}: some weights are not finite; stop training at "
        "the first NaN"
      )
    size = np.sqrt(squares[dim] / counts[dim])
    keep[dim] = size >= below
    keep[dim][np.argmax(size)] = True
  masks = treedef.unflatten([traced.mask(v, keep) for v in traced.values])
  masked = jax.tree.map(lambda x, m: jnp.where(m, x, 0), weights, masks)
  return shrink(apply_fn, masked, *example_inputs)


def _squares(
  traced: _groups.Traced, dims: list[Dim], weights: Any
) -> dict[Dim, Any]:
  """Return the sum of squares of each group."""
  squares = [
    jnp.square(x.astype(jnp.float32)) for x in jax.tree.leaves(weights)
  ]
  arrays = dict(zip(traced.values, squares, strict=True))
  return _groups.weight_scores(traced, dims, arrays)
