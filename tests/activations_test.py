"""Activation sparsity: exact counts, found in every framework, measured."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import activations

TOP = functools.partial(activations.top_k, sparsity=0.75)


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numpy_top(x, keep):
  """The `keep` largest of each row; equals by index."""
  result = np.zeros_like(x)
  for row, out in zip(x, result, strict=True):
    kept = np.argsort(-np.abs(row), kind="stable")[:keep]
    out[kept] = row[kept]
  return result


def test_top_k_keeps_the_largest_of_every_row():
  x = np.round(draw(0, 6, 8) * 2)  # with ties
  np.testing.assert_array_equal(TOP(x), numpy_top(x, 2))
  np.testing.assert_array_equal(
    activations.top_k(x.T, 0.75, axis=0), numpy_top(x, 2).T
  )
  grads = jax.grad(lambda x: TOP(x).sum())(jnp.asarray(draw(1, 6, 8)))
  np.testing.assert_array_equal(grads, numpy_top(draw(1, 6, 8), 2) != 0)


def test_threshold_zeroes_the_small():
  x = draw(0, 4, 5)
  expected = np.where(np.abs(x) > 0.5, x, 0)
  np.testing.assert_array_equal(activations.threshold(x, 0.5), expected)


def weights():
  return {"one": draw(1, 8, 8), "two": draw(2, 8, 4)}


def plain(params, x, act=lambda h: h):
  return act(jax.nn.relu(x @ params["one"])) @ params["two"]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_found_activation_equals_one_written_by_hand(wrap):
  params, x = weights(), draw(3, 5, 8)
  found = activations.sparsify(wrap(plain), TOP)
  by_hand = functools.partial(plain, act=TOP)
  np.testing.assert_allclose(found(params, x), by_hand(params, x), 1e-5)
  loss = lambda f: jax.jit(jax.grad(lambda p: jnp.sum(f(p, x) ** 2)))
  got, expected = loss(found)(params), loss(by_hand)(params)
  for k in params:
    np.testing.assert_allclose(got[k], expected[k], 1e-4, 1e-4)


def test_sparsity_is_measured_before_and_after():
  params, x = weights(), draw(3, 5, 8)
  hidden = np.maximum(x @ params["one"], 0)
  before = activations.measure(plain, params, x)
  assert list(before) == ["0:relu"]
  np.testing.assert_allclose(before["0:relu"], (hidden == 0).mean(), 1e-6)
  after = activations.measure(activations.sparsify(plain, TOP), params, x)
  assert list(after) == ["0:relu", "1:sparsified"]
  kept = numpy_top(hidden, 2)
  np.testing.assert_allclose(after["1:sparsified"], (kept == 0).mean(), 1e-6)


def test_a_model_without_activations_is_refused():
  with pytest.raises(ValueError, match="no activation found"):
    activations.sparsify(lambda x: x + 1, TOP)(jnp.ones(3))
  tanh = activations.sparsify(jnp.tanh, TOP, names=frozenset({"tanh"}))
  assert int(jnp.sum(tanh(jnp.arange(8.0)) != 0)) == 2


def test_flax_models_are_found_too():
  nn = pytest.importorskip("flax.linen")

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(4)(nn.silu(nn.Dense(8)(x)))

  model, x = Model(), jnp.asarray(draw(0, 5, 8))
  params = model.init(jax.random.key(0), x)
  shares = activations.measure(
    activations.sparsify(model.apply, TOP), params, x
  )
  assert float(shares["1:sparsified"]) == 0.75


def test_equinox_models_are_found_too():
  eqx = pytest.importorskip("equinox")
  model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
  arrays, static = eqx.partition(model, eqx.is_array)
  call = lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x)
  shares = activations.measure(
    activations.sparsify(call, TOP), arrays, draw(0, 5, 4)
  )
  assert float(shares["1:sparsified"]) >= 0.75


def test_haiku_models_are_found_too():
  hk = pytest.importorskip("haiku")
  model = hk.transform(lambda x: hk.nets.MLP([8, 4])(x))
  x = jnp.asarray(draw(0, 5, 8))
  params = model.init(jax.random.key(0), x)
  shares = activations.measure(
    activations.sparsify(model.apply, TOP), params, None, x
  )
  assert float(shares["1:sparsified"]) >= 0.75
