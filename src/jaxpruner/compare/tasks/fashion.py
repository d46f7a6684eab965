"""Fashion-MNIST with a small convolutional network, and with a perceptron.

Data: all 60,000 + 10,000 images (Debian package `dataset-fashion-mnist`, or
`--data DIR` with IDX files).
Model: two 3 x 3 convolutions (16 and 32 channels) with pooling, then
1568 - 128 - 10; 207 k weights; Adam, cosine.
Command: `jaxpruner compare --task fashion --sparsity 0.8,0.9,0.95,0.98`.
Number: dense 86.9 %, magnitude at 90 % 83.1 % after 400 of the 1,500 steps; the
45 cells of that table (3 seeds) took 39 minutes on two busy cores.

`fashion-mlp` is LeNet-300-100 (LeCun et al., 1998), the perceptron 784 - 300 -
100 - 10 of many papers on pruning: 266 k weights, a tenth of the network above
in time, so that trainings to the plateau with five seeds take minutes.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import datasets
from jaxpruner.compare import layers
from jaxpruner.compare.tasks import base


@dataclasses.dataclass(frozen=True)
class Fashion(base.Classification):
  """Fashion-MNIST with two convolutions and two linear layers."""

  width: int = 16
  steps: int = 1500
  batch_size: int = 64
  learning_rate: float = 2e-3
  name: ClassVar[str] = "fashion"
  batching: ClassVar[str] = "auto"

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    return datasets.load_fashion(folder)

  def prepare(self, inputs: jax.Array) -> jax.Array:
    # Mean and deviation of the training pixels.
    return ((inputs / 255.0 - 0.286) / 0.353)[..., None]

  def init(self, key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    w = self.width
    return {
      "conv_0": layers.conv_init(keys[0], 3, 1, w),
      "conv_1": layers.conv_init(keys[1], 3, w, 2 * w),
      "dense_0": layers.dense_init(keys[2], 7 * 7 * 2 * w, 8 * w),
      "dense_1": layers.dense_init(keys[3], 8 * w, 10),
    }

  def apply(self, params: Any, inputs: jax.Array) -> jax.Array:
    x = inputs
    for name in ("conv_0", "conv_1"):
      x = _pool(jax.nn.relu(layers.conv(params[name], x)))
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(layers.dense(params["dense_0"], x))
    return layers.dense(params["dense_1"], x)


@dataclasses.dataclass(frozen=True)
class FashionMLP(Fashion):
  """Fashion-MNIST with LeNet-300-100, a perceptron."""

  width: int = 300
  steps: int = 10_000
  learning_rate: float = 1e-3
  name: ClassVar[str] = "fashion-mlp"
  batching: ClassVar[str] = "vmap"
  width_multiple: ClassVar[int] = 3

  def prepare(self, inputs: jax.Array) -> jax.Array:
    return super().prepare(inputs).reshape(len(inputs), -1)

  def init(self, key: jax.Array) -> Any:
    return layers.mlp_init(key, (784, self.width, self.width // 3, 10))

  def apply(self, params: Any, inputs: jax.Array) -> jax.Array:
    return layers.mlp(params, inputs)


def _pool(x: jax.Array) -> jax.Array:
  """Take the maximum of 2 x 2 pixels.

  By reshaping, since the gradient of `reduce_window` is slow on CPU.
  """
  n, h, w, c = x.shape
  return jnp.max(x.reshape(n, h // 2, 2, w // 2, 2, c), axis=(2, 4))
