"""Rows after training: from the dense row's own weights, at their cost."""

import functools
import pathlib
import tempfile

import compare_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparsity_distributions
from jaxpruner.compare import (
  after_run,
  cells,
  executors,
  files,
  groups,
  networks,
  plan,
  settings,
  tasks,
)
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.records import Failure

NAMES = ("after:magnitude", "after:wanda", "after:sparsegpt")


def chosen(**changes):
  return helpers.settings(algorithms=NAMES, sparsity=(0.5,), **changes)


@functools.cache
def computed(name, kind="", share=""):
  """Return (event, arrays, dense weights of all seeds) of a cell."""
  shares = (share,) if share else ()
  types = (kind,) if kind else ()
  picked = chosen(distribution=shares, type=types)
  with tempfile.TemporaryDirectory() as folder:
    path, events = pathlib.Path(folder), []
    (path / "weights").mkdir()
    dense = dense_files()
    for file, content in dense.items():
      (path / "weights" / file).write_bytes(content)
    cell = Cell(name, 0.5, kind, share)
    executors.compute(cell, picked, path, events.append)
    assert not isinstance(events[-1], Failure), events[-1]
    arrays = files.unpack_arrays(path / "weights" / f"{cell.id}.npz")
    every = files.unpack_arrays(path / "weights" / "dense.all.npz")
  return events[-1], arrays, every


@functools.cache
def dense_files():
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    executors.compute(cells.DENSE, chosen(), path, lambda _: None)
    return {f.name: f.read_bytes() for f in (path / "weights").iterdir()}


def test_magnitude_after_training_keeps_the_largest_of_the_dense_weights():
  record, arrays, every = computed("after:magnitude")
  assert record.problem == ""
  np.testing.assert_allclose(record.realised, 0.5, atol=2e-3)
  layers = [f"layer_{i}/kernel" for i in range(3)]
  for name in layers:
    dense, mask = every[f"param:{name}"][0], arrays[f"mask:{name}"]
    np.testing.assert_array_equal(
      arrays[f"param:{name}"], np.where(mask, dense, 0)
    )
    kept, gone = np.abs(dense[mask == 1]), np.abs(dense[mask == 0])
    assert not gone.size or kept.min() >= gone.max()


def test_all_seeds_of_the_dense_row_are_stored_and_pruned():
  record, _, every = computed("after:magnitude")
  assert every["param:layer_0/kernel"].shape[0] == 2
  assert len(record.metrics["accuracy"]) == 2


@pytest.mark.parametrize("name", ["after:wanda", "after:sparsegpt"])
def test_a_solver_is_priced_at_the_dense_training_and_its_calibration(name):
  record = computed(name)[0]
  magnitude = computed("after:magnitude")[0]
  assert magnitude.training_flops == magnitude.training_flops_dense
  assert record.training_flops > magnitude.training_flops
  forward = record.inference_flops_dense
  extra = record.training_flops - record.training_flops_dense
  if name == "after:wanda":
    assert extra == 8 * forward
  else:  # second moments of every leaf: 2 n d², then d³ + 2 d² k
    rows = 8 * helpers.TINY["batch_size"]
    by_hand = 8 * forward
    for inputs, outputs in ((64, 8), (8, 8), (8, 10)):
      by_hand += 2 * rows * inputs**2 + inputs**3 + 2 * inputs**2 * outputs
    assert extra == pytest.approx(by_hand)


def test_lamp_decides_the_leaves_by_the_trained_weights():
  _, arrays, every = computed("after:magnitude", "", "lamp")
  params = {
    f"layer_{i}": {"kernel": jnp.asarray(every[f"param:layer_{i}/kernel"][0])}
    for i in range(3)
  }
  targets = sparsity_distributions.lamp(params, 0.5)
  for i in range(3):
    mask = arrays[f"mask:layer_{i}/kernel"]
    target = targets[f"layer_{i}"]["kernel"]
    assert 1 - mask.mean() == pytest.approx(target, abs=1 / mask.size)


def test_two_to_four_after_training_leaves_the_ends_dense():
  record, arrays, _ = computed("after:wanda", "2:4")
  assert record.problem == "" and len(record.notes) == 2
  mask = arrays["mask:layer_1/kernel"]
  np.testing.assert_array_equal(mask.reshape(2, 4, 8).sum(1), 2)


def test_a_row_without_its_dense_row_fails_in_words(tmp_path):
  events = []
  executors.compute(Cell("after:wanda", 0.5), chosen(), tmp_path, events.append)
  assert isinstance(events[-1], Failure)
  assert "the dense row has no trained weights" in events[-1].problem


def test_dense_rows_come_first_and_before_during_and_after_share_a_table():
  picked = helpers.settings(
    algorithms=("magnitude", "after:wanda"), sparsity=(0.5,)
  )
  wanted = plan.cells_of(picked)
  first, after = executors.in_order(wanted)
  assert cells.DENSE in first and [c.id for c in after] == ["after%3Awanda@0.5"]
  assert groups.group("after:wanda").order > groups.group("rigl").order


@pytest.mark.parametrize(
  "change, reason",
  [
    ({"algorithms": ("after:wander",)}, "did you mean 'after:wanda'"),
    ({"algorithms": ("after:wanda{dampnig=1}",)}, "did you mean 'damping'"),
    ({"algorithms": ("after:wanda{calibration=0}",)}, "at least one"),
  ],
)
def test_a_wrong_row_is_named(change, reason):
  with pytest.raises(ValueError, match=reason):
    picked = helpers.settings(**change)
    settings.check_names(picked)
    plan.plan(picked)


def test_owl_and_lamp_need_a_trained_network():
  picked = helpers.settings(
    algorithms=("rigl", "after:wanda"), distribution=("erk", "owl")
  )
  made = plan.plan(picked)
  found = [c.id for c in made.cells if c.distribution == "owl"]
  assert found == ["after%3Awanda@0.8+distribution=owl"]
  assert made.notes == [
    "No row for rigl with owl: owl reads a trained network; use it with "
    "after:wanda and the like"
  ]


def test_a_structure_that_no_solver_keeps_has_no_row():
  kinds = ("unstructured", "2:4", "8x8", "channels")
  picked = helpers.settings(
    algorithms=("after:wanda",), sparsity=(0.5,), type=kinds
  )
  made = plan.plan(picked)
  found = [c.type for c in made.cells if c.name == "after:wanda"]
  assert found == ["", "2:4", "8x8"]
  (note,) = made.notes
  assert note.startswith("No row for after:wanda with channels: ")
  assert "with an algorithm that trains" in note


def test_a_dense_leaf_outside_of_products_is_not_named_to_a_solver():
  task = tasks.make_task("cifar10-vit", {"width": 8, "depth": 1, "heads": 2})
  params = jax.eval_shape(task.init, jax.random.key(0))
  assert "positions" in task.pruning["custom_sparsity_map"]
  cell = Cell("after:wanda", 0.5, "", "erk")
  dense = {"patches/kernel": "the first layer"}
  kernels = ("patches/kernel", "head/kernel")
  found = after_run._shares(cell, task, dense, params, kernels)
  assert found["custom_sparsity_map"] == {"patches/kernel": None}


def test_calibration_uses_the_first_training_batches():
  task = networks.cell_task(cells.DENSE, chosen())
  data = networks.load_data("digits", "", helpers.TINY)
  found = after_run.calibration_inputs(task, data, 1, 3)
  key, _ = jax.random.split(jax.random.fold_in(jax.random.key(1), 2))
  for step, inputs in enumerate(found):
    expected = task.batches(data, key, step)["x"]
    np.testing.assert_array_equal(inputs, expected)
