"""Trainers without params in update train as those with them, bit for bit."""

import jax
import optax
from framework import SGD, STEPS, assert_same, assert_sparse, make_pruner

from jaxpruner.integrations.no_params import keep_params


def test_keeping_params_changes_nothing():
  params = {"w": jax.random.normal(jax.random.key(0), (8, 16))}
  tx = make_pruner("rigl").wrap_optax(SGD)
  kept = keep_params(tx)
  a, b = (params, tx.init(params)), (params, kept.init(params))

  @jax.jit
  def step(a, b):
    (p, s), (q, t) = a, b
    updates, s = tx.update(jax.tree.map(lambda x: x - 1, p), s, p)
    p = optax.apply_updates(p, updates)
    updates, t = kept.update(jax.tree.map(lambda x: x - 1, q), t)
    q = optax.apply_updates(q, updates)
    return (p, s), (q, t)

  for _ in range(STEPS):
    a, b = step(a, b)
  assert_same(a, (b[0], b[1].inner_state))
  assert_same(b[0], b[1].params)
  assert_sparse(*b)
