"""What a sparse model costs, against counts made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.inspect import cost as report

shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)


@pytest.mark.quick
def test_mlp_flops_are_two_per_weight_and_example():
  params = {"a": {"kernel": shape(8, 16), "bias": shape(16)}, "b": shape(16, 4)}

  def mlp(p, x):
    return jax.nn.relu(x @ p["a"]["kernel"] + p["a"]["bias"]) @ p["b"]

  flops = report.count_flops(mlp, params, shape(3, 8))
  assert flops.leaves == {"a/kernel": 2 * 3 * 8 * 16, "b": 2 * 3 * 16 * 4}
  assert flops.other == 0
  assert flops.total({"a/kernel": 0.25}) == 2 * 3 * (32 + 64)


def test_convolution_flops_are_those_of_the_loops():
  params = {"kernel": shape(3, 3, 2, 5)}

  def apply(p, x):
    return jax.lax.conv_general_dilated(
      x, p["kernel"], (2, 2), "SAME",
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip

  flops = report.count_flops(apply, params, shape(4, 8, 8, 2))
  assert flops.leaves == {"kernel": 2 * 4 * (4 * 4) * 5 * (3 * 3 * 2)}


def test_grouped_convolution_counts_its_own_group_only():
  def apply(p, x):
    return jax.lax.conv_general_dilated(
      x, p, (1, 1), "VALID", feature_group_count=4,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip

  flops = report.count_flops(apply, shape(3, 3, 1, 4), shape(1, 5, 5, 4))
  assert sum(flops.leaves.values()) == 2 * 9 * 4 * 9


def test_products_without_weights_are_not_made_cheaper_by_masks():
  def attention(p, x):
    q = x @ p["q"]
    return jax.nn.softmax(q @ q.T) @ x

  flops = report.count_flops(attention, {"q": shape(6, 6)}, shape(10, 6))
  assert flops.leaves == {"q": 2 * 10 * 36}
  assert flops.other == 2 * (2 * 10 * 10 * 6)


def test_weights_are_followed_through_layout_calls_and_scan():
  def apply(p, x):
    @jax.jit
    def inner(w, x):
      return x @ jnp.where(w > 0, w, 0).T.reshape(8, 8)

    def body(x, w):
      return jax.checkpoint(inner)(w, x), None

    return jax.lax.scan(body, x, p["stack"])[0]

  flops = report.count_flops(apply, {"stack": shape(5, 8, 8)}, shape(2, 8))
  assert flops.leaves == {"stack": 5 * 2 * 2 * 64}
  assert flops.other == 0


def test_straight_through_weights_still_count_as_weights():
  @jax.custom_vjp
  def pick(w):
    return jnp.where(w > 0, w, 0)

  pick.defvjp(lambda w: (pick(w), None), lambda _, g: (g,))
  flops = report.count_flops(lambda p, x: x @ pick(p), shape(4, 4), shape(1, 4))
  assert flops.other == 0 and sum(flops.leaves.values()) == 32


def test_a_bias_never_owns_an_activation():
  # With one example, bias and activation have the same size.
  apply = lambda p, x: (x @ p["w"] + p["b"]) @ p["v"]
  params = {"w": shape(4, 4), "b": shape(4), "v": shape(4, 4)}
  flops = report.count_flops(apply, params, shape(1, 4))
  assert flops.leaves == {"w": 32, "v": 32}


def test_cond_counts_its_costliest_branch():
  def apply(p, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ p @ p, lambda: x @ p)

  flops = report.count_flops(apply, shape(4, 4), shape(1, 4))
  assert sum(flops.leaves.values()) + flops.other == 2 * 32


def test_while_with_products_is_refused():
  def apply(p, x):
    return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ p, x)

  with pytest.raises(ValueError, match="scan"):
    report.count_flops(apply, shape(4, 4), shape(1, 4))


def test_bytes_are_a_bit_per_weight_and_the_kept_values():
  params = {"w": np.ones((10, 10), np.float32), "b": np.ones(10, np.float32)}
  mask = np.zeros((10, 10), np.uint8)
  mask[0] = 1
  masks = {"w": mask, "b": None}
  assert report.stored_bytes(params, masks) == 13 + 40 + 40
  assert report.stored_bytes(params) == 440
  # A full mask is not worth its bits.
  assert (
    report.stored_bytes(params, {"w": np.ones_like(mask), "b": None}) == 440
  )
  assert report.count_weights(params, masks) == 20
  assert report.leaf_densities(masks) == {"w": 0.1}


def test_only_growth_by_gradient_needs_gradients_of_removed_weights():
  make = lambda name: jaxpruner.create_updater_from_config(
    {"algorithm": name, "sparsity": 0.5, "total_steps": 100}
  )
  needed = lambda name, step: bool(
    report.needs_dense_gradient(make(name), step)
  )
  for name in ("rigl", "itop", "srigl", "granet"):
    due = [t for t in range(100) if make(name).scheduler.is_mask_update_iter(t)]
    assert [t for t in range(100) if needed(name, t)] == due, name
  assert all(needed("snfs", t) for t in range(100))
  signal = jaxpruner.SignalRigL(
    grow=jaxpruner.criteria.SignalToNoise(window=3),
    scheduler=jaxpruner.sparsity_schedules.PeriodicSchedule(10, 10, 20),
  )
  near = [t for t in range(30) if report.needs_dense_gradient(signal, t)]
  assert near == [8, 9, 10, 18, 19, 20]
  for name in ("set", "mest", "dsr", "deep_r", "acdc", "magnitude", "saliency"):
    assert not any(needed(name, t) for t in range(0, 100, 5)), name
