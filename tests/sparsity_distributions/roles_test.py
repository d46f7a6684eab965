"""The default filter judges by role: names as whole words, rank, siblings."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxpruner
from jaxpruner.updater import prunable

X = jnp.ones((2, 8, 8, 3))


def taken(params):
  """The paths that a default pruner prunes; slices of a stack as one."""
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": "magnitude", "sparsity": 0.5}
  )
  try:
    return {"/".join(names) for names in pruner.view(params).names}
  except ValueError as error:
    assert "matches no leaf" in str(error)
    return set()


def shapes(tree):
  leaf = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.tree.map(leaf, tree, is_leaf=lambda x: isinstance(x, tuple))


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3))(x)))
    x = nn.GroupNorm(2)(x).reshape(2, 64, 4)
    x = nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
    x = nn.RMSNorm()(x) + nn.Embed(5, 4)(jnp.zeros(2, int))[:, None]
    return nn.Dense(3, name="normal_dense")(x)


def test_flax_linen_prunes_kernels_and_embeddings():
  params = jax.eval_shape(Linen().init, jax.random.key(0), X)["params"]
  attention = "MultiHeadDotProductAttention_0"
  assert taken(params) == {
    "Conv_0/kernel",
    "Embed_0/embedding",
    "normal_dense/kernel",
    *(
      f"{attention}/{part}/kernel" for part in ("query", "key", "value", "out")
    ),
  }


def test_flax_nnx_prunes_kernels():
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
      self.norm = nnx.BatchNorm(4, rngs=rngs)
      self.linear = nnx.Linear(4, 2, rngs=rngs)

  params = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
  assert taken(params) == {"conv/kernel", "linear/kernel"}


def test_equinox_prunes_weights_but_not_those_of_norms():
  key = jax.random.key(0)
  model = {
    "linear": eqx.nn.Linear(4, 3, key=key),
    "image_norm": eqx.nn.LayerNorm((8, 8)),  # its weight is a matrix
    "pair": (eqx.nn.LayerNorm((6, 6)),),  # its bias has the same shape
    "attention": eqx.nn.MultiheadAttention(2, 4, key=key),
  }
  found = taken(eqx.filter(model, eqx.is_array))
  projections = ("query", "key", "value", "output")
  assert found == {
    "linear/weight",
    *(f"attention/{name}_proj/weight" for name in projections),
  }


def test_haiku_prunes_w_but_not_four_dimensional_scales():
  def forward(x):
    x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(4, 3)(x), is_training=True)
    return hk.nets.MLP([5, 2], name="normal_mlp")(x.mean((1, 2)))

  net = hk.transform_with_state(forward)
  params, _ = jax.eval_shape(net.init, jax.random.key(0), X)
  assert params["batch_norm"]["scale"].ndim == 4
  assert taken(params) == {
    "conv2_d/w",
    "normal_mlp/~/linear_0/w",
    "normal_mlp/~/linear_1/w",
  }


TREES = {
  # Smith et al., 2023: B and C are matrices, log_step is a logarithm.
  "s5": (
    {
      "seq": {
        "B": (8, 4, 2),
        "C": (4, 8, 2),
        "D": (4,),
        "Lambda_re": (8,),
        "log_step": (8, 1),
      }
    },
    {"seq/B", "seq/C"},
  ),
  # Gu & Dao, 2023.
  "mamba": (
    {
      "mixer": {
        "A_log": (16, 4),
        "D": (16,),
        "in_proj": {"kernel": (8, 32)},
        "conv1d": {"kernel": (4, 1, 16), "bias": (16,)},
      }
    },
    {"mixer/in_proj/kernel", "mixer/conv1d/kernel"},
  ),
  "matrices with short names": (
    {"mix": {"scale": (4, 4), "alpha": (3, 5), "count": (2, 6), "b": (4, 4)}},
    {"mix/scale", "mix/alpha", "mix/count", "mix/b"},
  ),
  "low rank": ({"lora": {"a": (8, 2), "b": (2, 8)}}, {"lora/a", "lora/b"}),
  "an ensemble's bias beside its weight": (
    {"linear": {"w": (5, 3, 4), "b": (5, 4), "scale": (5, 4)}},
    {"linear/w"},
  ),
  "attention biases": (
    {"q": {"bias": (2, 4), "kernel": (8, 2, 4)}},
    {"q/kernel"},
  ),
  "norms in a stack that nobody declared": (
    {"decoder": {"pre_norm": {"scale": (6, 8)}, "ln_1": {"weight": (6, 8)}}},
    set(),
  ),
  "a scale and a bias of one shape": (
    {"affine": {"scale": (6, 8), "bias": (6, 8)}, "w": (3, 3)},
    {"w"},
  ),
  "statistics": ({"stats": {"mean": (4, 6), "var": (4, 6)}}, set()),
  "broadcast scales": ({"gamma": (1, 1, 1, 8), "cls": (1, 1, 8)}, {"cls"}),
  "a weight inside a norm's scope": (
    {"norm": {"linear": {"weight": (4, 4)}}},
    {"norm/linear/weight"},
  ),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", TREES)
def test_roles_decide_where_names_mislead(name):
  tree, wanted = TREES[name]
  assert taken(shapes(tree)) == wanted


def test_every_leaf_has_a_reason():
  tree = {
    "dense": {"kernel": (4, 4), "bias": (2, 4), "steps": (3,)},
    "ln_f": {"weight": (2, 4)},
    "A_log": (4, 4),
    "head": {"kernel": (4, 2)},
  }
  params = shapes(tree)
  params["index"] = jax.ShapeDtypeStruct((3, 3), jnp.int32)
  pruner = jaxpruner.create_updater_from_config(
    {
      "algorithm": "magnitude",
      "sparsity": 0.5,
      "custom_sparsity_map": {"head/*": None},
    }
  )
  leaves = jaxpruner._leaves.flatten_with_names(params)[0]
  reasons = {
    "/".join(names): reason
    for (names, _), reason in zip(
      leaves, prunable.reasons(pruner, params), strict=True
    )
  }
  assert reasons == {
    "A_log": "a logarithm: zero would stand for one",
    "dense/bias": "a bias",
    "dense/kernel": "a weight of 2 dimensions",
    "dense/steps": "a vector",
    "head/kernel": "custom_sparsity_map",
    "index": "not floating point: int32",
    "ln_f/weight": "part of a norm, 'ln_f'",
  }
  table = jaxpruner.sparsity_table(params, updater=pruner)
  for reason in reasons.values():
    assert reason in table


def test_a_filter_of_the_user_and_a_distribution_of_the_user_are_named():
  params = shapes({"a": (4, 4), "b": (4, 4)})
  config = {"algorithm": "global_magnitude", "sparsity": 0.5}
  config["filter_fn"] = lambda names, _: names[-1] == "a"
  pruner = jaxpruner.create_updater_from_config(config)
  assert prunable.reasons(pruner, params) == [
    "chosen by filter_fn",
    "left out by filter_fn",
  ]
  plan = lambda _: {"a": 0.5, "b": None}
  pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=plan)
  assert prunable.reasons(pruner, params) == [
    "chosen by the distribution",
    "left out by the distribution",
  ]
