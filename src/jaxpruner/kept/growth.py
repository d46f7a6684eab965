"""Growth scores of the weights that are not kept, a few rows at a time."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner import _leaves
from jaxpruner.engine import draw
from jaxpruner.sparse import formats

Pairs = tuple[tuple[Array, Array], ...]


class Growth:
  """Scores of a folded weight, at least zero, computed when they are read."""

  @property
  def has_kernel(self) -> bool:
    """Whether the kernel of mask updates can compute them."""
    raise NotImplementedError

  def rows(self, row: Array) -> Array:
    """Return the scores of some rows, (rows, columns)."""
    raise NotImplementedError

  def for_kernel(self, kernel) -> tuple[str, tuple[Array, ...]]:
    """Return the kernel's function, and its operands."""
    raise NotImplementedError


@formats.register
class Random(Growth):
  """The numbers of `BaseUpdater.random_scores`.

  Attributes:
    words: the two random words of the leaf.
    columns: columns of the folded weight.
  """

  words: Array
  columns: int = formats.static()

  @property
  def has_kernel(self) -> bool:
    return True

  def rows(self, row: Array) -> Array:
    first = row.astype(jnp.uint32)[:, None] * np.uint32(self.columns)
    return draw.at(
      self.words, first + jnp.arange(self.columns, dtype=jnp.uint32)
    )

  def for_kernel(self, kernel):
    del kernel
    return "rewire_random", (self.words,)


def random(data: Array, salt, names: _leaves.Names, columns: int) -> Random:
  """Return the random scores of a leaf.

  Args:
    data: PRNG key data.
    salt: what tells one draw from the next: the step.
    names: the path of the leaf.
    columns: columns of the folded weight.

  Returns:
    A `Random`.
  """
  return Random(draw.leaf_words(data, salt, (names,))[0], columns)


@formats.register
class Gradient(Growth):
  """|sum of left.T @ right|: the gradient of the dense weight.

  Attributes:
    pairs: per use of the weight, an array (batch, rows), or the int row of
      each batch entry, and an array (batch, columns).
  """

  pairs: Pairs

  @property
  def has_kernel(self) -> bool:
    # A looked-up row would have to be multiplied as a row of ones and zeros.
    return all(_is_float(left) for left, _ in self.pairs)

  def rows(self, row: Array) -> Array:
    total = jnp.zeros([], jnp.float32)
    for left, right in self.pairs:
      if _is_float(left):
        part = left[:, row]
      else:
        part = (left[:, None] == row).astype(right.dtype)
      total += part.astype(jnp.float32).T @ right.astype(jnp.float32)
    return jnp.abs(total)

  def for_kernel(self, kernel):
    left, right = (
      jnp.concatenate([a.astype(jnp.float32) for a in side])
      for side in zip(*self.pairs, strict=True)
    )
    return "rewire_gradient", (
      _tiles(left, kernel.GROUP),
      _tiles(right, kernel.PANEL),
    )

  def factors_finite(self) -> Array:
    """Return whether all factors are finite."""
    found = [jnp.all(jnp.isfinite(a)) for pair in self.pairs for a in pair]
    return jnp.all(jnp.stack(found)) if found else jnp.bool_(True)


def gradient(pairs: list[tuple[Array, Array]]) -> Gradient:
  """Return the gradient of a weight from its inputs and cotangents.

  Args:
    pairs: per use of the weight, two arrays whose last axes are rows and
      columns; or the int row of each entry, and an array.

  Returns:
    A `Gradient`.
  """

  def flat(left, right):
    shape = (-1, left.shape[-1]) if _is_float(left) else (-1,)
    return left.reshape(shape), right.reshape(-1, right.shape[-1])

  return Gradient(tuple(flat(*pair) for pair in pairs))


def _is_float(array: Array) -> bool:
  return jnp.issubdtype(array.dtype, jnp.floating)


def _tiles(x: Array, width: int) -> Array:
  """Return (batch, size) as (tiles, batch, width), filled up with zeros."""
  batch, size = x.shape
  x = jnp.pad(x, ((0, 0), (0, -size % width)))
  return jax.lax.transpose(x.reshape(batch, -1, width), (1, 0, 2))
