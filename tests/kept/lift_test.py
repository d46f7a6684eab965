"""Any model with kept weights computes what it computes with dense ones."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpruner
from jaxpruner import kept

STATIC = kept.KeptUpdater(jaxpruner.StaticRandomSparse())


def half(rng, leaf):
  return rng.random(leaf.shape) < 0.5


def half_of_each_layer(rng, leaf):
  """As many in each layer, at random."""
  size = leaf[0].size
  rank = rng.permuted(np.tile(np.arange(size), (len(leaf), 1)), axis=1)
  return (rank < size // 2).reshape(leaf.shape)


def check(model, params, *inputs, pruner=STATIC, draw=half):
  """Compare value and gradients, with every matrix in the tree kept."""
  rng = np.random.default_rng(0)

  def prunable(leaf):  # no bias, whatever its shape
    return leaf.ndim >= 2 and leaf.size > max(leaf.shape) and np.any(leaf)

  masks = jax.tree.map(
    lambda leaf: draw(rng, leaf) if prunable(leaf) else None, params
  )
  weights = pruner.from_dense(params, masks, *inputs, apply_fn=model)
  values, places = kept.split(weights)
  lifted = kept.lift(model)
  loss = lambda v: jnp.sum(jnp.sin(lifted(kept.join(v, places), *inputs)))
  value, grads = jax.jit(jax.value_and_grad(loss))(values)
  leaves, treedef = jax.tree.flatten(grads)

  @jax.jit
  def right(weights):
    dense, _ = kept.todense(weights)
    loss = lambda p: jnp.sum(jnp.sin(model(p, *inputs)))
    value, full = jax.value_and_grad(loss)(dense)
    pairs = zip(
      jax.tree.leaves(full), treedef.flatten_up_to(places), strict=True
    )
    return value, [g if place is None else place.pick(g) for g, place in pairs]

  wanted, full = right(weights)
  np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4)
  for grad, whole in zip(leaves, full, strict=True):
    np.testing.assert_allclose(grad, whole, rtol=1e-3, atol=1e-4)


def normal(*shape):
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def drawn(init, *inputs):
  """Return parameters as `init` makes them, without compiling it."""

  def leaf(path, x):
    if path[-1].key in ("bias", "b"):
      return np.zeros(x.shape, np.float32)
    return normal(*x.shape) / np.float32(np.sqrt(x.shape[0]))

  shapes = jax.eval_shape(init, jax.random.key(0), *inputs)
  return jax.tree.map_with_path(leaf, shapes)


def test_linen_convolutions_attention_and_dense_layers():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.relu(nn.Conv(8, (3, 3), strides=2)(x))
      x = nn.Conv(6, (1, 1))(x).reshape(x.shape[0], -1, 6)
      x = x + nn.MultiHeadDotProductAttention(2)(x)
      return nn.remat(nn.Dense)(5)(x)

  model, x = Model(), normal(2, 8, 8, 3)
  check(model.apply, drawn(model.init, x), x)


def test_a_tied_embedding_is_gathered_and_multiplied():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, ids):
      embed = nn.Embed(20, 8)
      return embed.attend(nn.relu(nn.Dense(8)(embed(ids))))

  model, ids = Model(), jnp.array([[0, 19, 3], [3, 3, 7]])
  check(model.apply, drawn(model.init, ids), ids)


def test_an_embedding_is_looked_up_row_by_row():
  params = {"rows": normal(7, 4)}
  ids = jnp.array([[0, 6, 3], [3, 3, -1]])
  check(lambda p, i: p["rows"][i], params, ids)
  one = lambda p: lambda i: p["rows"][i]
  check(lambda p, i: jax.vmap(jax.vmap(one(p)))(i), params, ids)
  check(lambda p, i: one(p)(i[0, 1]), params, ids)


def test_nnx_equinox_and_haiku():
  graph, state = nnx.split(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
  check(lambda s, x: nnx.merge(graph, s)(x), state, normal(2, 4))
  layers = [
    eqx.nn.Conv2d(3, 4, 3, key=jax.random.key(0)),
    eqx.nn.Lambda(jnp.ravel),
    eqx.nn.Linear(144, 3, key=jax.random.key(1)),
  ]
  params, rest = eqx.partition(eqx.nn.Sequential(layers), eqx.is_array)
  check(
    lambda p, x: jax.vmap(eqx.combine(p, rest))(x), params, normal(2, 3, 8, 8)
  )
  net = hk.transform(lambda x: hk.nets.MLP([8, 3])(x))
  params = drawn(net.init, normal(2, 4))
  check(lambda p, x: net.apply(p, None, x), params, normal(2, 4))


def test_concatenated_gates_are_products_side_by_side():
  # As the LSTM cell of Flax does; one of the weights is not kept.
  params = {"c": normal(1, 3), "f": normal(5, 3), "i": normal(5, 4)}

  def model(p, x):
    gates = jnp.concatenate([p["f"], jnp.tile(p["c"], (5, 1)), p["i"]], -1)
    return jnp.sin(x @ gates.astype(x.dtype))

  check(model, params, normal(2, 5))


def test_joined_weights_may_be_transposed_and_stand_on_the_left():
  params = {"a": normal(4, 6), "b": normal(3, 6)}

  def model(p, x):
    both = jnp.concatenate([p["a"], p["b"]]).astype(jnp.float32)
    return (x @ both.T) @ both

  with pytest.raises(jaxpruner.program.Unsupported, match="dot_general"):
    check(model, params, normal(2, 6))  # the second contracts the joined axis

  def left(p, x):
    both = jnp.concatenate([p["a"], p["b"]])
    return jnp.concatenate([x @ both.T, (both @ x.T).T])

  check(left, params, normal(2, 6))


def test_a_weight_shared_by_the_steps_of_a_scan():
  def model(p, x):
    step = lambda h, _: (jnp.tanh(h @ p["w"]), h @ p["w"].T)
    last, all_ = jax.lax.scan(step, x, None, length=3)
    return last + all_.sum(0)

  check(model, {"w": normal(4, 4)}, normal(2, 4))


STACKED = kept.KeptUpdater(jaxpruner.StaticRandomSparse(stacked_axis=0))


def test_scanned_layers_are_a_stack():
  """Attention's weights have three axes in each layer."""

  def block(h, p):
    q = jnp.einsum("bd,dhk->bhk", h, p["q"])
    h = h + jnp.einsum("bhk,hkd->bd", jnp.tanh(q), p["o"])
    return h + jnp.tanh(h @ p["up"]) @ p["down"], None

  model = lambda p, x: jax.lax.scan(jax.checkpoint(block), x, p)[0]
  shapes = {"q": (8, 2, 3), "o": (2, 3, 8), "up": (8, 12), "down": (12, 8)}
  params = {name: normal(3, *shape) for name, shape in shapes.items()}
  check(model, params, normal(5, 8), pruner=STACKED, draw=half_of_each_layer)


