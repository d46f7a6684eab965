"""Growth scores of the weights that are not kept, a few rows at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner.kept.places import fold
from jaxpruner.sparse import formats
from jaxpruner.updater import draw

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

  def factors_finite(self) -> Array:
    """Return whether all factors of the scores are finite."""
    return jnp.bool_(True)


@formats.register
class Random(Growth):
  """The numbers of `BaseUpdater.random_scores`.

  They belong to the flat index of the dense leaf, of which a layer of a stack
  has a part.

  Attributes:
    words: the two random words of the leaf.
    first: uint32, the index of the first weight.
    columns: columns of the folded weight.
    runs: for a stack whose layers are no first axis: how many weights of a
      layer are neighbours in the leaf, and from one such run to the next.
  """

  words: Array
  first: Array
  columns: int = formats.static()
  runs: tuple[int, int] | None = formats.static()

  @property
  def has_kernel(self) -> bool:
    return self.runs is None

  def rows(self, row: Array) -> Array:
    start = row.astype(jnp.uint32)[:, None] * np.uint32(self.columns)
    index = start + jnp.arange(self.columns, dtype=jnp.uint32)
    if self.runs is not None:
      length, step = map(np.uint32, self.runs)
      index = index // length * step + index % length
    return draw.at(self.words, index + self.first)

  def for_kernel(self, kernel):
    del kernel
    return "rewire_random", (jnp.append(self.words, self.first),)


def random(
  data: Array,
  salt: Any,
  name: str,
  shape: tuple[int, ...],
  split: int,
  axis: int | None = None,
) -> Random:
  """Return the random scores of a leaf.

  Args:
    data: PRNG key data.
    salt: what tells one draw from the next: the step.
    name: the path of the leaf.
    shape: the shape of the dense leaf.
    split: how many leading axes (of a layer) form the rows.
    axis: the axis that numbers the layers of a stack; None if it is none.

  Returns:
    A `Random`; for a stack, its arrays have the layers before.
  """
  words = draw.leaf_words(data, salt, (tuple(name.split("/")),))[0]
  inner = tuple(d for i, d in enumerate(shape) if i != axis)
  columns = fold(inner, split)[1]
  if axis is None:
    return Random(words, jnp.uint32(0), columns, None)
  layers, length = shape[axis], int(np.prod(inner[axis:]))
  first = jnp.arange(layers, dtype=jnp.uint32) * np.uint32(length)
  runs = None if axis == 0 else (length, layers * length)
  return Random(jnp.tile(words, (layers, 1)), first, columns, runs)


@formats.register
class Gradient(Growth):
  """|sum of left.T @ right|: the gradient of the dense weight.

  Attributes:
    pairs: per use of the weight, an array (batch, rows), or the int row of
      each batch entry, and an array (batch, columns). Of a stack, every array
      has the layers before.
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
    found = [jnp.all(jnp.isfinite(a)) for pair in self.pairs for a in pair]
    return jnp.all(jnp.stack(found)) if found else jnp.bool_(True)


def gradient(
  pairs: list[tuple[Array, Array]], layers: int | None = None
) -> Gradient:
  """Return the gradient of a weight from its inputs and cotangents.

  Args:
    pairs: per use of the weight, two arrays whose last axes are rows and
      columns; or the int row of each entry, and an array.
    layers: the length of their first axis, if the weight is a stack.

  Returns:
    A `Gradient`.
  """
  lead = () if layers is None else (layers,)

  def flat(left, right):
    shape = (*lead, -1, left.shape[-1]) if _is_float(left) else (*lead, -1)
    return left.reshape(shape), right.reshape(*lead, -1, right.shape[-1])

  return Gradient(tuple(flat(*pair) for pair in pairs))


def _is_float(array: Array) -> bool:
  return jnp.issubdtype(array.dtype, jnp.floating)


def _tiles(x: Array, width: int) -> Array:
  """Return (batch, size) as (tiles, batch, width), filled up with zeros."""
  batch, size = x.shape
  x = jnp.pad(x, ((0, 0), (0, -size % width)))
  return jax.lax.transpose(x.reshape(batch, -1, width), (1, 0, 2))
