"""Depthwise convolutions as a sum over the taps of the window.

XLA's depthwise convolution on a CPU takes up to 40 times as long as this sum,
which it fuses into one loop. It can go when XLA does so itself.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.program import windows
from jaxpruner.sparse import formats
from jaxpruner.sparse._parts import Movable

# Above, the sum is a long program.
MOST = 49


@formats.register
class Taps(Movable):
  """A dense depthwise kernel that is multiplied tap by tap.

  Attributes:
    values: the kernel.
  """

  values: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:  # pyright: ignore
    return tuple(self.values.shape)

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(self.values.dtype)

  def with_values(self, values: jax.Array) -> "Taps":
    return Taps(values)

  def todense(self) -> jax.Array:
    return self.values

  def permuted(self, order: Sequence[int]) -> "Taps":
    return Taps(jnp.transpose(self.values, order))

  def reshaped(self, shape: Sequence[int]) -> "Taps":
    return Taps(self.values.reshape(shape))

  def sliced(self, axis: int, start: int, stop: int) -> "Taps":
    return Taps(jax.lax.slice_in_dim(self.values, start, stop, axis=axis))

  def cast(self, dtype: Any) -> "Taps":
    return Taps(self.values.astype(dtype))


def conv(x: jax.Array, kernel: jax.Array, params: Any) -> jax.Array:
  """Return a depthwise convolution.

  Args:
    x: the image.
    kernel: one input feature for each output feature.
    params: those of `jax.lax.conv_general_dilated`.
  """
  spec = params["dimension_numbers"]
  features, space = spec.lhs_spec[1], spec.lhs_spec[2:]
  into, taps = spec.rhs_spec[1], spec.rhs_spec[2:]
  dtype = params.get("preferred_element_type")
  dtype = jnp.result_type(x, kernel) if dtype is None else dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  x, kernel = x.astype(wide), kernel.astype(wide)
  copies = kernel.shape[spec.rhs_spec[0]] // x.shape[features]
  if copies > 1:
    x = jnp.repeat(x, copies, axis=features)
  kernel = jnp.transpose(kernel, (*taps, into, spec.rhs_spec[0]))
  window, strides = kernel.shape[:-2], params["window_strides"]
  ones = (1,) * len(window)
  spread = params["lhs_dilation"] or ones
  dilation = params["rhs_dilation"] or ones
  sizes = [x.shape[d] for d in space]
  pads = windows.pads(
    params["padding"], sizes, window, strides, spread, dilation
  )
  edges = [(0, 0, 0)] * x.ndim
  for d, (low, high), gap in zip(space, pads, spread, strict=True):
    edges[d] = (low, high, gap - 1)
  x = jax.lax.pad(x, jnp.zeros((), wide), edges)
  scale = [1] * x.ndim
  scale[features] = x.shape[features]
  steps = [1] * x.ndim
  for d, stride in zip(space, strides, strict=True):
    steps[d] = stride

  def seen(tap):
    """Return what one tap of the window sees, times its weights."""
    start, stop = [0] * x.ndim, list(x.shape)
    for d, i, n, gap in zip(space, tap, window, dilation, strict=True):
      start[d], stop[d] = i * gap, x.shape[d] - (n - 1 - i) * gap
    part = jax.lax.slice(x, start, stop, steps)
    return part * kernel[tap][0].reshape(scale)

  first, *rest = map(seen, np.ndindex(*window))
  y = sum(rest, start=first).astype(dtype)
  out = np.empty(x.ndim, int)
  out[list(spec.out_spec)] = spec.lhs_spec
  return jnp.transpose(y, out.tolist())
