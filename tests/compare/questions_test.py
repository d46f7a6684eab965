"""Questions: their verdicts from records, their measurements, their report."""

import dataclasses
import math

import compare_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner.compare import (
  command,
  page,
  plan,
  questions,
  record_files,
  run_folder,
  settings,
  tasks,
)
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.questions import (
  asking,
  base,
  limits,
  qualities,
  small_dense,
  tickets,
)
from jaxpruner.compare.questions import structure as structure_question
from jaxpruner.compare.records import Latency, Measures

DENSE = [90.0, 91.0, 92.0]


def findings(values, latency=None, measures=None, **changes):
  """Return findings made by hand: cell -> (numbers, fields of its record)."""
  records = {}
  for cell, (numbers, fields) in values.items():
    made = {"sparsity": cell.sparsity, "algorithm": cell.algorithm}
    records[cell.id] = helpers.record(cell.id, numbers, **(made | fields))
  facts = {"metric": "accuracy", "unit": "%", "higher_is_better": True}
  return base.Findings(
    cells=list(values),
    records=records,
    latency=latency or {},
    measures=measures or {},
    **(facts | changes),
  )


def shifted(by, spread=0.1):
  return [x + by + d for x, d in zip(DENSE, (-spread, 0, spread), strict=True)]


def small_dense_run(gain):
  wide = Cell("rigl", 0.9)
  return findings(
    {
      Cell("dense", 0.0): (DENSE, {"weights": 1000}),
      Cell("small_dense", 0.9): (
        shifted(-3),
        {"weights": 100, "training_flops": 5.0},
      ),
      wide: (shifted(-3 + gain), {"weights": 100, "training_flops": 10.0}),
    }
  )


@pytest.mark.parametrize(
  ("gain", "words"),
  [(2.0, "better in 1 of 1"), (-2.0, "worse in 1"), (0.0, "told apart in 1")],
)
def test_small_dense_says_which_of_two_equal_sizes_is_better(gain, words):
  question = questions.QUESTIONS.find("small-dense")
  (sentence,) = question.verdict(small_dense_run(gain))
  assert words in sentence
  assert f"{gain:+.2f}" in sentence
  assert "2.0 to 2.0 times the FLOPs" in sentence


def test_small_dense_tells_structures_apart():
  """The command for question 3.4 names two types."""
  found = small_dense_run(1.0)
  channels = Cell("rigl", 0.9, "channels")
  more = findings({channels: (shifted(-9), {"weights": 200})})
  both = dataclasses.replace(
    found,
    cells=found.cells + more.cells,
    records=found.records | more.records,
  )
  words = questions.QUESTIONS.find("small-dense").verdict(both)
  assert [text.partition(",")[0] for text in words] == ["rigl", "rigl channels"]
  assert "(0.50 to 0.50 times)" in words[1]
  assert "+1.00" in words[0] and "-6.00" in words[1]
  (axis,) = small_dense.pictures(both)["small-dense"].axes
  assert axis.get_legend_handles_labels()[1] == [
    "dense",
    "rigl",
    "rigl channels",
  ]


def structure_run(higher=True, levels=(0.5, 0.9)):
  sign = 1 if higher else -1
  cells = {Cell("dense", 0.0): (DENSE, {"weights": 100, "bytes": 400})}
  cells[Cell("dense", 0.0)][1].update(inference_flops=100.0)
  for kind, loss in (("", 1), ("8x8", 2), ("channels", 4)):
    for sparsity in levels:
      kept = round(100 * (1 - sparsity))
      cells[Cell("magnitude", sparsity, kind)] = (
        shifted(-sign * loss * sparsity),
        {"weights": kept, "bytes": 4 * kept, "inference_flops": float(kept)},
      )
  latency = {cell.id: 1 - cell.sparsity / 2 for cell in cells}
  return findings(cells, latency, higher_is_better=higher)


@pytest.mark.parametrize("higher", [True, False])
def test_structure_ranks_at_equal_cost_with_the_sign_of_the_metric(higher):
  found = structure_run(higher)
  level, kinds = structure_question.compared(found, "weights")
  assert level == pytest.approx(0.1)
  for kind, loss in (("8x8", 0.9), ("channels", 2.7)):
    assert kinds[kind][1].mean == pytest.approx(-loss, abs=1e-6)
  sentences = structure_question.verdict(found)
  assert "At equal weights (0.10 of dense) unstructured is best" in sentences[0]
  assert "channels at 90 % 0.55 × dense" in sentences[-1]


