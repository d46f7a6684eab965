"""Rows that start from a checkpoint, a teacher or another row's masks."""

import functools
import pathlib
import tempfile

import compare_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse
from jaxpruner.compare import (
  cell_run,
  cells,
  distillation,
  executors,
  files,
  fingerprint,
  networks,
  plan,
  pretrained,
)
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.records import Failure

SHUFFLED = "retrain:imp{mask=shuffled,weights=new}"
NAMES = (
  "static_sparse{distill=0.5}",
  "imp",
  "retrain:imp",
  SHUFFLED,
)


@functools.cache
def computed():
  """Return (cell id -> record, cell id -> arrays of all seeds)."""
  chosen = helpers.settings(algorithms=NAMES, sparsity=(0.5,))
  with tempfile.TemporaryDirectory() as folder:
    path, events = pathlib.Path(folder), []
    wanted = [c for c in plan.cells_of(chosen) if c.name != "small_dense"]
    for group in executors.in_order(wanted):
      executors.serial(group, chosen, path, events.append)
    for event in events:
      assert not isinstance(event, Failure), event
    found = {e.cell: e for e in events if hasattr(e, "metrics")}
    weights = path / "weights"
    arrays = {
      f.name.removesuffix(".npz"): files.unpack_arrays(f)
      for f in weights.glob("*.npz")
    }
  return found, arrays


def test_rows_that_need_others_come_after_them():
  chosen = helpers.settings(algorithms=NAMES, sparsity=(0.5,))
  first, second = executors.in_order(plan.cells_of(chosen)[::-1])
  assert {c.name for c in first} == {"dense", "small_dense", "imp"}
  assert {c.name for c in second} == {"static_sparse", "retrain:imp"}


def test_a_row_that_finds_masks_is_added_by_itself():
  chosen = helpers.settings(
    algorithms=("retrain:rigl{drop_fraction=0.1}",), sparsity=(0.5,)
  )
  names = [cell.algorithm for cell in plan.cells_of(chosen)]
  assert names[2:] == [
    "rigl{drop_fraction=0.1}",
    "retrain:rigl{drop_fraction=0.1}",
  ]


def test_masks_trained_again_are_those_of_the_other_row():
  _, arrays = computed()
  theirs, ours = arrays["imp@0.5"], arrays["retrain%3Aimp@0.5"]
  masks = [name for name in theirs if name.startswith("mask:")]
  assert masks
  for name in masks:
    np.testing.assert_array_equal(ours[name], theirs[name])
    param = ours[name.replace("mask:", "param:")]
    assert np.all(param[ours[name] == 0] == 0)


def test_a_shuffled_mask_keeps_as_many_weights_in_each_leaf():
  records, arrays = computed()
  shuffled = Cell(SHUFFLED, 0.5).id
  theirs, ours = arrays["imp@0.5"], arrays[shuffled]
  for name in (name for name in theirs if name.startswith("mask:")):
    assert ours[name].sum() == theirs[name].sum()
  name = "mask:layer_0/kernel"
  assert not np.array_equal(ours[name], theirs[name])
  assert not records[shuffled].problem


def test_a_retrained_row_pays_for_the_search_of_its_mask():
  records, _ = computed()
  found, again = records["imp@0.5"], records["retrain%3Aimp@0.5"]
  own = again.training_flops - found.training_flops
  assert 0 < own < again.training_flops_dense
  assert own == pytest.approx(
    3 * again.inference_flops * helpers.TINY["steps"], rel=1e-3
  )


def test_a_taught_row_pays_for_its_teacher_and_for_asking_it():
  records, _ = computed()
  taught = records["static_sparse{distill=0.5}@0.5"]
  steps = 3 * taught.inference_flops * helpers.TINY["steps"]
  dense = taught.training_flops_dense
  assert taught.training_flops == pytest.approx(steps + dense + dense / 3)


def run(name, **changes):
  chosen = helpers.settings(algorithms=(name,), sparsity=(0.5,), **changes)
  return cell_run.run_cell(Cell(name, 0.5), chosen)


