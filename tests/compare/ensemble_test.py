"""Ensembles from one chain of sparse trainings, and Dropout."""

import compare_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpruner.compare import tasks
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.questions import base, ensemble, free_tickets
from jaxpruner.compare.tasks import dropout


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), fraction=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_a_rewired_mask_keeps_its_number_and_replaces_the_smallest(
  seed, fraction
):
  rng = np.random.default_rng(seed)
  weights = rng.permutation(24.0 * np.arange(1, 25)).reshape(4, 6)
  mask = rng.random((4, 6)) < rng.uniform(0.1, 0.9)
  growth = rng.random((4, 6))
  found = np.asarray(
    free_tickets.rewired(
      jnp.asarray(weights * mask), jnp.asarray(mask), growth, fraction
    )
  )
  # By the definition: the smallest leave, the best of the removed enter.
  kept = [tuple(place) for place in np.argwhere(mask)]
  away = [tuple(place) for place in np.argwhere(~mask)]
  moved = min(int(np.float32(fraction) * len(kept)), len(away))
  leave = sorted(kept, key=lambda place: weights[place])[:moved]
  enter = sorted(away, key=lambda place: -growth[place])[:moved]
  expected = (set(kept) - set(leave)) | set(enter)
  assert {tuple(place) for place in np.argwhere(found)} == expected


@pytest.mark.parametrize("growth", ["gradient", "random", ""])
def test_the_next_member_is_as_sparse_and_moved_only_if_dynamic(growth):
  task = tasks.make_task("digits", {"width": 8, "steps": 4})
  data = jax.tree.map(jnp.asarray, task.load())
  params = task.init(jax.random.key(0))
  key = jax.random.key(1)
  masks = jax.tree.map(
    lambda x: jax.random.bernoulli(key, 0.5, x.shape) if x.ndim > 1 else None,
    params,
  )
  leaves, treedef = jax.tree.flatten(params)
  masked = [
    w if m is None else w * m
    for w, m in zip(leaves, treedef.flatten_up_to(masks), strict=True)
  ]
  params = jax.tree.unflatten(treedef, masked)
  refine = jax.jit(free_tickets.refine, static_argnums=(0, 5))
  member, changed = refine(task, params, masks, data, key, growth)
  for weights, old, new in zip(
    jax.tree.leaves(member),
    treedef.flatten_up_to(masks),
    treedef.flatten_up_to(changed),
    strict=True,
  ):
    if old is None:
      continue
    assert int(old.sum()) == int(new.sum())
    assert bool((weights[~new.astype(bool)] == 0).all())
    assert bool((old != new).any()) == bool(growth)


def test_dropout_keeps_the_mean_of_a_linear_unit():
  params = {
    "layer_0": {"kernel": jnp.eye(2), "bias": jnp.zeros(2)},
    "layer_1": {"kernel": jnp.ones((2, 1)), "bias": jnp.zeros(1)},
  }
  keys = jax.random.split(jax.random.key(0), 4000)
  found = jax.vmap(lambda k: dropout.dropped(params, jnp.ones((1, 2)), k, 0.5))(
    keys
  )
  assert float(found.mean()) == pytest.approx(2.0, abs=0.1)
  with pytest.raises(ValueError, match="below 1"):
    tasks.make_task("digits-dropout", {"dropout": 1.0})


def test_the_verdict_holds_dynamic_against_static_and_names_dropout():
  plain, dropped = "dropout=0.0", "dropout=0.2"
  values = {
    Cell("dense", 0.0, options=plain): [90.0, 91.0, 92.0],
    Cell("dense", 0.0, options=dropped): [91.0, 92.1, 93.0],
    Cell("static_sparse", 0.9, options=plain): [85.0, 86.0, 87.0],
    Cell("rigl", 0.9, options=plain): [87.0, 88.1, 89.0],
  }
  rigl = Cell("rigl", 0.9, options=plain)
  records = {
    c.id: helpers.record(c.id, v, algorithm=c.algorithm, sparsity=c.sparsity)
    for c, v in values.items()
  }
  measures = {
    rigl.id: {"ensemble": [90.0, 91.0, 92.1], "last member": [89.0, 90.0, 91.0]}
  }
  found = base.Findings(
    list(values), records, {}, measures, "accuracy", "%", True
  )
  words = " ".join(ensemble.verdict(found))
  assert "rigl at 90 % (dropout=0.0): against a static mask +2.03" in words
  assert "against its last one +1.03" in words
  assert "Dropout of 0.2 on dense: +1.03" in words and "(better)" in words


def test_a_task_that_is_no_classifier_is_refused():
  with pytest.raises(ValueError, match="not a classifier"):
    ensemble.axes(tasks.make_task("addition"))
