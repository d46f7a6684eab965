"""One cell: the protocol, and the checks a cell must pass."""

import dataclasses
import functools

import compare_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.compare import (
  cell_run,
  networks,
  outcomes,
  stored_carry,
  tasks,
  training,
)
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.groups import costs_of


@functools.cache  # compiling costs far more than running
def parts(algorithm, seeds=2):
  settings = helpers.settings(seeds=seeds)
  chosen = Cell(algorithm, 0.8)
  task = networks.cell_task(chosen, settings)
  config = networks.updater_config(task, chosen)
  updater = jaxpruner.create_updater_from_config(config)
  data = networks.load_data("digits", "")
  built = training.build(
    task, updater, data, temperature=costs_of(chosen).temperature
  )
  keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
  return task, built, keys, data


@pytest.mark.quick
def test_all_algorithms_start_from_the_same_weights():
  _, built, keys, data = parts("dense")
  expected = built.start(keys, data).params
  for name in helpers.ALGORITHMS:
    _, built, keys, data = parts(name)
    carry = built.start(keys, data)

    def same(path, mine, theirs, masks=carry.masks):
      mask = dict(jax.tree_util.tree_flatten_with_path(masks)[0]).get(path)
      kept = np.ones(mine.shape, bool) if mask is None else np.asarray(mask) > 0
      np.testing.assert_array_equal(
        np.asarray(mine)[kept], np.asarray(theirs)[kept]
      )

    jax.tree_util.tree_map_with_path(same, carry.params, expected)


def test_batches_depend_on_seed_and_step_only():
  task = tasks.make_task("digits", helpers.TINY)
  data = networks.load_data("digits", "")
  key = jax.random.key(3)
  one = task.batches(data, key, 5)
  jax.tree.map(np.testing.assert_array_equal, one, task.batches(data, key, 5))
  for other in (
    task.batches(data, key, 6),
    task.batches(data, jax.random.key(4), 5),
  ):
    assert not np.array_equal(one["x"], other["x"])


def test_every_algorithm_trains_on_the_same_batches(monkeypatch):
  seen = {}

  def spy(name):
    def batches(self, data, key, step):
      batch = original(self, data, key, step)
      jax.debug.callback(
        lambda y, t: seen.setdefault(name, []).append((int(t), y.tolist())),
        batch["y"],
        step,
      )
      return batch

    return batches

  cls = tasks.task_class("digits")
  original = cls.batches
  for name in ("dense", "magnitude"):
    monkeypatch.setattr(cls, "batches", spy(name))
    _, built, keys, data = parts.__wrapped__(name, seeds=1)
    carry = built.start(keys, data)
    carry, *_ = built.train(carry, keys, data, 0, 6, 6)
    jax.block_until_ready(carry)
    jax.effects_barrier()
  assert sorted(seen["dense"]) == sorted(seen["magnitude"])
  assert len({t for t, _ in seen["dense"]}) == 6


@pytest.mark.parametrize("name", ["static_sparse"])
def test_seeds_batched_equal_seeds_one_by_one(name):
  _, built, keys, data = parts(name)
  carry, losses, _ = built.train(built.start(keys, data), keys, data, 0, 6, 6)
  for seed in range(2):
    key = keys[seed : seed + 1]
    alone, loss, _ = built.train(built.start(key, data), key, data, 0, 6, 6)
    np.testing.assert_allclose(loss[0], losses[seed], rtol=2e-5)
    pick = lambda x, seed=seed: np.asarray(x)[seed]
    for mine, all_of in zip(
      jax.tree.leaves(alone.masks), jax.tree.leaves(carry.masks), strict=True
    ):
      np.testing.assert_array_equal(mine[0], pick(all_of))


def test_seeds_get_masks_of_their_own():
  _, built, keys, data = parts("static_sparse")
  mask = jax.tree.leaves(built.start(keys, data).masks)[0]
  assert not np.array_equal(mask[0], mask[1])


def test_the_step_counter_stays_shared_between_seeds():
  # Batched, every mask would be recomputed at every step.
  _, built, keys, data = parts("magnitude")
  carry = built.start(keys, data)
  assert jaxpruner.find_state(carry.opt_state).count.shape == ()


