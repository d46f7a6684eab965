"""Weights made of several sparse weights: stacks of layers, and pieces."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import formats, ops
from jaxpruner.sparse.formats import Sparse, SparseTensor


@formats.register
class Stacked(Sparse):
  """Layers of equal shape, stacked for a scan; each layer is sparse."""

  layers: SparseTensor  # every array with one more axis in front
  length: int = formats.static()

  @property
  def shape(self) -> tuple[int, ...]:  # pyright: ignore
    return (self.length, *self.layers.shape)

  @property
  def dtype(self) -> np.dtype:
    return self.layers.dtype

  def todense(self) -> jax.Array:
    return jax.vmap(lambda layer: layer.todense())(self.layers)


class Movable(Sparse):
  """A weight that is transposed, reshaped and sliced without decoding it.

  The methods return None where it would have to be decoded.
  """

  def permuted(self, order: Sequence[int]) -> Any:
    raise NotImplementedError

  def reshaped(self, shape: Sequence[int]) -> Any:
    raise NotImplementedError

  def sliced(self, axis: int, start: int, stop: int) -> Any:
    raise NotImplementedError

  def cast(self, dtype: Any) -> Any:
    raise NotImplementedError


@formats.register
class Parts(Movable):
  """Weights joined along an axis; each is sparse or a dense array.

  Fused projections that the program slices, experts, groups of a convolution:
  each part is multiplied alone.
  """

  parts: tuple[Any, ...]
  axis: int = formats.static()

  @property
  def shape(self) -> tuple[int, ...]:  # pyright: ignore
    shape = list(self.parts[0].shape)
    shape[self.axis] = sum(p.shape[self.axis] for p in self.parts)
    return tuple(shape)

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(self.parts[0].dtype)

  @property
  def values(self) -> tuple[Any, ...]:  # pyright: ignore
    """The values of each part."""
    return tuple(getattr(p, "values", p) for p in self.parts)

  def with_values(self, values: Any) -> "Parts":
    pairs = zip(self.parts, values, strict=True)
    parts = [p.with_values(v) if isinstance(p, Sparse) else v for p, v in pairs]
    return Parts(tuple(parts), self.axis)

  def todense(self) -> jax.Array:
    return jnp.concatenate([ops.decode(p) for p in self.parts], self.axis)

  def each(self, change: Callable[[Any], Any], axis: int) -> "Parts | None":
    """Return the changed parts, joined along another axis."""
    parts = tuple(map(change, self.parts))
    return None if None in map(_nothing, parts) else Parts(parts, axis)

  def permuted(self, order: Sequence[int]) -> "Parts | None":
    axis = list(order).index(self.axis)
    return self.each(lambda p: permuted(p, order), axis)

  def reshaped(self, shape: Sequence[int]) -> Any:
    if self.shape[self.axis] == 1 and len(self.parts) == 1:
      return reshaped(self.parts[0], shape)
    groups = regroup(self.shape, shape)
    mine = [new for old, new in groups if old[0] == self.axis]
    if not mine:
      return None

    def change(part):
      new = resized(self.shape, shape, part.shape)
      return None if new is None else reshaped(part, new)

    return self.each(change, mine[0][0])

  def sliced(self, axis: int, start: int, stop: int) -> "Parts | None":
    if axis != self.axis:
      return None
    ends = np.cumsum([0, *(p.shape[axis] for p in self.parts)]).tolist()
    if start not in ends or stop not in ends:
      return None
    inside = slice(ends.index(start), ends.index(stop))
    return Parts(self.parts[inside], axis)

  def cast(self, dtype: Any) -> "Parts | None":
    return self.each(lambda p: cast(p, dtype), self.axis)


def _nothing(value: Any) -> Any:
  """Return None for None, so that arrays need not be compared."""
  return None if value is None else True


def permuted(w: Any, order: Sequence[int]) -> Any:
  """Transpose an array or a sparse weight; None if it must be decoded."""
  if isinstance(w, Movable):
    return w.permuted(order)
  if isinstance(w, SparseTensor):
    # The kept axes are folded in order.
    if [d for d in order if d in w.kept] != list(w.kept):
      return None
    shape = tuple(w.shape[d] for d in order)
    contract = tuple(list(order).index(d) for d in w.contract)
    return dataclasses.replace(w, shape=shape, contract=contract)
  return None if isinstance(w, Sparse) else jnp.transpose(w, order)


def reshaped(w: Any, shape: Sequence[int]) -> Any:
  """Reshape an array or a sparse weight; None if it must be decoded."""
  if isinstance(w, Movable):
    return w.reshaped(shape)
  if not isinstance(w, SparseTensor):
    return None if isinstance(w, Sparse) else jnp.reshape(w, shape)
  found: list[tuple[int, list[int]]] = []
  long = [d for d in w.contract if w.shape[d] != 1]
  for old, new in regroup(w.shape, shape):
    inside = [d for d in old if d in w.contract]
    if not inside:
      continue
    start = long.index(old[0]) if inside == old else -1
    if start < 0 or long[start : start + len(old)] != old:
      return None  # it mixes both sides, or the order in which they are folded
    found.append((start, new))
  contract = tuple(d for _, new in sorted(found) for d in new)
  return dataclasses.replace(w, shape=tuple(shape), contract=contract)


def sliced(w: Any, axis: int, start: int, stop: int) -> Any:
  """Return a range of an array or of a sparse weight; None: decode it."""
  if isinstance(w, Movable):
    return w.sliced(axis, start, stop)
  if isinstance(w, Sparse):
    return None
  return jax.lax.slice_in_dim(w, start, stop, axis=axis)


def cast(w: Any, dtype: Any) -> Any:
  """Cast an array or a sparse weight; None if it must be decoded."""
  if isinstance(w, Movable):
    return w.cast(dtype)
  if isinstance(w, SparseTensor):
    return w.with_values(w.values.astype(dtype))
  return None if isinstance(w, Sparse) else w.astype(dtype)


def regroup(
  old: Sequence[int], new: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
  """Return which axes of a shape become which of another by reshaping.

  Each group has the fewest axes whose sizes multiply to the same number. Axes
  of length 1 belong to no group.

  >>> regroup((4, 6, 1), (4, 2, 3))
  [([0], [0]), ([1], [1, 2])]
  """
  left = [d for d, n in enumerate(old) if n != 1]
  right = [d for d, n in enumerate(new) if n != 1]
  groups = []
  while left or right:
    pair: tuple[list[int], list[int]] = [left.pop(0)], [right.pop(0)]
    while (a := _size(old, pair[0])) != (b := _size(new, pair[1])):
      if a < b:
        pair[0].append(left.pop(0))
      else:
        pair[1].append(right.pop(0))
    groups.append(pair)
  return groups


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
  return int(np.prod([shape[d] for d in axes]))


def resized(
  old: Sequence[int], new: Sequence[int], shape: Sequence[int]
) -> tuple[int, ...] | None:
  """Return what a reshape makes of a shape that is shorter along one axis."""
  result = list(new)
  for d, (n, full) in enumerate(zip(shape, old, strict=True)):
    if n == full:
      continue
    first = [b[0] for a, b in regroup(old, new) if a[0] == d]
    if not first or result[first[0]] * n % full:
      return None
    result[first[0]] = result[first[0]] * n // full
  return tuple(result)
