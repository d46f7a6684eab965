"""Flax Linen with annotated parameters, by its guide to sharding."""

import functools

import framework
import jax
import numpy as np
import pytest
from framework import SGD, STEPS, assert_same, assert_sparse, make_pruner

framework.require("core", "flax", "orbax")

import flax.linen as nn
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

RULES = (("embed", "data"), ("hidden", "model"))


class Model(nn.Module):
  logical: bool

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.lecun_normal()
    annotate, names = nn.with_logical_partitioning, ("embed", "hidden")
    if not self.logical:
      annotate, names = nn.with_partitioning, ("data", "model")
    x = nn.Dense(16, kernel_init=annotate(init, names))(x)
    return nn.Dense(4, kernel_init=annotate(init, names[::-1]))(nn.relu(x))


@functools.cache
def make(algorithm, logical):
  """Return a donating step and a fresh state; both are laid out on a mesh."""
  devices = np.array(jax.devices()).reshape(-1, min(2, jax.device_count()))
  mesh = jax.sharding.Mesh(devices, ("data", "model"))
  model = Model(logical)
  x, y = framework.make_batch()
  pruner = make_pruner(algorithm)

  def init():
    return TrainState.create(
      apply_fn=model.apply,
      params=model.init(jax.random.key(0), x)["params"],
      tx=pruner.wrap_optax(SGD),  # added
    )

  shapes = jax.eval_shape(init)
  if logical:
    specs = nn.get_partition_spec(shapes)
    layout = nn.logical_to_mesh_sharding(specs, mesh, RULES)
  else:
    layout = nn.get_sharding(shapes, mesh)
  fresh = lambda: jax.jit(init, out_shardings=layout)()

  @functools.partial(
    jax.jit,
    in_shardings=(layout,),
    out_shardings=layout,
    donate_argnums=0,
  )
  def step(state):
    def loss(params):
      return framework.mean_square(model.apply({"params": params}, x), y)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))

  return step, fresh


def run(step, state, steps):
  for _ in range(steps):
    state = jax.block_until_ready(step(state))
  return state


@pytest.mark.parametrize("logical", [False, True], ids=["mesh", "logical"])
@framework.each_kind
def test_boxed_parameters_end_exactly_sparse(algorithm, logical):
  step, fresh = make(algorithm, logical)
  state = run(step, fresh(), STEPS)
  params, opt_state = nn.unbox((state.params, state.opt_state))
  assert_sparse(params, opt_state, grows=algorithm == "rigl")
  kernel = params["Dense_0"]["kernel"]
  assert opt_state.masks["Dense_0"]["kernel"].sharding == kernel.sharding


@pytest.mark.filterwarnings("default")
def test_boxed_states_survive_orbax(tmp_path):
  step, fresh = make("rigl", False)
  state = run(step, fresh(), STEPS - 10)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path.resolve() / "state", state)
  with ocp.StandardCheckpointer() as checkpointer:
    again = checkpointer.restore(tmp_path.resolve() / "state", fresh())
  assert_same(jax.tree.leaves(again), jax.tree.leaves(state))
  ends = [jax.tree.leaves(run(step, x, 10)) for x in (state, again)]
  assert_same(*ends)
