"""The layers of a stack lose units at different places."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shrink_models as models

from jaxpruner.sparse import shrinking

# The parameters here are not masked: what masks alone decide is the point.
pytestmark = pytest.mark.filterwarnings("ignore:.*the masks remove")

RNG = np.random.default_rng(3)
X = RNG.standard_normal((2, 8)).astype(np.float32)


def feed_forward(h, p):
  return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None


def scanned(layer):
  return lambda p, x: jax.lax.scan(layer, x, p)[0]


def stack(**shapes):
  return models.randomize({k: jnp.ones(s) for k, s in shapes.items()})


def with_dead(params, name, axis, dead):
  """Return masks that remove other indices of an axis in each layer."""
  masks = models.nothing_masked(params)
  masks[name] = np.ones(params[name].shape, np.uint8)
  for layer, indices in enumerate(dead):
    np.moveaxis(masks[name][layer], axis, 0)[list(indices)] = 0
  return masks


def test_half_of_the_units_at_different_places_is_half_of_the_stack():
  params = stack(up=(6, 8, 128), down=(6, 128, 8))
  dead = [RNG.permutation(128)[:64] for _ in range(6)]
  masks = with_dead(params, "up", 1, dead)
  small = models.shrink_and_compare(scanned(feed_forward), params, masks, X)
  assert models.shapes(small) == {"down": (6, 64, 8), "up": (6, 8, 64)}
  assert small.same_code


def test_the_widest_layer_decides():
  params = stack(up=(3, 8, 10), down=(3, 10, 8))
  masks = with_dead(params, "up", 1, [[0, 5, 9], [1, 2, 3, 4], []])
  assert not models.shrink_and_compare(
    scanned(feed_forward), params, masks, X
  ).removed
  masks = with_dead(params, "up", 1, [[0, 5, 9], [1, 2, 3, 4], [8, 9]])
  small = models.shrink_and_compare(scanned(feed_forward), params, masks, X)
  assert models.shapes(small)["up"] == (3, 8, 8)


def test_optimizer_state_takes_the_order_of_the_weights():
  params = stack(up=(3, 8, 10), down=(3, 10, 8))
  dead = [[0, 1, 2, 3], [6, 7, 8, 9], [1, 3, 5, 7]]
  masks = with_dead(params, "up", 1, dead)
  fn = scanned(feed_forward)
  tx = optax.adam(1e-2)
  weights = models.masked(params, masks)
  state = tx.init(weights)
  small = shrinking.shrink(fn, weights, X)
  loss = lambda f: lambda p: jnp.sum(f(p, X) ** 2)
  held = lambda p: jax.tree.map(lambda x, m: jnp.where(m, x, 0), p, {
    "up": masks["up"], "down": np.moveaxis(masks["up"], 1, 2)[:, :, :8]
  })  # fmt: skip
  weights, little = held(weights), small.params
  reduced = small.shrink(state)

  @jax.jit
  def step(weights, state):
    updates, state = tx.update(held(jax.grad(loss(fn))(weights)), state)
    return optax.apply_updates(weights, updates), state

  @jax.jit
  def small_step(little, reduced):
    updates, reduced = tx.update(jax.grad(loss(small.fn))(little), reduced)
    return optax.apply_updates(little, updates), reduced

  for _ in range(3):
    weights, state = step(weights, state)
    little, reduced = small_step(little, reduced)
  outputs = jax.jit(fn)(weights, X), jax.jit(small.fn)(little, X)
  np.testing.assert_allclose(*outputs, rtol=1e-4)
  moments = small.shrink(state)[0].mu["up"]
  np.testing.assert_allclose(moments, reduced[0].mu["up"], rtol=1e-3, atol=1e-5)


def test_heads_of_each_layer_have_their_own_order():
  def layer(h, p):
    q, k, v = ((h @ p[n]).reshape(2, 4, 3) for n in ("query", "key", "value"))
    scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    mixed = jnp.einsum("hqk,khd->qhd", scores, v).reshape(2, 12)
    return h + mixed @ p["out"], None

  names = ("query", "key", "value")
  params = stack(**{n: (2, 8, 12) for n in names}, out=(2, 12, 8))
  masks = models.nothing_masked(params)
  for n in names:
    lanes = [[*range(6)], [*range(3, 6), *range(9, 12)]]
    masks[n] = with_dead(params, n, 1, lanes)[n]
  small = models.shrink_and_compare(scanned(layer), params, masks, X)
  assert models.shapes(small)["out"] == (2, 6, 8)


@pytest.mark.parametrize("what", ["constant", "shared", "carried"])
def test_units_with_an_order_stay_where_they_are(what):
  """A constant per unit, a weight of all layers, a stream through them."""
  shared = RNG.standard_normal(8).astype(np.float32)

  def layer(h, p):
    if what == "carried":
      return jax.nn.relu(h @ p["up"]) @ p["down"] * p["scale"], None
    hidden = jax.nn.relu(h @ p["up"]) * shared
    return h + hidden @ p["down"], None

  def fn(p, x):
    def one(h, q):
      if what == "shared":
        hidden = jax.nn.relu(h @ q["up"]) * p["each"]
        return h + hidden @ q["down"], None
      return layer(h, q)

    return jax.lax.scan(one, x, p["stack"])[0]

  params = {"stack": stack(up=(2, 8, 8), down=(2, 8, 8), scale=(2, 8))}
  params["each"] = jnp.asarray(shared)
  masks = models.nothing_masked(params)
  name, dead = ("up", [[0, 1], [2, 3]])
  if what == "carried":
    name = "scale"
  masks["stack"] = with_dead(
    params["stack"], name, 0 if what == "carried" else 1, dead
  )
  small = models.shrink_and_compare(fn, params, masks, X)
  assert not small.removed
