"""Equinox: wrap the optimizer, one line; layers are (out, in)."""

import functools

import framework
import jax
from framework import SGD, assert_same, assert_sparse, make_batch, make_pruner

framework.require("core", "equinox")

import equinox as eqx


def make(algorithm="magnitude"):
  model = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
  # A row of a layer feeds one neuron: groups of N:M run along the last axis.
  pruner = make_pruner(algorithm, sparsity_type="nm_1,4,-1")
  tx = pruner.wrap_optax(SGD)  # added
  return model, tx, tx.init(eqx.filter(model, eqx.is_inexact_array))


@functools.cache
def trained(algorithm="magnitude"):
  model, tx, opt_state = make(algorithm)
  x, y = make_batch()

  @eqx.filter_jit
  def step(model, opt_state):
    loss = lambda model: framework.mean_square(jax.vmap(model)(x), y)
    grads = eqx.filter_grad(loss)(model)
    updates, opt_state = tx.update(
      grads, opt_state, eqx.filter(model, eqx.is_inexact_array)
    )
    return eqx.apply_updates(model, updates), opt_state

  for _ in range(framework.STEPS):
    model, opt_state = step(model, opt_state)
  return model, opt_state, step


@framework.each_kind
def test_an_equinox_model_ends_exactly_sparse(algorithm):
  model, opt_state, _ = trained(algorithm)
  grows = algorithm == "rigl"
  params = eqx.filter(model, eqx.is_inexact_array)
  assert_sparse(params, opt_state, grows=grows)
  first = model.layers[0].weight
  kept = (first.reshape(16, 2, 4) != 0).sum(-1)
  assert (kept <= 1).all() if grows else (kept == 1).all()


def test_masks_survive_tree_serialisation(tmp_path):
  model, opt_state, step = trained()
  path = tmp_path / "model.eqx"
  eqx.tree_serialise_leaves(path, (model, opt_state))
  fresh, _, state = make()
  found = eqx.tree_deserialise_leaves(path, (fresh, state))
  assert_same(eqx.filter(found, eqx.is_array)[1], opt_state)
  model, opt_state = step(*found)
  assert_sparse(eqx.filter(model, eqx.is_inexact_array), opt_state)
