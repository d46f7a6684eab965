"""Levels by evolution, against all levels there are."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import post_training
from jaxpruner.post_training import calibration, contrib
from jaxpruner.post_training.contrib import levels

COSTS = np.random.default_rng(3).uniform(0, 1, (4, 5)) * np.arange(5)
SIZES = (8, 8, 8, 3)


def judge(chosen, count):
  del count
  return sum(COSTS[i, k] for i, k in enumerate(chosen))


def evolve(**options):
  given = {"generations": 60, "offspring": 12, "survivors": (4, 1)}
  return levels.evolve((2,) * 4, SIZES, 4, judge, 3, **given | options)


def test_evolution_finds_the_best_of_all_levels():
  every = [
    k
    for k in itertools.product(range(5), repeat=4)
    if sum(k[:3]) == 6 and k[3] == 2  # the last one has no leaf of its size
  ]
  best = min(every, key=lambda k: judge(k, 1))
  assert evolve() == (best, judge(best, 1))


def test_the_best_never_gets_worse_and_the_total_stays():
  seen = []
  found, least = evolve(progress=lambda _, loss: seen.append(loss))
  assert seen == sorted(seen, reverse=True) and least == seen[-1]
  assert np.dot(found, SIZES) == np.dot((2,) * 4, SIZES)


def test_later_selections_see_more_batches():
  seen = []

  def counted(chosen, count):
    seen.append(count)
    return judge(chosen, count)

  levels.evolve(
    (2,) * 4, SIZES, 4, counted, 4, generations=1, offspring=9, survivors=(2, 1)
  )
  assert seen[0] == 4 and set(seen[1:-3]) == {2} and seen[-3:] == [4, 4, 4]


def test_the_judgement_is_the_divergence_in_float64():
  rng = np.random.default_rng(0)
  goal, now = rng.normal(size=(2, 5, 7)) * 3
  p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (goal, now))
  want = (p * np.log(p / q)).sum(-1).mean()
  found = levels._divergence(jnp.asarray(now), jnp.asarray(goal))
  np.testing.assert_allclose(found, want, rtol=1e-5)


def test_searched_levels_are_no_worse_than_uniform_ones():
  rng = np.random.default_rng(1)
  params = {k: rng.normal(size=(8, 8)).astype(np.float32) for k in "abc"}
  params["a"] *= 4  # of which more is left to remove than of the others
  data = [rng.normal(size=(32, 8)).astype(np.float32) for _ in range(2)]

  def apply_fn(p, x):
    x = jnp.tanh(x @ p["a"]) + x
    return (jnp.tanh(x @ p["b"]) + x) @ p["c"]

  found = contrib.search_levels(
    apply_fn, params, data, sparsity=0.5, step=0.125, generations=6,
    offspring=6, method="wanda",
  )  # fmt: skip
  assert sum(found.values()) == 1.5
  far = lambda custom: np.mean([
    levels._divergence(apply_fn(post_training.prune(
      apply_fn, params, data, sparsity=0.5, custom_sparsity_map=custom,
      method="wanda", sequential=False)[0], x), apply_fn(params, x))
    for x in data])  # fmt: skip
  assert far(found) <= far(None) + 1e-6


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_candidates_are_what_prune_gives(method):
  rng = np.random.default_rng(2)
  params = {
    "stack": rng.normal(size=(2, 8, 8)).astype(np.float32), "scale": 2.0,
    "last": rng.normal(size=(8, 4)).astype(np.float32),
  }  # fmt: skip
  data = [rng.normal(size=(16, 8)).astype(np.float32) for _ in range(2)]

  def apply_fn(p, x):
    step = lambda x, w: (jnp.tanh(x @ w), None)
    return jax.lax.scan(step, x * p["scale"], p["stack"])[0] @ p["last"]

  model = calibration.Model(apply_fn, params, data)
  for level, found in zip(
    (0.25, 0.75), levels.pruned_at(model, (0.25, 0.75), method), strict=True
  ):
    want, _, _ = post_training.prune(
      apply_fn, params, data, method=method, sparsity=level, sequential=False
    )
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.leaves(want))


@pytest.mark.parametrize(
  "given, told",
  [
    ({"sparsity": 0.9}, "must lie in"),
    ({"survivors": (1, 4)}, "fall to 1"),
    ({"survivors": ()}, "survivors="),
  ],
)
def test_bad_arguments_are_told(given, told):
  options = {"sparsity": 0.5, "step": 0.1} | given
  with pytest.raises(ValueError, match=told):
    contrib.search_levels(
      lambda p, x: x @ p, jax.numpy.ones((4, 4)), [np.ones((2, 4))], **options
    )
