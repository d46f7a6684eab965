"""Axes: types, distributions, options of algorithms and of the task."""

import argparse

import compare_helpers as helpers
import jax
import jax.numpy as jnp
import pytest

import jaxpruner
from jaxpruner.compare import (
  command,
  exports,
  groups,
  networks,
  page,
  plan,
  spelling,
  structure,
  table,
  tasks,
)
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.run_folder import RunFolder, RunInfo

pytestmark = pytest.mark.quick


def chosen(*words):
  parser = argparse.ArgumentParser()
  command.add_arguments(parser)
  return command.settings_from(parser.parse_args(words))


def ids(*words):
  return [cell.id for cell in plan.cells_of(chosen(*words))]


def test_types_and_distributions_make_every_combination_that_can_be():
  found = ids(
    "--type=unstructured,2:4,8x8",
    "--distribution=erk,uniform",
    "--algorithms=rigl,global_magnitude",
    "--sparsity=0.5,0.8",
  )
  assert found == [
    "dense",
    "small_dense@0.5",
    "rigl@0.5+distribution=erk",
    "rigl@0.5+distribution=uniform",
    "rigl@0.5+type=2%3A4+distribution=uniform",
    "rigl@0.5+type=8x8+distribution=erk",
    "rigl@0.5+type=8x8+distribution=uniform",
    "global_magnitude@0.5",
    "small_dense@0.8",
    "rigl@0.8+distribution=erk",
    "rigl@0.8+distribution=uniform",
    "rigl@0.8+type=8x8+distribution=erk",
    "rigl@0.8+type=8x8+distribution=uniform",
    "global_magnitude@0.8",
  ]


def test_a_combination_that_cannot_be_is_said():
  settings = chosen("--type=unstructured,8x8", "--algorithms=global_magnitude")
  (note,) = plan.plan(settings).notes
  assert note.startswith("No row for global_magnitude with 8x8: ")
  assert "compares single weights" in note


def test_options_of_the_task_are_axes_with_baselines_of_their_own():
  found = ids(
    "--set=width=8,16", "--optimizer=adam,sgd", "--algorithms=set",
    "--sparsity=0.8", "--set=batch_size=8",
  )  # fmt: skip
  assert len(found) == 4 * 3
  assert found[0] == "dense+optimizer=adam,width=8"
  assert "small_dense@0.8+optimizer=sgd,width=16" in found
  settings = chosen("--set=width=8,16", "--optimizer=adam,sgd")
  task = networks.cell_task(
    Cell("set", 0.8, options="optimizer=sgd,width=16"), settings
  )
  assert task.width == 16
  params = {"w": jnp.ones((2, 2))}
  kinds = {
    name: jax.tree.structure(
      plan.base_task(settings, f"optimizer={name},width=8")
      .optimizer()
      .init(params)
    )
    for name in ("adam", "sgd")
  }
  assert kinds["adam"] != kinds["sgd"]


def test_ids_are_unique_exact_and_file_names():
  settings = chosen(
    "--type=unstructured,8x8,channels,block_4,4",
    "--distribution=erk,uniform",
    "--set=width=8,16",
    "--algorithms=rigl,rigl{drop_fraction=0.1},rigl{drop_fraction=0.10001}",
    "--sparsity=0.8,0.80000001",
  )
  found = plan.cells_of(settings)
  assert len({cell.id for cell in found}) == len(found) == 2 + 2 * 2 * 25
  assert all("/" not in cell.id and ":" not in cell.id for cell in found)
  assert max(len(cell.id) for cell in found) < 200


@pytest.mark.parametrize(
  "words, reason",
  [
    (["--algorithms=rigl{drop_fractoin=1}"], "did you mean 'drop_fraction'"),
    (["--algorithms=rigl{drop_fraction}"], "write NAME=VALUE"),
    (["--algorithms=rigl{"], "write NAME or NAME{OPTION=VALUE"),
    (["--algorithms=rigl{a=1,a=2}"], "'a' is given twice"),
    (["--algorithms=rigl{sparsity=0.3}"], "use --sparsity"),
    (["--algorithms=rigl{sparsity_type=2:4}"], "use --type"),
    (["--algorithms=rigle{a=1}"], "did you mean 'rigl'"),
    (["--type=2:4,9y9"], "'9y9'.*'unstructured' and 'channels'"),
    (["--type=2:4", "--sparsity=0.8"], "removes exactly 0.5; add it"),
    (["--distribution=erc"], "did you mean 'erk'"),
    (["--optimizer=addam"], "did you mean 'adam"),
    (["--optimizer=sgd", "--task=fed-fashion"], "optimizer of its own"),
    (["--set=widht=1,2"], "did you mean 'width'"),
    (["--set=width=1,x"], "--set width=x"),
    (["--set=width="], "write OPTION=VALUE"),
  ],
)
def test_a_wrong_axis_is_named_with_what_is_valid(words, reason):
  with pytest.raises(ValueError, match=reason):
    chosen(*words)


def test_a_type_adds_the_sparsity_that_it_implies():
  assert chosen("--type=unstructured,2:4").sparsity == (0.5, 0.8, 0.95)
  assert chosen("--type=2:4,1:4").sparsity == (0.5, 0.75)


