"""Settings: what is refused, what is filled in, what is listed."""

import compare_helpers as helpers
import pytest

import jaxpruner
from jaxpruner.compare import command, plan, tasks


@pytest.mark.quick
def test_the_default_plan_is_the_papers_algorithms():
  found = {cell.algorithm for cell in plan.cells(plan.Settings())}
  assert found == {*plan.BASELINES, *plan.DEFAULT}


@pytest.mark.quick
def test_all_names_every_registered_algorithm_that_fits():
  settings = plan.Settings(algorithms=("all",))
  found = {cell.algorithm for cell in plan.cells(settings)}
  assert found == {*plan.BASELINES, *plan.fitting_algorithms()}
  assert "no_prune" not in found


def test_a_newly_registered_algorithm_is_enrolled(monkeypatch):
  class Mine(jaxpruner.MagnitudePruning):
    """Keep the largest."""

  from jaxpruner import api

  monkeypatch.setitem(api._REGISTRY, "mine", Mine)
  assert plan.Cell("mine", 0.8) in plan.cells(plan.Settings())


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
    plan.Settings(**change)


def test_settings_survive_json():
  settings = helpers.settings(type="2:4", imports=("json",))
  assert plan.from_dict(plan.as_dict(settings)) == settings
  assert plan.from_dict(plan.as_dict(settings)).digest() == settings.digest()


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
  with pytest.raises(ValueError, match="N:M keeps N of M"):
    command.settings_from(parse("--type", "4:2"))


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
  for name in plan.fitting_algorithms():
    assert name in text


def test_groups_never_mix_budgets():
  assert plan.group("magnitude") != plan.group("rigl")
  assert plan.group("static_sparse") != plan.group("rigl")
  assert plan.group("dense") == plan.group("small_dense")
