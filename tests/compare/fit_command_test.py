"""`jaxpruner fit`: run folders in, a law out."""

import itertools
import json

import pytest

from jaxpruner import cli, scaling
from jaxpruner.compare import files, fit_command, run_folder
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.records import Record

TRUTH = scaling.JointLaw(2.0, 0.7, 4.0, 0.25, 1e3, 0.3, 0.7)
# Prunable weights of a network by its width.
SIZES = {16: 10_000, 32: 40_000, 64: 160_000, 128: 640_000}


def write_run(
  path, widths=(16, 32, 64), steps=(100, 400, 1600), other="set", **info
):
  """A run folder as `compare` leaves it, with the losses of a known law."""
  path.mkdir()
  cells = []
  for width, count in itertools.product(widths, steps):
    options = f"steps={count},width={width}"
    cells.append(Cell("dense", 0.0, options=options))
    for sparsity in (0.5, 0.75, 0.9):
      cells.append(Cell("magnitude", sparsity, options=options))
      cells.append(Cell(other, sparsity, options=options))
  entries = [[*cell, "", 0, "a group"] for cell in cells]
  stored = run_folder.RunInfo(
    settings={},
    versions={},
    task={"batch_size": 8, "steps": 1, "width": 1},
    cells=entries,
    format=run_folder.FORMAT,
    **({"metric": "loss", "higher_is_better": False} | info),
  )
  with run_folder.RunFolder(path) as folder:
    content = json.dumps(stored.to_json()).encode()
    files.write_atomic(path / "run.json", content)
    for cell in cells:
      folder.append(record(cell))


def record(cell):
  options = dict(part.split("=") for part in cell.options.split(","))
  size, dense = SIZES[int(options["width"])], cell.algorithm == "dense"
  data = 8 * int(options["steps"])
  loss = float(TRUTH.loss(cell.sparsity, size * (1 - cell.sparsity), data))
  worse = 2.0 if cell.algorithm == "set" else 1.0
  return Record(
    cell=cell.id,
    algorithm=cell.algorithm,
    sparsity=cell.sparsity,
    width=int(options["width"]),
    metrics={"loss": [loss * worse - 0.01, loss * worse + 0.01]},
    prunable=0 if dense else size,
    realised=[0.0, 0.0] if dense else [cell.sparsity] * 2,
    nonzero_pruned=0,
    leaves=1,
    weights=size,
    bytes=1,
    bytes_dense=1,
    inference_flops=1.0,
    inference_flops_dense=1.0,
    training_flops=1.0,
    training_flops_dense=1.0,
    density={},
    seconds=1.0,
  )


def test_the_law_of_a_run_is_found_and_predicts_a_larger_one(tmp_path, capsys):
  write_run(tmp_path / "a")
  write_run(tmp_path / "b", widths=(128,), steps=(1600,))
  picture = tmp_path / "law.png"
  done = cli.main(
    [
      "fit", str(tmp_path / "a"), str(tmp_path / "b"),
      "--hold-out", "width=128", "--resamples", "4", "--plot", str(picture),
    ]
  )  # fmt: skip
  shown = capsys.readouterr().out
  assert done == 0
  assert "fitted to 36 trainings" in shown
  for line in shown.split("held out:")[1].splitlines()[1:5]:
    gap = float(line.split("(")[1].removesuffix("%)"))
    assert abs(gap) < 0.1, line
  assert "best sparsity, at equal training cost" in shown
  assert picture.read_bytes().startswith(b"\x89PNG")


def test_rows_of_the_other_algorithm_are_another_law(tmp_path, capsys):
  write_run(tmp_path / "a")
  argv = ["fit", str(tmp_path / "a"), "--resamples", "0"]
  assert cli.main([*argv, "--algorithm", "set"]) == 0
  other = capsys.readouterr().out
  assert cli.main(argv) == 0
  assert capsys.readouterr().out != other


def test_the_average_law_counts_weights_over_the_schedule(tmp_path, capsys):
  write_run(tmp_path / "a", steps=(100, 400, 1600))
  found = fit_command.trainings(str(tmp_path / "a"), "magnitude")
  for training in found:
    dense = training.weights / (1 - training.sparsity)
    mean = scaling.average_weights(dense, training.sparsity)
    # Masks are held between updates.
    assert training.average == pytest.approx(mean, rel=0.1)
    assert training.weights <= training.average <= dense
  constant = fit_command.trainings(str(tmp_path / "a"), "set")
  assert all(t.average == t.weights for t in constant)
  argv = ["fit", str(tmp_path / "a"), "--resamples", "0", "--law", "average"]
  assert cli.main([*argv, "--hold-out", "width=64"]) == 0
  shown = capsys.readouterr().out
  assert "loss = a_n N^-b_n + (a_d/D)^b_d + c, fitted to 24 trainings" in shown
  assert shown.count("predicted") == 12 and "best sparsity" not in shown


def test_the_average_law_refuses_what_trains_more_than_once(tmp_path, capsys):
  write_run(tmp_path / "a", other="imp")
  argv = ["fit", str(tmp_path / "a"), "--algorithm", "imp", "--resamples", "0"]
  assert cli.main(argv) == 0
  assert cli.main([*argv, "--law", "average"]) == 2
  assert "imp@0.5+steps=100,width=16: it is not" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (["--algorithm", "rigl"], "no finished row of 'rigl'"),
    (["--hold-out", "width=7"], "--hold-out 'width=7': no training has it"),
    (["--plot", "law.xyz"], "must end in .png or .svg"),
    (["--hold-out", "steps"], "too few for the joint law"),
    (["--hold-out", ""], "--hold-out '': is empty"),
    (["--plot", ""], "--plot '': is empty"),
    ([""], "path of a run folder is empty"),
  ],
)
def test_bad_options_are_named(tmp_path, capsys, argv, words):
  write_run(tmp_path / "a", widths=(16,), steps=(100,))
  assert cli.main(["fit", str(tmp_path / "a"), *argv]) == 2
  assert words in capsys.readouterr().err


def test_a_file_of_records_is_named_as_it_was_typed(tmp_path, capsys):
  write_run(tmp_path / "a", widths=(16,), steps=(100,))
  file = str(tmp_path / "a.jsonl")
  assert cli.main(["records", str(tmp_path / "a"), "--save", file]) == 0
  assert cli.main(["fit", file, "--algorithm", "rigl"]) == 2
  assert f"{file}: no finished row of 'rigl'" in capsys.readouterr().err


@pytest.mark.parametrize(
  "steps", ["1e400", "nan", "1000000000000", "0", "-5", "1.5", "true", "a"]
)
def test_steps_that_no_training_has_are_refused(steps):
  options = "steps={},width=16"
  cell = Cell("magnitude", 0.5, options=options.format(steps))
  found = record(Cell("magnitude", 0.5, options=options.format(100)))
  info = run_folder.RunInfo({}, {}, {"batch_size": 8}, metric="loss")
  with pytest.raises(files.RunFolderError, match=r"steps of the task is"):
    fit_command._training(cell, found, info, 10_000)


def test_an_accuracy_has_no_law(tmp_path, capsys):
  write_run(tmp_path / "a", metric="accuracy", higher_is_better=True)
  assert cli.main(["fit", str(tmp_path / "a")]) == 2
  assert "a law is fitted to a loss, and accuracy" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
  assert cli.main(["fit", str(tmp_path)]) == 2
  assert "no run.json" in capsys.readouterr().err
