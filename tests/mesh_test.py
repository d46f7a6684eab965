"""Eight devices compute what one does, and masks lie where parameters do."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_model import CORE

import jaxpruner

NAMES = jaxpruner.all_algorithm_names()
STEPS = 4
SPECS = {
  "a": {"kernel": PartitionSpec("x", "y"), "bias": PartitionSpec("y")},
  "b": {"kernel": PartitionSpec(None, ("x", "y"))},
}
SHAPES = {"a": {"kernel": (8, 6), "bias": (6,)}, "b": {"kernel": (5, 16)}}

needs_devices = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs 8 (virtual) devices"
)


@functools.cache
def mesh(kind):
  return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


def tree(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: (np.round(rng.normal(size=shape) * 8) / 8).astype(np.float32),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def place(values, kind):
  if kind is None:
    return jax.tree.map(jnp.asarray, values)
  return jax.tree.map(
    lambda x, spec: jax.device_put(x, NamedSharding(mesh(kind), spec)),
    values,
    SPECS,
  )


def updater(name, **options):
  config = {"algorithm": name, "sparsity": 0.7, "update_freq": 1, **options}
  if name == "no_prune":
    config = {"algorithm": name}
  elif name != "static_sparse":
    config |= {"update_start_step": 1, "update_end_step": 3}
  else:
    del config["update_freq"]
  pruner = jaxpruner.create_updater_from_config(config)
  # A product, because six columns of a sharded axis cannot be sliced off.
  chosen = jnp.eye(16, 6)
  apply = lambda p, x: x @ p["a"]["kernel"] @ (p["b"]["kernel"] @ chosen).T
  loss = lambda p, x: jnp.sum((apply(p, x) - 1) ** 2)
  batch = jnp.ones((2, 8))
  return pruner.bind(loss, batch, apply, batch)


def within(kind):
  """Explicit meshes want to be entered, by Optax's own `init` too."""
  if kind is AxisType.Explicit:
    return jax.set_mesh(mesh(kind))
  return contextlib.nullcontext()


def train(name, kind, **options):
  """Train a few steps; return all states, and how often each step traced."""
  pruner = updater(name, **options)
  tx = pruner.wrap_optax(optax.sgd(0.125, momentum=0.5))
  traces = []

  @jax.jit
  def step(params, state, grads):
    traces.append(1)
    updates, state = tx.update(grads, state, params, grad_fn=lambda _: grads)
    return optax.apply_updates(params, updates), state

  with within(kind):
    params = place(tree(0), kind)
    state = jax.jit(tx.init)(params)
    history, counts = [(params, state)], []
    for t in range(STEPS):
      params, state = step(params, state, place(tree(t + 1), kind))
      history.append((params, state))
      counts.append(len(traces))
  return history, counts


@functools.cache
def alone(name):
  return train(name, None)[0]


def same(one, two):
  left, right = jax.tree.flatten(one), jax.tree.flatten(two)
  return left[1] == right[1] and all(
    np.array_equal(np.asarray(a), np.asarray(b))
    for a, b in zip(left[0], right[0], strict=True)
  )


def cases():
  """Every algorithm on both kinds of mesh; most of the explicit ones slow."""
  for name in NAMES:
    marks = () if name in CORE else pytest.mark.slow
    yield pytest.param(name, AxisType.Auto, marks=marks)
    fast = name in ("no_prune", "global_magnitude", "rigl")
    marks = () if fast else pytest.mark.slow
    yield pytest.param(name, AxisType.Explicit, marks=marks)


@needs_devices
@pytest.mark.parametrize(("name", "kind"), list(cases()), ids=str)
def test_eight_devices_equal_one_and_masks_lie_with_parameters(name, kind):
  history, counts = train(name, kind)
  for t, (one, eight) in enumerate(zip(alone(name), history, strict=True)):
    assert same(one, eight), t
  for t, (params, state) in enumerate(history):
    for layer in SPECS:
      mask, param = state.masks[layer]["kernel"], params[layer]["kernel"]
      if mask is not None:
        assert mask.sharding.is_equivalent_to(param.sharding, 2), (t, layer)
  # The first step sees the state of init, the second its own.
  assert counts[1:] == [counts[1]] * (STEPS - 1), counts


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["magnitude", "rigl"])
def test_masks_lie_with_parameters_from_an_eager_init_on(name, kind):
  tx = updater(name).wrap_optax(optax.sgd(0.1))
  with within(kind):
    params = place(tree(0), kind)
    state = tx.init(params)
  assert same(state, jax.jit(tx.init)(place(tree(0), None)))
  for layer in SPECS:
    mask, param = state.masks[layer]["kernel"], params[layer]["kernel"]
    assert mask.sharding.is_equivalent_to(param.sharding, 2), layer


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_packed_masks_are_the_same_on_eight_devices(kind):
  one = train("magnitude", None, use_packed_masks=True)[0]
  eight = train("magnitude", kind, use_packed_masks=True)[0]
  assert same(one, eight)


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("structure", ["2:4", "4x4", "channel_-1"])
def test_structured_masks_are_the_same_on_eight_devices(structure, kind):
  pruner = updater(
    "magnitude",
    sparsity_type=structure,
    sparsity=0.5,
    filter_fn=lambda names, _p: names == ("a", "kernel"),
  )
  masks = [
    jax.jit(pruner.instant_sparsify)(place(tree(0), k))[1] for k in (None, kind)
  ]
  assert same(*masks)
