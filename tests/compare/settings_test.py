"""Settings: what is refused, what is filled in, what is listed."""

import compare_helpers as helpers
import numpy as np
import pytest

import jaxpruner
from jaxpruner.compare import cells, command, groups, plan, tasks
from jaxpruner.compare import settings as settings_lib
from jaxpruner.compare.settings import ComparisonSettings


@pytest.mark.quick
def test_the_default_cells_are_the_papers_algorithms():
  found = {cell.algorithm for cell in plan.cells_of(ComparisonSettings())}
  assert found == {*cells.BASELINES, *groups.DEFAULT}


@pytest.mark.quick
def test_all_names_every_registered_algorithm_that_fits():
  settings = ComparisonSettings(algorithms=("all",))
  found = {cell.algorithm for cell in plan.cells_of(settings)}
  assert found == {*cells.BASELINES, *groups.fitting_algorithms()}
  assert "no_prune" not in found


def test_a_newly_registered_algorithm_is_enrolled(monkeypatch):
  class Mine(jaxpruner.MagnitudePruning):
    """Keep the largest."""

  from jaxpruner import api

  monkeypatch.setitem(api._REGISTRY, "mine", Mine)
  assert cells.Cell("mine", 0.8) in plan.cells_of(ComparisonSettings())


@pytest.mark.parametrize(
  "change, reason",
  [
    ({"task": "digit"}, "did you mean 'digits'"),
    ({"algorithms": ("rigle",)}, "did you mean 'rigl'"),
    ({"sparsity": (1.0,)}, "strictly between 0 and 1"),
    ({"sparsity": (80.0,)}, "0.8 removes 80 %"),
    ({"sparsity": ()}, "--sparsity is empty"),
    ({"seeds": 0}, "at least one"),
    ({"devices": 0}, "at least one"),
    ({"options": {"widht": 3}}, "no option 'widht'"),
  ],
)
def test_nonsense_is_refused_with_a_cure(change, reason):
  with pytest.raises(ValueError, match=reason):
    settings_lib.check_names(ComparisonSettings(**change))


def test_settings_survive_json():
  settings = helpers.settings(type="2:4", imports=("json",))
  assert settings_lib.from_json(settings.to_json()) == settings
  assert (
    settings_lib.from_json(settings.to_json()).digest() == settings.digest()
  )


def test_a_config_file_gives_way_to_options(tmp_path):
  path = tmp_path / "run.toml"
  path.write_text('task = "digits"\nseeds = 7\nsparsity = [0.5]\n')
  args = parse("--config", str(path), "--seeds", "2", "--steps", "9")
  settings = command.settings_from(args)
  assert settings.seeds == 2
  assert settings.sparsity == (0.5,)
  assert settings.options == {"steps": 9}
  path.write_text("seed = 7\n")
  with pytest.raises(ValueError, match="did you mean 'seeds'"):
    command.settings_from(args)
  path.unlink()
  with pytest.raises(ValueError, match="No such file"):
    command.settings_from(args)
  path.write_text("seeds = \n")
  with pytest.raises(ValueError, match="not valid TOML"):
    command.settings_from(args)


def test_a_type_that_dictates_its_sparsity_sets_it():
  assert command.settings_from(parse("--type", "2:4")).sparsity == (0.5,)
  assert command.settings_from(parse("--type", "1:4")).sparsity == (0.75,)
  with pytest.raises(ValueError, match="--type '4:2'.*n=4 exceeds m=2"):
    command.settings_from(parse("--type", "4:2"))
  with pytest.raises(ValueError, match="N:M keeps N of M"):
    command.settings_from(parse("--type", "4:4"))


def parse(*words):
  import argparse

  parser = argparse.ArgumentParser()
  command.add_arguments(parser)
  return parser.parse_args(words)


def test_the_list_names_every_task_and_algorithm(capsys):
  assert command.run(parse("--list")) == 0
  text = capsys.readouterr().out
  for name in tasks.TASKS:
    assert name in text
  for name in groups.fitting_algorithms():
    assert name in text


def test_groups_never_mix_budgets():
  assert groups.group("magnitude") != groups.group("rigl")
  assert groups.group("static_sparse") != groups.group("rigl")
  assert groups.group("dense") == groups.group("small_dense")


