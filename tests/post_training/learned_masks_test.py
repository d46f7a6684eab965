"""Learned masks, against their definition in float64."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpruner.post_training import contrib
from jaxpruner.post_training.contrib import learned_masks

RNG = np.random.default_rng(0)
W = RNG.normal(size=(8, 3)).astype(np.float32)
CURVES = RNG.uniform(0.5, 2, W.shape).astype(np.float32)
GOALS = [RNG.normal(size=W.shape).astype(np.float32) for _ in range(6)]


def loss(params, goal):
  return jnp.sum(CURVES * (params["w"] - goal) ** 2) / 2


def in_float64(known, steps, rate, weight):
  """Softmax of Gumbel draws, its gradient by hand, plain gradient descent."""
  choices = np.array(
    [np.isin(range(4), c) for c in itertools.combinations(range(4), 2)], float
  )
  group = lambda x: x.reshape(2, 4, 3).transpose(0, 2, 1).reshape(6, 4)
  whole = lambda x: x.reshape(2, 3, 4).transpose(0, 2, 1).reshape(8, 3)
  overlap = group(known) @ choices.T
  logits = 0.01 * 3.0 * (overlap - 1.0)  # 1 = N / 2, the mean for 2:4
  losses = []
  for t in range(steps):
    share = t / (steps - 1)
    tau, kappa = 4.0 - 3.95 * share, 100 + 400 * share
    noise = np.asarray(learned_masks.draw(5, t, 0, (6, 6)), np.float64)
    z = (kappa * logits + noise) / tau
    chances = np.exp(z - z.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    mask = whole(chances @ choices)
    seen = W.astype(np.float64) * mask
    fit = (CURVES * (seen - GOALS[t]) ** 2).sum() / 2
    losses.append(fit - weight * (seen**2).sum())
    slope = W * CURVES * (seen - GOALS[t]) - 2 * weight * W * seen
    by_choice = group(slope) @ choices.T
    mean = (chances * by_choice).sum(-1, keepdims=True)
    logits = logits - rate * chances * (by_choice - mean) * kappa / tau
  return whole(choices[logits.argmax(-1)]), losses


def test_masks_are_learned_as_the_paper_says(monkeypatch):
  first = learned_masks._first
  # Without the small random start, which the reference does not know.
  monkeypatch.setattr(
    learned_masks, "_first", lambda key, *rest: first(key, *rest) - 0.01 *
    learned_masks.jax.random.normal(key, (6, 6)),
  )  # fmt: skip
  known = learned_masks._whole(
    learned_masks.NByM(2, 4), np.tile([1.0, 1, 0, 0], (6, 1)), (8, 3)
  )
  seen = []
  found = contrib.learn_masks(
    loss, {"w": W}, GOALS, steps=6, masks={"w": known}, tx=optax.sgd(2e-3),
    weight=0.1, seed=5, progress=lambda _, value: seen.append(value),
  )  # fmt: skip
  want, losses = in_float64(np.asarray(known), 6, 2e-3, 0.1)
  np.testing.assert_allclose(seen, losses, rtol=1e-4)
  assert (want != np.asarray(known)).any()
  np.testing.assert_array_equal(found["w"], want)


def test_every_group_keeps_its_number_and_dense_leaves_have_no_mask():
  params = {"w": W, "b": np.zeros(3, np.float32)}
  found = contrib.learn_masks(loss, params, GOALS, steps=6)
  assert found["b"] is None and found["w"].dtype == np.uint8
  assert (np.asarray(found["w"]).reshape(2, 4, 3).sum(1) == 2).all()


def test_learning_ends_at_the_best_mask_of_each_group():
  goal = np.where(np.arange(8)[:, None] % 4 > 1, W, 0).astype(np.float32)
  found = contrib.learn_masks(
    loss, {"w": W}, itertools.repeat(goal), steps=150, learning_rate=0.02
  )
  cost = CURVES * W**2 * (goal != 0) - CURVES * W**2 * (goal == 0)
  best = np.zeros_like(W, np.uint8)
  for i in (0, 4):
    for j in range(3):
      best[i + np.argsort(-cost[i : i + 4, j])[:2], j] = 1
  np.testing.assert_array_equal(found["w"], best)


def test_a_mask_to_start_from_is_preferred():
  known = np.tile(np.array([0, 1, 0, 1], np.uint8)[:, None], (2, 3))
  found = contrib.learn_masks(
    loss, {"w": W}, GOALS, steps=1, masks={"w": known}, learning_rate=1e-9,
    prior=50.0,
  )  # fmt: skip
  np.testing.assert_array_equal(found["w"], known)


@pytest.mark.parametrize(
  "given, told",
  [
    ({"sparsity_type": "4x4"}, "must be N:M"),
    ({"steps": 0}, "steps=0"),
    ({"steps": 9}, "batches has 6"),
    ({"filter_fn": lambda *_: False}, "takes no leaf"),
    ({"sparsity_type": "1:3"}, "not divisible"),
  ],
)
def test_bad_arguments_are_told(given, told):
  with pytest.raises(ValueError, match=told):
    contrib.learn_masks(loss, {"w": W}, GOALS, **{"steps": 6} | given)