def test_grasp_looks_at_outputs_divided_by_its_temperature():
  task, built, keys, data = parts("grasp")
  carry = built.start(keys, data)
  params = task.init(jax.random.fold_in(keys[0], 0))
  batch_key, _ = jax.random.split(jax.random.fold_in(keys[0], 2))
  batch = task.batches(data, batch_key, 0)

  def flow(weights):  # |gradient|² of the loss at temperature 200
    logp = jax.nn.log_softmax(task.apply(weights, batch["x"]) / 200)
    picked = jnp.take_along_axis(logp, batch["y"][:, None], 1)
    return -picked.mean()

  gradient = jax.grad(flow)
  free = jax.tree.map(lambda p: p.ndim > 1, params)  # biases stay dense
  along = jax.tree.map(lambda g, f: g * f, gradient(params), free)
  _, change = jax.jvp(gradient, (params,), (along,))
  missed = jax.tree.map(lambda w, h: np.asarray(w * h), params, change)
  missed = dict(jax.tree_util.tree_flatten_with_path(missed)[0])
  masks = jax.tree_util.tree_flatten_with_path(carry.masks)[0]
  kept = [missed[path][np.asarray(mask[0]) != 0] for path, mask in masks]
  gone = [missed[path][np.asarray(mask[0]) == 0] for path, mask in masks]
  least, most = np.concatenate(kept).min(), np.concatenate(gone).max()
  np.testing.assert_array_less(most, least + 1e-5 * abs(least) + 1e-12)


def test_the_small_dense_network_has_as_many_weights_as_the_sparse_one():
  for sparsity in (0.5, 0.8, 0.95):
    weights = 64 * 256 + 256 * 256 + 256 * 10
    biases = 256 + 256 + 10
    sparse = weights - round(sparsity * weights) + biases
    task = networks.with_width_for(tasks.make_task("digits"), sparsity)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    small = sum(x.size for x in jax.tree.leaves(shapes))
    assert abs(small - sparse) / sparse < 0.03


def run(name, emit=None, checkpoint=None):
  """Run a cell with the functions of `parts`, which are compiled already."""
  built = parts(name)[1]
  chosen, settings = Cell(name, 0.8), helpers.settings()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(training, "build", lambda *_args, **_options: built)
    return cell_run.run_cell(
      chosen, settings, emit or (lambda _: None), checkpoint
    )


@functools.cache
def trained():
  """Return (outcome, its chunks) of one small cell."""
  chunks = []
  return run("magnitude", chunks.append), chunks


def test_a_cell_realises_its_request_and_says_what_it_costs():
  found = trained()[0].record
  assert found.problem == ""
  np.testing.assert_allclose(found.realised, 0.8, atol=2e-3)
  assert found.inference_flops < 0.5 * found.inference_flops_dense
  assert found.training_flops < found.training_flops_dense
  assert found.bytes < found.bytes_dense
  assert len(found.metrics["accuracy"]) == 2
  assert found.notes == []
  _, built, keys, data = parts("magnitude")
  held = cell_run._held_bytes(built.start(keys, data), 2)
  assert found.training_bytes == held
  assert found.step_seconds > 0


@pytest.mark.parametrize("name", ["acdc", "granet", "mest"])
def test_training_flops_are_those_of_every_single_step(name):
  # Masks counted before each step, not at the ends of chunks; GraNet grows by
  # dense gradients at mask updates, MEST reads those of kept weights only.
  found = run(name).record
  task, built, keys, data = parts(name)
  config = networks.updater_config(task, Cell(name, 0.8))
  schedule = jaxpruner.create_updater_from_config(config).scheduler
  flops = jaxpruner.report.count_flops(
    task.apply,
    jax.eval_shape(task.init, jax.random.key(0)),
    task.example(data),
  )
  carry, expected = built.start(keys, data), 0.0
  for t in range(task.steps):
    masks = jax.device_get(carry.masks)
    kept = flops.total(jaxpruner.report.leaf_densities(masks))
    dense = name == "granet" and bool(schedule.is_mask_update_iter(t))
    expected += 2 * kept + (flops.total() if dense else kept)
    carry, *_ = built.train(carry, keys, data, t, 1, 2)
  assert found.training_flops == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
  "change, reason",
  [
    ({"realised": [0.8, 0.7]}, "0.7000 was realised, 0.8 requested"),
    ({"nonzero_pruned": 3}, "3 weights under the mask are not zero"),
    ({"metrics": {"accuracy": [1.0, float("nan")]}}, "diverged"),
    ({"prunable": 0}, "nothing was pruned"),
  ],
)
def test_a_cell_that_breaks_its_promise_fails(change, reason):
  task = tasks.make_task("digits", helpers.TINY)
  good = helpers.record("magnitude@0.8", [1.0, 1.0], leaves=3)
  chosen = Cell("magnitude", 0.8)
  assert outcomes.problem_of(good, task, chosen) == ""
  bad = dataclasses.replace(good, **change)
  assert reason in outcomes.problem_of(bad, task, chosen)


