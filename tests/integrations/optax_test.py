"""Optax's own walkers and wrappers over the state of a pruner."""

import functools

import framework
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from framework import SGD, STEPS, assert_same, assert_sparse, make_pruner
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpruner

framework.require("core", "flax", "msgpack")

import flax.serialization


@functools.cache
def make_params():
  keys = jax.random.split(jax.random.key(0))
  return {
    "first": {
      "kernel": jax.random.normal(keys[0], (8, 16)),
      "bias": np.ones(16),
    },
    "last": {"kernel": jax.random.normal(keys[1], (16, 4)), "bias": np.ones(4)},
  }


def loss(params):
  x, y = framework.make_batch()
  layer = lambda x, name: x @ params[name]["kernel"] + params[name]["bias"]
  return framework.mean_square(layer(jnp.tanh(layer(x, "first")), "last"), y)


def map_params(fn, tx, state, tree):
  """Map as praxis does; a dense leaf is a `MaskedNode`, as in optax.masked."""
  is_masked = lambda node: isinstance(node, optax.MaskedNode)
  return optax.tree_utils.tree_map_params(
    tx,
    lambda x, other: x if is_masked(x) else fn(x, other),
    state,
    tree,
    transform_non_params=lambda x: fn(x, None),
    is_leaf=is_masked,
  )


@framework.each_kind
def test_tree_map_params_reaches_what_is_shaped_like_parameters(algorithm):
  params = jax.tree.map(jnp.array, make_params())
  tx = make_pruner(algorithm).wrap_optax(SGD)
  state = tx.init(params)
  axes = jax.tree.map(lambda x: ("in", "out")[: x.ndim], params)
  found = map_params(lambda x, axes: (x.shape, axes), tx, state, axes)
  masks = jaxpruner.find_state(found).masks
  assert masks["first"]["kernel"] == ((8, 16), ("in", "out"))
  assert masks["first"]["bias"] is None
  assert found.inner_state[0].trace["last"]["bias"] == ((4,), ("in",))
  assert found.count == ((), None)
  assert found.target_sparsities["last"]["kernel"] == ((), None)


@pytest.mark.parametrize(
  "algorithm", ["no_prune", "soft_movement", "snfs", "str", "imp"]
)
def test_tree_map_params_reaches_every_leaf_of_a_state(algorithm):
  params = jax.tree.map(jnp.array, make_params())
  tx = make_pruner(algorithm).wrap_optax(SGD)
  state = tx.init(params)
  shapes = map_params(lambda x, _: str(x.shape), tx, state, params)
  assert shapes == jax.tree.map(lambda x: str(x.shape), state)


def test_tree_map_params_hands_fields_over_whole_where_states_differ():
  params = jax.tree.map(jnp.array, make_params())
  tx = make_pruner("magnitude").wrap_optax(SGD)
  state, _ = tx.init(params), tx.init(params["first"])
  whole = lambda x: jax.tree.map(jnp.shape, x)
  found = optax.tree_utils.tree_map_params(
    tx, lambda x: x, state, transform_non_params=whole
  )
  assert found.target_sparsities["first"]["kernel"] == ()


@framework.each_kind
def test_shardings_by_tree_map_params_carry_a_training(algorithm):
  params = jax.tree.map(jnp.array, make_params())
  tx = make_pruner(algorithm).wrap_optax(SGD)  # added
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  put = lambda spec: NamedSharding(mesh, spec)
  split = lambda x: put(P("data", *([None] * (x.ndim - 1))))
  layout = jax.tree.map(lambda x: split(x) if x.ndim == 2 else put(P()), params)
  shapes = jax.eval_shape(tx.init, params)
  place = lambda _, place: put(P()) if place is None else place
  places = map_params(place, tx, shapes, layout)
  state = jax.jit(tx.init, out_shardings=places)(params)

  @functools.partial(
    jax.jit, out_shardings=(layout, places), donate_argnums=(0, 1)
  )
  def step(params, state):
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  params = jax.device_put(params, layout)
  for _ in range(STEPS):
    params, state = jax.block_until_ready(step(params, state))
  assert_sparse(params, state, grows=algorithm == "rigl")
  mask = state.masks["first"]["kernel"]
  assert mask.sharding.is_equivalent_to(params["first"]["kernel"].sharding, 2)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@framework.each_kind
def test_multi_steps_on_either_side_ends_exactly_sparse(algorithm, inside):
  micro = 2
  pruner = make_pruner(algorithm)
  if inside:  # the pruner counts real steps; trainers read `gradient_step`
    tx = optax.MultiSteps(pruner.wrap_optax(SGD), micro)
  else:  # the pruner counts micro-steps
    tx = pruner.wrap_optax(
      optax.MultiSteps(SGD, micro).gradient_transformation()
    )
  params = jax.tree.map(jnp.array, make_params())
  state = tx.init(params)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state):
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(micro * STEPS):
    params, state = step(params, state)
  found = jaxpruner.find_state(state)
  assert int(found.count) == (STEPS if inside else micro * STEPS)
  if inside:
    assert int(state.gradient_step) == STEPS
  assert_sparse(params, state, grows=algorithm == "rigl")
  data = flax.serialization.to_bytes(state)
  again = flax.serialization.from_bytes(state, data)
  assert_same(jax.tree.leaves(again), jax.tree.leaves(state))