@pytest.mark.parametrize(
  "text, reason",
  [
    ('seeds = "3"', "--seeds '3': must be a whole number"),
    ("seeds = true", "--seeds True"),
    ("seeds = 2.0", "--seeds 2.0"),
    ("algorithms = 3", "--algorithms 3: must be text"),
    ("algorithms = [[1]]", r"--algorithms \[1\]: must be text"),
    ('sparsity = "0.8"', "--sparsity '0.8'"),
    ("sparsity = [nan]", "--sparsity nan"),
    ("sparsity = []", "--sparsity is empty"),
    ("task = 1", "--task 1: must be text"),
    ("options = 1", r"\[options\] 1: must be a table"),
    ("[options]\nsteps = inf", "--steps inf"),
    ("[options]\nsteps = true", "--steps True"),
    ('[options]\nlearning_rate = "a"', "--set learning_rate=a"),
    ("[data]\nx = 1", "--data"),
  ],
)
def test_a_config_of_wrong_types_is_refused_in_words(tmp_path, text, reason):
  path = tmp_path / "run.toml"
  path.write_text(text)
  with pytest.raises(ValueError, match=reason) as error:
    command.settings_from(parse("--config", str(path)))
  assert str(path) in str(error.value)


def test_one_value_stands_for_a_list_of_one(tmp_path):
  path = tmp_path / "run.toml"
  path.write_text('sparsity = 0.8\nalgorithms = "rigl"\n')
  found = command.settings_from(parse("--config", str(path)))
  assert found.sparsity == (0.8,) and found.algorithms == ("rigl",)


@pytest.mark.parametrize(
  "words, reason",
  [
    (["--steps", "0"], "--steps 0"),
    (["--seeds", "0"], "--seeds 0"),
    (["--set", "steps=inf"], "--steps inf"),
    (["--set", "steps=nan"], "--steps nan"),
    (["--set", "steps=-3"], "--steps -3"),
    (["--set", "width=2.5"], "--set width=2.5"),
    (["--set", "learning_rate=nan"], "--set learning_rate=nan"),
    (["--set", "learning_rate=-1"], "--set learning_rate=-1"),
    (["--set", "width=x"], "must be a whole number"),
    (["--sparsity", "0.8,x"], "write fractions"),
    (["--sparsity", ""], "write fractions"),
    (["--algorithms", ","], "is empty"),
    (["--out", ""], "--out '': is empty"),
    (["--out", "\0"], "--out '\\x00'"),
    (["--jobs", "0"], "--jobs 0"),
    # As of a variable of the shell that is not set: not what was asked for.
    (["--type", ""], "--type '': is empty"),
    (["--data", ""], "--data '': is empty"),
    (["--init", ""], "--init '': is empty"),
    (["--config", ""], "--config '': is empty"),
    (["--question", ""], "--question '': is empty"),
    # Steps and seeds are counted in int32.
    (["--steps", f"{2**31}"], "--steps 2147483648"),
    (["--seeds", f"{2**31}"], "--seeds 2147483648"),
    (["--devices", f"{2**31}"], "--devices 2147483648"),
    (["--set", "width=99999999999"], "--set width=99999999999"),
    (
      ["--algorithms", "rigl{storage=kept,distill=0.5}"],
      "a teacher's loss is not traced at kept size",
    ),
    (["--import", "no_such_module"], "--import 'no_such_module'"),
    (["--import", "../mine"], "--import '../mine': is a path"),
    (["--task", "./mine:Task"], "--task './mine:Task': is a path"),
    (["--task", "sys:nothing"], "--task 'sys:nothing': sys has no 'nothing'"),
  ],
)
def test_nothing_starts_before_every_option_is_checked(
  words, reason, capsys, monkeypatch
):
  monkeypatch.setattr(command, "compare", lambda *_: pytest.fail("started"))
  assert command.run(parse(*words)) == 1
  assert reason in capsys.readouterr().err


def test_a_checkpoint_that_does_not_fit_starts_nothing(tmp_path, capsys):
  np.savez(tmp_path / "other.npz", w=np.ones(3))
  (tmp_path / "empty.npz").write_bytes(b"")
  for name in ("other.npz", "empty.npz", ".", "none"):
    words = ["--init", str(tmp_path / name), "--out", str(tmp_path / "run")]
    assert command.run(parse(*words)) == 1
    assert f"--init {tmp_path / name}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_config_file_imports_nothing_by_itself(tmp_path, monkeypatch):
  (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
  monkeypatch.syspath_prepend(str(tmp_path))
  path = tmp_path / "run.toml"
  path.write_text('imports = "planted"')
  with pytest.raises(ValueError, match="type --import planted"):
    command.settings_from(parse("--config", str(path)))


def test_cells_never_share_a_name():
  close = ComparisonSettings(sparsity=(0.999999, 0.9999991, 0.8, 0.8))
  found = plan.cells_of(close)
  assert len({cell.id for cell in found}) == len(found)
  assert cells.Cell("rigl", 0.8).id == "rigl@0.8"
