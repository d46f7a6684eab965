"""The metric picture shows every algorithm, however many there are."""

import matplotlib.pyplot as plt
import pytest

from jaxpruner.compare import groups, metric_picture, statistics, table

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
  shown = {text.get_text() for axis in figure.axes for text in _labels(axis)}
  assert set(names) <= shown
  for axis in figure.axes:
    inside = axis.get_window_extent()
    legend = axis.get_legend().get_window_extent()
    assert inside.width > 100 and inside.height > 100
    assert legend.height < 0.8 * inside.height
  plt.close(figure)


def _labels(axis):
  return [*axis.get_legend().get_texts(), *axis.get_yticklabels()]


def test_a_table_of_baselines_alone_has_no_picture():
  assert metric_picture.draw_metric(_rows(())) is None
