"""Rows of `compare` at kept size: the masked row's training, in less memory."""

import compare_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.compare import cell_run, kept_training, networks, tasks, training
from jaxpruner.compare.cells import Cell

SLOW = pytest.mark.slow  # RigL takes every path of the other two
NAMES = (
  pytest.param("static_sparse", marks=SLOW),
  pytest.param("set", marks=SLOW),
  "rigl",
)


def built_of(name):
  """Return the training of a row, and its data."""
  cell, settings = Cell(name, 0.9), helpers.settings(seeds=2)
  task = networks.cell_task(cell, settings)
  config = networks.updater_config(task, cell)
  updater = jaxpruner.create_updater_from_config(config)
  data = networks.load_data("digits", "")
  return training.build(task, updater, data), data


def steps_of(name, number=4):
  """Masks and losses of the first steps, one seed per row."""
  keys = jax.vmap(jax.random.key)(jnp.arange(2))
  built, data = built_of(name)
  carry = built.start(keys, data)
  masks, losses = [jax.device_get(carry.masks)], []
  for step in range(number):
    carry, loss, _ = built.train(carry, keys, data, step, 1, 1)
    masks.append(jax.device_get(carry.masks))
    losses.append(np.asarray(loss)[:, 0])
  return masks, losses


@pytest.mark.parametrize("name", NAMES)
def test_a_kept_row_trains_as_its_masked_row(name):
  (masks, losses) = steps_of(name)
  (their_masks, their_losses) = steps_of(name + "{storage=kept}")
  jax.tree.map(np.testing.assert_array_equal, masks, their_masks)
  np.testing.assert_allclose(losses, their_losses, rtol=1e-5)


def test_a_kept_row_takes_less_memory_and_measures_its_steps():
  settings = helpers.settings(seeds=1)
  kept = cell_run.run_cell(Cell("set{storage=kept}", 0.9), settings).record
  assert not kept.problem and kept.step_seconds > 0
  keys = jax.random.split(jax.random.key(0), 1)

  def held(name):
    built, data = built_of(name)
    return cell_run._held_bytes(built.start(keys, data), 1)

  assert kept.training_bytes < 0.5 * held("dense")
  assert held("dense") < held("set")


def test_a_task_that_cannot_train_at_kept_size_says_why():
  task = tasks.make_task("digits", helpers.TINY)
  with pytest.raises(ValueError, match="a teacher's loss.*leave out storage"):
    kept_training.check(task, None, taught=True)
