"""Convolutions, batch norm, attention: coupled arrays shrink together."""

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import shrink_models as models

from jaxpruner.sparse import shrinking

# The parameters here are not masked: what masks alone decide is the point.
pytestmark = pytest.mark.filterwarnings("ignore:.*the masks remove")


class Block(nn.Module):
  """A residual block."""

  @nn.compact
  def __call__(self, x):
    norm = lambda: nn.BatchNorm(use_running_average=True)
    y = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
    y = norm()(nn.Conv(8, (3, 3), use_bias=False)(y))
    return nn.relu(x + y)


class Cnn(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Conv(8, (3, 3))(x)
    x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
    x = nn.avg_pool(Block()(x), (2, 2), (2, 2))
    return nn.Dense(4)(x.reshape(x.shape[0], -1))


IMAGES = np.random.default_rng(3).standard_normal((2, 4, 4, 3)).astype("f4")


@pytest.fixture(scope="module")
def cnn():
  params = models.randomize(
    jax.eval_shape(Cnn().init, jax.random.key(0), IMAGES)
  )
  params["batch_stats"] = jax.tree.map(jnp.abs, params["batch_stats"])
  return params


@pytest.mark.quick
def test_inner_channels_go_with_their_batch_norm(cnn):
  masks = models.nothing_masked(cnn)
  kernel = cnn["params"]["Block_0"]["Conv_0"]["kernel"]
  masks["params"]["Block_0"]["Conv_0"]["kernel"] = models.mask_axis(
    kernel, 3, [1, 2, 5]
  )
  small = models.shrink_and_compare(Cnn().apply, cnn, masks, IMAGES)
  assert models.shapes(small, "params", "Block_0") == {
    "Conv_0": {"kernel": (3, 3, 8, 3)},
    "BatchNorm_0": {"scale": (3,), "bias": (3,)},
    "Conv_1": {"kernel": (3, 3, 3, 8)},
    "BatchNorm_1": {"scale": (8,), "bias": (8,)},
  }
  stats = models.shapes(small, "batch_stats", "Block_0", "BatchNorm_0")
  assert stats == {"mean": (3,), "var": (3,)}


def test_the_residual_stream_goes_with_all_its_partners(cnn):
  masks = models.nothing_masked(cnn)
  kept = [0, 3, 6]
  p, m = cnn["params"], masks["params"]
  m["Conv_0"]["kernel"] = models.mask_axis(p["Conv_0"]["kernel"], 3, kept)
  kernel = p["Block_0"]["Conv_1"]["kernel"]
  m["Block_0"]["Conv_1"]["kernel"] = models.mask_axis(kernel, 3, kept)
  small = models.shrink_and_compare(Cnn().apply, cnn, masks, IMAGES)
  assert models.shapes(small, "params", "Conv_0", "kernel") == (3, 3, 3, 3)
  assert models.shapes(small, "params", "Block_0", "Conv_0", "kernel") == (
    3, 3, 3, 8
  )  # fmt: skip
  # Four positions of eight channels each, behind one flattened axis.
  assert models.shapes(small, "params", "Dense_0", "kernel") == (4 * 3, 4)


def test_one_partner_alone_stays_and_names_the_sum(cnn):
  masks = models.nothing_masked(cnn)
  kernel = cnn["params"]["Conv_0"]["kernel"]
  masks["params"]["Conv_0"]["kernel"] = models.mask_axis(kernel, 3, [0, 3, 6])
  small = models.shrink_and_compare(Cnn().apply, cnn, masks, IMAGES)
  assert small.removed == []
  (blocked,) = small.blocked
  assert blocked.name == "params/Conv_0/kernel" and blocked.slices == 5
  assert "Block_0/Conv_0" in blocked.reason


def test_depthwise_convolutions_follow_their_channels():
  def fn(p, x):
    conv = lambda x, w, groups=1: jax.lax.conv_general_dilated(
      x, w, (1, 1), "SAME", feature_group_count=groups,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    x = jax.nn.relu(conv(x, p["a"]))
    x = jax.nn.relu(conv(x, p["b"], x.shape[-1]))
    return conv(x, p["c"]).mean((1, 2))

  params = models.randomize(
    {"a": jnp.ones((3, 3, 3, 6)), "b": jnp.ones((3, 3, 1, 6)),
     "c": jnp.ones((1, 1, 6, 2))}
  )  # fmt: skip
  masks = models.nothing_masked(params)
  masks["a"] = models.mask_axis(params["a"], 3, [0, 1])
  small = models.shrink_and_compare(fn, params, masks, IMAGES)
  assert models.shapes(small) == {
    "a": (3, 3, 3, 2), "b": (3, 3, 1, 2), "c": (1, 1, 2, 2)
  }  # fmt: skip
  assert small.same_code


IDS = np.random.default_rng(4).integers(0, 11, (2, 5))


def rows(count, gone):
  return [i for i in range(count) if i not in gone]


@pytest.mark.parametrize("repeat", [True, False])
def test_grouped_query_heads_go_group_by_group(repeat):
  def fn(p, ids):
    return models.decoder(p, ids, repeat=repeat)

  params = models.decoder_params()
  masks = models.nothing_masked(params)
  first, second = masks["layers"]
  # The second group's values: its key, value and both its queries go.
  first["v"] = models.mask_axis(params["layers"][0]["v"], 1, range(4))
  # One query of each group: the keys and values stay.
  second["o"] = models.mask_axis(
    params["layers"][1]["o"], 0, rows(16, {0, 1, 2, 3, 8, 9, 10, 11})
  )
  first["gate"] = models.mask_axis(params["layers"][0]["gate"], 1, range(7))
  second["up"] = models.mask_axis(params["layers"][1]["up"], 1, range(9))
  small = models.shrink_and_compare(fn, params, masks, IDS)
  assert models.shapes(small, "layers", 0) == {
    "norm1": (16,), "norm2": (16,), "q": (16, 8), "k": (16, 4), "v": (16, 4),
    "o": (8, 16), "gate": (16, 7), "up": (16, 7), "down": (7, 16),
  }  # fmt: skip
  assert models.shapes(small, "layers", 1) == {
    "norm1": (16,), "norm2": (16,), "q": (16, 8), "k": (16, 8), "v": (16, 8),
    "o": (8, 16), "gate": (16, 9), "up": (16, 9), "down": (9, 16),
  }  # fmt: skip
  assert small.blocked == []
  assert not small.same_code


def test_one_query_of_one_group_stays():
  params = models.decoder_params(layers=1)
  masks = models.nothing_masked(params)
  o = params["layers"][0]["o"]
  masks["layers"][0]["o"] = models.mask_axis(o, 0, range(4, 16))
  small = models.shrink_and_compare(models.decoder, params, masks, IDS)
  assert small.removed == []
  (blocked,) = small.blocked
  assert blocked.slices == 4 and "as 2x2x4" in blocked.reason


def test_zero_queries_do_not_make_a_head_useless():
  params = models.decoder_params(layers=1)
  masks = models.nothing_masked(params)
  q = params["layers"][0]["q"]
  masks["layers"][0]["q"] = models.mask_axis(q, 1, range(8))
  small = models.shrink_and_compare(models.decoder, params, masks, IDS)
  assert small.removed == []


@pytest.mark.parametrize("by", ["split", "slice"])
def test_fused_projections_lose_a_head_from_each_part(by):
  def fn(p, x):
    fused = x @ p["qkv"] + p["bias"]
    if by == "split":
      parts = jnp.split(fused, 3, -1)
    else:
      size = fused.shape[-1] // 3
      parts = [fused[..., i * size : (i + 1) * size] for i in range(3)]
    q, k, v = (t.reshape(*t.shape[:-1], -1, 4) for t in parts)
    out = jax.nn.dot_product_attention(q, k, v)
    return x + out.reshape(*x.shape[:-1], -1) @ p["o"]

  x = np.random.default_rng(7).standard_normal((2, 3, 8)).astype(np.float32)
  params = models.randomize(
    {"qkv": jnp.ones((8, 36)), "bias": jnp.ones(36), "o": jnp.ones((12, 8))}
  )
  masks = models.nothing_masked(params)
  masks["o"] = models.mask_axis(params["o"], 0, rows(12, range(4, 8)))
  small = models.shrink_and_compare(fn, params, masks, x)
  assert models.shapes(small) == {"qkv": (8, 24), "bias": (24,), "o": (8, 8)}
  assert small.same_code


class Attention(nn.Module):
  @nn.compact
  def __call__(self, x):
    h = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(4)(h, h)
    h = nn.LayerNorm()(x)
    return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(h)))


