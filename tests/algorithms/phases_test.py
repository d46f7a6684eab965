"""A chain is each of its pruners in turn, with the masks handed on."""

import functools
import json

import jax
import numpy as np
import optax
import pytest
from small_model import (
  STEPS,
  Trainer,
  apply_fn,
  assert_identical,
  loss_fn,
  make_batch,
  make_params,
  make_updater,
  masks_by_name,
  reference_run,
)

import jaxpruner

GRADUAL = {
  "algorithm": "magnitude",
  "sparsity": 0.75,
  "update_freq": 1,
  "update_start_step": 0,
  "update_end_step": 3,
}
RIGL = {
  "algorithm": "rigl",
  "sparsity": 0.75,
  "update_freq": 2,
  "update_start_step": 4,
  "update_end_step": 20,
}


def make(*phases, **shared):
  pruner = jaxpruner.create_updater_from_config(
    {"phases": [{"start": s, **p} for s, p in phases], **shared}
  )
  return pruner.bind(loss_fn, make_batch(), apply_fn, make_batch()[0])


@functools.cache
def run(*names, packed=False):
  """A history of (params, state); each phase takes four steps."""
  tables = {
    "gradual": GRADUAL,
    "rigl": RIGL,
    "dense": {"algorithm": "no_prune"},
    "static": {"algorithm": "static_sparse", "sparsity": 0.75},
    "second": {
      **GRADUAL,
      "sparsity": 0.9,
      "update_start_step": 4,
      "update_end_step": 7,
    },
    "snip": {"algorithm": "snip", "sparsity": 0.75},
  }
  phases = [(4 * i, tables[name]) for i, name in enumerate(names)]
  options = {"use_packed_masks": True} if packed else {}
  pruner = make(*phases, **options)
  trainer = Trainer(pruner, optax.adam(0.05))
  history = [trainer.start(make_params())]
  for _ in range(STEPS):
    history.append(trainer.jitted(*history[-1], make_batch()))
  assert trainer.traces == 1
  return pruner, history


def kept(pruner, at):
  masks = masks_by_name(pruner, *at).values()
  return np.concatenate([mask.ravel() for mask in masks])


def test_gradual_pruning_hands_its_masks_to_rigl():
  pruner, history = run("gradual", "rigl")
  counts = [int(kept(pruner, at).sum()) for at in history]
  assert counts[0] == 144 and counts[4:] == [36] * 5
  first, last = kept(pruner, history[4]), kept(pruner, history[-1])
  # At step 4 and 6 RigL rewires what it was given, and keeps most of it.
  assert (first != last).any() and (first & last).sum() > 18
  for params, state in history:
    for leaf in ("in", "out"):
      pruned = np.asarray(state.masks[leaf]["kernel"]) == 0
      assert not np.asarray(params[leaf]["kernel"])[pruned].any()


def test_the_first_phase_is_the_pruner_alone():
  _, history = run("gradual", "rigl")
  alone = Trainer(
    jaxpruner.create_updater_from_config(GRADUAL), optax.adam(0.05)
  )
  at = alone.start(make_params())
  for step in range(4):
    at = alone.jitted(*at, make_batch())
    for mine, other in zip(
      jax.tree.leaves(history[step + 1][0]), jax.tree.leaves(at[0]), strict=True
    ):
      np.testing.assert_allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize("name", ["static", "snip"])
def test_a_dense_warm_up_ends_in_the_next_pruners_own_masks(name):
  pruner, history = run("dense", name)
  bare = Trainer(jaxpruner.NoPruning(), optax.adam(0.05))
  at = bare.start(make_params())
  for step in range(4):
    at = bare.jitted(*at, make_batch())
    assert kept(pruner, history[step + 1]).all()
    np.testing.assert_allclose(
      history[step + 1][0]["in"]["kernel"], at[0]["in"]["kernel"], atol=1e-6
    )
  masks = [kept(pruner, at) for at in history[5:]]
  assert masks[0].sum() == 36 and all((m == masks[0]).all() for m in masks)
  assert jaxpruner.state_metrics(history[5][1])["dropped"] == 108


def test_packed_masks_chain_alike():
  pruner, history = run("gradual", "rigl")
  packed, bits = run("gradual", "rigl", packed=True)
  np.testing.assert_array_equal(
    kept(pruner, history[-1]), kept(packed, bits[-1])
  )


def test_a_second_ramp_waits_until_it_asks_for_less():
  pruner, history = run("gradual", "second")
  masks = [kept(pruner, at) for at in history]
  for before, after in zip(masks[:-1], masks[1:], strict=True):
    assert (after <= before).all()
  # Its ramp starts at 0 again, but nothing comes back.
  assert masks[4].sum() == masks[5].sum() == 36 and masks[-1].sum() == 14


def test_a_chain_survives_its_configuration():
  pruner = make((0, GRADUAL), (4, RIGL))
  config = json.loads(json.dumps(jaxpruner.config_from_updater(pruner)))
  again = jaxpruner.create_updater_from_config(config)
  assert again == pruner and hash(again) == hash(pruner)
  assert again != make((0, GRADUAL), (5, RIGL))


def test_a_chain_of_one_is_that_pruner():
  trainer = Trainer(
    jaxpruner.chain((0, make_updater("rigl"))), optax.adam(0.05, eps=1e-4)
  )
  at = trainer.start(make_params())
  for _ in range(STEPS):
    at = trainer.jitted(*at, make_batch())
  expected = reference_run("rigl")[-1]
  assert_identical(at[1].masks, expected[1].masks)


@pytest.mark.parametrize(
  "phases, reason",
  [
    ((), r"steps \[\]"),
    (((1, GRADUAL),), "must begin at 0"),
    (((0, GRADUAL), (0, RIGL)), "later than the one before"),
  ],
)
def test_phases_out_of_order_are_refused(phases, reason):
  with pytest.raises(ValueError, match=reason):
    make(*phases)


def test_phases_must_prune_the_same_leaves():
  fewer = {**RIGL, "filter_fn": lambda names, _p: names == ("in", "kernel")}
  pruner = make((0, GRADUAL), (4, fewer))
  with pytest.raises(ValueError, match=r"leaves out 'out/kernel'.*filter_fn"):
    pruner.init_state(make_params())
