"""Sparsity types of a weight in the layout (inputs, outputs)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator
from jaxpruner.sparsity_types import Block, NByM, SparsityType, Unstructured


@dataclasses.dataclass(frozen=True)
class Pattern:
  """The sparsity type of an (inputs, outputs) matrix.

  A solver that only ranks scores needs `mask`. A solver that removes weights
  one after another reads `n` and `m`, or `block`, and rejects other types with
  `refuse_other`.

  Attributes:
    kind: the sparsity type that `SparsityType.on_matrix` returned.

  Example:
    >>> import jax.numpy as jnp
    >>> scores = jnp.array([[[4.0, 1.0], [3.0, 2.0]]])
    >>> Pattern(NByM(1, 2)).mask(scores, 0.5).tolist()
    [[[1, 0], [0, 1]]]
  """

  kind: SparsityType = Unstructured()

  @property
  def n(self) -> int:
    """Inputs kept of every `m`; 0 if the kind is not N:M."""
    return self.kind.n if type(self.kind) is NByM else 0

  @property
  def m(self) -> int:
    """Inputs per group; 0 if the kind is not N:M."""
    return self.kind.m if type(self.kind) is NByM else 0

  @property
  def block(self) -> tuple[int, int] | None:
    """Height and width of blocks (inputs × outputs); None for other types."""
    return self.kind.block_shape if type(self.kind) is Block else None

  def refuse_other(self, solver: str, *kinds: type[SparsityType]) -> None:
    """Raise unless the kind is one that a solver knows."""
    if type(self.kind) not in kinds:
      known = ", ".join(kind.__name__ for kind in kinds)
      raise ValueError(
        f"method={solver!r} knows the sparsity types {known}, not "
        f"{self.kind!r}; use 'magnitude', 'wanda' or 'alps'"
      )

  def mask(
    self, scores: jax.Array, sparsity: float, per_output: bool = False
  ) -> jax.Array:
    """Keep the highest scores.

    Args:
      scores: (groups, inputs, outputs).
      sparsity: fraction removed.
      per_output: rank the inputs of each output among themselves, where
        single weights may go.

    Returns:
      The mask, uint8, 1 = kept.
    """
    if self.m:
      return mask_calculator.n_by_m_mask(scores, self.n, self.m, axis=-2)
    if type(self.kind) is not Unstructured:
      return jax.vmap(lambda s: self.kind.mask(s, sparsity))(scores)
    return largest(scores, kept(scores, sparsity, per_output), per_output)


def kept(scores: jax.Array, sparsity: float, per_output: bool) -> Any:
  """Return how many single weights stay, of each output or of all."""
  size = scores.shape[-2] if per_output else scores.size
  return mask_calculator.num_ones(size, sparsity)


def largest(scores: jax.Array, ones: Any, per_output: bool) -> jax.Array:
  """Keep so many single weights; see `Pattern.mask`."""
  choose = lambda s: mask_calculator.topk_masks([s], [ones])[0]
  return (
    jax.vmap(jax.vmap(choose, -1, -1))(scores)
    if per_output
    else (choose(scores))
  )


FREE = Pattern()  # single weights, anywhere


def of(
  kind: Any, indices: np.ndarray, shape: tuple[int, ...], run: int, name: str
) -> Pattern:
  """Return the pattern of a sparsity type on a weight of a given layout.

  Args:
    kind: a sparsity type with `on_matrix`.
    indices: which element of the leaf each element of the matrix is.
    shape: the leaf's shape.
    run: how many inputs lie in one run.
    name: the leaf, for errors.
  """
  ask = getattr(kind, "on_matrix", lambda _: None)
  found = ask(_axes(indices, shape))
  if found is None:
    raise ValueError(
      f"sparsity_type={kind!r} for params leaf {name!r} of shape {shape}: "
      "pruning after training knows Unstructured, NByM and Block, types that "
      "define on_matrix, and blocks only where inputs and outputs are the last "
      "two axes; leave the leaf out with filter_fn"
    )
  if run % found.inputs_together:
    raise ValueError(
      f"params leaf {name!r}: {kind!r} joins {found.inputs_together} inputs, "
      f"which does not divide the {run} inputs of its product; leave the leaf "
      "out with filter_fn or choose another size"
    )
  return Pattern(found)


def _axes(indices: np.ndarray, shape: tuple) -> tuple[int, int] | None:
  """Return the axes of inputs and outputs among the leaf's last two axes."""
  if len(shape) < 2:
    return None
  # A step along an axis of the matrix tells which axis of the leaf it is.
  first = int(indices[0, 0, 0])
  steps = [
    int(indices[0, 1, 0]) - first if indices.shape[1] > 1 else 0,
    int(indices[0, 0, 1]) - first if indices.shape[2] > 1 else 0,
  ]
  if steps == [shape[-1], 1]:
    return -2, -1
  return (-1, -2) if steps == [1, shape[-1]] else None


def panel_units(
  pattern: Pattern, scores: jax.Array, ones: jax.Array
) -> jax.Array:
  """Choose `ones` units of an (inputs, outputs) panel by their scores."""
  kind = pattern.kind
  units = mask_calculator.topk_masks([kind.pool(scores)], [ones])[0]
  return kind.expand(units, scores.shape).astype(jnp.uint8)


def units(pattern: Pattern, shape: tuple[int, int]) -> int:
  """Return the number of units of a panel that a mask chooses from."""
  if pattern.m:  # chosen group by group, counted as single weights
    return shape[0] * shape[1]
  return pattern.kind.units(shape)
