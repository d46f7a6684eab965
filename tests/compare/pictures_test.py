"""The metric picture shows every algorithm, however many there are."""

import dataclasses

import compare_helpers as helpers
import matplotlib.pyplot as plt
import pytest

from jaxpruner.compare import (
  groups,
  metric_picture,
  pictures,
  statistics,
  table,
)
from jaxpruner.inspect import plot

FEW = ("magnitude", "random", "set")
MANY = tuple(groups.fitting_algorithms())


def _rows(names, levels=(0.8,)):
  def row(name, level, values):
    return table.TableRow(
      task="digits",
      sparsity=level,
      group=groups.group(name).title,
      algorithm=name,
      metric_name="accuracy",
      metric=statistics.estimate(values),
    )

  return [
    row(name, level, [90.0 + i % 7, 91.0 + i % 5, 92.0])
    for level in levels
    for i, name in enumerate(("dense", "small_dense", *names))
  ]


@pytest.mark.parametrize("levels", [(0.8,), (0.9, 0.98)])
@pytest.mark.parametrize("names", [FEW, MANY])
def test_every_algorithm_is_named_and_nothing_hides_the_axes(names, levels):
  figure = metric_picture.draw_metric(_rows(names, levels))
  figure.draw_without_rendering()
  shown = {text.get_text() for text in _labels(figure)}
  assert set(names) <= shown
  for axis in figure.axes:
    inside = axis.get_window_extent()
    assert inside.width > 100 and inside.height > 100
    if axis.get_legend():
      assert axis.get_legend().get_window_extent().height < 0.8 * inside.height
  plt.close(figure)


def _labels(figure):
  legends = [axis.get_legend() for axis in figure.axes] + figure.legends
  ticks = [text for axis in figure.axes for text in axis.get_yticklabels()]
  return [*ticks, *(t for found in legends if found for t in found.get_texts())]


def _with_options(rows):
  """Return the rows at two values of an option, with the names of axes."""
  return [
    dataclasses.replace(
      row,
      options=f"optimizer={name}",
      label=f"{row.algorithm}{{drop_fraction=0.1}} optimizer={name}",
    )
    for name in ("adam", "momentum")
    for row in rows
  ]


def _chunks(rows):
  part = {"churn": [0.1], "explored": [0.5], "density": {"a": 0.2}}
  return {
    pictures._cell(row): [
      dataclasses.replace(helpers.chunk("x"), **part, start=10 * i, count=10)
      for i in range(2)
    ]
    for row in rows
  }


@pytest.mark.parametrize("kind", ["metric", "masks", "loss"])
def test_long_names_cover_neither_panels_nor_title(kind):
  rows = _with_options(_rows(FEW, (0.5,)))
  figure = pictures.draw_all(rows, _chunks(rows))[kind]
  figure.draw_without_rendering()
  (legend,) = figure.legends
  covered = legend.get_window_extent()
  assert not covered.overlaps(figure._suptitle.get_window_extent())
  for axis in figure.axes:
    assert not covered.overlaps(axis.get_tightbbox())
    assert axis.get_window_extent().width > 200
  assert covered.width < figure.bbox.width
  plt.close(figure)


def test_networks_of_a_baseline_are_told_apart():
  rows = _with_options(_rows(FEW, (0.5,)))
  found = [
    (look["color"], look["ls"])
    for name in ("dense", "small_dense")
    for look in metric_picture.baseline_looks(rows, name).values()
  ]
  assert len(set(found)) == 4


def test_curves_beyond_the_twelfth_have_a_look_of_their_own():
  looks = plot.look([str(i) for i in range(48)]).values()
  assert len({tuple(look.values()) for look in looks}) == 48


def test_a_table_of_baselines_alone_has_no_picture():
  assert metric_picture.draw_metric(_rows(())) is None
