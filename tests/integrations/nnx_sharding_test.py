"""Flax NNX on a mesh with explicit axes; the state is laid out at creation."""

import functools

import framework
import jax
import pytest
from framework import SGD, STEPS, assert_same, assert_sparse, make_pruner

framework.require("core", "flax", "orbax")

import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType


class Model(nnx.Module):
  def __init__(self, rngs):
    init = nnx.initializers.lecun_normal()
    make = lambda axes: nnx.with_partitioning(init, axes)
    self.first = nnx.Linear(8, 16, rngs=rngs, kernel_init=make(("x", "y")))
    self.last = nnx.Linear(16, 4, rngs=rngs, kernel_init=make(("y", None)))

  def __call__(self, x):
    out = jax.sharding.PartitionSpec(None, None)
    x = self.first(x, out_sharding=out)
    return self.last(nnx.relu(x), out_sharding=out)


def make_mesh(kind):
  shape = (jax.device_count() // 2, 2) if jax.device_count() > 1 else (1, 1)
  return jax.make_mesh(shape, ("x", "y"), axis_types=(kind, kind))


def make(algorithm):
  pruner = make_pruner(algorithm)

  @nnx.jit
  def create():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(
      model,
      pruner.wrap_optax(SGD),  # added
      wrt=nnx.Param,
    )

  return create()


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def step(model, optimizer, x, y):
  grads = nnx.grad(lambda model: framework.mean_square(model(x), y))(model)
  optimizer.update(model, grads)


def parts(model, optimizer):
  """Parameters and masks as plain trees of arrays."""
  is_variable = lambda node: isinstance(node, nnx.Variable)
  unbox = lambda tree: jax.tree.map(
    lambda v: v.get_value() if is_variable(v) else v, tree, is_leaf=is_variable
  )
  return unbox(nnx.state(model, nnx.Param)), unbox(optimizer.opt_state)


def run(nodes, steps):
  x, y = map(jax.numpy.asarray, framework.make_batch())
  for _ in range(steps):
    step(*nodes, x, y)
    jax.block_until_ready(nnx.state(nodes[0]))
  return nodes


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@framework.each_kind
def test_a_sharded_model_ends_exactly_sparse(algorithm, kind):
  with jax.set_mesh(make_mesh(kind)):
    params, state = parts(*run(make(algorithm), STEPS))
    kernel = params["first"]["kernel"]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec("x", "y")
    mask = state.masks["first"]["kernel"]
    assert mask.sharding.is_equivalent_to(kernel.sharding, 2)
    params, state = jax.device_get((params, state))
  assert_sparse(params, state, grows=algorithm == "rigl")


@pytest.mark.filterwarnings("default")
def test_a_sharded_state_survives_orbax(tmp_path):
  plain = lambda node: nnx.to_pure_dict(nnx.state(node))
  with jax.set_mesh(make_mesh(AxisType.Explicit)):
    nodes = run(make("rigl"), STEPS - 20)
    saved = [plain(node) for node in nodes]
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(tmp_path.resolve() / "state", saved)
    again = make("rigl")
    template = [plain(node) for node in again]
    with ocp.StandardCheckpointer() as checkpointer:
      found = checkpointer.restore(tmp_path.resolve() / "state", template)
    assert_same(found, saved)
    for node, values in zip(again, found, strict=True):
      state = nnx.state(node)
      nnx.replace_by_pure_dict(state, values)
      nnx.update(node, state)
    ends = [jax.device_get(parts(*run(x, 20))) for x in (nodes, again)]
  assert_same(*map(jax.tree.leaves, ends))
  assert_sparse(*ends[0], grows=True)