def test_layers_scanned_by_flax_and_by_nnx():
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return x + nn.tanh(nn.Dense(6)(x)), None

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      layers = nn.scan(
        Layer, variable_axes={"params": 0}, split_rngs={"params": True},
        length=3,
      )  # fmt: skip
      return nn.Dense(4)(layers()(x, None)[0])

  def draw(rng, leaf):
    return (half if leaf.ndim == 2 else half_of_each_layer)(rng, leaf)

  model, x = Model(), normal(2, 6)
  check(model.apply, drawn(model.init, x), x, draw=draw)

  @nnx.split_rngs(splits=3)
  @nnx.vmap(in_axes=0, out_axes=0)
  def make(rngs):
    return nnx.Linear(6, 6, rngs=rngs)

  graph, state = nnx.split(make(nnx.Rngs(0)))

  def scanned(state, x):
    step = nnx.scan(lambda x, layer: jnp.tanh(layer(x)),
                    in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)  # fmt: skip
    return step(x, nnx.merge(graph, state))

  check(scanned, state, x, pruner=STACKED, draw=draw)


def test_an_ensemble_is_a_stack():
  model = lambda p, x: jax.vmap(lambda w: jnp.tanh(x @ w) @ w.T)(p["w"])
  params = {"w": normal(3, 6, 4)}
  check(model, params, normal(5, 6), pruner=STACKED, draw=half_of_each_layer)