def test_options_of_an_algorithm_reach_its_updater():
  task = tasks.make_task("digits", helpers.TINY)
  text = spelling.canonical("magnitude{schedule=one_shot, update_start_step=6}")
  assert text == "magnitude{schedule=one_shot,update_start_step=6}"
  config = networks.updater_config(task, Cell(text, 0.8))
  made = jaxpruner.create_updater_from_config(config)
  assert type(made.scheduler).__name__ == "OneShotSchedule"
  assert groups.group(text) == groups.group("magnitude")


def test_a_leaf_that_a_structure_does_not_fit_stays_dense():
  shapes = {"conv_0": (3, 3, 1, 16), "conv_1": (3, 3, 16, 32), "out": (32, 10)}
  found = structure.dense_leaves(
    jaxpruner.NByM(2, 4), 0.5, shapes, list(shapes), all_layers=True
  )
  assert found == {"conv_0": "axis -2 has length 1, not divisible by m=4"}
  ends = structure.dense_leaves(jaxpruner.NByM(2, 4), 0.5, shapes, list(shapes))
  assert ends == {"conv_0": "the first layer", "out": "the output layer"}
  unstructured = jaxpruner.Unstructured()
  assert not structure.dense_leaves(unstructured, 0.5, shapes, list(shapes))
  # With nothing between them, the ends are pruned.
  two = {"in": (8, 8), "out": (8, 8)}
  assert not structure.dense_leaves(jaxpruner.Channel(), 0.5, two, list(two))


AXES = ("--type=unstructured,2:4", "--algorithms=magnitude", "--sparsity=0.5")


def _tiny():
  return [f"--set={key}={value}" for key, value in helpers.TINY.items()]


def axes_folder(path, *words):
  """Write a run folder of all cells, with records made by hand."""
  settings = chosen(*words)
  task = plan.base_task(settings)
  listed = [groups.listed(cell, task) for cell in plan.cells_of(settings)]
  info = RunInfo(
    settings=settings.to_json(),
    versions={"jax": "1"},
    cells=[[*e.cell, e.distribution, *e.group] for e in listed],
    metric="accuracy",
    format=3,
  )
  with RunFolder(path) as run:
    run.open_run(info)
    for i, (cell, *_) in enumerate(listed):
      record = helpers.record("x@0.5", [80.0 + i, 81.0 + 2 * i])
      changes = {"cell": cell.id, "algorithm": cell.algorithm}
      changes["notes"] = ["a stays dense: why"] if cell.type == "2:4" else []
      run.append(type(record)(**(record.to_json() | changes)))
  return settings


def test_the_table_has_columns_for_the_axes_and_pairs_with_its_own_dense(
  tmp_path,
):
  path = str(tmp_path / "run")
  axes_folder(path, *AXES, "--set=width=8,16", "--seeds=2")
  rows = table.rows(path)
  labels = [row.label for row in rows]
  assert labels == [
    "dense width=8",
    "dense width=16",
    "small_dense width=8",
    "small_dense width=16",
    "magnitude unstructured width=8",
    "magnitude 2:4 width=8",
    "magnitude unstructured width=16",
    "magnitude 2:4 width=16",
  ]
  values = {row.label: row for row in rows}
  for width in (8, 16):
    mine = values[f"magnitude 2:4 width={width}"]
    dense = values[f"dense width={width}"]
    gap = mine.metric.mean - dense.metric.mean
    assert mine.difference.mean == pytest.approx(gap)
  text = exports.to_csv(rows)
  assert "structure,distribution,options" in text
  assert "2:4,uniform,width=16" in text and "a stays dense: why" in text
  assert "| structure | distribution | options |" in exports.to_markdown(rows)


def test_a_report_of_two_runs_keeps_the_pictures_of_both(tmp_path):
  paths = [str(tmp_path / name) for name in ("one", "two")]
  for path in paths:
    axes_folder(path, *AXES, "--seeds=2")
  page.write_report(paths, str(tmp_path / "both"))
  pictures = {p.name for p in (tmp_path / "both").glob("*metric.png")}
  assert pictures == {"1-digits-metric.png", "2-digits-metric.png"}
  text = (tmp_path / "both" / "report.html").read_text()
  assert text.count("2:4: a stays dense: why.") == 2


def test_a_row_more_leaves_the_other_programs_as_they_are():
  """The program of a cell does not know which other cells there are."""

  def program(*words):
    settings = chosen("--sparsity=0.5", "--seeds=1", *_tiny(), *words)
    cell = Cell("magnitude", 0.5)
    assert cell in plan.cells_of(settings)
    task = networks.cell_task(cell, settings)
    return networks.updater_config(
      task, cell, networks.dense_leaves(task, cell, [], settings)
    )

  alone = program("--algorithms=magnitude")
  among = program("--algorithms=magnitude,rigl", "--type=unstructured,8x8")
  assert alone == among


@pytest.mark.slow
def test_a_killed_run_with_axes_ends_in_the_same_table(tmp_path):
  words = ("--type=unstructured,2:4", "--sparsity=0.5", "--jobs=1")
  assert helpers.run(tmp_path / "whole", *words).returncode == 0
  expected = helpers.untimed(tmp_path / "whole")
  for i, seconds in enumerate((6, 9, 12)):
    helpers.kill_at(tmp_path / f"{i}", seconds, *words)
    assert helpers.run(tmp_path / f"{i}", *words).returncode == 0
    assert helpers.untimed(tmp_path / f"{i}") == expected
