"""A kept weight as a program sees it, and its products."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpruner.kept import capture, products
from jaxpruner.kept.tensors import KeptTensor
from jaxpruner.sparse import formats


@formats.register
class View:
  """A kept weight with its axes in another order."""

  tensor: KeptTensor
  order: tuple[int, ...] = formats.static()

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(self.tensor.shape[d] for d in self.order)

  @property
  def stacked(self) -> bool:
    return self.tensor.layout.axis is not None

  def todense(self) -> Array:
    return jnp.transpose(self.tensor.todense(), self.order)

  def with_values(self, values: Array) -> "View":
    return View(self.tensor.with_values(values), self.order)

  def layer(self) -> "View":
    """Return the view of one layer; its arrays still have the layers first."""
    axis = self.tensor.layout.axis
    assert axis is not None
    order = tuple(d - (d > axis) for d in self.order if d != axis)
    tensor = KeptTensor(self.tensor.values, self.tensor.layout.one())
    return View(tensor, order)


def whole(tensor: KeptTensor) -> View:
  """Return the view of a weight as it is."""
  return View(tensor, tuple(range(tensor.ndim)))


def is_view(value: Any) -> bool:
  return isinstance(value, View)


def side(view: View, contract: Sequence[int]) -> bool | None:
  """Tell whether a product contracts the columns; None: neither side."""
  axes = {view.order[d] for d in contract}
  split, ndim = view.tensor.layout.split, view.tensor.ndim
  if view.stacked:
    return None
  if axes == set(range(split)):
    return False
  return True if axes == set(range(split, ndim)) else None


def multiply(x: Array, view: View, columns: bool) -> Array:
  """Return (..., K) times the folded weight, captured if asked for."""
  layout = view.tensor.layout
  rows = x.reshape(-1, x.shape[-1])
  y = products.product(rows, view.tensor.values, layout, columns)
  noting = capture.active()
  if noting is not None:
    y = noting.use(layout.name, capture.Use(rows, columns), y)
  return y.reshape(*x.shape[:-1], -1)


def multiply_layers(x: Array, view: View, columns: bool) -> Array:
  """Return (layers, ..., K) times the folded weight of each layer."""
  layout, layers = view.tensor.layout, x.shape[0]
  rows = x.reshape(layers, -1, x.shape[-1])
  one = lambda layout, values, x: products.product(x, values, layout, columns)
  y = layout.in_turn(one, view.tensor.values, rows)
  noting = capture.active()
  if noting is not None:
    y = noting.use(layout.name, capture.Use(rows, columns, 0), y)
  return y.reshape(*x.shape[:-1], -1)


def unfolded(y: Array, view: View, axes: Sequence[int]) -> Array:
  """Split the last axis of a product into the view's axes, in its order."""
  before = y.ndim - 1
  own = [view.order[d] for d in axes]
  inside = sorted(own)
  y = y.reshape(*y.shape[:-1], *(view.tensor.shape[d] for d in inside))
  order = [*range(before), *(before + inside.index(d) for d in own)]
  return jnp.transpose(y, order)


def stopped(view: View) -> View:
  return view.with_values(jax.lax.stop_gradient(view.tensor.values))