def attention():
  x = np.random.default_rng(5).standard_normal((2, 3, 8)).astype(np.float32)
  params = models.randomize(
    jax.eval_shape(Attention().init, jax.random.key(0), x)
  )
  masks = models.nothing_masked(params)
  mha = params["params"]["MultiHeadDotProductAttention_0"]["out"]["kernel"]
  masks["params"]["MultiHeadDotProductAttention_0"]["out"]["kernel"] = (
    models.mask_axis(mha, 0, [0, 2])
  )
  up = params["params"]["up"]["kernel"]
  masks["params"]["up"]["kernel"] = models.mask_axis(up, 1, range(4))
  return params, masks, x


def test_flax_attention_loses_heads_and_width():
  params, masks, x = attention()
  small = models.shrink_and_compare(Attention().apply, params, masks, x)
  mha = models.shapes(small, "params", "MultiHeadDotProductAttention_0")
  assert mha["query"] == mha["key"] == mha["value"] == {
    "kernel": (8, 2, 2), "bias": (2, 2)
  }  # fmt: skip
  assert mha["out"] == {"kernel": (2, 2, 8), "bias": (8,)}
  assert models.shapes(small, "params", "down", "kernel") == (4, 8)


def test_masked_and_shrunk_models_export_and_run():
  params, masks, x = attention()
  small = shrinking.shrink(Attention().apply, params, x, masks=masks)
  programs = {
    "masked": (Attention().apply, models.masked(params, masks)),
    "shrunk": (small.fn, small.params),
  }
  outputs, sizes = {}, {}
  for name, (fn, weights) in programs.items():
    # Weights are closed over: the file is the whole model.
    exported = jax.export.export(
      jax.jit(lambda x, fn=fn, weights=weights: fn(weights, x)),
      platforms=["cpu", "cuda", "tpu"],
    )(x)
    blob = exported.serialize()
    outputs[name] = jax.export.deserialize(blob).call(x)
    sizes[name] = len(blob)
    weights = jax.tree.map(np.asarray, weights)
    open_weights = jax.export.export(jax.jit(fn))(weights, x).serialize()
    again = jax.export.deserialize(bytearray(open_weights)).call(weights, x)
    np.testing.assert_allclose(again, outputs[name], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    outputs["masked"], outputs["shrunk"], rtol=1e-5, atol=1e-5
  )
  assert sizes["shrunk"] < sizes["masked"]


def test_equinox_and_haiku_models_shrink():
  eqx = pytest.importorskip("equinox")
  hk = pytest.importorskip("haiku")
  x = np.random.default_rng(6).standard_normal((3, 5)).astype(np.float32)
  model = eqx.nn.MLP(5, 4, 6, 1, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_array)
  fn = lambda p, x: jax.vmap(eqx.combine(p, static))(x)
  masks = models.nothing_masked(params)
  masks = eqx.tree_at(
    lambda m: m.layers[0].weight, masks,
    models.mask_axis(params.layers[0].weight, 0, [1, 2]),
    is_leaf=lambda x: x is None,
  )  # fmt: skip
  small = models.shrink_and_compare(fn, params, masks, x)
  assert small.params.layers[1].weight.shape == (4, 2)
  net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([6, 4])(x)))
  params = models.randomize(jax.eval_shape(net.init, jax.random.key(0), x))
  masks = models.nothing_masked(params)
  w = params["mlp/~/linear_0"]["w"]
  masks["mlp/~/linear_0"]["w"] = models.mask_axis(w, 1, [0, 3])
  small = models.shrink_and_compare(net.apply, params, masks, x)
  assert small.params["mlp/~/linear_1"]["w"].shape == (2, 4)
