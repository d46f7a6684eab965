"""Lottery tickets: rounds, rewinding, resuming, settling, mixing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import tickets

SHAPES = {"a": (4, 5), "b": (5, 6)}
TOTAL = 4


def params():
  rng = np.random.default_rng(0)
  return {
    k: {"kernel": jnp.asarray(rng.normal(size=s), jnp.float32)}
    for k, s in SHAPES.items()
  }


def shift(name, step):
  """What a step adds: different for each step and weight."""
  rng = np.random.default_rng([step, ord(name)])
  return rng.normal(size=SHAPES[name]).astype(np.float32)


class Training:
  """A training function that only adds numbers, and counts its calls."""

  def __init__(self, fail_after=None):
    self.calls, self.fail_after = [], fail_after

  def __call__(self, params, masks, start, stop):
    if self.fail_after == len(self.calls):
      raise KeyboardInterrupt
    self.calls.append((start, stop, masks is None))
    for step in range(start, TOTAL if stop is None else stop):
      params = {
        k: {"kernel": tree["kernel"] + shift(k, step)}
        for k, tree in params.items()
      }
    return params


def reference(rewind, back, sparsity):
  """Iterative magnitude pruning in NumPy, as the papers tell it."""
  add = lambda w, steps: {
    k: v + sum(shift(k, t) for t in steps) for k, v in w.items()
  }
  w0 = {k: np.asarray(t["kernel"]) for k, t in params().items()}
  if rewind == "initialization":
    back = 0
  early = add(w0, range(back)) if rewind == "weights" else w0
  trained = add(w0, range(TOTAL))
  mask = {k: np.ones(s, bool) for k, s in SHAPES.items()}
  size = sum(m.size for m in mask.values())
  history = []
  current = 0.0
  while current < sparsity:
    current = min(sparsity, 1 - (1 - current) * 0.8)
    left = np.concatenate([abs(trained[k])[mask[k]] for k in SHAPES])
    least = np.sort(left)[::-1][round(size * (1 - current)) - 1]
    mask = {k: mask[k] & (abs(trained[k]) >= least) for k in SHAPES}
    source = trained if rewind == "learning_rate" else early
    start = {k: source[k] * mask[k] for k in SHAPES}
    trained = add(start, range(back, TOTAL))
    trained = {k: trained[k] * mask[k] for k in SHAPES}
    history.append(mask)
  return trained, history[-1], start


@pytest.mark.parametrize(
  ("rewind", "back"),
  [("weights", 2), ("weights", 0), ("initialization", 3), ("learning_rate", 1)],
)
def test_iterative_pruning_follows_the_papers(rewind, back):
  training = Training()
  ticket = tickets.find_ticket(
    training, params(), 0.6, rewind=rewind, rewind_step=back
  )
  trained, mask, start = reference(rewind, back, 0.6)
  for k in SHAPES:
    np.testing.assert_array_equal(ticket.masks[k]["kernel"], mask[k])
    np.testing.assert_allclose(ticket.params[k]["kernel"], trained[k], 1e-5)
    np.testing.assert_allclose(ticket.start[k]["kernel"], start[k], 1e-5)
  kept = sum(int(m.sum()) for m in mask.values())
  assert kept == 20 and ticket.sparsities[-1] == 0.6
  assert len(ticket.sparsities) == 6  # a dense training and five rounds


def test_an_interrupted_search_goes_on_where_it_stopped(tmp_path):
  whole = tickets.find_ticket(Training(), params(), 0.6, rewind_step=2)
  options = {"rewind_step": 2, "folder": tmp_path / "search"}
  with pytest.raises(KeyboardInterrupt):
    tickets.find_ticket(Training(fail_after=4), params(), 0.6, **options)
  rest = Training()
  resumed = tickets.find_ticket(rest, params(), 0.6, **options)
  assert len(rest.calls) == 7 - 4
  for a, b in zip(
    jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  idle = Training(fail_after=0)
  tickets.find_ticket(idle, params(), 0.6, **options)
  with pytest.raises(ValueError, match="holds another search"):
    tickets.find_ticket(Training(), params(), 0.7, **options)


@pytest.mark.parametrize("sparsity", [0.1, 0.2, 0.5, 0.9, 0.98])
def test_rounds_remove_a_fifth_each_and_end_exactly(sparsity):
  steps = tickets.rounds(sparsity)
  assert steps[-1] == sparsity and steps == sorted(steps)
  left = [1.0, *(1 - s for s in steps)]
  for before, after in zip(left, left[1:], strict=False):
    assert after >= 0.8 * before - 1e-9
  assert len(steps) == int(np.ceil(np.log(1 - sparsity) / np.log(0.8) - 1e-9))


def test_early_birds_wait_until_masks_settle():
  bird = tickets.EarlyBird(window=3, tolerance=0.2)
  base = np.zeros((10, 10), np.uint8)
  told = []
  for changed in (50, 30, 20, 15, 14):
    mask = base.copy()
    mask.flat[:changed] = 1
    told.append(bird.settled({"w": mask, "b": None}))
  # Distances to the last: 0.3 and 0.1 are too far, then 0.15 and 0.05 are not.
  assert told == [False, False, False, True, True]
  assert tickets.mask_distance({"w": base}, {"w": mask}) == 0.14


def test_averages_stay_within_their_mask():
  masks = {"w": np.array([[1, 0, 1, 0]], np.uint8), "b": None}
  snap = lambda x, y: {
    "w": jnp.asarray([[x, 0.0, y, 0.0]]),
    "b": jnp.asarray([x]),
  }
  mean = tickets.average([snap(1, 2), snap(3, 6)])
  np.testing.assert_allclose(mean["w"], [[2, 0, 4, 0]])
  np.testing.assert_allclose(mean["b"], [2])
  mean = tickets.average([snap(1, 2), snap(3, 6)], [3, 1])
  np.testing.assert_allclose(mean["w"], [[1.5, 0, 3, 0]])
  other = {"w": np.array([[0, 1, 1, 0]], np.uint8), "b": None}
  second = {"w": jnp.asarray([[0.0, 9.0, 1.0, 0.0]]), "b": jnp.zeros(1)}
  mixed, chosen = tickets.superpose([(snap(1, 2), masks), (second, other)])
  assert chosen["w"].tolist() == [[0, 1, 1, 0]] and chosen["b"] is None
  np.testing.assert_allclose(mixed["w"], [[0, 4.5, 1.5, 0]])


def test_nonsense_is_refused():
  with pytest.raises(ValueError, match="rewind='middle'"):
    tickets.find_ticket(Training(), params(), 0.5, rewind="middle")
  with pytest.raises(ValueError, match="sparsity=1.0"):
    tickets.rounds(1.0)
  with pytest.raises(ValueError, match="window=1"):
    tickets.EarlyBird(1)
  with pytest.raises(ValueError, match="weights="):
    tickets.average([params()], [1, 2])


def test_any_updater_can_rank():
  ticket = tickets.find_ticket(
    Training(),
    params(),
    0.5,
    fraction=0.5,
    make_pruner=lambda s: jaxpruner.LampPruning(sparsity=s),
  )
  kept = sum(int(m.sum()) for m in jax.tree.leaves(ticket.masks))
  assert kept == 25
