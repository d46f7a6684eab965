"""The layers of the tasks' networks, as plain functions on dicts."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def dense_init(key: jax.Array, inputs: int, outputs: int) -> Params:
  """Return the parameters of a linear layer.

  Initialised as in He et al., "Delving Deep into Rectifiers", 2015.

  Args:
    key: the random key.
    inputs: the number of inputs.
    outputs: the number of outputs.

  Returns:
    `{"kernel", "bias"}`.

  Example:
    >>> dense_init(jax.random.key(0), 2, 3)["kernel"].shape
    (2, 3)
  """
  scale = math.sqrt(2 / inputs)
  kernel = scale * jax.random.normal(key, (inputs, outputs))
  return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def dense(params: Params, x: jax.Array) -> jax.Array:
  """Return `x @ kernel + bias`."""
  return x @ params["kernel"] + params["bias"]


def conv_init(key: jax.Array, size: int, inputs: int, outputs: int) -> Params:
  """Return `{"kernel", "bias"}` of a size x size convolution (HWIO)."""
  scale = math.sqrt(2 / (size * size * inputs))
  kernel = scale * jax.random.normal(key, (size, size, inputs, outputs))
  return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def conv(
  params: Params, x: jax.Array, stride: int = 1, pad: int | None = None
) -> jax.Array:
  """Convolve images (NHWC) with the kernel (HWIO) and add the bias.

  What XLA does: its CPU backend runs convolutions inside loops, and under vmap
  over kernels, ten times slower. What we do: one product of patches and kernel.
  When it can go: when XLA runs them equally fast.

  Args:
    params: `{"kernel", "bias"}`.
    x: images.
    stride: the distance between outputs.
    pad: the number of zeros around the image; half the kernel by default.

  Returns:
    The outputs, NHWC.

  Example:
    >>> params = {"kernel": jnp.ones((3, 3, 1, 1)), "bias": jnp.zeros(1)}
    >>> conv(params, jnp.ones((1, 2, 2, 1))).ravel().tolist()
    [4.0, 4.0, 4.0, 4.0]
  """
  kernel = params["kernel"]
  size = kernel.shape[0]
  edge = size // 2 if pad is None else pad
  x = jnp.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
  # The number of positions of the window along each axis.
  rows, columns = (length - size + 1 for length in x.shape[1:3])
  shifted = [
    x[:, i : i + rows : stride, j : j + columns : stride]
    for i in range(size)
    for j in range(size)
  ]
  patches = jnp.concatenate(shifted, -1)
  return patches @ kernel.reshape(-1, kernel.shape[-1]) + params["bias"]


def norm_init(width: int) -> Params:
  """Return `{"scale", "bias"}` of a normalisation layer."""
  return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def layer_norm(params: Params, x: jax.Array) -> jax.Array:
  """Normalise over the last axis."""
  x = x - x.mean(-1, keepdims=True)
  x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
  return x * params["scale"] + params["bias"]


def group_norm(params: Params, x: jax.Array, groups: int = 4) -> jax.Array:
  """Normalise images over space and groups of channels.

  Unlike batch norm it has no running statistics, so that the network is a
  function of its weights only (Wu & He, "Group Normalization", 2018).

  Args:
    params: `{"scale", "bias"}`.
    x: images, NHWC.
    groups: the number of groups, or a divisor of it that divides the channels.

  Returns:
    An array of the same shape.

  Example:
    >>> params = norm_init(1)
    >>> x = jnp.array([0.0, 2.0]).reshape(1, 1, 2, 1)
    >>> group_norm(params, x).round(2).ravel().tolist()
    [-1.0, 1.0]
  """
  *lead, height, width, channels = x.shape
  groups = math.gcd(groups, channels)
  x = x.reshape(*lead, height, width, groups, channels // groups)
  x = x - x.mean((-4, -3, -1), keepdims=True)
  variance = jnp.square(x).mean((-4, -3, -1), keepdims=True)
  x = x * jax.lax.rsqrt(variance + 1e-5)
  x = x.reshape(*lead, height, width, channels)
  return x * params["scale"] + params["bias"]


def mlp_init(key: jax.Array, sizes: Sequence[int]) -> Params:
  """Return linear layers `layer_0, layer_1, ...` between the sizes."""
  keys = jax.random.split(key, len(sizes) - 1)
  return {
    f"layer_{i}": dense_init(keys[i], a, b)
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
  }


def mlp(params: Params, x: jax.Array) -> jax.Array:
  """Apply the layers with ReLU between them."""
  for i in range(len(params)):
    x = dense(params[f"layer_{i}"], jax.nn.relu(x) if i else x)
  return x


def block_init(key: jax.Array, width: int, cross: bool = False) -> Params:
  """Return one pre-norm transformer block (4 x wide MLP)."""
  keys = iter(jax.random.split(key, 10))
  params = {
    "norm_1": norm_init(width),
    "norm_2": norm_init(width),
    "attention": _attention_init(keys, width),
    "up": dense_init(next(keys), width, 4 * width),
    "down": dense_init(next(keys), 4 * width, width),
  }
  if cross:
    params["norm_3"] = norm_init(width)
    params["cross"] = _attention_init(keys, width)
  return params


def _attention_init(keys, width: int) -> Params:
  names = ("query", "key", "value", "out")
  return {name: dense_init(next(keys), width, width) for name in names}


def block(
  params: Params,
  x: jax.Array,
  heads: int,
  causal: bool = False,
  memory: jax.Array | None = None,
) -> jax.Array:
  """Apply self-attention, attention to `memory` if given, and the MLP."""
  y = layer_norm(params["norm_1"], x)
  x = x + attention(params["attention"], y, y, heads, causal)
  if memory is not None:
    y = layer_norm(params["norm_3"], x)
    x = x + attention(params["cross"], y, memory, heads)
  y = jax.nn.gelu(dense(params["up"], layer_norm(params["norm_2"], x)))
  return x + dense(params["down"], y)


def attention(
  params: Params,
  x: jax.Array,
  memory: jax.Array,
  heads: int,
  causal: bool = False,
) -> jax.Array:
  """Attend from `x` (..., t, width) to `memory` (..., s, width)."""

  def split(name: str, y: jax.Array) -> jax.Array:
    y = dense(params[name], y)
    return y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads)

  query, key = split("query", x), split("key", memory)
  value = split("value", memory)
  logits = jnp.einsum("...thd,...shd->...hts", query, key)
  logits = logits / math.sqrt(query.shape[-1])
  if causal:
    seen = jnp.tri(x.shape[-2], memory.shape[-2], dtype=bool)
    logits = jnp.where(seen, logits, -1e9)
  mixed = jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(logits), value)
  return dense(params["out"], mixed.reshape(x.shape))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Return the mean negative log-likelihood (nats) of integer labels.

  Args:
    logits: unnormalised log-probabilities, classes on the last axis.
    labels: the classes.

  Returns:
    A scalar.

  Example:
    >>> round(float(cross_entropy(jnp.zeros((1, 2)), jnp.array([0]))), 4)
    0.6931
  """
  logp = jax.nn.log_softmax(logits)
  picked = jnp.take_along_axis(logp, labels[..., None], -1)
  return -picked.mean()
