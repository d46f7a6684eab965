# pyright: strict, reportUnknownMemberType=false
"""The windows of a convolution as the rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped


def pads(
  padding: Any,
  sizes: Sequence[int],
  window: Sequence[int],
  strides: Sequence[int],
  lhs_dilation: Sequence[int],
  rhs_dilation: Sequence[int],
) -> list[tuple[int, int]]:
  """Return the padding of each spatial axis as numbers.

  Args:
    padding: "SAME", "VALID", or pairs of numbers.
    sizes: the lengths of the input's spatial axes.
    window: the lengths of the kernel's spatial axes.
    strides: the strides of the window.
    lhs_dilation: the dilation of the input.
    rhs_dilation: the dilation of the kernel.

  Returns:
    Low and high padding of each spatial axis.

  Example:
    >>> pads("SAME", [4], [3], [1], [1], [1])
    [(1, 1)]
  """
  if not isinstance(padding, str):
    return [(int(low), int(high)) for low, high in padding]
  spread = [(n - 1) * d + 1 for n, d in zip(sizes, lhs_dilation, strict=True)]
  reach = [(k - 1) * d + 1 for k, d in zip(window, rhs_dilation, strict=True)]
  found = jax.lax.padtype_to_pads(spread, reach, strides, padding)
  return [(int(low), int(high)) for low, high in found]


def rows(
  x: Shaped[Array, "*any"],
  spec: Sequence[int],
  window: Sequence[int],
  strides: Sequence[int],
  padding: Sequence[tuple[int, int]],
  lhs_dilation: Sequence[int],
  rhs_dilation: Sequence[int],
) -> Shaped[Array, "batch *space taps channels"]:
  """Return the inputs in the kernel's window, for every output position.

  A convolution is the product of these rows and the kernel, after `taps` and
  `channels` are reshaped into one axis on both sides.

  Args:
    x: the input of the convolution.
    spec: its batch axis, channel axis and spatial axes (`lhs_spec` of JAX).
    window: the lengths of the kernel's spatial axes.
    strides: the strides of the window.
    padding: low and high padding of each spatial axis; may be negative.
    lhs_dilation: the dilation of the input.
    rhs_dilation: the dilation of the kernel.

  Returns:
    The windows; a tap is one position inside the kernel's window.

  Example:
    >>> x = jnp.arange(4.0).reshape(1, 4, 1)  # batch, position, channel
    >>> seen = rows(x, (0, 2, 1), (2,), (1,), [(0, 0)], (1,), (1,))
    >>> seen[0, :, :, 0].tolist()
    [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
  """
  x = jnp.transpose(x, (spec[0], *spec[2:], spec[1]))
  edges = [
    (low, high, d - 1)
    for (low, high), d in zip(padding, lhs_dilation, strict=True)
  ]
  x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
  batch, *space, channels = x.shape
  reach = [(k - 1) * d for k, d in zip(window, rhs_dilation, strict=True)]
  taps: list[jax.Array] = []
  for tap in np.ndindex(*window):
    start = [i * d for i, d in zip(tap, rhs_dilation, strict=True)]
    stop = [a + n - r for a, n, r in zip(start, space, reach, strict=True)]
    taps.append(
      jax.lax.slice(
        x, (0, *start, 0), (batch, *stop, channels), (1, *strides, 1)
      )
    )
  return jnp.stack(taps, axis=-2)
