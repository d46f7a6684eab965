"""Flax NNX: the pruner is the `tx` of an `nnx.Optimizer`, one line."""

import functools

import framework
import jax
from framework import SGD, assert_same, assert_sparse, make_batch, make_pruner

framework.require("core", "flax", "orbax")

import orbax.checkpoint as ocp
from flax import nnx


class Model(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(8, 16, rngs=rngs)
    self.last = nnx.Linear(16, 4, rngs=rngs)

  def __call__(self, x):
    return self.last(nnx.relu(self.first(x)))


def make(algorithm="magnitude"):
  model = Model(nnx.Rngs(0))
  pruner = make_pruner(algorithm)
  optimizer = nnx.Optimizer(
    model,
    pruner.wrap_optax(SGD),  # added
    wrt=nnx.Param,
  )
  return model, optimizer


@nnx.jit
def step(model, optimizer, x, y):
  grads = nnx.grad(lambda model: framework.mean_square(model(x), y))(model)
  optimizer.update(model, grads)


@functools.cache
def trained(algorithm="magnitude"):
  model, optimizer = make(algorithm)
  for _ in range(framework.STEPS):
    step(model, optimizer, *make_batch())
  return model, optimizer


def plain(node):
  return nnx.to_pure_dict(nnx.state(node))


def parts(model, optimizer):
  """Parameters and masks as plain trees of arrays."""
  is_variable = lambda node: isinstance(node, nnx.Variable)
  unbox = lambda tree: jax.tree.map(
    lambda v: v.get_value() if is_variable(v) else v, tree, is_leaf=is_variable
  )
  return unbox(nnx.state(model, nnx.Param)), unbox(optimizer.opt_state)


@framework.each_kind
def test_an_nnx_optimizer_ends_exactly_sparse(algorithm):
  found = parts(*trained(algorithm))
  assert_sparse(*found, grows=algorithm == "rigl")


def test_masks_survive_orbax(tmp_path):
  model, optimizer = trained()
  saved = (plain(model), plain(optimizer))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path.resolve() / "state", saved)
  model, optimizer = make()
  template = (plain(model), plain(optimizer))
  with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.restore(tmp_path.resolve() / "state", template)
  assert_same(found, saved)
  for node, values in zip((model, optimizer), found, strict=True):
    state = nnx.state(node)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(node, state)
  assert_sparse(*parts(model, optimizer))
  step(model, optimizer, *make_batch())
  assert_sparse(*parts(model, optimizer))
