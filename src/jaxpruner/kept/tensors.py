"""A weight stored at the size of what is kept, in place of the dense array."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner import _leaves
from jaxpruner.kept import layouts, products
from jaxpruner.kept.blocks import BlockLayout
from jaxpruner.kept.layouts import Layout
from jaxpruner.sparse import formats
from jaxpruner.sparsity_types import Block


@formats.register
class KeptTensor(formats.Sparse):
  """A weight with one array of kept values, and integer arrays beside it.

  `values` is the trainable part; take derivatives with respect to it with
  `split` and `join`. A product contracts the first `split` axes of the dense
  weight, or all the others. Values of blocks have the shape (blocks, height,
  width); those of a stack of layers have the layers before.

  Attributes:
    values: the kept weights, by slot.
    layout: their positions.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> w = kept.from_dense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> w.shape, w.values.tolist(), (jnp.ones((1, 2)) @ w).tolist()
    ((2, 2), [2.0, 3.0], [[3.0, 2.0]])
  """

  values: Array
  layout: Layout | BlockLayout

  @property
  def shape(self) -> tuple[int, ...]:  # pyright: ignore
    return self.layout.shape

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(self.values.dtype)

  def todense(self) -> Array:
    return self.layout.todense(self.values)

  def with_values(self, values: Array) -> "KeptTensor":
    return KeptTensor(values, self.layout)

  def __rmatmul__(self, x: Any) -> Array:
    x = jnp.asarray(x)
    if (
      self.ndim != 2
      or self.layout.axis is not None
      or x.shape[-1] != self.shape[0]
    ):
      raise ValueError(
        f"x has shape {x.shape}, w {self.shape}: x @ w needs a matrix whose "
        "rows match x's last axis; kept.lift handles other products"
      )
    y = products.product(x.reshape(-1, x.shape[-1]), self.values, self.layout)
    return y.reshape(*x.shape[:-1], -1)


def is_kept(leaf: Any) -> bool:
  return isinstance(leaf, KeptTensor)


def restack(layout: Any, shape: tuple[int, ...], axis: int) -> Any:
  """Return the layout of a stack from that of a layer with more arrays."""
  return dataclasses.replace(layout, shape=tuple(shape), axis=axis)


def as_block(block: Block | tuple[int, int] | None) -> Block | None:
  """Return the sparsity type of the blocks; None: single weights."""
  if block is None or isinstance(block, Block):
    return block
  return Block(block)


def check_form(
  shape: Any,
  dtype: Any,
  split: int | None,
  name: str = "",
  block: Block | None = None,
  axis: int | None = None,
) -> int:
  """Return a checked `split`; raise if the weight has no kept form."""
  about = f"params leaf {name!r}: " if name else ""
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(
      f"{about}dtype {dtype} has no kept form: only floating weights are "
      "trained; leave it dense with filter_fn"
    )
  if axis is not None and not 0 <= axis < len(shape):
    raise ValueError(
      f"{about}axis={axis} must number the layers of shape {tuple(shape)}: an "
      f"axis from 0 to {len(shape) - 1}"
    )
  inner = tuple(d for i, d in enumerate(shape) if i != axis)
  if len(inner) < 2:
    raise ValueError(
      f"{about}shape {tuple(shape)} has no kept form: a kept weight has at "
      "least 2 axes; leave it dense with filter_fn"
    )
  if int(np.prod(inner)) > layouts.LIMIT:
    raise ValueError(
      f"{about}shape {tuple(shape)} has 2**31 weights or more; split the layer "
      "in two"
    )
  split = len(inner) - 1 if split is None else split
  if not 0 < split < len(inner):
    raise ValueError(
      f"{about}split={split} must lie between 1 and {len(inner) - 1}: rows and "
      "columns need an axis each"
    )
  if block is not None and len(inner) > 2:
    cure = "leave it dense with filter_fn, or keep single weights"
    height = block.block_shape[0]
    if split == len(inner) - 1:
      cure = f"choose a block height that divides {inner[-2]}, or {cure}"
    if split != len(inner) - 1 or inner[-2] % height:
      raise ValueError(
        f"{about}blocks of {block.block_shape} lie in the last two axes of "
        f"shape {inner}, which are no blocks of the matrix that its products "
        f"use (rows: the first {split} axes); {cure}"
      )
  return split


def split(params: Any) -> tuple[Any, Any]:
  """Separate what is trained from where it is.

  Args:
    params: a tree with `KeptTensor` leaves.

  Returns:
    `(values, layouts)`: a tree of arrays for `jax.grad` and Optax, and a tree
    of layouts with None for dense leaves.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> params = {"w": kept.from_dense(jnp.eye(2)), "b": jnp.zeros(2)}
    >>> values, layouts = kept.split(params)
    >>> values["w"].tolist(), layouts["b"]
    ([1.0, 1.0], None)
  """
  values = jax.tree.map(
    lambda leaf: leaf.values if is_kept(leaf) else leaf, params, is_leaf=is_kept
  )
  places = jax.tree.map(
    lambda leaf: leaf.layout if is_kept(leaf) else None, params, is_leaf=is_kept
  )
  return values, places


def join(values: Any, layouts: Any) -> Any:
  """Put values and layouts together again; the inverse of `split`.

  Args:
    values: a tree of arrays.
    layouts: a tree of layouts, None (or `optax.MaskedNode()`) for dense leaves.

  Returns:
    A tree with `KeptTensor` leaves.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> values, layouts = kept.split({"w": kept.from_dense(jnp.eye(2))})
    >>> loss = lambda values: (
    ...   jnp.ones((1, 2)) @ kept.join(values, layouts)["w"]).sum()
    >>> jax.grad(loss)(values)["w"].tolist()
    [1.0, 1.0]
  """
  leaves, treedef = jax.tree.flatten(values)
  places = _leaves.align(values, layouts, "layouts")
  out = [
    leaf if place is None else KeptTensor(leaf, place)
    for leaf, place in zip(leaves, places, strict=True)
  ]
  return treedef.unflatten(out)


def todense(params: Any) -> tuple[Any, Any]:
  """Return dense parameters and their masks.

  Args:
    params: a tree with `KeptTensor` leaves.

  Returns:
    `(params, masks)`, as the rest of the library takes them; masks are None
    for dense leaves.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> params, masks = kept.todense({"w": kept.from_dense(jnp.eye(2))})
    >>> params["w"].tolist(), masks["w"].tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [[1, 0], [0, 1]])
  """
  masks = jax.tree.map(
    lambda leaf: leaf.layout.mask() if is_kept(leaf) else None,
    params,
    is_leaf=is_kept,
  )
  dense = jax.tree.map(
    lambda leaf: leaf.todense() if is_kept(leaf) else leaf,
    params,
    is_leaf=is_kept,
  )
  return dense, masks
