"""Matrices as int8 codes with a scale per group along their last axis."""

import jax.numpy as jnp
import numpy as np

GROUP = 64
SCALE = np.dtype(jnp.bfloat16)


def suits(shape: tuple[int, ...], dtype: np.dtype) -> bool:
  """Tell whether a tensor is rounded: floating, at least a matrix, not empty.

  Vectors are biases and norms: few bytes, and sensitive ones.
  """
  floating = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
  return floating and len(shape) > 1 and 0 not in shape


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Return the shape of the scales of a tensor of this shape."""
  return (*shape[:-1], -(-shape[-1] // GROUP)) if shape else ()


def encode(array: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Round a tensor; what is zero stays zero.

  Scales are rounded to the nearest bfloat16: the largest weight of a group
  still becomes ±127, and a tensor that is decoded and encoded again has the
  same codes and scales.

  Args:
    array: floating, of at least one axis.
    name: its name, for the error.

  Returns:
    `(codes, scales)`: int8 of the shape of the tensor, and one scale per 64
    neighbours along the last axis. A weight is within half a scale of its code
    times the scale.
  """
  array = array.astype(np.float32)
  if not np.isfinite(array).all():
    raise ValueError(f"{name} holds weights that are not finite")
  length = array.shape[-1]
  padded = np.zeros((*array.shape[:-1], -(-length // GROUP) * GROUP), "f4")
  padded[..., :length] = array
  groups = padded.reshape(*scale_shape(array.shape), GROUP)
  scales = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(SCALE)
  wide = scales.astype(np.float32)[..., None]
  codes = np.divide(groups, wide, where=wide > 0, out=np.zeros_like(groups))
  codes = np.rint(codes, out=codes).astype(np.int8)
  return codes.reshape(padded.shape)[..., :length], scales


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Return float32 weights."""
  wide = np.repeat(scales.astype(np.float32), GROUP, axis=-1)
  return codes.astype(np.float32) * wide[..., : codes.shape[-1]]
