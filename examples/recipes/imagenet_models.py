"""ResNet-50 and ViT-B/16 in Flax NNX, as Scenic's baselines define them."""

import jax
import jax.numpy as jnp
from flax import nnx


class Bottleneck(nnx.Module):
  """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

  def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs):
    outputs = 4 * width
    conv = lambda i, o, size, s: nnx.Conv(
      i, o, (size, size), strides=s, use_bias=False, rngs=rngs
    )
    self.conv_0 = conv(inputs, width, 1, 1)
    self.norm_0 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
    self.conv_1 = conv(width, width, 3, stride)
    self.norm_1 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
    self.conv_2 = conv(width, outputs, 1, 1)
    # A block starts as its shortcut.
    self.norm_2 = nnx.BatchNorm(
      outputs, momentum=0.9, scale_init=nnx.initializers.zeros, rngs=rngs
    )
    self.has_skip = inputs != outputs or stride != 1
    if self.has_skip:
      self.skip = conv(inputs, outputs, 1, stride)
      self.skip_norm = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    y = jax.nn.relu(self.norm_0(self.conv_0(x)))
    y = jax.nn.relu(self.norm_1(self.conv_1(y)))
    y = self.norm_2(self.conv_2(y))
    skip = self.skip_norm(self.skip(x)) if self.has_skip else x
    return jax.nn.relu(skip + y)


class ResNet(nnx.Module):
  """ResNet-50 (He et al., 2016) by default."""

  dense = ("stem/kernel",)  # the first layer, which the paper leaves dense

  def __init__(
    self,
    rngs: nnx.Rngs,
    blocks: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 64,
    classes: int = 1000,
  ):
    self.stem = nnx.Conv(3, width, (7, 7), strides=2, use_bias=False, rngs=rngs)
    self.stem_norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
    made, inputs = [], width
    for i, count in enumerate(blocks):
      for j in range(count):
        stride = 2 if i and not j else 1
        made.append(Bottleneck(inputs, width << i, stride, rngs))
        inputs = 4 * (width << i)
    self.blocks = nnx.List(made)
    self.head = nnx.Linear(inputs, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = jax.nn.relu(self.stem_norm(self.stem(images)))
    x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean((1, 2)))


class Block(nnx.Module):
  """A pre-norm transformer block."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs, dropout: float):
    self.norm_0 = nnx.LayerNorm(width, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
      heads, width, decode=False, rngs=rngs
    )
    self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, rngs=rngs)
    self.down = nnx.Linear(4 * width, width, rngs=rngs)
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x + self.dropout(self.attention(self.norm_0(x)))
    y = self.dropout(jax.nn.gelu(self.up(self.norm_1(x))))
    return x + self.dropout(self.down(y))


class ViT(nnx.Module):
  """ViT-B/16 (Dosovitskiy et al., 2021) by default."""

  dense = ("cls", "positions")

  def __init__(
    self,
    rngs: nnx.Rngs,
    image: int = 224,
    patch: int = 16,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    classes: int = 1000,
    dropout: float = 0.1,
  ):
    count = (image // patch) ** 2 + 1
    self.patches = nnx.Conv(
      3, width, (patch, patch), strides=patch, padding="VALID", rngs=rngs
    )
    self.cls = nnx.Param(jnp.zeros((1, 1, width)))
    self.positions = nnx.Param(
      0.02 * jax.random.normal(rngs.params(), (1, count, width))
    )
    self.blocks = nnx.List(
      [Block(width, heads, rngs, dropout) for _ in range(depth)]
    )
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.hidden = nnx.Linear(width, width, rngs=rngs)
    self.head = nnx.Linear(width, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = self.patches(images)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    cls = jnp.broadcast_to(self.cls[...], (x.shape[0], 1, x.shape[-1]))
    x = jnp.concatenate([cls, x], 1) + self.positions[...]
    for block in self.blocks:
      x = block(x)
    return self.head(jnp.tanh(self.hidden(self.norm(x)[:, 0])))
