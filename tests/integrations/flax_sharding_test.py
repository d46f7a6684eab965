"""Flax's sharding annotations: boxed params, as its guide shards them."""

import functools

import framework
import jax
import jax.numpy as jnp
import numpy as np
import optax
from framework import SGD, make_batch, make_pruner

framework.require("core", "flax", "msgpack", "orbax")

import flax.linen as nn
import flax.serialization
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

import jaxpruner
from jaxpruner import _leaves
from jaxpruner.updater.state import unpack_mask

AUTO = (jax.sharding.AxisType.Auto,) * 2
STEPS = 4
TRACED = []  # the name of a pruner whenever its step is traced
KINDS = {
  "magnitude": {},
  "magnitude_ste": {},
  "str": {},
  "rigl": {"use_packed_masks": True},
}


class Annotated(nn.Module):
  """Every leaf in a box: `nn.Partitioned`, or with logical names."""

  logical: bool = False

  @nn.compact
  def __call__(self, x):
    box = nn.with_logical_partitioning if self.logical else nn.with_partitioning
    names = ("embed", "mlp") if self.logical else ("data", "model")
    kernel = box(nn.initializers.lecun_normal(), names)
    bias = box(nn.initializers.zeros_init(), names[1:])
    layer = functools.partial(nn.Dense, kernel_init=kernel, bias_init=bias)
    return layer(4)(nn.relu(layer(16)(x)))


@functools.cache
def sharded(name, logical=False, micro_steps=1):
  """Return the state after each step, its sharding, and the step."""
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=AUTO)
  config = {"total_steps": STEPS, "sparsity": 0.5, **KINDS[name]}
  tx = make_pruner(name, **config).wrap_optax(SGD)
  if micro_steps > 1:
    tx = optax.MultiSteps(tx, micro_steps)
  model, (x, y) = Annotated(logical), make_batch()

  def create(key):
    params = model.init(key, x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return state.replace(step=jnp.zeros([], jnp.int32))  # not a Python int

  shapes = jax.eval_shape(create, jax.random.key(0))
  if logical:
    rules = (("embed", "data"), ("mlp", "model"))
    spec = nn.get_partition_spec(shapes)
    sharding = nn.logical_to_mesh_sharding(spec, mesh, rules)
  else:
    sharding = nn.get_sharding(shapes, mesh)
  state = jax.jit(create, out_shardings=sharding)(jax.random.key(0))

  @functools.partial(
    jax.jit,
    in_shardings=(sharding,),
    out_shardings=sharding,
    donate_argnums=0,
  )
  def step(state):
    TRACED.append(name)

    def loss(params):
      return framework.mean_square(state.apply_fn({"params": params}, x), y)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))

  for _ in range(STEPS * micro_steps):
    state = step(state)
  return state, sharding, step


def kernels(state):
  """Return `(param, mask)` of the pruned leaves, in NumPy."""
  found = jaxpruner.find_state(state.opt_state)
  pairs = []
  for param, mask in zip(
    jax.tree.leaves(state.params),
    _leaves.align(state.params, found.masks),
    strict=True,
  ):
    if mask is not None:
      if mask.shape != param.shape:
        mask = unpack_mask(mask, param)
      pairs.append((np.asarray(param), np.asarray(mask)))
  return pairs


@pytest.mark.parametrize("name", KINDS)
def test_boxed_params_train_sparse_under_the_shardings_of_flax(name):
  state, sharding, _ = sharded(name)
  pairs = kernels(state)
  assert len(pairs) == 2
  assert sum(int(mask.sum()) for _, mask in pairs) == (8 * 16 + 16 * 4) // 2
  for param, mask in pairs:
    assert not param[mask == 0].any()
  for leaf, wanted in zip(
    jax.tree.leaves(state), jax.tree.leaves(sharding), strict=True
  ):
    assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
  found = jaxpruner.find_state(state.opt_state)
  kernel = state.params["Dense_0"]["kernel"].value
  if name == "rigl":  # packed bits have no axes of the kernel
    assert found.masks["Dense_0"]["kernel"].ndim == 1
  else:
    mask = found.masks["Dense_0"]["kernel"].value
    assert mask.sharding.is_equivalent_to(kernel.sharding, 2)
  # Scalars lose the box, whose names are those of two axes.
  assert found.target_sparsities["Dense_0"]["kernel"].shape == ()
  assert found.target_sparsities["Dense_0"]["bias"] == optax.MaskedNode()


def test_logical_names_shard_the_state_too():
  state, sharding, _ = sharded("magnitude_ste", logical=True)
  hidden = jaxpruner.find_state(state.opt_state).hidden["Dense_0"]["kernel"]
  assert hidden.value.sharding.spec == jax.P("data", "model")
  for leaf, wanted in zip(
    jax.tree.leaves(state), jax.tree.leaves(sharding), strict=True
  ):
    assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)


def test_metrics_and_tables_read_a_boxed_state_inside_multi_steps():
  state, _, _ = sharded("magnitude_ste", micro_steps=2)
  assert int(state.opt_state.gradient_step) == STEPS
  metrics = jaxpruner.state_metrics(state.opt_state, per_leaf=True)
  assert float(metrics["sparsity"]) == 0.5
  assert float(metrics["sparsity/Dense_0/kernel"]) == 0.5
  table = jaxpruner.sparsity_table(state.params, opt_state=state.opt_state)
  rows = [row for row in table.splitlines() if "kernel" in row]
  assert len(rows) == 2 and all("50.00%" in row for row in rows)
  assert jaxpruner.layers_near_collapse(state.opt_state) == {}


def through_msgpack(state, folder):
  del folder
  data = flax.serialization.to_bytes(state)
  return flax.serialization.from_bytes(
    jax.tree.map(jnp.zeros_like, state), data
  )


def through_orbax(state, folder):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder.resolve() / "state", state)
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(
      folder.resolve() / "state", jax.tree.map(jnp.zeros_like, state)
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("through", [through_msgpack, through_orbax])
@pytest.mark.parametrize("name", ["magnitude_ste", "rigl"])
def test_boxed_states_survive_checkpoints(name, through, tmp_path):
  state, sharding, step = sharded(name)
  state = jax.tree.map(jnp.copy, state)
  restored = jax.device_put(through(state, tmp_path), sharding)
  framework.assert_same(restored, state)
  # First without a checkpoint: compiled steps may have been dropped meanwhile.
  expected = step(state)
  before = list(TRACED)
  framework.assert_same(step(restored), expected)
  assert before == TRACED
