"""A weight stored at the size of what is kept, in place of the dense array."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner import _leaves, _tools, mask_calculator
from jaxpruner.kept import (
  block_rewiring,
  blocks,
  growth,
  layouts,
  products,
  rewiring,
)
from jaxpruner.kept.blocks import BlockLayout
from jaxpruner.kept.layouts import Layout
from jaxpruner.kept.places import fold
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


def from_dense(
  weight: Any,
  mask: Any = None,
  *,
  split: int | None = None,
  block: Block | tuple[int, int] | None = None,
  axis: int | None = None,
  name: str = "",
) -> KeptTensor:
  """Store the kept entries of a dense weight.

  Args:
    weight: a dense array with at least 2 axes.
    mask: 1 = kept; by default nonzero entries are kept.
    split: how many leading axes form the rows of the folded matrix; a product
      contracts these axes or all the others. By default all but the last.
    block: rows and columns of the blocks that are kept whole, or the sparsity
      type `Block`; None: single weights.
    axis: the axis that numbers the layers of a stack, which `split` does not
      count; every layer keeps as many weights, and where rounding gave one
      layer one less, it gets one more, of value zero. None: no stack.
    name: the path of the weight, for errors.

  Returns:
    A `KeptTensor`; its slots are in row-major order.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> w = kept.from_dense(jnp.eye(4))
    >>> w.values.size, w.todense().tolist() == jnp.eye(4).tolist()
    (4, True)
  """
  weight = np.asarray(weight)
  chosen = weight != 0 if mask is None else np.asarray(mask) != 0
  if chosen.shape != weight.shape:
    raise ValueError(
      f"mask has shape {chosen.shape}, weight has {weight.shape}; they must "
      "agree (unpack packed masks first)"
    )
  block = as_block(block)
  split = check_form(weight.shape, weight.dtype, split, name, block, axis)
  strict = mask is not None
  if axis is None:
    return _layer(weight, chosen, split, block, strict, name)
  weights = np.moveaxis(weight, axis, 0)
  wanted = np.moveaxis(chosen, axis, 0)
  even = _evened(wanted.reshape(len(wanted), *fold(wanted.shape[1:], split)),
                 block, name).reshape(wanted.shape)  # fmt: skip
  weights = np.where(wanted, weights, np.zeros((), weights.dtype))
  parts = [
    _layer(w, c, split, block, strict, name)
    for w, c in zip(weights, even, strict=True)
  ]
  stacked: Any = jax.tree.map(lambda *a: jnp.stack(a), *parts)
  return KeptTensor(stacked.values, restack(stacked.layout, weight.shape, axis))


def _evened(chosen: np.ndarray, block: Block | None, name: str) -> np.ndarray:
  """Return masks of layers (layers, rows, columns) that keep as many units.

  Rounding may leave layers that differ by one unit: the smaller ones get one
  more, of weight zero, at their lowest free place.
  """
  units, grid = chosen, chosen.shape[1:]
  if block is not None:
    pool = lambda layer: blocks.tiled(layer, block.block_shape).any((2, 3))
    units = np.asarray(jax.vmap(pool)(jnp.asarray(chosen)))
    grid = units.shape[1:]
  units = units.reshape(len(chosen), -1)
  counts = units.sum(1)
  if counts.max() - counts.min() > 1:
    raise ValueError(
      f"params leaf {name!r}: the layers of this stack keep {counts.min()} to "
      f"{counts.max()} weights or blocks; a kept stack keeps as many in each: "
      "prune with one sparsity per leaf (uniform or erk), or leave it out with "
      "filter_fn"
    )
  units = units.copy()
  for layer in np.flatnonzero(counts < counts.max()):
    units[layer, np.argmin(units[layer])] = True
  if block is None:
    return units.reshape(chosen.shape)
  wide = units.reshape(len(chosen), *grid)
  for axis, side in enumerate(block.block_shape):
    wide = np.repeat(wide, side, axis + 1)
  return chosen | (
    wide[:, : chosen.shape[1], : chosen.shape[2]]
    & (counts < counts.max())[:, None, None]
  )


def restack(layout: Any, shape: tuple[int, ...], axis: int) -> Any:
  """Return the layout of a stack from that of a layer with more arrays."""
  return dataclasses.replace(layout, shape=tuple(shape), axis=axis)


def _layer(weight, chosen, split, block, strict, name) -> KeptTensor:
  """Store one layer."""
  matrix = fold(weight.shape, split)
  weight, chosen, shape = (
    weight.reshape(matrix),
    chosen.reshape(matrix),
    weight.shape,
  )
  if not chosen.any():
    raise ValueError(
      f"params leaf {name!r}: the mask keeps no weight; keep at least one"
    )
  if block is None:
    positions = np.flatnonzero(chosen).astype(np.int32)
    layout: Any = layouts.from_sorted(positions, shape, split, name)
    return KeptTensor(jnp.asarray(weight.reshape(-1)[positions]), layout)
  found = np.asarray(blocks.tiled(jnp.asarray(chosen), block.block_shape)).any(
    (2, 3)
  )
  rows, columns = (jnp.asarray(a.astype(np.int32)) for a in np.nonzero(found))
  layout = BlockLayout(rows, columns, tuple(shape), split, name, block)
  if strict and np.any(np.asarray(layout.mask()).reshape(matrix) != chosen):
    raise ValueError(
      f"params leaf {name!r}: the mask does not consist of whole blocks of "
      f"{block.block_shape}; prune with sparsity_type={block!r}, or store "
      "single weights"
    )
  return KeptTensor(layout.gather(jnp.asarray(weight)), layout)


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


Initializer = Callable[[Array, int, tuple[int, ...], Any], Array]


def create(
  key: Any,
  shape: tuple[int, ...],
  sparsity: float,
  *,
  initializer: str | Initializer = "lecun_normal",
  dtype: Any = jnp.float32,
  split: int | None = None,
  block: Block | tuple[int, int] | None = None,
  axis: int | None = None,
  fan_in: int | None = None,
  name: str = "",
  positions_key: Any = None,
) -> KeptTensor:
  """Create a random sparse weight without ever making the dense array.

  The positions are those of `static_sparse`'s initial mask for the same key and
  the same path. Temporary arrays, bitmaps and counts of their bits, take about
  1.6 bytes per weight of the dense shape together.

  Args:
    key: a PRNG key.
    shape: the shape of the dense weight.
    sparsity: fraction removed; exactly round(size · (1 − sparsity)) are kept,
      weights or blocks, in every layer of a stack.
    initializer: "lecun_normal", "he_normal", "glorot_normal" (variance from
      the *dense* fan, as in a masked network), "zeros", or a function `(key,
      count, shape, dtype) -> values`.
    dtype: dtype of the values.
    split: as in `from_dense`.
    block: as in `from_dense`.
    axis: as in `from_dense`.
    fan_in: inputs of each output, for the variance; by default the rows.
    name: the path of the weight, which the positions depend on.
    positions_key: another key for the positions, such as that of an updater.

  Returns:
    A `KeptTensor`.

  Example:
    >>> import jax
    >>> from jaxpruner import kept
    >>> w = kept.create(jax.random.key(0), (1024, 1024), 0.99)
    >>> w.values.shape, w.shape
    ((10486,), (1024, 1024))
    >>> w = kept.create(jax.random.key(0), (64, 64), 0.75, block=(16, 16))
    >>> w.values.shape
    (4, 16, 16)
  """
  block = as_block(block)
  split = check_form(shape, dtype, split, name, block, axis)
  data = jax.random.key_data(key) if is_key(key) else key
  places = data if positions_key is None else positions_key
  form = _Form(tuple(shape), split, name, block, axis)
  layout = _random_layout(places, form, sparsity)
  drawn = jax.random.fold_in(jax.random.wrap_key_data(data), 1)
  drawn = jax.random.fold_in(drawn, _tools.path_hash(name))
  rows, columns = layout.matrix
  fans = (fan_in or rows, rows * columns // (fan_in or rows))
  count = int(np.prod(layout.values_shape))
  values = _initial(initializer, drawn, count, shape, fans, dtype)
  values = values.reshape(layout.values_shape)
  if isinstance(layout, BlockLayout):
    values = layout.clear_outside(values)
  return KeptTensor(values, layout)


def is_key(key: Any) -> bool:
  return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


class _Form(NamedTuple):
  """What is known of a layout before its positions are drawn."""

  shape: tuple[int, ...]
  split: int
  name: str
  block: Block | None
  axis: int | None

  @property
  def inner(self) -> tuple[int, ...]:
    return tuple(d for i, d in enumerate(self.shape) if i != self.axis)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_layout(data, form: _Form, sparsity: float) -> Any:
  scores = growth.random(data, 0, form.name, form.shape, form.split, form.axis)

  def one(scores):
    if form.block is None:
      count = int(mask_calculator.num_ones(int(np.prod(form.inner)), sparsity))
      return rewiring.first_layout(
        scores, form.inner, form.split, form.name, count
      )
    none = jnp.zeros(0, jnp.int32)
    empty = BlockLayout(
      none, none, form.inner, form.split, form.name, form.block
    )
    count = int(mask_calculator.num_ones(int(np.prod(empty.grid)), sparsity))
    return block_rewiring.first_layout(scores, empty, count)

  if form.axis is None:
    return one(scores)
  return restack(jax.lax.map(one, scores), form.shape, form.axis)


def _initial(initializer, key, count, shape, fans, dtype) -> Array:
  if callable(initializer):
    values: Any = initializer(key, count, tuple(shape), dtype)
    if np.shape(values) != (count,):
      raise ValueError(
        f"initializer returned shape {np.shape(values)} for {count} kept "
        "weights; it is called as initializer(key, count, shape, dtype)"
      )
    return jnp.asarray(values, dtype)
  if initializer == "zeros":
    return jnp.zeros(count, dtype)
  fan_in, fan_out = fans
  variances = {
    "lecun_normal": 1 / fan_in,
    "he_normal": 2 / fan_in,
    "glorot_normal": 2 / (fan_in + fan_out),
  }
  if initializer not in variances:
    raise ValueError(
      f"initializer={initializer!r} is unknown; use one of "
      f"{', '.join(['zeros', *variances])}, or a function (key, count, shape, "
      "dtype) -> values"
    )
  deviation = np.sqrt(variances[initializer])
  # As jax.nn.initializers: a normal cut at two deviations, rescaled to 1.
  values = jax.random.truncated_normal(key, -2, 2, (count,), jnp.float32)
  return (values * (deviation / 0.87962566103423978)).astype(dtype)


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
