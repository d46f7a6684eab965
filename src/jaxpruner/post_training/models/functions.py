"""Functions that several models share: products, norms, activations."""

from typing import Any

import jax
import jax.numpy as jnp

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
  "relu": jax.nn.relu,
}


def linear(params: Any, name: str, x: jax.Array) -> jax.Array:
  """Multiply by a weight of (outputs, inputs); add its bias if it has one.

  With `NAME.threshold` inputs up to this size count as zeros.
  """
  level = params.get(f"{name}.threshold")
  if level is not None:
    x = jnp.where(jnp.abs(x) > level, x, 0)
  y = x @ params[f"{name}.weight"].T
  bias = params.get(f"{name}.bias")
  return y if bias is None else y + bias


def layer_norm(
  x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float
) -> jax.Array:
  """Normalise the last axis, then scale and shift it."""
  mean = jnp.mean(x, axis=-1, keepdims=True)
  var = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
  return ((x - mean) * jax.lax.rsqrt(var + eps) * scale + bias).astype(
    scale.dtype
  )