def test_a_pruner_that_misses_its_target_fails_the_cell(monkeypatch):
  make = jaxpruner.create_updater_from_config
  monkeypatch.setattr(
    jaxpruner,
    "create_updater_from_config",
    lambda config: make({**config, "sparsity": 0.6}),
  )
  settings = helpers.settings()
  found = cell_run.run_cell(Cell("static_sparse", 0.8), settings).record
  assert "was realised, 0.8 requested" in found.problem


class Kept:
  """A checkpoint in memory."""

  def __init__(self, arrays):
    self.arrays, self.aside = arrays, []

  def load(self):
    return self.arrays

  def save(self, arrays):
    self.arrays = arrays

  def set_aside(self, reason):
    self.aside.append(reason)


def test_a_restored_training_ends_in_the_same_bits():
  whole, chunks = trained()
  _, built, keys, data = parts("magnitude")
  carry = built.start(keys, data)
  length = -(-helpers.TINY["steps"] // cell_run.CHUNKS)
  cost = 0.0
  for chunk in chunks[:5]:
    carry, *_ = built.train(carry, keys, data, chunk.start, chunk.count, length)
  first = chunks[5].start
  saved = stored_carry.arrays_of(carry, [first, 1.0, cost, 0])
  later = []
  kept = Kept(saved)
  resumed = run("magnitude", later.append, kept)
  assert not kept.aside
  assert later == chunks[5:]
  assert resumed.record.metrics == whole.record.metrics
  for name in whole.arrays:
    np.testing.assert_array_equal(whole.arrays[name], resumed.arrays[name])


def test_two_to_four_sparsity_is_exact():
  settings = helpers.settings(type="2:4", sparsity=(0.5,), seeds=1)
  outcome = cell_run.run_cell(Cell("static_sparse", 0.5, "2:4"), settings)
  assert outcome.record.problem == ""
  # 8 of the 640 weights of the tiny network lie between its ends.
  assert outcome.record.prunable == 8 * 8
  dense_ends, biases = 64 * 8 + 8 * 10, 8 + 8 + 10
  assert outcome.record.weights == dense_ends + 8 * 8 / 2 + biases
  mask = outcome.arrays["mask:layer_1/kernel"]
  assert (mask.reshape(2, 4, -1).sum(1) == 2).all()
  assert outcome.record.notes == [
    "layer_0/kernel stays dense: the first layer",
    "layer_2/kernel stays dense: the output layer",
  ]
  assert "mask:layer_0/kernel" not in outcome.arrays


def test_devices_share_a_batch_and_agree_with_one():
  settings = helpers.settings(seeds=1)
  chosen = Cell("dense", 0.0)
  one, eight = [], []
  cell_run.run_cell(chosen, settings, one.append)
  spread = dataclasses.replace(settings, devices=8)
  cell_run.run_cell(chosen, spread, eight.append)
  for a, b in zip(one[:4], eight[:4], strict=True):
    np.testing.assert_allclose(a.loss, b.loss, rtol=1e-4)


@functools.cache
def started():
  """Return a training before its first step, and that as stored arrays."""
  _, built, keys, data = parts("magnitude")
  carry = built.start(keys, data)
  return carry, stored_carry.arrays_of(carry, [2, 1.0, 1.0, 0])


@pytest.mark.parametrize(
  "change, reason",
  [
    ({"progress": np.array([99.0, 1, 1, 0])}, "step 99 of 24"),
    ({"progress": np.array([np.nan, 1, 1, 0])}, "four numbers"),
    ({"leaf:0": np.zeros(3)}, "need float32"),
    ({"more": np.zeros(3)}, "arrays"),
  ],
)
def test_a_readable_but_wrong_checkpoint_is_refused(change, reason):
  carry, saved = started()
  steps = helpers.TINY["steps"]
  _, progress = stored_carry.restore(carry, saved, steps)
  assert progress == [2, 1, 1, 0]
  with pytest.raises(stored_carry.CheckpointError, match=reason):
    stored_carry.restore(carry, saved | change, steps)


def test_a_refused_checkpoint_is_set_aside_and_the_training_begins_anew():
  _, saved = started()
  change, reason = {"progress": np.array([99.0, 1, 1, 0])}, "step 99 of 24"
  kept = Kept(saved | change)
  later = []
  found = run("magnitude", later.append, kept)
  assert reason in kept.aside[0]
  assert later == trained()[1]
  assert found.record.metrics == trained()[0].record.metrics
