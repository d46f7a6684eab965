"""Groups that training empties are removed, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpruner import sparse
from jaxpruner.sparse import budgets

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((64, 6)), "float32")


def mlp(p, x):
  hidden = jnp.tanh(x @ p["up"] + p["bias"])
  return hidden @ p["down"]


def params(width, scale=0.5):
  draw = lambda *shape: jnp.asarray(RNG.standard_normal(shape) * scale)
  return {
    "up": draw(6, width).astype("float32"),
    "bias": jnp.zeros(width),
    "down": draw(width, 2).astype("float32"),
  }


def test_the_penalty_is_the_sum_of_the_norms_of_all_groups():
  p = params(5)
  units = np.concatenate([np.asarray(p["up"]), np.asarray(p["down"]).T])
  want = np.sqrt((units.astype(np.float64) ** 2).sum(0)).sum()
  penalty = sparse.group_lasso(mlp, p, X)
  np.testing.assert_allclose(penalty(p), want, rtol=1e-6)


def test_the_penalty_pulls_a_group_evenly_and_leaves_empty_ones():
  p = params(4)
  p = {**p, "up": p["up"].at[:, 1].set(0), "down": p["down"].at[1].set(0)}
  grads = jax.grad(sparse.group_lasso(mlp, p, X))(p)
  norm = np.sqrt(np.square(p["up"]).sum(0) + np.square(p["down"]).sum(1))
  np.testing.assert_allclose(
    grads["up"], p["up"] / np.maximum(norm, 1e-9), rtol=1e-5
  )
  assert not np.asarray(grads["up"])[:, 1].any()


def test_a_filter_leaves_groups_alone():
  p = {
    "first": params(5),
    "second": {"w": jnp.ones((2, 3)), "v": jnp.ones((3, 2))},
  }
  fn = lambda p, x: mlp(p["first"], x) @ p["second"]["w"] @ p["second"]["v"]
  only = lambda names, _: names[0] == "second"
  kept = sparse.remove_small_groups(fn, p, X, below=9.0, filter_fn=only)
  assert kept.params["second"]["w"].shape == (2, 1)
  assert kept.params["first"]["up"].shape == (6, 5)
  with pytest.raises(ValueError, match="left out by filter_fn"):
    sparse.group_lasso(fn, p, X, filter_fn=lambda *_: False)


@pytest.mark.parametrize("below", [0.0, -1.0, float("nan")])
def test_a_threshold_is_positive(below):
  with pytest.raises(ValueError, match="must be positive"):
    sparse.remove_small_groups(mlp, params(3), X, below=below)


def test_weights_that_are_not_finite_are_named():
  p = params(3)
  p["up"] = p["up"].at[0, 0].set(jnp.nan)
  with pytest.raises(ValueError, match=r"up\[1\].*not finite"):
    sparse.remove_small_groups(mlp, p, X, below=0.1)


def test_training_finds_the_width_of_its_teacher():
  """Of 24 neurons those remain that the teacher's 3 need, or a few more."""
  teacher = params(3, scale=1.0)
  y = mlp(teacher, X)
  fn, p = mlp, params(24)
  tx = optax.adam(2e-2)
  state = tx.init(p)
  widths = []
  for _ in range(4):
    penalty = sparse.group_lasso(fn, p, X)

    @jax.jit
    def step(p, state, fn=fn, penalty=penalty):
      loss = lambda p: jnp.mean((fn(p, X) - y) ** 2) + 1e-2 * penalty(p)
      updates, state = tx.update(jax.grad(loss)(p), state, p)
      return optax.apply_updates(p, updates), state

    for _ in range(150):
      p, state = step(p, state)
    before = fn(p, X)
    small = sparse.remove_small_groups(fn, p, X, below=0.05)
    p, state, fn = small.params, small.shrink(state), small.fn
    np.testing.assert_allclose(fn(p, X), before, atol=0.1)
    widths.append(p["up"].shape[1])
  assert widths[-1] <= 12 and widths == sorted(widths, reverse=True)
  assert state[0].mu["up"].shape == p["up"].shape
  assert float(jnp.mean((fn(p, X) - y) ** 2)) < 0.1 * float(jnp.mean(y**2))


def test_budgets_and_penalties_have_the_same_groups():
  p = params(6)
  p["up"] = p["up"].at[:, 2].multiply(1e-3)
  p["down"] = p["down"].at[2].multiply(1e-3)
  small = sparse.remove_small_groups(mlp, p, X, below=1e-2)
  wanted = 5 * 9 / (6 * 9)
  pruned = budgets.prune_to(mlp, p, X, params=wanted)
  np.testing.assert_array_equal(small.params["up"], pruned.small.params["up"])
