"""Half the parameters of whole model families: budget met, outputs equal."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner

RNG = np.random.default_rng(0)


def normal(*shape):
  return jnp.asarray(RNG.standard_normal(shape), "float32")


def norm():
  return nn.BatchNorm(use_running_average=True)


class ResNet(nn.Module):
  """Bottlenecks as in ResNet-50: 1x1, 3x3, 1x1, projected shortcuts."""

  @nn.compact
  def __call__(self, x):
    x = nn.relu(norm()(nn.Conv(8, (7, 7), 2, use_bias=False)(x)))
    x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    for stage, blocks in enumerate((2, 2)):
      width = 8 << stage
      for block in range(blocks):
        stride = 2 if stage and not block else 1
        y = nn.relu(norm()(nn.Conv(width, (1, 1), use_bias=False)(x)))
        y = nn.Conv(width, (3, 3), stride, use_bias=False)(y)
        y = nn.Conv(4 * width, (1, 1), use_bias=False)(nn.relu(norm()(y)))
        if not block:
          x = norm()(nn.Conv(4 * width, (1, 1), stride, use_bias=False)(x))
        x = nn.relu(x + norm()(y))
    return nn.Dense(5)(x.mean((1, 2)))


class ViT(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Conv(32, (4, 4), 4, padding="VALID")(x)
    x = x.reshape(len(x), -1, 32)
    x += self.param("positions", nn.initializers.normal(), x.shape[1:])
    for _ in range(2):
      y = nn.LayerNorm()(x)
      x += nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
      x += nn.Dense(32)(nn.gelu(nn.Dense(96)(nn.LayerNorm()(x))))
    return nn.Dense(5)(nn.LayerNorm()(x).mean(1))


class Decoder(nn.Module):
  """Two query heads for each key head, gated hidden units, RMS norms."""

  @nn.compact
  def __call__(self, tokens):
    table = nn.Embed(40, 32)
    x = table(tokens)
    for _ in range(2):
      h = nn.RMSNorm()(x)
      q = nn.DenseGeneral((2, 2, 8), use_bias=False)(h)
      k, v = (nn.DenseGeneral((2, 8), use_bias=False)(h) for _ in range(2))
      a = jax.nn.softmax(jnp.einsum("bsngd,btnd->bngst", q, k))
      o = jnp.einsum("bngst,btnd->bsngd", a, v)
      x += nn.DenseGeneral(32, (-3, -2, -1), use_bias=False)(o)
      h = nn.RMSNorm()(x)
      gate, up = (nn.Dense(64, use_bias=False)(h) for _ in range(2))
      x += nn.Dense(32, use_bias=False)(nn.silu(gate) * up)
    return table.attend(nn.RMSNorm()(x))


class UNet(nn.Module):
  """Down, up by transposed convolutions, skips by concatenation."""

  @nn.compact
  def __call__(self, x):
    def twice(x, width):
      for _ in range(2):
        x = nn.relu(norm()(nn.Conv(width, (3, 3), use_bias=False)(x)))
      return x

    skips = []
    for width in (8, 16):
      skips.append(twice(x, width))
      x = nn.max_pool(skips[-1], (2, 2), (2, 2))
    x = twice(x, 32)
    for width, skip in zip((16, 8), reversed(skips), strict=True):
      x = nn.ConvTranspose(width, (2, 2), (2, 2))(x)
      x = twice(jnp.concatenate([x, skip], -1), width)
    return nn.Conv(2, (1, 1))(x)


class DenseNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Conv(16, (3, 3), use_bias=False)(x)
    for _ in range(2):
      for _ in range(3):
        y = nn.Conv(32, (1, 1), use_bias=False)(nn.relu(norm()(x)))
        y = nn.Conv(8, (3, 3), use_bias=False)(nn.relu(norm()(y)))
        x = jnp.concatenate([x, y], -1)
      x = nn.Conv(x.shape[-1] // 2, (1, 1), use_bias=False)(nn.relu(x))
      x = nn.avg_pool(x, (2, 2), (2, 2))
    return nn.Dense(5)(x.mean((1, 2)))


class Lstm(nn.Module):
  @nn.compact
  def __call__(self, x):
    for _ in range(2):
      x = nn.RNN(nn.OptimizedLSTMCell(32))(x)
    return nn.Dense(5)(x)


class Experts(nn.Module):
  """A softmax over four experts, each a hidden layer, in two blocks."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(16)(x)
    init = nn.initializers.normal()
    for i in range(2):
      gates = nn.softmax(nn.Dense(4)(nn.LayerNorm()(x)))
      up = self.param(f"up{i}", init, (4, 16, 48))
      down = self.param(f"down{i}", init, (4, 48, 16))
      hidden = nn.relu(jnp.einsum("bd,edh->beh", x, up))
      x += jnp.einsum("be,beh,ehd->bd", gates, hidden, down)
    return nn.Dense(5)(x)


class GroupNorms(nn.Module):
  """A group of channels goes whole: it has a mean and a variance."""

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.GroupNorm(16)(nn.Conv(32, (3, 3))(x)))
    y = nn.relu(nn.GroupNorm(24)(nn.Conv(48, (3, 3))(x)))
    x = nn.relu(x + nn.GroupNorm(16)(nn.Conv(32, (3, 3))(y)))
    return nn.Dense(4)(x.mean((1, 2)))


CASES = {
  "group-norms": (GroupNorms(), normal(1, 8, 8, 3)),
  "resnet": (ResNet(), normal(1, 16, 16, 3)),
  "vit": (ViT(), normal(2, 8, 8, 3)),
  "gqa-decoder": (Decoder(), jnp.arange(6)[None]),
  "u-net": (UNet(), normal(1, 8, 8, 3)),
  "densenet": (DenseNet(), normal(1, 8, 8, 3)),
  "lstm": (Lstm(), normal(2, 4, 16)),
  "experts": (Experts(), normal(3, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_half_of_the_parameters_of_every_family(name):
  model, x = CASES[name]
  shapes = jax.eval_shape(model.init, jax.random.key(0), x)
  weights = jax.tree.map(lambda s: normal(*s.shape) / 4, shapes)
  if "batch_stats" in weights:
    weights["batch_stats"] = jax.tree.map(jnp.abs, weights["batch_stats"])
  pruned = jaxpruner.prune_to(model.apply, weights, x, params=0.5)
  sizes = [
    sum(leaf.size for leaf in jax.tree.leaves(tree))
    for tree in (pruned.small.params, weights)
  ]
  assert abs(sizes[0] / sizes[1] - 0.5) <= 0.01
  want = np.asarray(jax.jit(model.apply)(pruned.params, x))
  got = jax.jit(pruned.small.fn)(pruned.small.params, x)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=4e-6 * abs(want).max())
