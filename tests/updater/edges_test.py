"""Edges of a step: absent keys, hints, stacks, uint8 scores, scalars."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import base_updater, engine


@dataclasses.dataclass(eq=False)
class ByChance(base_updater.BaseUpdater):
  """Random scores without saying that it needs a key."""

  category: ClassVar = base_updater.Category()

  def calculate_scores(self, params, sparse_state=None, grads=None):
    return self.random_scores(params, sparse_state)


@dataclasses.dataclass(eq=False)
class ByByte(base_updater.BaseUpdater):
  """Scores of 8 bits."""

  category: ClassVar = base_updater.Category()

  def calculate_scores(self, params, sparse_state=None, grads=None):
    return jax.tree.map(lambda p: jnp.abs(p).astype(jnp.uint8), params)


def updater(cls, **fields):
  return cls(
    sparsity_distribution_fn=lambda params, **_: jax.tree.map(
      lambda _: 0.5, params
    ),
    scheduler=jaxpruner.sparsity_schedules.OneShotSchedule(target_step=0),
    **fields,
  )


def step(pruner, params):
  tx = pruner.wrap_optax(optax.sgd(0.0))
  state = tx.init(params)
  grads = jax.tree.map(jnp.zeros_like, params)
  updates, state = jax.jit(tx.update)(grads, state, params)
  return optax.apply_updates(params, updates), state


def test_random_scores_need_no_key_in_the_state():
  params = {"w": jnp.arange(1.0, 9.0).reshape(2, 4)}
  _, state = step(updater(ByChance), params)
  assert int(state.masks["w"].sum()) == 4


@pytest.mark.parametrize("packed", [False, True])
def test_scores_of_eight_bits_are_no_packed_masks(packed):
  params = {"w": jnp.arange(1.0, 17.0).reshape(2, 8)}
  new, _ = step(updater(ByByte, use_packed_masks=packed), params)
  np.testing.assert_array_equal(np.asarray(new["w"])[0], 0)
  np.testing.assert_array_equal(new["w"][1], params["w"][1])


def test_a_foreign_mask_after_a_stack_is_named_by_its_own_path():
  params = {
    "a": jnp.ones((3, 4, 4)),
    "b": jnp.ones((4, 4)),
    "c": jnp.ones((4, 4)),
  }
  make = lambda **extra: jaxpruner.create_updater_from_config({
    "algorithm": "magnitude", "sparsity": 0.5, "total_steps": 10,
    "stacked_axis": {"a": 0}, **extra,
  })  # fmt: skip
  tx = make().wrap_optax(optax.sgd(0.1))
  state = tx.init(params)
  fewer = make(custom_sparsity_map={"b": None}).wrap_optax(optax.sgd(0.1))
  with pytest.raises(ValueError, match="leaf 'b': .*a mask, but .* does not"):
    fewer.update(params, state, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scalar_is_selected_on_a_mesh_too(dtype):
  mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  place = jax.sharding.NamedSharding(mesh, jax.P())
  score = jax.device_put(jnp.asarray(1.0, dtype), place)
  found = jax.jit(lambda s: engine.select([s], jnp.ones(1, jnp.uint32)))(score)
  assert int(found.masks[0]) == 1


def test_inside_a_partly_manual_mesh_nothing_is_gathered():
  kinds = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
  scores = jnp.asarray(np.random.default_rng(0).normal(size=(2, 512, 1024)))
  scores = scores.astype("float32")
  place = jax.sharding.NamedSharding(mesh, jax.P("data", "model", None))

  def local(s):
    keep = jnp.full((1,), s.size // 4, jnp.uint32)
    return engine.select([s[0]], keep).masks[0][None]

  fn = jax.jit(
    jax.shard_map(
      local, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"),
      axis_names={"data"},
    )
  )  # fmt: skip
  masks = fn(jax.device_put(scores, place))
  np.testing.assert_array_equal(
    np.asarray(masks, np.int64).sum((1, 2)), [scores[0].size // 4] * 2
  )
  text = fn.lower(jax.device_put(scores, place)).compile().as_text()
  gathered = [
    line for line in text.splitlines()
    if "all-gather" in line and "512,1024" in line
  ]  # fmt: skip
  assert not gathered