def test_structures_of_one_sparsity_each_are_compared_once():
  sentences = structure_question.verdict(structure_run(levels=(0.5,)))
  assert "At equal weights (0.50 of dense) unstructured" in sentences[0]
  assert not any("has one sparsity" in text for text in sentences)


def test_structures_of_each_algorithm_have_their_own_curves():
  """Two algorithms are two answers, and are held against each other."""
  found = structure_run()
  after = {}
  for cell in found.cells[1:]:
    record = found.records[cell.id]
    other = cell._replace(algorithm="after:magnitude")
    fields = {"weights": record.weights, "bytes": record.bytes}
    fields["inference_flops"] = record.inference_flops
    values = [x - 5 for x in record.metrics["accuracy"]]
    after[other] = (values, fields)
  both = findings(after)
  both = dataclasses.replace(
    found,
    cells=found.cells + both.cells,
    records=found.records | both.records,
  )
  alone = structure_question.verdict(found)
  words = structure_question.verdict(both)
  assert [f"magnitude: {text}" for text in alone] == words[: len(alone)]
  assert words[len(alone)].startswith("after:magnitude: At equal weights")
  assert words[-2:] == [
    f"after:magnitude against magnitude at {level} %: "
    "unstructured -5.00 [-5.00, -5.00] (worse), "
    "8x8 -5.00 [-5.00, -5.00] (worse), "
    "channels -5.00 [-5.00, -5.00] (worse)."
    for level in (50, 90)
  ]
  titles = [table.title for table in structure_question.tables(both)]
  assert [title.partition(":")[0] for title in titles] == [
    "magnitude",
    "after",
  ]
  (axis, *_) = structure_question.pictures(both)["structure"].axes
  labels = axis.get_legend_handles_labels()[1]
  assert labels[0] == "unstructured, magnitude" and len(labels) == 6


def test_structure_interpolates_between_the_points_of_a_curve():
  points = [(0.1, [1.0, 2.0]), (0.5, [3.0, 6.0]), (1.0, [4.0, 8.0])]
  assert structure_question.at_cost(points, 0.3) == [2.0, 4.0]


def test_positions_cost_what_their_structure_needs():
  record = {"bytes": 100, "prunable": 80}
  cells = [Cell("magnitude", 0.5, kind) for kind in ("", "2:4", "8x8")]
  found = findings({cell: (DENSE, record) for cell in cells})
  sizes = [structure_question.bytes_of(cell, found) for cell in cells]
  assert sizes == pytest.approx([100, 100 - 10 * 0.25, 100 - 10 * 63 / 64])


@given(
  st.lists(st.floats(-0.2, 0.5), min_size=1, max_size=6),
  st.floats(0.001, 0.2),
)
def test_a_limit_lies_where_the_loss_first_reaches_it(losses, limit):
  levels = np.linspace(0.1, 0.9, len(losses)).tolist()
  found = limits.crossing(levels, losses, limit)
  # With the levels themselves: a peak may lie between two points of the grid.
  grid = np.union1d(np.linspace(0, 0.9, 2001), levels)
  above = grid[np.interp(grid, [0, *levels], [0, *losses]) >= limit]
  if not above.size:
    assert math.isinf(found)
  else:
    assert found == pytest.approx(above[0], abs=1e-3)


def test_limits_are_paired_by_seed():
  cells = {Cell("dense", 0.0): ([100.0, 50.0, 80.0], {})}
  for sparsity, lost in ((0.5, 0.0), (0.9, 0.02)):
    values = [x * (1 - lost) for x in (100.0, 50.0, 80.0)]
    cells[Cell("rigl", sparsity)] = (values, {})
  found = findings(cells)
  (table,) = limits.tables(found)
  assert table.lines == [["rigl", "70 % [70, 70]", "above 90 %"]]


