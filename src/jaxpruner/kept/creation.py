"""Create random kept weights; the dense array is never made."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpruner import _tools, mask_calculator
from jaxpruner.kept import block_rewiring, growth, rewiring
from jaxpruner.kept.blocks import BlockLayout
from jaxpruner.kept.tensors import KeptTensor, as_block, check_form, restack
from jaxpruner.sparsity_types import Block

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
  scores = growth.random(places, 0, name, tuple(shape), split, axis)
  # Without the name: layers of one shape share a compiled function.
  layout = _random_layout(
    scores, _Form(tuple(shape), split, block, axis), sparsity
  )
  layout = dataclasses.replace(layout, name=name)
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
  block: Block | None
  axis: int | None

  @property
  def inner(self) -> tuple[int, ...]:
    return tuple(d for i, d in enumerate(self.shape) if i != self.axis)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_layout(scores, form: _Form, sparsity: float) -> Any:
  def one(scores):
    if form.block is None:
      count = int(mask_calculator.num_ones(int(np.prod(form.inner)), sparsity))
      return rewiring.first_layout(scores, form.inner, form.split, "", count)
    none = jnp.zeros(0, jnp.int32)
    empty = BlockLayout(none, none, form.inner, form.split, "", form.block)
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
