"""Pictures show the numbers they are given."""

import jax
import numpy as np
import pytest
from small_model import SPARSITY, make_params, make_updater

import jaxpruner

plot = jaxpruner.plot


@pytest.fixture(autouse=True)
def close_figures():
  yield
  plot.plt.close("all")


def pruned(**config):
  pruner = make_updater("magnitude", **config)
  return pruner.instant_sparsify(make_params())


@pytest.mark.quick
@pytest.mark.parametrize("packed", [False, True])
def test_bars_are_as_long_as_the_layers_are_sparse(packed):
  params, masks = pruned(use_packed_masks=packed)
  axis = plot.sparsity(masks, params if packed else None).axes[0]
  assert [t.get_text() for t in axis.get_yticklabels()] == [
    "in/kernel",
    "out/kernel",
  ]
  widths = [bar.get_width() for bar in axis.patches]
  np.testing.assert_allclose(widths, 100 * SPARSITY)


def test_parameters_and_states_are_drawn_like_their_masks():
  params, masks = pruned()
  from_params, from_masks = plot.named_masks(params), plot.named_masks(masks)
  state = jaxpruner.SparseState(masks=masks)
  assert from_params.keys() == from_masks.keys()
  for name, mask in plot.named_masks(state).items():
    np.testing.assert_array_equal(mask, from_params[name])
    np.testing.assert_array_equal(mask, from_masks[name])


def test_a_mask_image_is_the_mask():
  _, masks = pruned()
  figure = plot.masks(masks)
  drawn = figure.axes[0].images[0].get_array()
  np.testing.assert_array_equal(drawn, masks["in"]["kernel"])


def test_a_large_mask_is_drawn_by_its_densities():
  mask = np.zeros((256, 128), np.uint8)
  mask[:, ::2] = 1
  picture = plot.density(mask)
  assert picture.shape == (64, 64)
  np.testing.assert_allclose(picture, 0.5)


def test_a_schedule_is_drawn_with_its_updates():
  schedule = jaxpruner.sparsity_schedules.PolynomialSchedule(10, 0, 45)
  axis = plot.schedules({"cubic": schedule}, 60, 0.5).axes[0]
  curve, updates = axis.lines
  assert updates.get_xdata().tolist() == [0, 10, 20, 30, 40, 45]
  assert curve.get_ydata()[0] == 0 and curve.get_ydata()[-1] == 50


def test_evolution_follows_what_is_kept_and_explored():
  first = {"w": np.array([[1, 1, 0, 0]], np.uint8)}
  second = {"w": np.array([[1, 0, 1, 0]], np.uint8)}
  figure = plot.evolution({0: first, 5: second})
  kept, explored = figure.axes[-1].lines
  assert kept.get_ydata().tolist() == [100, 50]
  assert explored.get_ydata().tolist() == [50, 75]
  with pytest.raises(ValueError, match="'v' has no mask.*'w'"):
    plot.evolution({0: first}, leaf="v")


def test_tradeoffs_show_means_and_intervals():
  nan = float("nan")
  curves = {"a": [(0.9, 1.0, 0.5, 1.5), (0.8, 2.0, 1.5, 2.5)],
            "b": [(0.8, 3.0, nan, nan)]}  # fmt: skip
  axis = plot.tradeoff(curves).axes[0]
  assert axis.lines[0].get_xdata().tolist() == [80, 90]
  assert axis.lines[0].get_ydata().tolist() == [2, 1]


def test_nothing_to_draw_is_said():
  with pytest.raises(ValueError, match="no mask to draw"):
    plot.masks({"bias": jax.numpy.ones(3)})
