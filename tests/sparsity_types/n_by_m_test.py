"""N:M groups: strided ones, and those of attention kernels."""

import json

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import sparsity_types
from jaxpruner.sparsity_types import grouped


def strided_reference(scores, n, m, stride, axis):
  """Groups are the indices i, i + stride, … of each run of m·stride indices."""
  scores = np.moveaxis(np.asarray(scores), axis, -1)
  mask = np.zeros(scores.shape, np.uint8)
  for start in range(0, scores.shape[-1], m * stride):
    for first in range(start, start + stride):
      group = first + stride * np.arange(m)
      best = np.argsort(-scores[..., group], axis=-1, kind="stable")[..., :n]
      np.put_along_axis(mask, group[best], 1, axis=-1)
  return np.moveaxis(mask, -1, axis)


@pytest.mark.quick
@hypothesis.settings(max_examples=25)  # each shape is compiled
@hypothesis.given(
  st.integers(1, 4),
  st.integers(1, 4),
  st.integers(1, 5),
  st.integers(1, 3),
  st.sampled_from([0, 1, -1]),
  st.integers(0, 9),
)
def test_strided_groups_equal_the_reference(n, m, stride, runs, axis, seed):
  hypothesis.assume(n <= m)
  shape = [3, 3]
  shape[axis] = runs * m * stride
  scores = np.random.default_rng(seed).integers(0, 4, shape)  # with ties
  scores = scores.astype(np.float32)
  kind = sparsity_types.NByM(n, m, axis, stride)
  want = strided_reference(scores, n, m, stride, axis)
  mask = jax.jit(
    kind.mask, static_argnums=1
  )  # one program, not one an operation
  np.testing.assert_array_equal(mask(scores, kind.sparsity), want)


def test_a_stride_of_128_groups_as_qwix_does():
  # qwix 0.1.8, get_sparsity_mask(w, 1, 2, order="C", offset=128) of
  # w[i, 0] = (37 * i) % 251 for i < 256: rows i and i + 128 compete.
  w = (37 * np.arange(256, dtype=np.float32) % 251)[:, None]
  mask = np.asarray(sparsity_types.NByM(1, 2, stride=128).mask(w, 0.5))[:, 0]
  first = w[:128, 0] >= w[128:, 0]
  np.testing.assert_array_equal(mask, np.concatenate([first, ~first]))


SPECS = {
  "nm_2,4": sparsity_types.NByM(2, 4),
  "nm_2,4,-2": sparsity_types.NByM(2, 4, -2),
  "nm_2,4,0+1": sparsity_types.NByM(2, 4, (0, 1)),
  "nm_2,4,,128": sparsity_types.NByM(2, 4, stride=128),
  "nm_1,2,-1,8": sparsity_types.NByM(1, 2, -1, 8),
  "transposable_2,4": sparsity_types.TransposableNByM(2, 4),
}


@pytest.mark.quick
@pytest.mark.parametrize("spec", SPECS)
def test_axis_and_stride_survive_json(spec):
  assert jaxpruner.parse_sparsity_type(spec) == SPECS[spec]
  pruner = jaxpruner.MagnitudePruning(sparsity_type=SPECS[spec])
  config = json.loads(json.dumps(jaxpruner.config_from_updater(pruner)))
  assert config["sparsity_type"] == spec
  assert jaxpruner.create_updater_from_config(config) == pruner


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: sparsity_types.NByM(2, 4, stride=0), "stride"),
    (lambda: sparsity_types.NByM(2, 4, axis=(0, 1.5)), "axis=1.5"),
    (lambda: sparsity_types.TransposableNByM(2, 4, stride=2), "must be 1"),
    (
      lambda: sparsity_types.NByM(2, 4, stride=3).mask(jnp.ones((8, 2)), 0.5),
      "length 8, not divisible by m=4 times stride=3",
    ),
    (
      lambda: sparsity_types.NByM(2, 4, (0, 2)).mask(jnp.ones((4, 4, 4)), 0.5),
      "neighbouring axes",
    ),
  ],
)
def test_a_wrong_axis_or_stride_is_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()


def attention_masks(heads=3, width=4, features=8, sparsity_type="2:4"):
  model = nn.MultiHeadDotProductAttention(
    num_heads=heads, qkv_features=heads * width, out_features=features
  )
  x = jnp.ones((2, 5, features))
  params = {"attn": model.init(jax.random.key(0), x)["params"]}
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": "magnitude", "sparsity": 0.5, "sparsity_type": sparsity_type}
  )
  masks = pruner.instant_sparsify(params)[1]["attn"]
  return {name: np.asarray(masks[name]["kernel"]) for name in masks}


def groups_of_two(mask):
  """Whether every 4 rows of an (inputs, outputs) mask keep 2."""
  rows, columns = mask.shape
  return (mask.reshape(rows // 4, 4, columns).sum(1) == 2).all()


def test_groups_of_attention_kernels_lie_along_what_products_sum_over():
  masks = attention_masks()
  for name in ("query", "key", "value"):
    assert masks[name].shape == (8, 3, 4)
    assert groups_of_two(masks[name].reshape(8, 12))
  assert masks["out"].shape == (3, 4, 8)
  assert groups_of_two(masks["out"].reshape(12, 8))


def test_output_groups_may_cross_heads_as_the_product_does():
  masks = attention_masks(heads=4, width=3)  # 3 is not divisible by 4, 12 is
  assert groups_of_two(masks["out"].reshape(12, 8))


def test_an_explicit_axis_wins():
  explicit = {"attn/query/kernel": "nm_2,4,-1"}
  masks = attention_masks(sparsity_type=explicit)
  assert (masks["query"].sum(-1) == 2).all()


@pytest.mark.parametrize(
  ("path", "shape", "axes"),
  [
    ("mlp/kernel", (8, 4), -2),
    ("conv/kernel", (3, 8, 4), -2),
    ("experts/up/kernel", (3, 8, 4), -2),
    ("encoder/self_attention/query/kernel", (8, 2, 4), 0),
    ("MultiHeadDotProductAttention_0/out/kernel", (2, 4, 8), (0, 1)),
    ("attn/qkv/kernel", (8, 3, 4), 0),
    ("attn/query/kernel", (8, 8), -2),
  ],
)
def test_the_contraction_axes_follow_from_the_path(path, shape, axes):
  assert grouped.contraction_axes(tuple(path.split("/")), shape) == axes


def test_an_attention_kernel_of_unknown_role_is_refused_with_the_cure():
  params = {"attention": {"mix": {"kernel": jnp.ones((8, 4, 4))}}}
  pruner = jaxpruner.MagnitudePruning(sparsity_type=jaxpruner.NByM(2, 4))
  with pytest.raises(ValueError, match=r"'attention/mix/kernel'.*axis=…"):
    pruner.init_state(params)
  kind = {"attention/mix/kernel": jaxpruner.NByM(2, 4, axis=0)}
  pruner = jaxpruner.MagnitudePruning(sparsity_type=kind)
  assert pruner.view(params).targets == (0.5,)