def test_a_barrier_is_the_gap_below_the_straight_line():
  cell = Cell("retrain:imp", 0.8)
  path = np.linspace(80, 90, tickets.POINTS)
  path[5] -= 7
  names = [f"path {s:.1f}" for s in np.linspace(0, 1, tickets.POINTS)]
  measures = {n: [v, 50.0] for n, v in zip(names, path, strict=True)}
  found = findings({cell: ([1.0, 1.0], {})}, measures={cell.id: measures})
  assert tickets.barrier(found, cell) == pytest.approx([7.0, 0.0])


def test_tickets_of_one_sparsity_stand_side_by_side():
  names = ("imp", "retrain:imp", "static_sparse")
  values = {Cell(name, 0.9): (shifted(0), {}) for name in names}
  figure = tickets.pictures(findings(values))["tickets"]
  shown = [text.get_text() for text in figure.axes[0].get_xticklabels()]
  assert shown == list(names)


def test_tickets_are_held_against_each_control():
  values = {Cell("imp", 0.8): (shifted(0), {})}
  for name, loss in (
    ("retrain:imp{weights=new}", 2),
    ("retrain:imp{mask=shuffled}", 3),
    ("static_sparse", 4),
    ("imp{rewind_step=2}", -1),
  ):
    values[Cell(name, 0.8)] = (shifted(-loss), {})
  (sentence,) = tickets.verdict(findings(values))
  for words in (
    "new weights under its mask (+2.00 [+2.00, +2.00], better)",
    "rewinding to step 2 (-1.00 [-1.00, -1.00], worse)",
  ):
    assert words in sentence


def test_a_gradient_attack_stays_within_its_radius_and_does_harm():
  x = jax.random.normal(jax.random.key(0), (5, 8))
  w = jax.random.normal(jax.random.key(1), (8,))
  loss = lambda x, y: jnp.sum(y * (x @ w))
  y = jnp.array([1.0, -1, 1, -1, 1])
  moved = qualities.attack(loss, x, y, 0.1)
  assert float(jnp.abs(moved - x).max()) <= 0.1 + 1e-6
  np.testing.assert_allclose(
    moved, x + 0.1 * y[:, None] * jnp.sign(w), atol=1e-6
  )


# Three lengths: each shape compiles.
scores = st.sampled_from([1, 2, 8]).flatmap(
  lambda n: st.lists(st.integers(0, 5), min_size=n, max_size=n)
)


@given(scores, scores)
def test_auroc_is_the_share_of_pairs_in_order(inside, outside):
  pairs = [(a > b) + 0.5 * (a == b) for a in inside for b in outside]
  found = qualities.auroc(
    jnp.array(inside, jnp.float32), jnp.array(outside, jnp.float32)
  )
  assert float(found) == pytest.approx(np.mean(pairs), abs=1e-6)


def test_corruptions_change_inputs_and_keep_their_shape():
  x = jax.random.normal(jax.random.key(0), (3, 6, 6, 1))
  for name, changed in qualities.corruptions(x, 0.5).items():
    assert changed.shape == x.shape, name
    assert not np.allclose(changed, x), name


def test_a_second_task_has_the_shape_of_the_first():
  digits = tasks.make_task("digits")
  data = digits.load()
  second = digits.second(data)
  np.testing.assert_array_equal(second["test_x"], data["test_x"][:400, ::-1])
  images = {"test_x": np.zeros((2, 12, 10, 3), np.uint8)}
  images["test_x"][0] = 200
  found = digits.second(images)
  assert found["train_x"].shape == (400, 12, 10, 3)
  assert float(found["train_x"].max()) == 200


def test_a_share_of_the_data_is_its_first_rows():
  task = tasks.make_task("digits", {"share": 0.01})
  data = {"train_x": jnp.arange(1437.0)[:, None], "train_y": jnp.arange(1437)}
  batch = task.batches(data, jax.random.key(0), jnp.array(0))
  assert int(batch["y"].max()) < 14
  with pytest.raises(ValueError, match="above 0"):
    tasks.make_task("digits", {"share": 0.0})


@pytest.mark.parametrize("name", sorted(questions.QUESTIONS))
def test_every_question_has_axes_words_and_a_caption_for_each_picture(name):
  question = questions.QUESTIONS.find(name)
  assert question.asks.endswith("?") and question.section
  asked = asking.with_axes({"question": name, "options": helpers.TINY})
  chosen = settings.ComparisonSettings(**asked)
  settings.check_names(chosen)
  assert len(plan.cells_of(chosen)) > 3
  nothing = findings({})
  assert all(isinstance(text, str) for text in question.verdict(nothing))
  drawn = question.pictures(small_dense_run(1.0))
  assert set(drawn) <= set(question.captions)