def test_a_convolution_of_any_kind():
  """Strided, dilated, one-dimensional, 1 × 1, and its window first or last."""

  def model(p, x):
    conv = jax.lax.conv_general_dilated
    y = conv(
      x, p["a"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = conv(y, p["b"], (1, 1), "VALID", rhs_dilation=(2, 2),
             dimension_numbers=("NHWC", "OIHW", "NHWC"))  # fmt: skip
    y = conv(
      y, p["c"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = y.reshape(y.shape[0], -1, y.shape[-1])
    return conv(
      y, p["d"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )

  params = {
    "a": normal(3, 3, 2, 6), "b": normal(5, 6, 2, 2), "c": normal(1, 1, 5, 4),
    "d": normal(3, 4, 3),
  }  # fmt: skip
  check(model, params, normal(2, 8, 6, 2))


def test_half_precision_compute_and_float32_weights():
  def model(p, x):
    y = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
    return y.astype(jnp.float32)

  w = kept.from_dense(jnp.eye(4))
  out = kept.lift(model)({"w": w}, jnp.ones((2, 4)))
  assert out.tolist() == jnp.ones((2, 4)).tolist()


def test_an_unsupported_use_names_the_layer_and_the_way_out():
  model = lambda p, x: x @ jnp.sort(p["net"]["w"])
  params = {"net": {"w": kept.from_dense(jnp.eye(3))}}
  with pytest.raises(ValueError, match='sort .*w\'.*"net/w": None.*densify'):
    kept.lift(model)(params, jnp.ones((1, 3)))
  lifted = kept.lift(model, on_unsupported="densify")
  with pytest.warns(UserWarning, match="'net/w' is decoded"):
    out = lifted(params, jnp.ones((1, 3)))
  assert out.tolist() == [[0.0, 0.0, 3.0]]
  stacked = {"w": kept.from_dense(jnp.ones((3, 2, 2)), split=2)}
  scan = lambda p, x: jax.lax.scan(lambda h, w: (h @ w, None), x, p["w"])[0]
  with pytest.raises(ValueError, match="'w'.*a scan slices it.*stacked_axis"):
    kept.lift(scan)(stacked, jnp.ones((1, 2)))


def test_inputs_and_cotangents_give_the_dense_gradient():
  """Of a weight used in a scan, transposed, and looked up: the sum of uses."""

  def model(p, x, ids):
    step = lambda h, _: (jnp.tanh(h @ p["w"]), None)
    last, _ = jax.lax.scan(step, x, None, length=3)
    return last @ p["w"].T + p["w"][ids]

  pruner = kept.KeptUpdater(jaxpruner.RigL(rng_seed=0))
  weights = {"w": kept.from_dense(normal(6, 6), normal(6, 6) > 0)}
  with pytest.warns(UserWarning, match="never change its masks"):
    state = pruner.wrap_optax(optax.sgd(0.1)).init(weights)
  params, _ = kept.split(weights)
  inputs = normal(4, 6), jnp.array([0, 5, 5, 2])
  lifted = kept.lift(model)

  def loss(p, state):
    seen = pruner.pre_forward_update(p, state)
    return jnp.sum(jnp.sin(lifted(seen, *inputs)))

  _, grads, growth = jax.jit(pruner.value_and_grad(loss))(params, state)
  dense, _ = jax.jit(kept.todense)(weights)
  full = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(model(p, *inputs)))))(dense)
  rows = lambda a: a.reshape(-1, a.shape[-1])
  total = 0.0
  for left, right in growth["w"]:
    left, right = np.asarray(left), np.asarray(right)
    if np.issubdtype(left.dtype, np.integer):
      left = np.eye(6)[left]
    total += rows(left).T @ rows(right)
  np.testing.assert_allclose(total, full["w"], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(
    grads["w"], weights["w"].layout.gather(full["w"]), rtol=1e-4, atol=1e-5
  )