def test_the_divergence_is_that_of_numpy():
  rng = np.random.default_rng(0)
  ours, theirs = rng.normal(size=(2, 5, 3))
  soft = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
  p, q = soft(theirs / 3), soft(ours / 3)
  expected = 9 * np.mean(np.sum(p * np.log(p / q), -1))
  found = distillation.Distillation(0.5, 3.0).divergence(
    jnp.asarray(ours), jnp.asarray(theirs)
  )
  assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_the_mean_of_the_labels_and_the_teachers():
  task = networks.cell_task(cells.DENSE, helpers.settings())
  student, teacher = (task.init(jax.random.key(i)) for i in (1, 2))
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(6, 64)), jnp.float32)
  batch = {"x": x, "y": jnp.arange(6)}
  plain = task.loss(student, batch, jax.random.key(0))
  mix = distillation.Distillation(0.25)
  found = mix.mixed(task, plain, student, (), batch, (teacher, ()))
  apart = mix.divergence(task.apply(student, x), task.apply(teacher, x))
  assert float(found) == pytest.approx(float(0.75 * plain + 0.25 * apart))
  slope = jax.grad(
    lambda t: mix.mixed(task, plain, student, (), batch, (t, ()))
  )(teacher)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(slope))


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("magnitude{distill=0}", "above 0"),
    ("magnitude{distill=soft}", "above 0"),
    ("magnitude{distill_temperature=2}", "needs distill"),
    ("retrain:imp{mask=mixed}", "same or shuffled"),
    ("retrain:imp{masks=same}", "masks"),
    ("retrain:after:wanda", "not a row that trains"),
    ("after:wanda{distill=0.5}", "no option 'distill'"),
  ],
)
def test_wrong_options_are_refused_in_words(name, words):
  with pytest.raises(ValueError, match=words):
    plan.plan(helpers.settings(algorithms=(name,)))


def test_a_task_without_inputs_cannot_be_taught():
  with pytest.raises(ValueError, match="inputs"):
    plan.plan(
      helpers.settings(
        task="dqn-minatar", algorithms=("rigl{distill=0.5}",), options={}
      )
    )


def checkpoint(path, kind, width=8):
  """Store weights of the tiny task, in a kind of file; return them."""
  task = networks.cell_task(cells.DENSE, helpers.settings())
  params = jax.device_get(task.init(jax.random.key(7)))
  if kind == "npz":
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    named = {".".join(k.key for k in p): leaf for p, leaf in flat}
    np.savez(path, **{f"params.{name}": leaf for name, leaf in named.items()})
  elif kind == "safetensors":
    sparse.save(path, params)
  else:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as saver:
      saver.save(path.absolute(), {"params": params, "step": np.asarray(3)})
  return params


@pytest.mark.parametrize("kind", ["npz", "safetensors", "orbax"])
def test_every_kind_of_checkpoint_is_read(kind, tmp_path):
  path = tmp_path / ("model" if kind == "orbax" else f"model.{kind}")
  params = checkpoint(path, kind)
  task = networks.cell_task(cells.DENSE, helpers.settings())
  found, state = pretrained.read(str(path), task)
  assert state is None
  jax.tree.map(np.testing.assert_array_equal, found, params)


def test_every_seed_of_every_row_starts_from_the_checkpoint(tmp_path):
  path = tmp_path / "model.npz"
  params = checkpoint(path, "npz")
  # A learning rate of zero: what comes out is what went in.
  options = helpers.TINY | {"steps": 2, "learning_rate": 0.0}
  made = run("static_sparse", checkpoint=str(path), options=options)
  kernel = params["layer_1"]["kernel"]
  mask = made.arrays["mask:layer_1/kernel"]
  np.testing.assert_array_equal(
    made.arrays["param:layer_1/kernel"], np.where(mask, kernel, 0)
  )


def test_a_checkpoint_leaves_no_narrower_baseline(tmp_path):
  checkpoint(tmp_path / "model.npz", "npz")
  chosen = helpers.settings(checkpoint=str(tmp_path / "model.npz"))
  assert "small_dense" not in {c.name for c in plan.cells_of(chosen)}
  assert any("--init" in note for note in fingerprint.notes_of(chosen))


def test_checkpoints_that_do_not_fit_are_refused_in_words(tmp_path):
  path = tmp_path / "model.npz"
  params = checkpoint(path, "npz")
  task = networks.cell_task(cells.DENSE, helpers.settings())
  wide = networks.cell_task(
    cells.DENSE, helpers.settings(options=helpers.TINY | {"width": 9})
  )
  with pytest.raises(ValueError, match="--set width"):
    pretrained.read(str(path), wide)
  np.savez(tmp_path / "part.npz", **{"layer_0.kernel": np.ones((64, 8))})
  with pytest.raises(ValueError, match=r"has no 'layer_0/bias'"):
    pretrained.read(str(tmp_path / "part.npz"), task)
  with pytest.raises(ValueError, match="--init"):
    pretrained.read(str(tmp_path / "absent.npz"), task)
  bad = {f"layer_{i}.bias": params[f"layer_{i}"]["bias"] for i in range(3)}
  bad |= {
    f"layer_{i}.kernel": params[f"layer_{i}"]["kernel"] + np.nan
    for i in range(3)
  }
  np.savez(tmp_path / "nan.npz", **bad)
  with pytest.raises(ValueError, match="not finite"):
    pretrained.read(str(tmp_path / "nan.npz"), task)


def test_another_checkpoint_is_another_run(tmp_path):
  one, two = tmp_path / "one.npz", tmp_path / "two.npz"
  checkpoint(one, "npz")
  two.write_bytes(one.read_bytes() + b"\0")
  assert pretrained.digest(str(one)) != pretrained.digest(str(two))