def test_what_the_user_gives_wins_over_a_questions_axes():
  asked = asking.with_axes(
    {
      "question": "small-dense",
      "algorithms": ("set",),
      "options": {"width": (4, 8)},
    }
  )
  assert asked["algorithms"] == ("set",)
  assert asked["options"] == {"width": (4, 8)}
  assert len(asked["sparsity"]) == 4
  with pytest.raises(ValueError, match="did you mean 'structure'"):
    asking.with_axes({"question": "structur"})
  with pytest.raises(ValueError, match="not a classifier"):
    asking.with_axes({"question": "robustness", "task": "sotu"})


def test_a_question_leaves_out_types_that_the_given_sparsity_excludes():
  """2:4 removes a half; the user asked for 80 % and named no type."""
  asked = asking.with_axes({"question": "structure", "sparsity": (0.8,)})
  assert asked["type"] == ("unstructured", "8x8", "channels")
  typed = {"question": "structure", "sparsity": (0.8,), "type": ("2:4",)}
  assert asking.with_axes(typed)["type"] == ("2:4",)  # refused later, in words


def test_a_metric_without_a_unit_leaves_no_gap_in_a_sentence():
  found = base.Findings([], {}, {}, {}, "bits per byte", "", False)
  assert f"(4.16{found.suffix})" == "(4.16)"
  assert dataclasses.replace(found, unit="%").suffix == " %"


def test_the_report_has_the_verdict_before_the_table(tmp_path):
  chosen = helpers.settings(question="limits", sparsity=(0.5, 0.8))
  info = helpers.run_info(
    settings=chosen.to_json(),
    cells=[[*c, "erk", 1, "Group"] for c in plan.cells_of(chosen)],
  )
  with run_folder.RunFolder(tmp_path) as run:
    run.open_run(info)
    for cell in plan.cells_of(chosen):
      values = [90 - 20 * cell.sparsity, 91 - 20 * cell.sparsity]
      run.append(helpers.record(cell.id, values))
      run.append(Measures(cell.id, {"x": [1.0, None]}))
      run.append(Latency(cell.id, 1.0, "dense"))
  page.write_report([str(tmp_path)], str(tmp_path))
  text = (tmp_path / "report.html").read_text()
  question = questions.QUESTIONS.find("limits")
  assert text.index(question.asks) < text.index("digits, 50 % sparse")
  assert "loses 1 % of dense at" in text
  assert (tmp_path / "limits.png").exists()
  assert run_folder.read_measures(tmp_path)["dense"].values["x"] == [1.0, None]


def test_a_file_of_records_keeps_what_a_question_measured(tmp_path):
  chosen = helpers.settings(question="tickets")
  info = helpers.run_info(settings=chosen.to_json())
  with run_folder.RunFolder(tmp_path / "run") as run:
    run.open_run(info)
    run.append(helpers.record("dense", DENSE))
    run.append(Measures("dense", {"pool": [1.0, 2.0, None]}))
  file = str(tmp_path / "run.jsonl")
  record_files.save(record_files.load(str(tmp_path / "run")), file)
  record_files.restore(record_files.read(file), str(tmp_path / "again"))
  found = run_folder.read_measures(tmp_path / "again")
  assert found["dense"].values == {"pool": [1.0, 2.0, None]}


def test_sources_without_weights_are_computed_again(tmp_path):
  chosen = helpers.settings(algorithms=("after:wanda", "rigl"))
  wanted = plan.cells_of(chosen)
  records = {
    cell.id: helpers.record(cell.id, DENSE)
    for cell in wanted
    if not cell.name.startswith("after:")
  }
  names = lambda: [c.id for c in command._pending(records, wanted, tmp_path)]
  assert names() == ["dense", "after%3Awanda@0.8"]
  (tmp_path / "weights").mkdir()
  (tmp_path / "weights" / "dense.all.npz").touch()
  assert names() == ["after%3Awanda@0.8"]
